//! `cargo xtask image`: an OCI archive with the agent, the CNI plugin and what the firewall needs.
//! No container engine is needed: the archive is written here, byte for byte the same from the
//! same files.

mod debian;
mod oci;
mod rootfs;
mod tree;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use flate2::Compression;

use crate::{build_ebpf, setup, tool};
pub use rootfs::Binaries;

/// Arguments of `image`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Where to write the archive [default: target/flannel-agent-image.tar]
    #[arg(long)]
    output: Option<PathBuf>,
    /// The image's name and tag
    #[arg(long, default_value = DEFAULT_REFERENCE)]
    reference: String,
}

const DEFAULT_REFERENCE: &str = concat!("localhost/flannel-agent:", env!("CARGO_PKG_VERSION"));

/// Builds the programs as released, then the image.
pub fn run(arguments: &Arguments) -> Result<()> {
    setup::ensure()?;
    let binaries = static_binaries()?;
    let output = arguments.output.clone().unwrap_or_else(default_output);
    write(&binaries, &output, &arguments.reference, Compression::best())
}

/// Makes the image for tests from programs that are already built, quickly.
pub fn for_tests(agent: &Path) -> Result<PathBuf> {
    let output = default_output().with_file_name("flannel-agent-test-image.tar");
    let binaries = Binaries { agent: agent.to_owned(), plugin: agent.with_file_name("flannel") };
    write(&binaries, &output, DEFAULT_REFERENCE, Compression::fast())?;
    Ok(output)
}

fn write(binaries: &Binaries, output: &Path, reference: &str, level: Compression) -> Result<()> {
    let description = oci::Description {
        reference: reference.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        entrypoint: rootfs::ENTRYPOINT.to_owned(),
        path: rootfs::PATH.to_owned(),
    };
    let image = oci::build(&rootfs::layers(binaries)?, &description, level)?;
    fs::write(output, &image.archive)
        .with_context(|| format!("cannot write {}", output.display()))?;
    println!(
        "{}\n{reference} {}\n{} packed, {} unpacked; agent {}, plugin {}",
        output.display(),
        image.digest,
        mib(image.archive.len()),
        mib(image.unpacked),
        mib(size(&binaries.agent)?),
        mib(size(&binaries.plugin)?),
    );
    Ok(())
}

/// Both programs without shared libraries: the plugin runs on hosts of any kind, musl's too.
fn static_binaries() -> Result<Binaries> {
    build_ebpf::run()?;
    let triple = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let mut command = tool::cargo();
    command.args(["build", "--locked", "--release", "--package", "flannel-agent", "--bins"]);
    command.args(["--target", &triple]).env("RUSTFLAGS", "-C target-feature=+crt-static");
    tool::check(&mut command)?;
    let dir = tool::target_dir().join(triple).join("release");
    Ok(Binaries { agent: dir.join("flannel-agent"), plugin: dir.join("flannel") })
}

fn default_output() -> PathBuf {
    tool::target_dir().join("flannel-agent-image.tar")
}

fn size(path: &Path) -> Result<usize> {
    let meta = fs::metadata(path).with_context(|| format!("no {}", path.display()))?;
    usize::try_from(meta.len()).context("a file too large")
}

fn mib(bytes: usize) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let size = bytes as f64 / f64::from(1 << 20);
    format!("{size:.1} MiB")
}
