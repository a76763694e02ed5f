//! The network configuration on standard input (specification §9.1).

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{
    environment::{Command, is_identifier},
    error::{CniError, code},
};
use crate::go_json::{GoJsonError, Object};

const DEFAULT_SUBNET_FILE: &str = "/run/flannel/subnet.env";
const DEFAULT_DATA_DIR: &str = "/var/lib/cni/flannel";

/// CNI versions spoken, oldest first.
pub const VERSIONS: &[&str] = &["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The newest of [`VERSIONS`].
pub const NEWEST: &str = "1.1.0";

/// The version of a configuration that names none.
const OLDEST: &str = "0.1.0";

/// The network configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkConfig {
    /// `cniVersion` as given; may be empty.
    pub cni_version: String,
    /// The network's name.
    pub name: String,
    /// The agent's env file.
    pub subnet_file: PathBuf,
    /// Where the delegate's configuration is kept until DEL.
    pub data_dir: PathBuf,
    /// The delegate's configuration as the user began it.
    pub delegate: Map<String, Value>,
    /// What the user wants in the delegate's `ipam`.
    pub ipam: Map<String, Value>,
    /// Passed on to the delegate.
    pub runtime_config: Option<Map<String, Value>>,
    /// ADD's result, when CHECK is asked.
    pub prev_result: Option<Value>,
    /// The containers that are to stay, when GC is asked.
    pub valid_attachments: Option<Value>,
}

impl NetworkConfig {
    /// Reads and checks a configuration for a command.
    pub fn parse(text: &str, command: Command) -> Result<Self, CniError> {
        let object = Object::parse(text).map_err(|e| decoding(&e))?;
        let string = |field: &str| object.get_str(field).map_err(|e| decoding(&e));
        let path = |field: &str, default: &str| -> Result<PathBuf, CniError> {
            Ok(string(field)?.map_or_else(|| default.into(), PathBuf::from))
        };
        let attachments = value(&object, "cni.dev/valid-attachments")?;
        let config = Self {
            cni_version: string("cniVersion")?.unwrap_or_default(),
            name: string("name")?.unwrap_or_default(),
            subnet_file: path("subnetFile", DEFAULT_SUBNET_FILE)?,
            data_dir: path("dataDir", DEFAULT_DATA_DIR)?,
            delegate: map(&object, "delegate")?.unwrap_or_default(),
            ipam: map(&object, "ipam")?.unwrap_or_default(),
            runtime_config: map(&object, "runtimeConfig")?,
            prev_result: value(&object, "prevResult")?,
            // libcni's first releases with GC said it so.
            valid_attachments: match attachments {
                None => value(&object, "cni.dev/attachments")?,
                some => some,
            },
        };
        config.check(command)?;
        Ok(config)
    }

