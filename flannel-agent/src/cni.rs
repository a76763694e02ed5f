//! The CNI plugin `flannel`: takes the node's subnet from the agent's env file and has another
//! plugin, `bridge` by default, make the interface. CNI specification 0.1.0 to 1.1.0; what flannel's
//! own plugin does is specification §9.
//!
//! Nothing here starts a runtime or a thread, and the only files written are those of [`scratch`].

pub mod config;
mod delegate;
mod delegate_config;
pub mod environment;
pub mod error;
mod go_encoding;
pub mod install;
mod scratch;
mod subnet_file;

use std::{
    collections::HashSet,
    ffi::OsString,
    io::{self, Read, Write},
    process::ExitCode,
};

use serde_json::{Value, json};

use config::{NEWEST, NetworkConfig, VERSIONS};
use environment::{Command, Environment, is_yes};
use error::{CniError, code};
use scratch::{Entry, Scratch};
use subnet_file::SubnetFile;

/// Does what the variables and standard input ask for; the whole of the plugin.
pub fn main() -> ExitCode {
    let mut input = String::new();
    let answer = answer(&|name| std::env::var_os(name), &mut || {
        io::stdin().read_to_string(&mut input).map(|_| std::mem::take(&mut input))
    });
    let (text, code) = match answer {
        Ok(Answer::About(text)) => {
            // For people at a terminal, who are no runtime.
            eprintln!("{text}");
            return ExitCode::SUCCESS;
        }
        Ok(Answer::Nothing) => return ExitCode::SUCCESS,
        Ok(Answer::Json(value)) => (pretty(&value), ExitCode::SUCCESS),
        Err(error) => (pretty(&error.to_json(NEWEST)), ExitCode::FAILURE),
    };
    // Nobody is left to tell when the stream is closed.
    let _ = io::stdout().write_all(text.as_bytes());
    code
}

/// What a call comes to.
#[derive(Debug, PartialEq)]
enum Answer {
    /// The plugin was run by hand.
    About(String),
    /// Success, with nothing to say.
    Nothing,
    /// Success, and a result.
    Json(Value),
}

fn answer(
    var: &dyn Fn(&str) -> Option<OsString>,
    stdin: &mut dyn FnMut() -> io::Result<String>,
) -> Result<Answer, CniError> {
    let Some(environment) = Environment::read(var)? else { return Ok(Answer::About(about())) };
    let command = environment.command;
    if command == Command::Version {
        return Ok(Answer::Json(json!({"cniVersion": NEWEST, "supportedVersions": VERSIONS})));
    }
    let text = stdin().map_err(|e| {
        CniError::new(code::IO_FAILURE, format!("cannot read the configuration: {e}"))
    })?;
    let config = NetworkConfig::parse(&text, command)?;
    match command {
        Command::Add | Command::Del => {
            environment.check_netns(is_yes(var("CNI_NETNS_OVERRIDE")))?;
            if command == Command::Add {
                add(&environment, &config).map(Answer::Json)
            } else {
                del(&environment, &config).map(|()| Answer::Nothing)
            }
        }
        Command::Check => check(&environment, &config).map(|()| Answer::Nothing),
        Command::Status => status(&environment, &config).map(|()| Answer::Nothing),
        Command::Gc => collect_garbage(&environment, &config).map(|()| Answer::Nothing),
        Command::Version => Ok(Answer::Nothing),
    }
}

fn about() -> String {
    format!(
        "CNI Plugin flannel version {} ({}/{})\nCNI protocol versions supported: {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
        VERSIONS.join(", ")
    )
}

