//! The VTEP's MAC across reboots.
//!
//! Peers that cannot reach the store keep sending to the MAC they know. The store comes first (it
//! is what peers read); this file is for stores that have forgotten us.

use std::{
    cell::Cell,
    fs,
    io::{self, Write},
    net::IpAddr,
    path::{Path, PathBuf},
};

use tracing::warn;

use crate::mac::MacAddr;

/// The file that holds one device's MAC. Its name carries our public address, so that a cloned
/// machine does not come up with its twin's MAC.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    /// Whether it was said that the file cannot be written: once is enough.
    complained: Cell<bool>,
}

impl StateFile {
    /// The file for a device of the node with this public address.
    pub fn new(dir: &Path, device: &str, public: Option<IpAddr>) -> Self {
        let owner = public.map_or_else(|| "unknown".to_owned(), |ip| ip.to_string());
        Self { path: dir.join(format!("{device}@{owner}.mac")), complained: Cell::new(false) }
    }

    /// The MAC kept there, if it is one.
    pub fn read(&self) -> Option<MacAddr> {
        match fs::read_to_string(&self.path) {
            Ok(text) => {
                let mac = MacAddr::parse(text.trim()).filter(|mac| mac.is_station());
                if mac.is_none() {
                    warn!("{} holds no MAC; a new one is chosen", self.path.display());
                }
                mac
            }
            Err(err) if err.kind() == io::ErrorKind::NotFound => None,
            Err(err) => {
                warn!("cannot read {}: {err}; a new MAC is chosen", self.path.display());
                None
            }
        }
    }

    /// Keeps a MAC, in one step. Failing costs only the memory of it.
    pub fn keep(&self, mac: MacAddr) {
        let text = format!("{mac}\n");
        if fs::read_to_string(&self.path).is_ok_and(|kept| kept == text) {
            return;
        }
        if let Err(err) = self.write(&text)
            && !self.complained.replace(true)
        {
            warn!(
                "cannot keep the VTEP's MAC in {}: {err}; after a reboot without the store peers \
                 have to learn a new one (choose a writable --state-dir)",
                self.path.display()
            );
        }
    }

    fn write(&self, text: &str) -> io::Result<()> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(dir)?;
        let mut file = tempfile::Builder::new().prefix(".mac").tempfile_in(dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        fs::File::open(dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_survives_and_rubbish_is_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let ip = "192.0.2.11".parse().ok();
        let file = StateFile::new(&dir.path().join("deep/er"), "flannel.1", ip);
        assert_eq!(file.read(), None);
        let mac = MacAddr([2, 0xfa, 0, 0, 0, 0x11]);
        file.keep(mac);
        assert_eq!(file.read(), Some(mac));
        let other = StateFile::new(&dir.path().join("deep/er"), "flannel.1", None);
        assert_eq!(other.read(), None, "another node's file");
        fs::write(&file.path, "ff:ff:ff:ff:ff:ff").expect("writable");
        assert_eq!(file.read(), None);
    }
}
