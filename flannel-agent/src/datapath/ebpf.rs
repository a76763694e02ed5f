//! The eBPF programs beside the kernel's VXLAN device: loaded, attached, fed with the peers.
//!
//! What stands in the kernel outlives the agent. Maps and links are pinned; the next agent adopts
//! the maps with their counters, and replaces the program in one step.

mod attach;
mod counters;
mod index;
mod link;
mod object;
mod pin;
mod tc_filter;
mod tcx_query;
mod teardown;

use std::{collections::BTreeMap, io, net::IpAddr, path::PathBuf};

use aya::{
    Ebpf,
    maps::{Array, MapData, MapError},
};
use flannel_common::map::{Config, Counters, MAX_PEERS, OuterAddress, Peer};
use serde_json::{Value, json};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::AbortHandle,
};

use self::{
    attach::Attachments,
    counters::{CounterArray, Peers},
    index::IndexPool,
    object::chain,
    pin::PinDirectory,
};
use crate::lease::Subnets;

pub use self::{counters::read_pinned_peers, teardown::Pins};

/// How to attach the programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttachMode {
    /// TCX where the kernel has it, else clsact.
    #[default]
    Auto,
    /// As a filter of the clsact qdisc, whatever the kernel has.
    Clsact,
}

/// What does not change while the agent runs.
#[derive(Clone, Debug)]
pub struct EbpfOptions {
    /// The directory for pins, on a bpf file system: `/sys/fs/bpf/flannel`.
    pub pin_dir: PathBuf,
    /// The tunnel's device, by which the pins of several tunnels are told apart: `flannel.1`.
    pub device: String,
    /// How to attach.
    pub attach: AttachMode,
    /// Whether the programs log, at most once a second, packets from unknown senders. Without,
    /// the code for it is not even loaded. Needs a running tokio runtime.
    pub log: bool,
}

/// What the programs shall do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastPathWanted {
    /// The underlay's devices, by interface index.
    pub underlay: Vec<u32>,
    /// The tunnel's VNI, 24 bits.
    pub vni: u32,
    /// The tunnel's UDP port.
    pub port: u16,
    /// The peers, one entry per outer address.
    pub peers: Vec<PeerEntry>,
}

/// A peer as the programs know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerEntry {
    /// The address that the peer sends from.
    pub outer: IpAddr,
    /// What is behind it.
    pub subnets: Subnets,
}

/// What came from a peer since its address became known, over restarts of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCounters {
    /// The address that the peer sends from.
    pub outer: IpAddr,
    /// What is behind it.
    pub subnets: Subnets,
    /// Packets; merged ones count as what they were merged from.
    pub packets: u64,
    /// Bytes with the outer headers, which count once for merged packets.
    pub bytes: u64,
}

/// Why the programs cannot be used, or not fully.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The build found no object.
    #[error("built without eBPF programs: run `cargo xtask build-ebpf` and build again")]
    NotBuilt,
    /// The process lacks these.
    #[error("missing {0}: give the agent these capabilities, or start it as root")]
    Capabilities(String),
    /// The pins have no place.
    #[error("{0} is not on a bpf file system: run `mount -t bpf bpf /sys/fs/bpf`")]
    NoBpfFileSystem(PathBuf),
    /// Another agent has locked the pins.
    #[error("another agent uses the pins in {0}: give this one another --bpf-pin-dir")]
    InUse(PathBuf),
    /// It cannot be a directory's name.
    #[error("{0:?} cannot be the name of a device")]
    DeviceName(String),
    /// The bpf file system refuses.
    #[error("cannot pin at {path}: {reason}")]
    Pin {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        reason: io::Error,
    },
    /// The verifier refuses the program.
    #[error("the kernel refuses the eBPF program ({reason}): {tail}")]
    Verifier {
        /// What the kernel said.
        reason: io::Error,
        /// The end of the verifier's log.
        tail: String,
    },
    /// The object cannot be loaded for another reason.
    #[error("cannot load the eBPF programs: {0}")]
    Load(String),
    /// The program's log cannot be read.
    #[error("cannot read the log of the eBPF programs: {0}")]
    Log(String),
    /// A map cannot be read or written.
    #[error("cannot use an eBPF map: {0}")]
    Map(String),
    /// A device does not take the program.
    #[error("cannot attach the eBPF program to interface {ifindex}: {reason}")]
    Attach {
        /// The interface's index.
        ifindex: u32,
        /// What is the matter.
        reason: String,
    },
    /// No agent has left anything.
    #[error("no agent has pinned peers in {0}")]
    NoPinnedMaps(PathBuf),
}

