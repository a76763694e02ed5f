//! A tree of files in memory that becomes a tar file, the same one each time: sorted, owned by
//! root, of 1970.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result};
use tar::{Builder, EntryType, Header};

/// Files by their paths without the leading slash. Directories that are only on the way to a
/// file come by themselves.
#[derive(Debug, Default)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
enum Entry {
    Directory(u32),
    File(u32, Vec<u8>),
    Symlink(String),
}

impl Tree {
    /// An empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory.
    pub fn directory(&mut self, path: &str, mode: u32) {
        self.parents(path);
        self.entries.insert(path.to_owned(), Entry::Directory(mode));
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        self.parents(path);
        self.entries.insert(path.to_owned(), Entry::File(mode, content.into()));
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entries.insert(path.to_owned(), Entry::Symlink(target.to_owned()));
    }

    /// Adds a file of this machine; links are followed.
    pub fn copy(&mut self, source: &Path, path: &str) -> Result<()> {
        let content =
            fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        let executable = fs::metadata(source)?.permissions().mode() & 0o111 != 0;
        self.file(path, if executable { 0o755 } else { 0o644 }, content);
        Ok(())
    }

    fn parents(&mut self, path: &str) {
        for (end, _) in path.match_indices('/') {
            self.entries.entry(path[..end].to_owned()).or_insert(Entry::Directory(0o755));
        }
    }

    /// The tar file.
    pub fn to_tar(&self) -> Result<Vec<u8>> {
        let mut builder = Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            let mut header = Header::new_gnu();
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_size(0);
            let added = match entry {
                Entry::Directory(mode) => {
                    header.set_entry_type(EntryType::Directory);
                    header.set_mode(*mode);
                    builder.append_data(&mut header, format!("{path}/"), &[][..])
                }
                Entry::File(mode, content) => {
                    header.set_mode(*mode);
                    header.set_size(content.len() as u64);
                    builder.append_data(&mut header, path, &content[..])
                }
                Entry::Symlink(target) => {
                    header.set_entry_type(EntryType::Symlink);
                    header.set_mode(0o777);
                    builder.append_link(&mut header, path, target)
                }
            };
            added.with_context(|| format!("cannot pack {path}"))?;
        }
        builder.into_inner().context("cannot finish a tar file")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_packed_with_its_directories_first() {
        let mut tree = Tree::new();
        tree.symlink("usr/bin/b", "a");
        tree.file("usr/bin/a", 0o755, "text");
        tree.directory("tmp", 0o1777);
        let tar = tree.to_tar().expect("packed");
        let mut archive = tar::Archive::new(&tar[..]);
        let entries: Vec<(String, u32, u64)> = archive
            .entries()
            .expect("a tar file")
            .map(|entry| {
                let entry = entry.expect("an entry");
                let header = entry.header();
                assert_eq!((header.uid().ok(), header.mtime().ok()), (Some(0), Some(0)));
                let path = entry.path().expect("a path").display().to_string();
                (path, header.mode().expect("a mode"), entry.size())
            })
            .collect();
        let wanted = [
            ("tmp/", 0o1777, 0),
            ("usr/", 0o755, 0),
            ("usr/bin/", 0o755, 0),
            ("usr/bin/a", 0o755, 4),
            ("usr/bin/b", 0o777, 0),
        ];
        assert_eq!(entries, wanted.map(|(path, mode, size)| (path.to_owned(), mode, size)));
    }
}
