//! Where maps and links outlive the agent: a directory on a bpf file system.
//!
//! `<pin dir>/<device>/<program>-<ifindex>` are links, `<pin dir>/<device>/v<schema>/`
//! holds the maps. Links stand outside of the version, because a new version takes them over.
//! Such a file system allows no dots in names: `flannel.1` becomes `flannel:1`, and as no
//! device's name can have a colon, no two devices meet there.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapInfo, MapType, lpm_trie::Key};
use flannel_common::{
    flow::{Flow, Flow4Key, Flow6Key, FlowRules, MAX_FLOWS},
    map::{
        Config, Counters, Lease, MAX_PEERS, MAX_VTEPS, OuterAddress, Peer, SCHEMA_VERSION, Vtep,
        VtepKey, XdpFront,
    },
    outcome::Outcome,
};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use super::{EbpfError, link};

/// What a pinned map must look like to be adopted.
pub(super) struct MapShape {
    pub(super) name: &'static str,
    kind: MapType,
    key: usize,
    value: usize,
    entries: usize,
}

pub(super) const CONFIG: MapShape = shape::<u32, Config>("CONFIG", MapType::Array, 1);
pub(super) const PEERS: MapShape =
    shape::<OuterAddress, Peer>("PEERS", MapType::Hash, MAX_PEERS as usize);
pub(super) const PEER_COUNTERS: MapShape =
    shape::<u32, Counters>("PEER_COUNTERS", MapType::PerCpuArray, MAX_PEERS as usize);
pub(super) const OUTCOMES: MapShape =
    shape::<u32, Counters>("OUTCOMES", MapType::PerCpuArray, Outcome::COUNT);

pub(super) const XDP_FRONT: MapShape = shape::<u32, XdpFront>("XDP_FRONT", MapType::Array, 1);
pub(super) const XDP_OUTCOMES: MapShape =
    shape::<u32, Counters>("XDP_OUTCOMES", MapType::PerCpuArray, Outcome::COUNT);

pub(super) const VTEPS: MapShape =
    shape::<VtepKey, Vtep>("VTEPS", MapType::Hash, MAX_VTEPS as usize);
pub(super) const SUBNETS4: MapShape =
    shape::<Key<[u8; 4]>, Lease>("SUBNETS4", MapType::LpmTrie, MAX_PEERS as usize);
pub(super) const SUBNETS6: MapShape =
    shape::<Key<[u8; 16]>, Lease>("SUBNETS6", MapType::LpmTrie, MAX_PEERS as usize);

pub(super) const FLOW_RULES: MapShape = shape::<u32, FlowRules>("FLOW_RULES", MapType::Array, 1);
pub(super) const FLOWS4: MapShape =
    shape::<Flow4Key, Flow>("FLOWS4", MapType::LruHash, MAX_FLOWS as usize);
pub(super) const FLOWS6: MapShape =
    shape::<Flow6Key, Flow>("FLOWS6", MapType::LruHash, MAX_FLOWS as usize);

/// The maps that are pinned.
pub(super) const MAPS: [MapShape; 12] = [
    XDP_FRONT,
    XDP_OUTCOMES,
    CONFIG,
    PEERS,
    PEER_COUNTERS,
    OUTCOMES,
    VTEPS,
    SUBNETS4,
    SUBNETS6,
    FLOW_RULES,
    FLOWS4,
    FLOWS6,
];

const fn shape<K, V>(name: &'static str, kind: MapType, entries: usize) -> MapShape {
    MapShape { name, kind, key: size_of::<K>(), value: size_of::<V>(), entries }
}

impl MapShape {
    /// Opens the map pinned in a directory; `None` if there is none, or one of another shape.
    pub(super) fn open(&self, directory: &Path) -> Option<MapData> {
        let map = MapData::from_pin(directory.join(self.name)).ok()?;
        self.fits(&map.info().ok()?).then_some(map)
    }

    fn fits(&self, info: &MapInfo) -> bool {
        let same = |found: u32, wanted: usize| usize::try_from(found) == Ok(wanted);
        info.map_type().is_ok_and(|kind| kind == self.kind)
            && same(info.key_size(), self.key)
            && same(info.value_size(), self.value)
            && same(info.max_entries(), self.entries)
    }
}

/// The directory of one device, ours alone as long as this lives.
pub(super) struct PinDirectory {
    device: PathBuf,
    lock: Flock<File>,
}

