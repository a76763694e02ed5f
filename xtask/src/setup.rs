//! `cargo xtask setup`: what the build and the lab need is found or installed.

mod needs;

use std::{
    env, fmt,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    tool,
    toolchain::{self, Compiler, Missing},
};
use needs::Need;

/// The linker that the programs are built with.
const LINKER_VERSION: &str = "0.13.0";

/// LLVM major versions that this `bpf-linker` can be built with.
const LINKER_LLVM: std::ops::RangeInclusive<u32> = 21..=23;

/// The compiler as Debian has it, with a prebuilt `core` for BPF.
const COMPILER_PACKAGES: [&str; 4] =
    ["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf", "rust-web-clippy"];

/// Arguments of `setup`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only tell what is there and what is missing; exit status 1 if anything is
    #[arg(long)]
    check: bool,
}

/// Reports, and installs unless told not to.
pub fn run(arguments: &Arguments) -> Result<()> {
    let missing = Gaps::find();
    if arguments.check {
        println!("{}", report());
        ensure!(missing.is_none(), "{missing}\n`cargo xtask setup` installs it");
        return Ok(());
    }
    ensure()?;
    println!("{}", report());
    Ok(())
}

/// Installs what is missing. Quick and silent if nothing is.
pub fn ensure() -> Result<()> {
    let gaps = Gaps::find();
    if gaps.is_none() {
        return Ok(());
    }
    eprintln!("{gaps}");
    ensure!(tool::has("apt-get"), "{}", by_hand(&gaps));
    let mut packages: Vec<String> = gaps.tools.iter().map(|need| need.package.into()).collect();
    if matches!(gaps.toolchain, Some(Missing::Compiler { .. })) {
        packages.extend(COMPILER_PACKAGES.map(str::to_owned));
    }
    install(&packages)?;
    // With the compiler in place its LLVM is known, and with that the linker to build.
    match toolchain::find() {
        Ok(_) => {}
        Err(Missing::Linker { llvm, .. }) => install_linker(llvm)?,
        Err(missing @ Missing::Compiler { .. }) => bail!("{missing}"),
    }
    let left = Gaps::find();
    ensure!(left.is_none(), "after the installation, still: {left}");
    Ok(())
}

/// What is missing.
struct Gaps {
    tools: Vec<&'static Need>,
    toolchain: Option<Missing>,
}

impl Gaps {
    fn find() -> Self {
        Self {
            tools: needs::ALL.iter().filter(|need| !need.is_met()).collect(),
            toolchain: toolchain::find().err(),
        }
    }

    fn is_none(&self) -> bool {
        self.tools.is_empty() && self.toolchain.is_none()
    }
}

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "missing:")?;
        for need in &self.tools {
            write!(f, "\n  {} ({}): package {}", need.what, need.purpose, need.package)?;
        }
        match &self.toolchain {
            Some(Missing::Compiler { nightly, system }) => {
                write!(f, "\n  a Rust compiler for {}: {nightly}; {system}", toolchain::TARGET)
            }
            Some(Missing::Linker { llvm, .. }) => {
                write!(f, "\n  bpf-linker {LINKER_VERSION}, built with LLVM {llvm}")
            }
            None => Ok(()),
        }
    }
}

/// What is there, for people.
fn report() -> String {
    let mut text = match toolchain::find() {
        Ok(toolchain) => {
            let which = match toolchain.compiler {
                Compiler::Nightly => "rustup and bpf-linker",
                Compiler::Prebuilt(_) => "the distribution's compiler and bpf-linker",
            };
            format!("BPF toolchain: {which}: {toolchain}")
        }
        Err(missing) => format!("BPF toolchain: {missing}"),
    };
    let (met, unmet): (Vec<_>, Vec<_>) = needs::ALL.iter().partition(|need| need.is_met());
    for (word, needs) in [("found", met), ("missing", unmet)] {
        if !needs.is_empty() {
            let names: Vec<_> = needs.iter().map(|need| need.what).collect();
            text.extend(["\n", word, ": ", &names.join(" ")]);
        }
    }
    text
}

/// What to do on a system that this cannot serve.
fn by_hand(gaps: &Gaps) -> String {
    let mut text =
        "this is no Debian system, so nothing was installed. Install by hand:".to_owned();
    for need in &gaps.tools {
        text.extend(["\n  ", need.what, " (in Debian's package ", need.package, ")"]);
    }
    if let Some(missing) = &gaps.toolchain {
        if matches!(missing, Missing::Compiler { .. }) {
            text.push_str("\n  rustup toolchain install nightly --component rust-src");
        }
        text.extend([
            "\n  the LLVM development files of the version that `rustc -vV` names (llvm-config in \
             PATH), then\n  cargo install bpf-linker --no-default-features --features llvm-<that \
             version> --version ",
            LINKER_VERSION,
        ]);
    }
    text
}

fn install(packages: &[String]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    ensure!(
        tool::is_root()?,
        "only root may install packages. As root: apt-get update && apt-get install -y {list}"
    );
    eprintln!("installing Debian packages: {list}");
    apt(&["update"])?;
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(packages.iter().map(String::as_str));
    apt(&arguments).with_context(|| {
        format!("this system's package sources do not give {list}; see `apt-cache policy {list}`")
    })
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    // Its progress goes to standard error: the standard output belongs to the task.
    command.args(["-qq", "-o", "Dpkg::Use-Pty=0"]).args(arguments);
    command.env("DEBIAN_FRONTEND", "noninteractive");
    let output = command.stdin(Stdio::null()).output().context("cannot start apt-get")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("apt-get {}: {}: {}", arguments.join(" "), output.status, words.trim());
    }
    Ok(())
}

fn install_linker(llvm: u32) -> Result<()> {
    ensure!(
        LINKER_LLVM.contains(&llvm),
        "the compiler has LLVM {llvm}, and bpf-linker {LINKER_VERSION} can be built with LLVM {} \
         to {} only",
        LINKER_LLVM.start(),
        LINKER_LLVM.end()
    );
    let bin = PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin"));
    if !bin.join("llvm-config").exists() || !bin.with_file_name("lib/libPolly.a").exists() {
        install(&[format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev")])?;
    }
    eprintln!("building bpf-linker {LINKER_VERSION} with LLVM {llvm}: a minute or two");
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([bin].into_iter().chain(env::split_paths(&path)))?;
    let mut command = tool::cargo();
    command
        .args(["install", "bpf-linker", "--quiet", "--locked", "--version", LINKER_VERSION])
        .args(["--no-default-features", &format!("--features=llvm-{llvm}")])
        .env("PATH", path);
    tool::check(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_and_so_is_the_way_to_get_it() {
        let compiler = Compiler::Nightly;
        let need = &needs::ALL[0];
        let gaps =
            Gaps { tools: vec![need], toolchain: Some(Missing::Linker { compiler, llvm: 22 }) };
        assert!(!gaps.is_none());
        let named = gaps.to_string();
        assert!(named.contains(need.package) && named.contains("built with LLVM 22"), "{named}");
        let advice = by_hand(&gaps);
        assert!(advice.contains(need.what) && advice.contains("bpf-linker"), "{advice}");
        assert!(!advice.contains("rustup"), "the compiler is there: {advice}");
    }
}
