//! `cargo xtask bench`: builds the optimised agent and the part that measures, and becomes that.

use std::{env, os::unix::process::CommandExt, process::Command};

use anyhow::{Result, bail, ensure};

use crate::tool;

/// What measures, a program of the lab's package.
const PROGRAM: &str = "flannel-bench";

/// Builds and becomes it; returns only if that fails. It takes the same arguments as we do, so
/// those are handed on as they are.
pub fn run() -> Result<()> {
    ensure!(
        tool::is_root()?,
        "the benchmarks make network namespaces and load eBPF programs: run them as root"
    );
    let agent = tool::build_agent(true)?;
    let mut build = tool::cargo();
    build.args(["build", "--locked", "--release", "--package", "flannel-lab"]);
    tool::check(build.args(["--bin", PROGRAM]))?;
    let program = agent.with_file_name(PROGRAM);
    let error =
        Command::new(&program).args(env::args_os().skip(2)).env("FLANNEL_AGENT", &agent).exec();
    bail!("cannot start {}: {error}", program.display())
}