    fn check(&self, command: Command) -> Result<(), CniError> {
        let version = if self.cni_version.is_empty() { OLDEST } else { &self.cni_version };
        let Some(rank) = VERSIONS.iter().position(|known| *known == version) else {
            return Err(CniError::new(code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
                .details(format!("config is {version:?}, plugin supports {VERSIONS:?}")));
        };
        let needed = match command {
            Command::Check => "0.4.0",
            Command::Status | Command::Gc => "1.1.0",
            Command::Add | Command::Del | Command::Version => OLDEST,
        };
        if VERSIONS.iter().position(|known| *known == needed).is_some_and(|least| rank < least) {
            return Err(CniError::new(
                code::INCOMPATIBLE_VERSION,
                format!("config version {version} does not allow {command:?}, {needed} does"),
            ));
        }
        let invalid = |text: String| Err(CniError::new(code::INVALID_NETWORK_CONFIG, text));
        if self.name.is_empty() {
            return invalid("missing network name".to_owned());
        }
        if !is_identifier(&self.name) {
            return invalid(format!("invalid characters found in network name {:?}", self.name));
        }
        if self.delegate.get("type").is_some_and(|kind| !kind.is_string()) {
            return invalid("'delegate' must have a string as its 'type', if it has one".into());
        }
        if let Some(key) = ["name", "ipam"].into_iter().find(|key| self.delegate.contains_key(*key))
        {
            return invalid(format!(
                "'delegate' must not have a field '{key}': flannel sets it{}",
                if key == "ipam" { "; put yours beside 'delegate'" } else { "" }
            ));
        }
        Ok(())
    }
}

fn decoding(error: &GoJsonError) -> CniError {
    CniError::new(code::DECODING_FAILURE, format!("failed to load netconf: {error}"))
}

/// A field of any kind; `null` counts as absent.
fn value(object: &Object, field: &str) -> Result<Option<Value>, CniError> {
    let Some(raw) = object.get_raw(field) else { return Ok(None) };
    let value: Value = serde_json::from_str(raw)
        .map_err(|e| decoding(&GoJsonError::field(field, "", e.to_string())))?;
    Ok(Some(value).filter(|value| !value.is_null()))
}

/// A field that is an object; `null` counts as absent.
fn map(object: &Object, field: &str) -> Result<Option<Map<String, Value>>, CniError> {
    match value(object, field)? {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(decoding(&GoJsonError::field(field, other, "must be an object"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NetworkConfig, CniError> {
        NetworkConfig::parse(text, Command::Add)
    }

    #[test]
    fn defaults_and_given_values() {
        let config = parse(r#"{"name":"cbr0","type":"flannel"}"#).expect("valid");
        assert_eq!(config.subnet_file.to_str(), Some(DEFAULT_SUBNET_FILE));
        assert_eq!(config.data_dir.to_str(), Some(DEFAULT_DATA_DIR));
        assert!(config.delegate.is_empty() && config.runtime_config.is_none());
        let config = parse(
            r#"{"CNIVersion":"1.0.0","name":"n","subnetfile":"/a","dataDir":"/b","delegate":null,
                "ipam":{"type":"x"},"runtimeConfig":{}}"#,
        )
        .expect("valid");
        assert_eq!(config.cni_version, "1.0.0");
        assert_eq!(config.subnet_file.to_str(), Some("/a"));
        assert_eq!(config.data_dir.to_str(), Some("/b"));
        assert_eq!(config.ipam["type"], "x");
        assert_eq!(config.runtime_config, Some(Map::new()));
    }

    #[test]
    fn each_mistake_has_its_code() {
        for (text, code, word) in [
            ("{", code::DECODING_FAILURE, "failed to load netconf"),
            (r#"{"name":1}"#, code::DECODING_FAILURE, "name 1"),
            (r#"{"name":"n","delegate":[]}"#, code::DECODING_FAILURE, "delegate"),
            (r#"{"type":"flannel"}"#, code::INVALID_NETWORK_CONFIG, "missing network name"),
            (r#"{"name":"../x"}"#, code::INVALID_NETWORK_CONFIG, "../x"),
            (r#"{"name":"n","delegate":{"type":1}}"#, code::INVALID_NETWORK_CONFIG, "'type'"),
            (r#"{"name":"n","delegate":{"name":"x"}}"#, code::INVALID_NETWORK_CONFIG, "'name'"),
            (r#"{"name":"n","delegate":{"ipam":{}}}"#, code::INVALID_NETWORK_CONFIG, "'ipam'"),
            (r#"{"name":"n","cniVersion":"9.0.0"}"#, code::INCOMPATIBLE_VERSION, "incompatible"),
        ] {
            let error = parse(text).expect_err(text);
            assert_eq!(error.code, code, "{text}: {error}");
            assert!(error.to_string().contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn commands_need_their_version() {
        let of = |version: &str, command| {
            NetworkConfig::parse(&format!(r#"{{"name":"n","cniVersion":"{version}"}}"#), command)
        };
        for (version, command, allowed) in [
            ("0.3.1", Command::Check, false),
            ("0.4.0", Command::Check, true),
            ("1.0.0", Command::Status, false),
            ("1.1.0", Command::Status, true),
            ("", Command::Gc, false),
            ("", Command::Del, true),
        ] {
            let result = of(version, command);
            assert_eq!(result.is_ok(), allowed, "{version} {command:?}: {result:?}");
        }
    }
}
