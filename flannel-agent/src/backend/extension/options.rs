//! The extension backend's options in the network configuration (specification §7.8).

use std::time::Duration;

use super::words::Words;
use crate::{
    backend::BackendError,
    go_json::{GoJsonError, Object},
    lease::RawJson,
};

/// How long a command may take unless told.
const DEFAULT_TIMEOUT: u64 = 30;

/// Options of `Backend` for type `extension`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtensionOptions {
    /// Run before the lease; what it says is published as backend data.
    pub pre_startup: Option<Words>,
    /// Run once we have a lease.
    pub post_startup: Option<Words>,
    /// Run for every peer that is new or changed.
    pub subnet_add: Option<Words>,
    /// Run for every peer that is gone, or as it was before a change.
    pub subnet_remove: Option<Words>,
    /// Run when the agent is told to stop.
    pub shutdown: Option<Words>,
    /// How long each may take.
    pub timeout: Duration,
}

impl ExtensionOptions {
    /// Reads the options.
    ///
    /// # Errors
    /// [`BackendError::Config`] naming the field and the value.
    pub fn parse(backend: &RawJson) -> Result<Self, BackendError> {
        let config = |err: GoJsonError| BackendError::Config(format!("Backend: {err}"));
        let object = Object::parse(backend.as_str()).map_err(config)?;
        let seconds = object.get_uint("CommandTimeout").map_err(config)?.unwrap_or(DEFAULT_TIMEOUT);
        if !(1..=3600).contains(&seconds) {
            return Err(BackendError::Config(format!(
                "Backend.CommandTimeout {seconds} is not between 1 and 3600 seconds"
            )));
        }
        Ok(Self {
            pre_startup: Words::parse(&object, "PreStartupCommand")?,
            post_startup: Words::parse(&object, "PostStartupCommand")?,
            subnet_add: Words::parse(&object, "SubnetAddCommand")?,
            subnet_remove: Words::parse(&object, "SubnetRemoveCommand")?,
            shutdown: Words::parse(&object, "ShutdownCommand")?,
            timeout: Duration::from_secs(seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_is_bounded() {
        let parse = |text: &str| ExtensionOptions::parse(&RawJson::parse(text).expect("JSON"));
        assert_eq!(parse("{}").expect("good").timeout, Duration::from_secs(30));
        assert_eq!(parse(r#"{"CommandTimeout":2}"#).expect("good").timeout.as_secs(), 2);
        for text in [r#"{"CommandTimeout":0}"#, r#"{"CommandTimeout":3601}"#] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains("CommandTimeout"), "{error}");
        }
    }
}
