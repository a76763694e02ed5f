//! The udp backend's options in the network configuration (specification §7.3).

use crate::{
    backend::BackendError,
    go_json::{GoJsonError, Object},
    lease::RawJson,
};

/// flannel's port for bare packets in UDP.
pub const DEFAULT_PORT: u16 = 8285;

/// Options of `Backend` for type `udp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpOptions {
    /// UDP port, ours and every peer's.
    pub port: u16,
}

impl UdpOptions {
    /// Reads the options.
    ///
    /// # Errors
    /// [`BackendError::Config`] naming the field and the value.
    pub fn parse(backend: &RawJson) -> Result<Self, BackendError> {
        let config = |err: GoJsonError| BackendError::Config(format!("Backend: {err}"));
        let object = Object::parse(backend.as_str()).map_err(config)?;
        let port = object.get_uint("Port").map_err(config)?.unwrap_or(DEFAULT_PORT.into());
        match u16::try_from(port) {
            Ok(port @ 1..) => Ok(Self { port }),
            _ => {
                Err(BackendError::Config(format!("Backend.Port {port} is not between 1 and 65535")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<UdpOptions, BackendError> {
        UdpOptions::parse(&RawJson::parse(text).expect("JSON"))
    }

    #[test]
    fn the_port_is_flannels_unless_told() {
        for (text, port) in [
            ("{}", 8285),
            (r#"{"Type":"udp"}"#, 8285),
            (r#"{"Type":"udp","Port":null}"#, 8285),
            (r#"{"port":7890}"#, 7890),
            (r#"{"Port":1}"#, 1),
            (r#"{"Port":65535}"#, 65535),
        ] {
            assert_eq!(parse(text).expect(text), UdpOptions { port }, "{text}");
        }
    }

    #[test]
    fn a_rejection_names_field_and_value() {
        for (text, words) in [
            (r#"{"Port":0}"#, "Port 0"),
            (r#"{"Port":65536}"#, "Port 65536"),
            (r#"{"Port":-1}"#, "-1"),
            (r#"{"Port":"8285"}"#, "8285"),
            (r#"{"Port":82.5}"#, "82.5"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains("Port") && error.contains(words), "{text}: {error}");
        }
    }
}
