//! `cargo xtask build-ebpf`: one object with all programs, where the agent's build finds it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, ensure};

use crate::toolchain::{self, Compiler, TARGET, Toolchain};

/// The profile of the programs, which has nothing to do with the agent's.
const PROFILE: &str = "bpf";

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// Where the object is put, and where `flannel-agent/build.rs` looks for it.
pub fn object(workspace: &Path) -> PathBuf {
    workspace.join("target/bpf/flannel-ebpf")
}

/// Builds the object and returns its path.
pub fn run() -> anyhow::Result<PathBuf> {
    let toolchain = toolchain::find()?;
    eprintln!("building the eBPF programs with {toolchain}");
    let root = workspace();
    // What changes after this is not in the object.
    let newest = newest_source(&root)?;
    // Away from the other artifacts: another compiler, other flags, another lock.
    let target_dir = root.join("target/bpf-build");
    let mut command = command(&toolchain, &root, &target_dir, "build");
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "building the eBPF programs failed ({status})");
    let built = target_dir.join(TARGET).join(PROFILE).join("flannel-ebpf");
    let object = object(&root);
    publish(&built, &object)?;
    stamp(&object.with_extension("built"), newest)?;
    eprintln!("{}", object.display());
    Ok(object)
}

/// Lets clippy judge the programs, compiled as they are for the kernel. Any warning is an error.
pub fn lint() -> anyhow::Result<()> {
    let toolchain = toolchain::find()?;
    if let Compiler::Prebuilt(rustc) = &toolchain.compiler {
        let clippy = clippy_beside(rustc);
        ensure!(
            clippy.exists(),
            "{} belongs to {} and is missing: on Debian, `apt-get install rust-web-clippy`",
            clippy.display(),
            rustc.display()
        );
    }
    let root = workspace();
    let mut command = command(&toolchain, &root, &root.join("target/bpf-build"), "clippy");
    let status =
        command.args(["--", "-Dwarnings"]).status().context("cannot start cargo clippy")?;
    ensure!(status.success(), "clippy found something in the eBPF programs ({status})");
    Ok(())
}

/// The clippy that was built for a compiler.
fn clippy_beside(rustc: &Path) -> PathBuf {
    rustc.with_file_name("cargo-clippy")
}

/// A `cargo` for the programs; `task` is `build` or `clippy`.
fn command(toolchain: &Toolchain, root: &Path, target_dir: &Path, task: &str) -> Command {
    let mut command = match &toolchain.compiler {
        Compiler::Nightly => {
            let mut command = Command::new("rustup");
            command.args(["run", "nightly", "cargo", task, "-Z", "build-std=core"]);
            // Set for this crate's own build, and stronger than the toolchain's choice.
            command.env_remove("RUSTC");
            command
        }
        Compiler::Prebuilt(rustc) => {
            let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            // Cargo would take the clippy of its own toolchain, which knows no `core` for BPF.
            let program = if task == "clippy" { clippy_beside(rustc).into() } else { cargo };
            let mut command = Command::new(program);
            command.arg(task).env("RUSTC", rustc);
            // The one unstable feature that aya-ebpf uses, for that crate alone.
            command.env("RUSTC_BOOTSTRAP", "aya_ebpf");
            command
        }
    };
    let flags = [
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        format!("--cfg=bpf_target_arch=\"{}\"", env::consts::ARCH),
        format!("-Clinker={}", toolchain.linker.display()),
    ];
    command
        .current_dir(root)
        .args(["--locked", "--quiet", "--profile", PROFILE, "--package", "flannel-ebpf"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(target_dir)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Notes how new the newest source in the object is, for `flannel-agent/build.rs`.
fn stamp(path: &Path, newest: SystemTime) -> anyhow::Result<()> {
    let text = newest.duration_since(SystemTime::UNIX_EPOCH)?.as_nanos().to_string();
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// When one of the programs' sources last changed.
fn newest_source(root: &Path) -> anyhow::Result<SystemTime> {
    let mut newest = SystemTime::UNIX_EPOCH;
    let mut directories = vec![root.join("flannel-ebpf/src"), root.join("flannel-common/src")];
    while let Some(directory) = directories.pop() {
        let failed = || format!("cannot read {}", directory.display());
        for entry in fs::read_dir(&directory).with_context(failed)? {
            let path = entry.with_context(failed)?.path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let changed = fs::metadata(&path).and_then(|data| data.modified());
                newest = newest.max(changed.with_context(failed)?);
            }
        }
    }
    Ok(newest)
}

/// Puts a copy in place in one step, so that a build of the agent at the same time reads the old
/// object or the new one. An object that did not change is left alone: nothing is built again.
fn publish(built: &Path, object: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    if fs::read(object).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let failed = || format!("cannot write {}", object.display());
    let directory = object.parent().context("the object has no directory")?;
    fs::create_dir_all(directory).with_context(failed)?;
    let temporary = object.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&temporary, bytes).with_context(failed)?;
    fs::rename(&temporary, object).with_context(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn only_a_changed_object_is_replaced() {
        let dir = env::temp_dir().join(format!("flannel-xtask-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let (built, object) = (dir.join("built"), dir.join("bpf/object"));
        fs::write(&built, "one").expect("written");
        publish(&built, &object).expect("published");
        let inode = || fs::metadata(&object).expect("there").ino();
        let first = inode();
        publish(&built, &object).expect("published");
        assert_eq!(inode(), first);
        fs::write(&built, "two").expect("written");
        publish(&built, &object).expect("published");
        assert_eq!(fs::read(&object).expect("there"), b"two");
        assert_eq!(fs::read_dir(dir.join("bpf")).expect("there").count(), 1);
        fs::remove_dir_all(&dir).expect("removed");
    }
}
