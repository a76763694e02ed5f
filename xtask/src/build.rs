//! `cargo xtask build`: the eBPF programs, then the agent with them inside.

use std::{env, process::Command};

use anyhow::{Context, ensure};

use crate::build_ebpf;

/// Builds everything.
pub fn run(release: bool) -> anyhow::Result<()> {
    build_ebpf::run()?;
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(build_ebpf::workspace());
    command.args(["build", "--locked", "--package", "flannel-agent"]);
    if release {
        command.arg("--release");
    }
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "building the agent failed ({status})");
    Ok(())
}