fn add(environment: &Environment, config: &NetworkConfig) -> Result<Value, CniError> {
    let subnet = SubnetFile::read(&config.subnet_file)?;
    let delegate = delegate_config::build(config, &subnet)?;
    let kind = kind_of(&Value::Object(delegate.clone()))?;
    let text = delegate_config::render(delegate);
    // Before the delegate runs: a failed or interrupted ADD is followed by a DEL, which has to
    // know what to undo.
    let scratch = Scratch::new(&config.data_dir);
    scratch.save(&environment.container, &text, &environment.interface)?;
    let printed = delegate::run(environment, &kind, &text, &[])?;
    let mut result: Value = serde_json::from_slice(&printed).map_err(|e| {
        CniError::new(code::DECODING_FAILURE, format!("the result of {kind} is not JSON: {e}"))
            .details(String::from_utf8_lossy(&printed))
    })?;
    if let Some(fields) = result.as_object_mut()
        && fields.get("cniVersion").is_none_or(|version| version == "")
    {
        fields.insert("cniVersion".into(), config.cni_version.as_str().into());
    }
    Ok(result)
}

/// Undoes an ADD; what is undone already, or was never done, is a success.
fn del(environment: &Environment, config: &NetworkConfig) -> Result<(), CniError> {
    let scratch = Scratch::new(&config.data_dir);
    let container = &environment.container;
    let Some(entry) = scratch.read(container)? else { return Ok(()) };
    let Ok(delegate) = serde_json::from_str::<Value>(&entry.config) else {
        // Nobody can ever undo this; an error would keep the pod from going for ever.
        let path = config.data_dir.join(container);
        eprintln!("{} is not JSON: the interface stays until the node restarts", path.display());
        return Ok(());
    };
    delegate::run(environment, &kind_of(&delegate)?, &entry.config, &[])?;
    scratch.remove(container)
}

/// The delegate's verdict: it was told how the interface has to be, and is told again.
fn check(environment: &Environment, config: &NetworkConfig) -> Result<(), CniError> {
    let container = &environment.container;
    let Some(previous) = &config.prev_result else {
        let text = "missing prevResult: CHECK compares with what ADD said";
        return Err(CniError::new(code::INVALID_NETWORK_CONFIG, text));
    };
    let Some(entry) = Scratch::new(&config.data_dir).read(container)? else {
        let text = format!("container {container} is not known to flannel on this node");
        return Err(CniError::new(code::UNKNOWN_CONTAINER, text));
    };
    let mut delegate = decode(&entry)?;
    let kind = kind_of(&delegate)?;
    let mut previous = previous.clone();
    fill_gateways(&mut previous);
    delegate["prevResult"] = previous;
    // The configuration may have been given another version since.
    delegate["cniVersion"] = config.cni_version.as_str().into();
    delegate::run(environment, &kind, &delegate.to_string(), &[]).map(drop)
}

/// Gives a result's routes that name no gateway the one of their family's address. That is what
/// CNI says they go through and how `bridge` makes them, but its CHECK looks for routes to nowhere.
fn fill_gateways(result: &mut Value) {
    let is_v6 = |text: &str| text.contains(':');
    let gateways: Vec<Value> = result["ips"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|ip| ip["gateway"].clone())
        .filter(Value::is_string)
        .collect();
    for route in result["routes"].as_array_mut().into_iter().flatten() {
        let Some(v6) = route["dst"].as_str().map(is_v6) else { continue };
        let fits = |gateway: &&Value| gateway.as_str().map(is_v6) == Some(v6);
        if route["gw"].is_null()
            && let Some(gateway) = gateways.iter().find(fits)
        {
            route["gw"] = gateway.clone();
        }
    }
}

/// Whether an ADD can work now.
fn status(environment: &Environment, config: &NetworkConfig) -> Result<(), CniError> {
    let ready = || {
        let subnet = SubnetFile::read(&config.subnet_file)?;
        let delegate = delegate_config::build(config, &subnet)?;
        let kind = kind_of(&Value::Object(delegate.clone()))?;
        let spoken = delegate::versions(environment, &kind)?;
        if !spoken.contains(&config.cni_version) {
            return Err(CniError::new(
                code::INCOMPATIBLE_VERSION,
                format!("delegate {kind} does not speak CNI {}", config.cni_version),
            )
            .details(format!("it speaks {}: update it", spoken.join(", "))));
        }
        delegate::run(environment, &kind, &delegate_config::render(delegate), &[])
    };
    // Whatever the reason, the runtime is to know that it is about availability.
    ready().map(drop).map_err(|error| CniError { code: code::NOT_AVAILABLE, ..error })
}

