//! Running the delegate (CNI specification, section "Plugin delegation").

use std::{
    io::{self, Write},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

use super::{
    environment::Environment,
    error::{CniError, code},
};

/// How often a plugin is started again that is being written at this moment, a second apart.
const BUSY_TRIES: u32 = 6;

/// Runs the plugin `kind` with a configuration on its standard input and our own variables, except
/// for those in `variables`. Returns what it printed.
pub fn run(
    environment: &Environment,
    kind: &str,
    config: &str,
    variables: &[(&str, &str)],
) -> Result<Vec<u8>, CniError> {
    let plugin = environment.find_plugin(kind)?;
    let output = start(&plugin, config, variables)
        .map_err(|e| CniError::io(code::IO_FAILURE, "exec", &plugin, &e))?;
    if output.status.success() { Ok(output.stdout) } else { Err(failure(kind, &output)) }
}

/// The CNI versions that the plugin `kind` says it speaks.
pub fn versions(environment: &Environment, kind: &str) -> Result<Vec<String>, CniError> {
    let printed = run(environment, kind, "{}", &[("CNI_COMMAND", "VERSION")])?;
    let answer: Value = serde_json::from_slice(&printed).map_err(|e| {
        CniError::new(code::DECODING_FAILURE, format!("what {kind} says of itself is no JSON: {e}"))
    })?;
    let versions = answer["supportedVersions"].as_array().into_iter().flatten();
    Ok(versions.filter_map(|version| version.as_str().map(str::to_owned)).collect())
}

fn start(plugin: &Path, config: &str, variables: &[(&str, &str)]) -> io::Result<Output> {
    let mut tries = 0;
    let mut child = loop {
        tries += 1;
        let mut command = Command::new(plugin);
        command.envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match command.spawn() {
            Err(e) if e.kind() == io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                thread::sleep(Duration::from_secs(1));
            }
            result => break result?,
        }
    };
    if let Some(mut stdin) = child.stdin.take() {
        // Smaller than a pipe's buffer, so this does not wait. A plugin that ends without reading
        // says why by its output.
        let _ = stdin.write_all(config.as_bytes());
    }
    let output = child.wait_with_output()?;
    // What it has to say besides goes where ours would; a closed stream is nobody's fault.
    let _ = io::stderr().write_all(&output.stderr);
    Ok(output)
}

/// The error that a plugin printed; if it printed none, one that says so.
fn failure(kind: &str, output: &Output) -> CniError {
    let printed: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let text = |name: &str| printed.as_ref()?.get(name)?.as_str().map(str::to_owned);
    let number = || printed.as_ref()?.get("code")?.as_u64().and_then(|n| u32::try_from(n).ok());
    if let (Some(code), Some(msg)) = (number(), text("msg")) {
        let error = CniError::new(code, format!("delegate {kind}: {msg}"));
        return error.details(text("details").unwrap_or_default());
    }
    let said = [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes));
    let said = said.each_ref().map(|text| text.trim()).join(" ");
    CniError::new(code::INTERNAL, format!("delegate {kind} failed ({})", output.status))
        .details(said.trim())
}
