//! Starting cargo, and knowing what there is to start.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{build, build_ebpf, setup, toolchain};

/// The cargo that runs us, to be run in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(build_ebpf::workspace());
    // What cargo told about this package is not about those to be built; some build scripts
    // (ring's) watch it, and would run anew each time.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command to its end; anything but success is an error.
pub fn check(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// Sets up what is missing, builds the eBPF programs and the agent with them inside, and returns
/// the binary's path.
pub fn build_agent(release: bool) -> Result<PathBuf> {
    setup::ensure()?;
    build::run(release)?;
    let profile = if release { "release" } else { "debug" };
    Ok(target_dir().join(profile).join("flannel-agent"))
}

/// Where cargo builds.
pub fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| build_ebpf::workspace().join("target"), PathBuf::from)
}

/// Whether there is such a program, in the directories of `PATH` or of the system.
pub fn has(program: &str) -> bool {
    toolchain::which(program).is_some()
        || ["/usr/sbin", "/sbin"].iter().any(|dir| Path::new(dir).join(program).exists())
}

/// Whether this process may do what root may.
pub fn is_root() -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status").context("cannot read /proc")?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    Ok(uids.is_some_and(|uids| uids.split_whitespace().nth(1) == Some("0")))
}