/// Undoes the ADDs of containers that the runtime does not list any more, then lets the delegate
/// do the same.
fn collect_garbage(environment: &Environment, config: &NetworkConfig) -> Result<(), CniError> {
    // Without the list every container would seem gone.
    let Some(valid) = config.valid_attachments.as_ref().and_then(Value::as_array) else {
        let text = "missing cni.dev/valid-attachments: nothing is cleaned up without it";
        return Err(CniError::new(code::INVALID_NETWORK_CONFIG, text));
    };
    let valid: HashSet<&str> = valid.iter().filter_map(|v| v["containerID"].as_str()).collect();
    let scratch = Scratch::new(&config.data_dir);
    let mut failures = Vec::new();
    for container in scratch.containers()? {
        if valid.contains(container.as_str()) {
            continue;
        }
        if let Err(error) = discard(environment, config, &scratch, &container) {
            failures.push(format!("{container}: {error}"));
        }
    }
    if let Err(error) = delegate_garbage(environment, config) {
        failures.push(error.to_string());
    }
    if failures.is_empty() {
        return Ok(());
    }
    Err(CniError::new(code::INTERNAL, "not all could be cleaned up").details(failures.join("; ")))
}

/// DEL of a container that is no more.
fn discard(
    environment: &Environment,
    config: &NetworkConfig,
    scratch: &Scratch<'_>,
    container: &str,
) -> Result<(), CniError> {
    let Some(entry) = scratch.read(container)? else { return Ok(()) };
    let delegate = decode(&entry)?;
    // The directory may be shared with another network, whose list we were not given.
    if delegate["name"] != config.name.as_str() {
        return Ok(());
    }
    // What runtimes call a pod's only interface.
    let interface = entry.interface.as_deref().unwrap_or("eth0");
    let variables = [
        ("CNI_COMMAND", "DEL"),
        ("CNI_CONTAINERID", container),
        ("CNI_IFNAME", interface),
        ("CNI_NETNS", ""),
    ];
    delegate::run(environment, &kind_of(&delegate)?, &entry.config, &variables)?;
    scratch.remove(container)
}

fn delegate_garbage(environment: &Environment, config: &NetworkConfig) -> Result<(), CniError> {
    // Without a subnet the delegate cannot be told which one is meant; the next GC will.
    let Ok(subnet) = SubnetFile::read(&config.subnet_file) else { return Ok(()) };
    let mut delegate = delegate_config::build(config, &subnet)?;
    let valid = config.valid_attachments.clone().unwrap_or_default();
    delegate.insert("cni.dev/attachments".into(), valid.clone());
    delegate.insert("cni.dev/valid-attachments".into(), valid);
    let kind = kind_of(&Value::Object(delegate.clone()))?;
    // One that is older than GC has never left anything to it.
    if !delegate::versions(environment, &kind)?.contains(&config.cni_version) {
        return Ok(());
    }
    delegate::run(environment, &kind, &Value::Object(delegate).to_string(), &[]).map(drop)
}

fn decode(entry: &Entry) -> Result<Value, CniError> {
    match serde_json::from_str(&entry.config) {
        Ok(delegate @ Value::Object(_)) => Ok(delegate),
        Ok(_) => Err(CniError::new(code::DECODING_FAILURE, "the scratch file is no object")),
        Err(e) => {
            Err(CniError::new(code::DECODING_FAILURE, format!("the scratch file is not JSON: {e}")))
        }
    }
}

/// The delegate that a configuration names.
fn kind_of(delegate: &Value) -> Result<String, CniError> {
    delegate.get("type").and_then(Value::as_str).map(str::to_owned).ok_or_else(|| {
        CniError::new(code::INVALID_NETWORK_CONFIG, "the delegate's configuration has no 'type'")
    })
}

/// JSON as CNI plugins print it: four blanks deep.
fn pretty(value: &Value) -> String {
    let mut text = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    match serde::Serialize::serialize(value, &mut serializer) {
        Ok(()) => String::from_utf8_lossy(&text).into_owned(),
        Err(_) => value.to_string(),
    }
}
