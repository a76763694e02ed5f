//! `cargo xtask run [-- flags]`: build everything, then be the agent.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::tool;

/// Arguments of `run`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Optimised, as released
    #[arg(long)]
    release: bool,
    /// Flags for the agent
    #[arg(last = true)]
    flags: Vec<String>,
}

/// Builds, then replaces this process by the agent: signals and exit status are its own.
pub fn run(arguments: &Arguments) -> Result<()> {
    let agent = tool::build_agent(arguments.release)?;
    let mut command = Command::new(&agent);
    command.args(&arguments.flags);
    Err(command.exec()).with_context(|| format!("cannot start {}", agent.display()))
}