impl EbpfError {
    fn map(error: &MapError) -> Self {
        Self::Map(chain(error))
    }
}

/// The loaded programs. Dropping this leaves everything attached and pinned.
pub struct EbpfDatapath {
    options: EbpfOptions,
    ebpf: Ebpf,
    pins: PinDirectory,
    /// The maps once more, for pinning: aya's typed maps cannot be pinned while in use.
    handles: Vec<(&'static str, MapData)>,
    /// Why the pins are not where they should be; said once.
    pins_lost: Option<String>,
    config: Array<MapData, Config>,
    peers: Peers,
    peer_counters: CounterArray,
    outcomes: CounterArray,
    /// What is in the map `PEERS`.
    known: BTreeMap<OuterAddress, Peer>,
    indexes: IndexPool,
    /// Peers for which there was no room.
    left_out: usize,
    attachments: Attachments,
    /// Whether what an agent of another version pinned has been removed.
    old_discarded: bool,
    log: Option<AbortHandle>,
}

impl EbpfDatapath {
    /// Loads the programs and adopts the maps that an earlier agent left. Attaches nothing yet.
    pub fn load(options: EbpfOptions) -> Result<Self, EbpfError> {
        object::check_built()?;
        object::check_capabilities()?;
        let pins = PinDirectory::open(&options.pin_dir, &options.device)?;
        pins.discard_misfits()?;
        let mut ebpf = object::load(&pins.maps(), options.log)?;
        let handles = pin::MAPS
            .iter()
            .filter_map(|shape| Some((shape.name, shape.open(&pins.maps())?)))
            .collect();
        let log = if options.log { Some(forward_log(&mut ebpf)?) } else { None };
        let mut this = Self {
            config: take(&mut ebpf, pin::CONFIG.name)?,
            peers: take(&mut ebpf, pin::PEERS.name)?,
            peer_counters: take(&mut ebpf, pin::PEER_COUNTERS.name)?,
            outcomes: take(&mut ebpf, pin::OUTCOMES.name)?,
            attachments: Attachments::new(options.attach),
            old_discarded: false,
            known: BTreeMap::new(),
            indexes: IndexPool::new(MAX_PEERS),
            left_out: 0,
            pins_lost: None,
            options,
            ebpf,
            pins,
            handles,
            log,
        };
        this.adopt().map_err(|error| EbpfError::map(&error))?;
        Ok(this)
    }

    /// Makes maps and attachments equal to what is wanted, changing only what differs. Returns
    /// the number of changes. Everything is tried; the first failure is the answer.
    pub fn apply(&mut self, wanted: &FastPathWanted) -> Result<usize, EbpfError> {
        self.keep_pins();
        let maps = self.apply_maps(wanted).map_err(|error| EbpfError::map(&error));
        let program = object::program(&mut self.ebpf)?;
        let attached = self.attachments.apply(program, &self.pins, &wanted.underlay);
        let changes = maps? + attached?;
        if !std::mem::replace(&mut self.old_discarded, true) {
            self.pins.discard_old(&[object::UNDERLAY_INGRESS]);
        }
        Ok(changes)
    }

    /// What came from each peer, in the order of their addresses.
    pub fn peer_counters(&self) -> Result<Vec<PeerCounters>, EbpfError> {
        let read = self
            .known
            .iter()
            .map(|(outer, peer)| counters::peer_counters(&self.peer_counters, outer, peer));
        read.collect::<Result<_, _>>().map_err(|error| EbpfError::map(&error))
    }

