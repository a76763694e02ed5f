//! Which of this machine's files a program needs, and which packages they are from.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// A Debian package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Its name, without the architecture.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licences, if the package has the file.
    pub copyright: Option<PathBuf>,
}

/// iptables' extensions. Rules of others cannot even be listed without theirs, so all are taken.
pub fn xtables_extensions() -> Result<Vec<PathBuf>> {
    let library = libraries(&["/usr/sbin/xtables-nft-multi".into()])?
        .into_iter()
        .find(|path| path.to_string_lossy().contains("/libxtables.so"))
        .context("iptables is built in an unknown way: it has no libxtables")?;
    let triplet = library.parent().and_then(Path::file_name).context("a library nowhere")?;
    let dir = Path::new("/usr/lib").join(triplet).join("xtables");
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "so"))
        .collect();
    paths.sort();
    ensure!(!paths.is_empty(), "{} has no extensions of iptables", dir.display());
    Ok(paths)
}

/// The shared libraries that programs and libraries need, the loader among them.
pub fn libraries(of: &[PathBuf]) -> Result<Vec<PathBuf>> {
    // Fails for a static program among several, yet tells of the others.
    let output = Command::new("ldd").args(of).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        ensure!(!line.ends_with("=> not found"), "a library is not installed: {line}");
        if let Some(path) = library(line) {
            found.insert(PathBuf::from(path));
        }
    }
    Ok(found.into_iter().collect())
}

/// `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)` or `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn library(line: &str) -> Option<&str> {
    let (path, address) = line.rsplit_once(" (0x")?;
    let path = path.rsplit_once("=> ").map_or(path, |(_, path)| path);
    (address.ends_with(')') && path.starts_with('/')).then_some(path)
}

/// The packages that files belong to, each once, by name.
pub fn packages_of(files: &[PathBuf]) -> Result<Vec<Package>> {
    let mut names = BTreeSet::new();
    for file in files {
        // dpkg knows a file by the path that its package has, on either side of /usr.
        let real = fs::canonicalize(file)?;
        let other = real.strip_prefix("/usr").map(|path| Path::new("/").join(path));
        let mut command = Command::new("dpkg-query");
        command.arg("--search").args([file, &real]).args(other.ok());
        let output = command.output().context("cannot start dpkg-query")?;
        let text = String::from_utf8_lossy(&output.stdout);
        // Certificates are generated and belong to nobody.
        let owners = text.lines().filter_map(|line| line.split_once(": "));
        names.extend(owners.map(|(package, _)| package.to_owned()));
    }
    let mut packages = Vec::new();
    for name in names {
        let output = Command::new("dpkg-query")
            .args(["--show", "--showformat=${Version}", &name])
            .output()
            .context("cannot start dpkg-query")?;
        let plain = name.split(':').next().unwrap_or(&name).to_owned();
        let copyright = Path::new("/usr/share/doc").join(&plain).join("copyright");
        packages.push(Package {
            version: String::from_utf8_lossy(&output.stdout).into_owned(),
            copyright: copyright.exists().then_some(copyright),
            name: plain,
        });
    }
    packages.sort();
    packages.dedup();
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_ldd_are_read() {
        let lib = "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1b97208000)";
        assert_eq!(library(lib), Some("/lib/x86_64-linux-gnu/libc.so.6"));
        let loader = "/lib64/ld-linux-x86-64.so.2 (0x00007f1b97519000)";
        assert_eq!(library(loader), Some("/lib64/ld-linux-x86-64.so.2"));
        for other in ["linux-vdso.so.1 (0x00007f1b97517000)", "/usr/sbin/nft:", "statically linked"]
        {
            assert_eq!(library(other), None, "{other}");
        }
    }
}
