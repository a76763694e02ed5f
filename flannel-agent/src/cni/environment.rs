//! The `CNI_*` variables (CNI specification, section "Parameters").

use std::{ffi::OsString, fs, os::unix::fs::MetadataExt, path::PathBuf};

use super::error::{CniError, code};

/// What the runtime asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Connect a container.
    Add,
    /// Disconnect one.
    Del,
    /// See whether a container is still connected.
    Check,
    /// Say which versions are spoken.
    Version,
    /// Say whether containers can be connected.
    Status,
    /// Clean up after containers that are no more.
    Gc,
}

/// The variables of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// `CNI_COMMAND`.
    pub command: Command,
    /// `CNI_CONTAINERID`; empty for commands that are about no container.
    pub container: String,
    /// `CNI_IFNAME`; empty likewise.
    pub interface: String,
    /// `CNI_NETNS`, if given.
    pub netns: Option<PathBuf>,
    /// `CNI_PATH`: where plugins are.
    pub path: Vec<PathBuf>,
}

impl Environment {
    /// Reads and checks the variables; `None` if there is no `CNI_COMMAND`, as when somebody
    /// runs the plugin by hand.
    pub fn read(var: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<Self>, CniError> {
        let invalid = |text: String| CniError::new(code::INVALID_ENVIRONMENT, text);
        let get = |name: &str| var(name).filter(|value| !value.is_empty());
        let Some(command) = get("CNI_COMMAND") else { return Ok(None) };
        let command = match command.to_str() {
            Some("ADD") => Command::Add,
            Some("DEL") => Command::Del,
            Some("CHECK") => Command::Check,
            Some("VERSION") => Command::Version,
            Some("STATUS") => Command::Status,
            Some("GC") => Command::Gc,
            _ => return Err(invalid(format!("unknown CNI_COMMAND: {}", command.display()))),
        };
        let needed: &[&str] = match command {
            Command::Add | Command::Check => {
                &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"]
            }
            Command::Del => &["CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"],
            Command::Status | Command::Gc => &["CNI_PATH"],
            Command::Version => &[],
        };
        let missing: Vec<_> = needed.iter().copied().filter(|name| get(name).is_none()).collect();
        if !missing.is_empty() {
            return Err(invalid(format!("required env variables [{}] missing", missing.join(","))));
        }
        let text = |name: &str| {
            if !needed.contains(&name) {
                return Ok(String::new());
            }
            get(name)
                .unwrap_or_default()
                .into_string()
                .map_err(|value| invalid(format!("{name} is no text: {}", value.display())))
        };
        let (container, interface) = (text("CNI_CONTAINERID")?, text("CNI_IFNAME")?);
        if needed.contains(&"CNI_CONTAINERID") && !is_identifier(&container) {
            return Err(invalid(format!("invalid characters in containerID: {container:?}")));
        }
        if needed.contains(&"CNI_IFNAME") {
            check_interface(&interface).map_err(invalid)?;
        }
        let path = get("CNI_PATH").unwrap_or_default();
        let path = std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()).collect();
        let netns = get("CNI_NETNS").map(PathBuf::from);
        Ok(Some(Self { command, container, interface, netns, path }))
    }

    /// Refuses to work on the network namespace that we run in, unless the runtime insists by
    /// `CNI_NETNS_OVERRIDE`.
    pub fn check_netns(&self, overridden: bool) -> Result<(), CniError> {
        let (Some(netns), false) = (&self.netns, overridden) else { return Ok(()) };
        // A namespace that is gone is none of ours; ADD's delegate will say so better.
        let (Ok(own), Ok(given)) = (fs::metadata("/proc/self/ns/net"), fs::metadata(netns)) else {
            return Ok(());
        };
        if (own.dev(), own.ino()) == (given.dev(), given.ino()) {
            let netns = netns.display();
            return Err(CniError::new(
                code::INVALID_NETNS,
                format!("plugin's netns and netns from CNI_NETNS should not be the same ({netns})"),
            ));
        }
        Ok(())
    }

    /// The plugin of this name, in the first directory of `CNI_PATH` that has it.
    pub fn find_plugin(&self, name: &str) -> Result<PathBuf, CniError> {
        let invalid = |text: String| CniError::new(code::INVALID_NETWORK_CONFIG, text);
        if name.is_empty() || name.contains('/') {
            return Err(invalid(format!("invalid plugin name: {name:?}")));
        }
        let is_file = |path: &PathBuf| fs::metadata(path).is_ok_and(|meta| meta.is_file());
        self.path.iter().map(|dir| dir.join(name)).find(is_file).ok_or_else(|| {
            let dirs: Vec<_> = self.path.iter().map(|dir| dir.display().to_string()).collect();
            invalid(format!("failed to find plugin {name:?} in path [{}]", dirs.join(" ")))
                .details("install it there (Debian: package containernetworking-plugins)")
        })
    }
}

/// Whether a container's id or a network's name has only the characters that CNI allows. Such a
/// name can be a file's.
pub fn is_identifier(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric()) && text.bytes().all(inner)
}

/// The kernel's rules for interface names.
fn check_interface(name: &str) -> Result<(), String> {
    const MAX_LEN: usize = 15;
    let reason = if name.len() > MAX_LEN {
        "is longer than 15 bytes"
    } else if matches!(name, "." | "..") {
        "is . or .."
    } else if name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
        "contains / or : or a blank"
    } else {
        return Ok(());
    };
    Err(format!("interface name {reason}: {name:?}"))
}

/// Whether a variable's text is a yes, as the CNI library reads `CNI_NETNS_OVERRIDE`.
pub fn is_yes(value: Option<OsString>) -> bool {
    value.is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1")
}
