//! Starting cargo, and knowing what there is to start.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

/// The workspace's directory.
pub fn workspace() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), std::path::Path::to_path_buf)
}

/// The cargo that runs us, to be run in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
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

/// Builds the agent, eBPF included where it can be, and returns the binary's path.
pub fn build_agent(release: bool) -> Result<PathBuf> {
    let profile = if release { "release" } else { "debug" };
    let mut command = cargo();
    command.args(["build", "--quiet", "-p", "flannel-agent"]);
    if release {
        command.arg("--release");
    }
    check(&mut command)?;
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
    Ok(target.join(profile).join("flannel-agent"))
}

/// Whether this process may do what root may.
pub fn is_root() -> Result<bool> {
    let status = fs::read_to_string("/proc/self/status").context("cannot read /proc")?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    Ok(uids.is_some_and(|uids| uids.split_whitespace().nth(1) == Some("0")))
}