    /// The programs' part of the status: `hook`, `why_not_tcx`, `attached`, `peers`,
    /// `peers_left_out`, `outcomes`, `pins`, `problem`.
    pub fn status(&self) -> Value {
        let attached: Vec<_> = self
            .attachments
            .held()
            .map(|(ifindex, device, rung)| {
                json!({"device": device, "ifindex": ifindex, "hook": rung.word()})
            })
            .collect();
        let hook = self.attachments.held().next().map(|(.., rung)| rung.word());
        let outcomes = counters::outcomes(&self.outcomes);
        let problem = self.pins_lost.clone();
        json!({
            "hook": hook,
            "why_not_tcx": self.attachments.why_not_tcx(),
            "attached": attached,
            "peers": self.known.len(),
            "peers_left_out": self.left_out,
            "outcomes": outcomes.unwrap_or_else(|error| json!(chain(&error))),
            "pins": self.pins.path(),
            "problem": problem,
        })
    }

    /// Takes over the peers in the map. Entries that contradict each other are dropped.
    fn adopt(&mut self) -> Result<(), MapError> {
        let found: Vec<_> = self.peers.iter().collect::<Result<_, _>>()?;
        for (outer, peer) in found {
            if self.indexes.claim(peer.index) {
                self.known.insert(outer, peer);
            } else {
                self.peers.remove(&outer)?;
            }
        }
        Ok(())
    }

    fn apply_maps(&mut self, wanted: &FastPathWanted) -> Result<usize, MapError> {
        let mut changes = 0;
        let config = Config { vni: wanted.vni, port: wanted.port, reserved: 0 };
        if self.config.get(&0, 0)? != config {
            self.config.set(0, config, 0)?;
            changes += 1;
        }
        let peers = by_outer_address(&wanted.peers);
        let gone: Vec<_> =
            self.known.keys().filter(|outer| !peers.contains_key(*outer)).copied().collect();
        for outer in gone {
            self.forget(&outer)?;
            changes += 1;
        }
        let left_before = std::mem::take(&mut self.left_out);
        for (outer, subnets) in peers {
            changes += usize::from(self.set_peer(outer, &subnets)?);
        }
        self.warn_left_out(left_before);
        Ok(changes)
    }

    /// Peers for which there was no room.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Makes the map of peers equal to what is wanted for these outer addresses; `None` removes
    /// one. All else stays as it is. Returns the number of changes.
    pub fn apply_peers(
        &mut self,
        changed: &[(IpAddr, Option<Subnets>)],
    ) -> Result<usize, EbpfError> {
        self.change_peers(changed).map_err(|error| EbpfError::map(&error))
    }

    fn change_peers(&mut self, changed: &[(IpAddr, Option<Subnets>)]) -> Result<usize, MapError> {
        let mut changes = 0;
        // Whoever goes makes room.
        for (outer, _) in changed.iter().filter(|(_, subnets)| subnets.is_none()) {
            let outer = counters::outer_address(*outer);
            if self.known.contains_key(&outer) {
                self.forget(&outer)?;
                changes += 1;
            }
        }
        let left_before = self.left_out;
        for (outer, subnets) in changed {
            if let Some(subnets) = subnets {
                changes += usize::from(self.set_peer(counters::outer_address(*outer), subnets)?);
            }
        }
        self.warn_left_out(left_before);
        Ok(changes)
    }

    /// Writes one peer, if it is not known like this. Returns whether it was written.
    fn set_peer(&mut self, outer: OuterAddress, subnets: &Subnets) -> Result<bool, MapError> {
        let known = self.known.get(&outer).copied();
        let Some(index) = known.map(|peer| peer.index).or_else(|| self.indexes.take()) else {
            self.left_out += 1;
            return Ok(false);
        };
        let peer = counters::peer(index, subnets);
        if known == Some(peer) {
            return Ok(false);
        }
        if let Err(error) = self.learn(outer, peer, known.is_none()) {
            if known.is_none() {
                self.indexes.give_back(index);
            }
            return Err(error);
        }
        Ok(true)
    }

