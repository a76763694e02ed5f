//! Taking everything away that agents pinned and attached.

use std::{
    fs::{self, File},
    io, iter,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    net::if_::if_nameindex,
};

use super::{attach, hook::HOOKS, link, pin, xdp::UNDERLAY_XDP};

/// The pins of all devices, locked against agents.
pub struct Pins {
    pin_dir: PathBuf,
    directories: Vec<(PathBuf, Flock<File>)>,
}

/// Is told of each thing: its kind, its name, and whether it was removed or why not.
pub type Note<'a> = &'a mut dyn FnMut(&'static str, &str, Result<bool, String>);

impl Pins {
    /// Takes the locks. Without a directory on a bpf file system there are no pins.
    ///
    /// # Errors
    /// The directory that an agent uses.
    pub fn lock(pin_dir: &Path) -> Result<Self, PathBuf> {
        let mut directories = Vec::new();
        let entries = pin::check_bpffs(pin_dir).ok().and_then(|()| fs::read_dir(pin_dir).ok());
        for path in entries.into_iter().flatten().flatten().map(|entry| entry.path()) {
            let Ok(file) = File::open(&path).and_then(|file| {
                if file.metadata()?.is_dir() { Ok(file) } else { Err(io::ErrorKind::Other.into()) }
            }) else {
                continue;
            };
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => directories.push((path, lock)),
                Err((_, Errno::EWOULDBLOCK)) => return Err(path),
                // It was removed just now.
                Err(_) => {}
            }
        }
        Ok(Self { pin_dir: pin_dir.to_owned(), directories })
    }

    /// The devices that have pins.
    pub fn devices(&self) -> impl Iterator<Item = String> {
        self.directories.iter().map(|(path, _)| pin::device_of(path))
    }

    /// Detaches all programs and removes all pins.
    pub fn remove(self, note: Note<'_>) {
        if self.directories.is_empty() {
            return;
        }
        for (path, _lock) in &self.directories {
            for entry in entries(path) {
                let name = entry.display().to_string();
                if entry.is_dir() {
                    note("pins", &name, pin::remove_directory(&entry).map(|()| true));
                } else {
                    let outcome = link::detach(&entry).map_err(|error| error.to_string());
                    note("link", &name, outcome.map(|()| true));
                }
            }
            let outcome = fs::remove_dir(path).map_err(|error| error.to_string());
            note("pins", &path.display().to_string(), outcome.map(|()| true));
        }
        // Where there is no TCX.
        for interface in if_nameindex().iter().flatten() {
            let Ok(name) = interface.name().to_str() else { continue };
            for hook in HOOKS {
                let outcome = attach::remove_filter(hook, interface.index(), name);
                note("filter", &format!("{} at {name}", hook.program), outcome);
            }
        }
        // Others may keep something there.
        let _ = fs::remove_dir(&self.pin_dir);
    }
}

/// Detaches what an earlier agent left at the packets of a tunnel, for one that uses no programs: with
/// maps that nobody keeps they would refuse new peers. The maps stay, for their counters.
pub fn detach_left_over(pin_dir: &Path, device: &str) {
    let directory = pin::directory(pin_dir, device);
    // XDP first: what it hands over needs the program at TC.
    for program in iter::once(UNDERLAY_XDP).chain(HOOKS.map(|hook| hook.program)) {
        for (_, path) in pin::links_in(&directory, program) {
            match link::detach(&path) {
                Ok(()) => tracing::info!("removed {}: no eBPF is wanted", path.display()),
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut entries: Vec<_> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries
}
