//! `cargo xtask fuzz [TARGET]`.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::{build_ebpf::workspace, tool};

/// The package of the targets, from the workspace's root.
const PACKAGE: &str = "tests/fuzz";

/// Arguments of `fuzz`.
#[derive(clap::Args)]
pub struct Arguments {
    /// One of tests/fuzz/targets; all of them, one after the other, if none is given
    target: Option<String>,
    /// How long each runs
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// Fuzzes; the error names what was found. The inputs found worth keeping stay in
/// `tests/fuzz/corpus`, those that fail in `tests/fuzz/artifacts`.
pub fn run(arguments: &Arguments) -> Result<()> {
    ensure!(tool::has("cargo-fuzz"), "cargo-fuzz is missing: `cargo install --locked cargo-fuzz`");
    let package = workspace().join(PACKAGE);
    let all = targets(&package.join("targets"))?;
    let chosen = match &arguments.target {
        Some(target) => {
            ensure!(
                all.contains(target),
                "no fuzz target is named {target}; there are {}",
                all.join(", ")
            );
            vec![target.clone()]
        }
        None => all,
    };
    for target in chosen {
        let corpus = package.join("corpus").join(&target);
        fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
        let mut command = tool::cargo();
        // The sanitizers' flags are unstable, and no other compiler may be there.
        command.env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", "--fuzz-dir", PACKAGE, &target]);
        command.arg(&corpus).arg(package.join("seeds").join(&target)).arg("--");
        tool::check(command.arg(format!("-max_total_time={}", arguments.seconds)))?;
    }
    Ok(())
}

/// The names of the targets in a directory.
fn targets(directory: &Path) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut names: Vec<String> =
        paths.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort_unstable();
    Ok(names)
}
