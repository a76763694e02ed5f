//! CNI's error object (CNI specification, section "Error").

use std::{fmt, io, path::Path};

use serde_json::{Value, json};

/// CNI's well-known error codes.
pub mod code {
    /// The configuration's `cniVersion` is none of ours, or too old for the command.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// There is no such container.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// A `CNI_*` variable is missing or makes no sense.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// A file cannot be read or written, a program cannot be started.
    pub const IO_FAILURE: u32 = 5;
    /// JSON that cannot be decoded.
    pub const DECODING_FAILURE: u32 = 6;
    /// A configuration that can be decoded but makes no sense.
    pub const INVALID_NETWORK_CONFIG: u32 = 7;
    /// The container's network namespace is the plugin's own.
    pub const INVALID_NETNS: u32 = 8;
    /// Not now; the runtime is to try again.
    pub const TRY_AGAIN_LATER: u32 = 11;
    /// `STATUS`: no container can be added now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// Anything else.
    pub const INTERNAL: u32 = 999;
}

/// What a CNI plugin prints when it fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniError {
    /// One of [`code`], or a delegate's own.
    pub code: u32,
    /// What is wrong, in one line; runtimes show it.
    pub msg: String,
    /// More about it, or nothing.
    pub details: String,
}

impl CniError {
    /// An error without details.
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// The same with details.
    #[must_use]
    pub fn details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }

    /// A failed operation on a file, in the words that Go's `os` package has for it: operators
    /// and their tools know `open /run/flannel/subnet.env: no such file or directory`.
    pub fn io(code: u32, operation: &str, path: &Path, error: &io::Error) -> Self {
        let reason = match error.kind() {
            io::ErrorKind::NotFound => "no such file or directory".to_owned(),
            io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            io::ErrorKind::NotADirectory => "not a directory".to_owned(),
            io::ErrorKind::IsADirectory => "is a directory".to_owned(),
            _ => error.to_string(),
        };
        Self::new(code, format!("{operation} {}: {reason}", path.display()))
    }

    /// The error object as it is printed. `version` is the CNI version spoken.
    pub fn to_json(&self, version: &str) -> Value {
        let mut object = json!({"cniVersion": version, "code": self.code, "msg": self.msg});
        if !self.details.is_empty() {
            object["details"] = self.details.as_str().into();
        }
        object
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if !self.details.is_empty() {
            write!(f, "; {}", self.details)?;
        }
        Ok(())
    }
}

impl std::error::Error for CniError {}