impl PinDirectory {
    /// Makes the directories and takes the lock.
    pub(super) fn open(pin_dir: &Path, device: &str) -> Result<Self, EbpfError> {
        if device.is_empty() || device.contains(['/', ':']) {
            return Err(EbpfError::DeviceName(device.to_owned()));
        }
        check_bpffs(pin_dir)?;
        let device = directory(pin_dir, device);
        let maps = maps_in(&device);
        let failed = |reason| EbpfError::Pin { path: maps.clone(), reason };
        fs::create_dir_all(&maps).map_err(failed)?;
        let file = File::open(&device).map_err(failed)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { device, lock }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(EbpfError::InUse(device)),
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }

    /// Whether the directory that was opened is still the one at this path. It is not after
    /// the bpf file system was unmounted, or mounted anew.
    pub(super) fn intact(&self) -> bool {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let ours = self.lock.metadata().map(identity).ok();
        ours.is_some()
            && ours == fs::metadata(&self.device).map(identity).ok()
            && self.maps().is_dir()
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        &self.device
    }

    /// Where the maps are.
    pub(super) fn maps(&self) -> PathBuf {
        maps_in(&self.device)
    }

    /// Where the link of an interface is.
    pub(super) fn link(&self, program: &str, ifindex: u32) -> PathBuf {
        self.device.join(format!("{program}-{ifindex}"))
    }

    /// The interfaces whose links are pinned.
    pub(super) fn linked(&self, program: &str) -> Vec<u32> {
        links_in(&self.device, program).map(|(ifindex, _)| ifindex).collect()
    }

    /// Removes what an agent of another version left: maps of its schema, and links of programs
    /// that are not among ours (`programs`). Called once ours are attached, so that no packet goes
    /// without. The directory is ours alone, so whatever is in it is an agent's.
    pub(super) fn discard_old(&self, programs: &[&str]) {
        let Ok(entries) = fs::read_dir(&self.device) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let outcome = if path.is_dir() {
                if path == self.maps() {
                    continue;
                }
                remove_directory(&path)
            } else {
                let program = name.rsplit_once('-').map_or(&*name, |(program, _)| program);
                if programs.contains(&program) {
                    continue;
                }
                link::detach(&path).map_err(|error| error.to_string())
            };
            match outcome {
                Ok(()) => tracing::info!("removed {}: another version's", path.display()),
                Err(why) => tracing::warn!("cannot remove {}: {why}", path.display()),
            }
        }
    }

    /// Takes pinned maps of another shape out of the way: they cannot be ours.
    pub(super) fn discard_misfits(&self) -> Result<(), EbpfError> {
        let directory = self.maps();
        for shape in &MAPS {
            let path = directory.join(shape.name);
            if path.exists() && shape.open(&directory).is_none() {
                tracing::warn!("{} is not a map of ours and is replaced", path.display());
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// The directory of a device.
pub(super) fn directory(pin_dir: &Path, device: &str) -> PathBuf {
    pin_dir.join(device.replace('.', ":"))
}

/// A program's links in a device's directory: the interface of each, and where it is pinned.
pub(super) fn links_in(directory: &Path, program: &str) -> impl Iterator<Item = (u32, PathBuf)> {
    fs::read_dir(directory).into_iter().flatten().flatten().filter_map(move |entry| {
        let name = entry.file_name();
        let index = name.to_str()?.strip_prefix(program)?.strip_prefix('-')?.parse().ok()?;
        Some((index, entry.path()))
    })
}

/// Removes a pin; none there is as good.
pub(super) fn remove(path: &Path) -> Result<(), EbpfError> {
    match fs::remove_file(path) {
        Err(reason) if reason.kind() != io::ErrorKind::NotFound => {
            Err(EbpfError::Pin { path: path.to_owned(), reason })
        }
        _ => Ok(()),
    }
}

/// Removes a directory of pinned maps.
///
/// # Errors
/// What could not be removed, in the kernel's words.
pub(super) fn remove_directory(path: &Path) -> Result<(), String> {
    let entries = fs::read_dir(path).map_err(|error| error.to_string())?;
    for entry in entries.flatten() {
        remove(&entry.path()).map_err(|error| error.to_string())?;
    }
    fs::remove_dir(path).map_err(|error| error.to_string())
}

/// The device whose directory this is.
pub(super) fn device_of(directory: &Path) -> String {
    directory.file_name().unwrap_or_default().to_string_lossy().replace(':', ".")
}

/// Where the maps of a device's directory are.
pub(super) fn maps_in(device: &Path) -> PathBuf {
    device.join(format!("v{SCHEMA_VERSION}"))
}

/// Whether the path is, or will be, on a bpf file system.
pub(super) fn check_bpffs(path: &Path) -> Result<(), EbpfError> {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(path);
    match statfs(existing) {
        Ok(found) if found.filesystem_type() == BPF_FS_MAGIC => Ok(()),
        _ => Err(EbpfError::NoBpfFileSystem(path.to_owned())),
    }
}
