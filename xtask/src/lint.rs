//! `cargo xtask lint`: clippy over the workspace, and over the eBPF programs for their target.

use crate::{build_ebpf, setup, tool};

/// Any warning is an error.
pub fn run() -> anyhow::Result<()> {
    setup::ensure()?;
    tool::check(tool::cargo().args(["fmt", "--all", "--check"]))?;
    tool::check(tool::cargo().args([
        "clippy",
        "--locked",
        "--workspace",
        "--exclude=flannel-ebpf",
        "--all-targets",
        "--",
        "-Dwarnings",
    ]))?;
    build_ebpf::lint()
}
