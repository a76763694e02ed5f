//! Finding a toolchain that compiles for BPF: rustup's nightly with `rust-src`, else the
//! distribution's compiler with its prebuilt `core`. Each needs a `bpf-linker` besides.

use std::{
    env,
    ffi::OsStr,
    fmt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The target that the programs are compiled for: the host's byte order.
pub const TARGET: &str =
    if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };

/// Where Debian's `rustc-web` puts the compiler.
const SYSTEM_RUSTC: &str = "/usr/bin/rustc";

/// The oldest compiler that the programs and aya-ebpf compile with: minor version of 1.x.
const MIN_MINOR: u32 = 95;

/// A compiler for BPF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// rustup's nightly, which builds `core` from `rust-src`.
    Nightly,
    /// A compiler with a prebuilt `core` for [`TARGET`]: the path of `rustc`.
    Prebuilt(PathBuf),
}

/// Everything it takes to build the BPF object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// Which compiler.
    pub compiler: Compiler,
    /// Its version, for people: `rustc 1.96.0 (…)`.
    pub version: String,
    /// The major version of the LLVM inside it; `bpf-linker` must be built with one as new.
    pub llvm: u32,
    /// The linker.
    pub linker: PathBuf,
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match &self.compiler {
            Compiler::Nightly => "rustup's nightly with rust-src".to_owned(),
            Compiler::Prebuilt(rustc) => format!("{} with a prebuilt core", rustc.display()),
        };
        let Self { version, llvm, linker, .. } = self;
        write!(f, "{way} ({version}, LLVM {llvm}), {}", linker.display())
    }
}

/// What is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Neither compiler is there; why not, one by one.
    Compiler {
        /// What is the matter with rustup's nightly.
        nightly: String,
        /// What is the matter with the distribution's compiler.
        system: String,
    },
    /// There is a compiler but no linker.
    Linker {
        /// The compiler that would be taken.
        compiler: Compiler,
        /// The major version of its LLVM.
        llvm: u32,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compiler { nightly, system } => write!(
                f,
                "no Rust compiler for {TARGET}: {nightly}; {system}. Run `cargo xtask setup`, or \
                 by hand either `rustup toolchain install nightly --component rust-src`, or on \
                 Debian `apt-get install rustc-web libstd-rust-web-dev-bpf`"
            ),
            Self::Linker { llvm, .. } => write!(
                f,
                "no bpf-linker. Run `cargo xtask setup`, or by hand `apt-get install \
                 llvm-{llvm}-dev libpolly-{llvm}-dev` and, with /usr/lib/llvm-{llvm}/bin first in \
                 PATH, `cargo install bpf-linker --no-default-features --features llvm-{llvm}`"
            ),
        }
    }
}

impl std::error::Error for Missing {}

/// Finds the first toolchain that is complete.
pub fn find() -> Result<Toolchain, Missing> {
    let linker = which("bpf-linker");
    let (nightly, system) = (nightly(), system());
    let (compiler, version) = match (nightly, system) {
        (Ok(version), _) => (Compiler::Nightly, version),
        (Err(_), Ok(version)) => (Compiler::Prebuilt(SYSTEM_RUSTC.into()), version),
        (Err(nightly), Err(system)) => return Err(Missing::Compiler { nightly, system }),
    };
    let Version { text, llvm, .. } = version;
    match linker {
        Some(linker) => Ok(Toolchain { compiler, version: text, llvm, linker }),
        None => Err(Missing::Linker { compiler, llvm }),
    }
}

/// What `rustc -vV` says.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    text: String,
    minor: u32,
    llvm: u32,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let first = text.lines().next()?.to_owned();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        let release = field("release: 1.")?;
        let llvm = field("LLVM version: ")?;
        Some(Self {
            text: first,
            minor: release.split('.').next()?.parse().ok()?,
            llvm: llvm.split('.').next()?.parse().ok()?,
        })
    }
}

fn nightly() -> Result<Version, String> {
    let what = "rustup's nightly";
    let rustup = which("rustup").ok_or("rustup is not installed")?;
    let rustc = |args: &[&str]| {
        let run = Command::new(&rustup).args(["run", "nightly", "rustc"]).args(args).output();
        text_of(run).map_err(|why| format!("{what} does not run: {why}"))
    };
    let version = checked_version(what, &rustc(&["-vV"])?)?;
    let source = Path::new(rustc(&["--print", "sysroot"])?.trim())
        .join("lib/rustlib/src/rust/library/core/Cargo.toml");
    if source.exists() { Ok(version) } else { Err(format!("{what} has no rust-src")) }
}

fn system() -> Result<Version, String> {
    let rustc = |args: &[&str]| {
        text_of(Command::new(SYSTEM_RUSTC).args(args).output())
            .map_err(|why| format!("{SYSTEM_RUSTC} does not run: {why}"))
    };
    let version = checked_version(SYSTEM_RUSTC, &rustc(&["-vV"])?)?;
    let library = rustc(&["--target", TARGET, "--print", "target-libdir"])?;
    let has_core = std::fs::read_dir(library.trim()).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libcore-"))
    });
    if has_core { Ok(version) } else { Err(format!("{SYSTEM_RUSTC} has no core for {TARGET}")) }
}

fn checked_version(what: &str, text: &str) -> Result<Version, String> {
    let version = Version::parse(text).ok_or_else(|| format!("{what} tells no version"))?;
    if version.minor < MIN_MINOR {
        return Err(format!("{what} is {}, and 1.{MIN_MINOR} is needed", version.text));
    }
    Ok(version)
}

fn text_of(output: std::io::Result<Output>) -> Result<String, String> {
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(complaint.lines().next().unwrap_or("it fails").trim().to_owned())
}

/// The path of a program: from `PATH`, or from where cargo installs.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")));
    find_in(env::split_paths(&path).chain(home.map(|home| home.join("bin"))), program.as_ref())
}

fn find_in(directories: impl Iterator<Item = PathBuf>, program: &OsStr) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    directories.map(|directory| directory.join(program)).find(|path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_version_is_read() {
        let text = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)\nbinary: \
                    rustc\nhost: x86_64-unknown-linux-gnu\nrelease: 1.96.0-nightly\nLLVM version: \
                    22.1.5\n";
        let version = Version::parse(text).expect("a version");
        assert_eq!((version.minor, version.llvm), (96, 22));
        assert!(version.text.starts_with("rustc 1.96.0"));
        assert_eq!(Version::parse("rustc 1.96.0\n"), None);
        assert!(
            checked_version("x", &text.replace("1.96", "1.63")).expect_err("old").contains("1.63")
        );
    }

    #[test]
    fn what_is_missing_is_named_with_the_remedy() {
        let linker = Missing::Linker { compiler: Compiler::Nightly, llvm: 23 }.to_string();
        assert!(
            linker.contains("llvm-23-dev") && linker.contains("--features llvm-23"),
            "{linker}"
        );
        let (nightly, system) = ("no rustup".to_owned(), "no rustc".to_owned());
        let compiler = Missing::Compiler { nightly, system }.to_string();
        assert!(compiler.contains("no rustup; no rustc. Run `cargo xtask setup`"), "{compiler}");
    }
}
