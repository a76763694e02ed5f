//! `cargo xtask build`: the eBPF programs, then the agent with them inside.

use anyhow::{Context, ensure};

use crate::{build_ebpf, tool};

/// Builds everything.
pub fn run(release: bool) -> anyhow::Result<()> {
    build_ebpf::run()?;
    let mut command = tool::cargo();
    command.args(["build", "--locked", "--package", "flannel-agent"]);
    if release {
        command.arg("--release");
    }
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "building the agent failed ({status})");
    Ok(())
}