    fn warn_left_out(&self, before: usize) {
        if self.left_out > 0 && before == 0 {
            tracing::warn!(
                "{} peers are beyond the {MAX_PEERS} that eBPF can count",
                self.left_out
            );
        }
    }

    fn learn(&mut self, outer: OuterAddress, peer: Peer, new: bool) -> Result<(), MapError> {
        if new && counters::total(&self.peer_counters, peer.index)? != Counters::default() {
            // Another peer had the place before.
            let cpus = self.peer_counters.get(&peer.index, 0)?.len();
            let zeros = aya::maps::PerCpuValues::try_from(vec![Counters::default(); cpus]);
            self.peer_counters.set(peer.index, zeros.map_err(MapError::IoError)?, 0)?;
        }
        self.peers.insert(outer, peer, 0)?;
        self.known.insert(outer, peer);
        Ok(())
    }

    fn forget(&mut self, outer: &OuterAddress) -> Result<(), MapError> {
        match self.peers.remove(outer) {
            // Somebody else removed it.
            Ok(()) | Err(MapError::KeyNotFound) => (),
            Err(error) => return Err(error),
        }
        if let Some(peer) = self.known.remove(outer) {
            self.indexes.give_back(peer.index);
        }
        Ok(())
    }

    /// Pins the maps again if the bpf file system was unmounted or cleared meanwhile. Without
    /// pins all works on; only a restart would begin with empty maps.
    fn keep_pins(&mut self) {
        let lost = match self.pin_again() {
            Ok(()) => None,
            Err(error) => Some(error.to_string()),
        };
        if lost != self.pins_lost {
            if let Some(problem) = &lost {
                tracing::warn!("eBPF counters will not outlive us: {problem}");
            } else {
                tracing::info!("eBPF maps are pinned again");
            }
            self.pins_lost = lost;
        }
    }

    fn pin_again(&mut self) -> Result<(), EbpfError> {
        if !self.pins.intact() {
            self.pins = PinDirectory::open(&self.options.pin_dir, &self.options.device)?;
            self.pins.discard_misfits()?;
        }
        let directory = self.pins.maps();
        for (name, map) in &self.handles {
            let path = directory.join(name);
            if !path.exists() {
                map.pin(&path).map_err(|error| EbpfError::Pin {
                    path,
                    reason: io::Error::other(chain(&error)),
                })?;
            }
        }
        Ok(())
    }
}

impl Drop for EbpfDatapath {
    fn drop(&mut self) {
        if let Some(log) = &self.log {
            log.abort();
        }
    }
}

/// One entry per outer address. Of leases that share one, the first with a subnet of the family.
fn by_outer_address(peers: &[PeerEntry]) -> BTreeMap<OuterAddress, Subnets> {
    let mut map = BTreeMap::new();
    for PeerEntry { outer, subnets } in peers {
        let merged: &mut Subnets = map.entry(counters::outer_address(*outer)).or_default();
        merged.v4 = merged.v4.or(subnets.v4);
        merged.v6 = merged.v6.or(subnets.v6);
    }
    map
}

fn take<T: TryFrom<aya::maps::Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    name: &str,
) -> Result<T, EbpfError> {
    let map = ebpf.take_map(name);
    let map = map.ok_or_else(|| EbpfError::Load(format!("no map {name} in the object")))?;
    map.try_into().map_err(|error| EbpfError::map(&error))
}

/// Hands what the programs log to the `log` crate, and so to tracing.
fn forward_log(ebpf: &mut Ebpf) -> Result<AbortHandle, EbpfError> {
    let failed = |error: &dyn std::error::Error| EbpfError::Log(chain(error));
    let runtime = tokio::runtime::Handle::try_current().map_err(|error| failed(&error))?;
    let logger = aya_log::EbpfLogger::init(ebpf).map_err(|error| failed(&error))?;
    // SAFETY: the logger keeps the one descriptor that it names open as long as it lives.
    let logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) };
    let mut logger = logger.map_err(|error| failed(&error))?;
    let forward = async move {
        while let Ok(mut ready) = logger.readable_mut().await {
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    };
    Ok(runtime.spawn(forward).abort_handle())
}
