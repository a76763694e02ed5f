//! The scratch directory: what each container's delegate was told at ADD, so that DEL can say the
//! same (specification §9.3, §9.4). Names and content are those of flannel's plugin, so that
//! either plugin can end what the other began.
//!
//! The name is the container's id alone, so two flannel interfaces in one container share a file.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::{
    environment::is_identifier,
    error::{CniError, code},
};

/// The scratch directory.
#[derive(Clone, Debug)]
pub struct Scratch<'a> {
    dir: &'a Path,
}

/// What is kept of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The delegate's configuration.
    pub config: String,
    /// The interface's name; unknown if flannel's own plugin wrote the entry.
    pub interface: Option<String>,
}

impl<'a> Scratch<'a> {
    /// The directory at this path; nothing is touched yet.
    pub fn new(dir: &'a Path) -> Self {
        Self { dir }
    }

    fn config_path(&self, container: &str) -> PathBuf {
        self.dir.join(container)
    }

    /// Beside the file that flannel's plugin knows, for GC, which is told no interface's name.
    /// No container's id starts with a dot.
    fn interface_path(&self, container: &str) -> PathBuf {
        self.dir.join(format!(".{container}.ifname"))
    }

    /// Keeps an entry, on disk before this returns.
    pub fn save(&self, container: &str, config: &str, interface: &str) -> Result<(), CniError> {
        let path = self.config_path(container);
        let failed = |e: &io::Error| CniError::io(code::IO_FAILURE, "write", &path, e);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(self.dir)
            .map_err(|e| CniError::io(code::IO_FAILURE, "mkdir", self.dir, &e))?;
        self.replace(&self.interface_path(container), interface).map_err(|e| failed(&e))?;
        self.replace(&path, config).map_err(|e| failed(&e))
    }

    /// A file of mode 0600, the old one or the new one and never a part.
    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        let mut temp = tempfile::Builder::new().prefix(".new").tempfile_in(self.dir)?;
        temp.write_all(text.as_bytes())?;
        temp.as_file().sync_data()?;
        temp.persist(path)?;
        Ok(())
    }

    /// What is kept of a container, if anything.
    pub fn read(&self, container: &str) -> Result<Option<Entry>, CniError> {
        let path = self.config_path(container);
        let config = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CniError::io(code::IO_FAILURE, "open", &path, &e)),
        };
        let interface = fs::read_to_string(self.interface_path(container)).ok();
        Ok(Some(Entry { config, interface }))
    }

    /// Forgets a container. One that is not known is fine.
    pub fn remove(&self, container: &str) -> Result<(), CniError> {
        for path in [self.config_path(container), self.interface_path(container)] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(CniError::io(code::IO_FAILURE, "remove", &path, &e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// All containers known.
    pub fn containers(&self) -> Result<Vec<String>, CniError> {
        let entries = match fs::read_dir(self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(CniError::io(code::IO_FAILURE, "open", self.dir, &e)),
        };
        let mut names: Vec<String> = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_identifier(name))
            .collect();
        names.sort_unstable();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn entries_are_kept_for_root_alone_until_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a/flannel");
        let scratch = Scratch::new(&path);
        assert_eq!(scratch.containers(), Ok(vec![]));
        assert_eq!(scratch.read("c1"), Ok(None));
        scratch.save("c1", "{}", "eth0").expect("saved");
        scratch.save("c1", "{\"a\":1}", "net1").expect("saved again");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join("c1"))), (0o700, 0o600));
        let entry = Entry { config: "{\"a\":1}".into(), interface: Some("net1".into()) };
        assert_eq!(scratch.read("c1"), Ok(Some(entry)));
        assert_eq!(scratch.containers(), Ok(vec!["c1".to_owned()]));
        scratch.remove("c1").expect("removed");
        scratch.remove("c1").expect("removed already");
        assert_eq!(fs::read_dir(&path).expect("a directory").count(), 0);
    }
}
