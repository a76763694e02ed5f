//! The plugin's configuration, for each command.

#![no_main]

use flannel_agent::cni::{config::NetworkConfig, environment::Command};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for command in [Command::Add, Command::Del, Command::Check, Command::Status, Command::Gc] {
        if let Err(error) = NetworkConfig::parse(text, command) {
            assert!(!error.to_string().is_empty());
        }
    }
});
