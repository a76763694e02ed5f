//! The eBPF programs beside the kernel's VXLAN device: loaded, attached, fed with the peers.
//!
//! What stands in the kernel outlives the agent. Maps and links are pinned; the next agent adopts
//! the maps with their counters, and replaces the program in one step.

mod attach;
mod counters;
mod decap_probe;
mod flow_list;
mod flows;
mod hook;
mod index;
mod link;
mod loading;
mod object;
mod pin;
mod promoter;
mod self_test;
mod table;
mod tc_filter;
mod tc_qdisc;
mod tcx_query;
mod teardown;
mod wanted;
mod xdp;
mod xdp_driver;
mod xdp_query;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::PathBuf,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, LpmTrie, MapData, MapError},
};
use flannel_common::map::{Config, Counters, Lease, MAX_PEERS, OuterAddress, Peer, Vtep, VtepKey};
use ipnet::IpNet;
use serde_json::{Value, json};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::AbortHandle,
    time::Instant,
};

use self::{
    attach::Attachments,
    counters::{CounterArray, Peers},
    flows::{Flows, SIGN_OF_LIFE},
    hook::{HOOKS, Hook, POD_EGRESS, POD_INGRESS, UNDERLAY_INGRESS},
    index::IndexPool,
    object::chain,
    pin::PinDirectory,
    table::Table,
    wanted::outer_address,
    xdp::{Front, UNDERLAY_XDP},
};
use crate::lease::Subnets;

pub use self::{
    counters::read_pinned_peers,
    flow_list::read_pinned_flows,
    flows::FlowsWanted,
    loading::{Loaded, Loading, Predecessor},
    teardown::{Pins, detach_left_over},
    wanted::{FastPathWanted, Filter, LeaseEntry, PeerEntry, TunnelEnd, VtepName},
    xdp::XdpWanted,
    xdp_driver::check as check_xdp_driver,
};

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
    /// The verifier refuses a program.
    #[error("the kernel refuses the eBPF program {program} ({reason}): {tail}")]
    Verifier {
        /// Its name.
        program: &'static str,
        /// What the kernel said.
        reason: io::Error,
        /// The end of the verifier's log.
        tail: String,
    },
    /// This kernel lacks something that the programs need.
    #[error("this kernel does not encapsulate by eBPF: {0}")]
    SelfTest(String),
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
    vteps: Table<HashMap<MapData, VtepKey, Vtep>>,
    subnets_v4: Table<LpmTrie<MapData, [u8; 4], Lease>>,
    subnets_v6: Table<LpmTrie<MapData, [u8; 16], Lease>>,
    /// What is in the map `PEERS`.
    known: BTreeMap<OuterAddress, Peer>,
    indexes: IndexPool,
    /// Peers for which there was no room.
    left_out: usize,
    /// Of each hook, in the order of [`HOOKS`].
    attachments: [Attachments; HOOKS.len()],
    front: Front,
    /// Whether the kernel could take merged packets out.
    takes_merged: Result<bool, String>,
    forwards: bool,
    flows: Flows,
    /// Pods' devices that somebody else works on, too.
    shared: BTreeSet<u32>,
    /// Whether flows may bypass the stack.
    bypass: bool,
    /// When the next sign of life is due, if there are pods with such flows.
    next_sign: Option<Instant>,
    /// Whether what an agent of another version pinned has been removed.
    old_discarded: bool,
    log: Option<AbortHandle>,
}

impl EbpfDatapath {
    /// Loads the programs and adopts the maps that an earlier agent left. Attaches nothing yet.
    /// Takes long: see [`Loading`].
    pub fn load(options: EbpfOptions) -> Result<Self, EbpfError> {
        Self::adopt(Loading::open(options)?.load()?)
    }

    /// Takes over what was loaded, and the maps that an earlier agent left. Attaches nothing yet.
    pub fn adopt(loaded: Loaded) -> Result<Self, EbpfError> {
        let Loaded { options, mut ebpf, pins, takes_merged } = loaded;
        let handles = pin::MAPS
            .iter()
            .filter_map(|shape| Some((shape.name, shape.open(&pins.maps())?)))
            .collect();
        let log = if options.log { Some(forward_log(&mut ebpf)?) } else { None };
        let map = |error: MapError| EbpfError::map(&error);
        let mut this = Self {
            config: take(&mut ebpf, pin::CONFIG.name)?,
            peers: take(&mut ebpf, pin::PEERS.name)?,
            peer_counters: take(&mut ebpf, pin::PEER_COUNTERS.name)?,
            outcomes: take(&mut ebpf, pin::OUTCOMES.name)?,
            vteps: Table::adopt(take(&mut ebpf, pin::VTEPS.name)?).map_err(map)?,
            subnets_v4: Table::adopt(take(&mut ebpf, pin::SUBNETS4.name)?).map_err(map)?,
            subnets_v6: Table::adopt(take(&mut ebpf, pin::SUBNETS6.name)?).map_err(map)?,
            attachments: HOOKS.map(|hook| Attachments::new(hook, options.attach)),
            front: Front::new(&mut ebpf)?,
            takes_merged,
            forwards: false,
            flows: Flows::new(&mut ebpf)?,
            shared: BTreeSet::new(),
            bypass: false,
            next_sign: None,
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
        this.adopt_peers().map_err(|error| EbpfError::map(&error))?;
        Ok(this)
    }

    /// Makes maps and attachments equal to what is wanted, changing only what differs. Returns
    /// the number of changes. Everything is tried; the first failure is the answer.
    pub fn apply(&mut self, wanted: &FastPathWanted) -> Result<usize, EbpfError> {
        self.keep_pins();
        // Others' programs at a pod's device may do anything to its packets.
        let mut wanted = wanted.clone();
        if let Some(flows) = &mut wanted.flows {
            self.shared =
                flows.pods.extract_if(.., |pod| has_strangers(&self.pins, *pod)).collect();
        }
        let wanted = &wanted;
        let maps = self.apply_maps(wanted).map_err(|error| EbpfError::map(&error));
        let pods = || wanted.flows.iter().flat_map(|flows| flows.pods.iter().copied()).collect();
        let for_flows = if wanted.flows.is_some() { wanted.tunnels() } else { Vec::new() };
        let devices = [
            wanted.underlay.clone(),
            wanted.tunnels(),
            wanted.pod_devices.clone(),
            for_flows,
            pods(),
            pods(),
        ];
        // Before TC: a new program in XDP hands nothing over until it has seen its like at TC.
        let front = self.front.apply(&mut self.ebpf, &self.pins, &wanted.xdp, underlay_is_shared);
        let mut changes = maps.and_then(|changes| Ok(changes + front?));
        for ((hook, attachments), devices) in HOOKS.iter().zip(&mut self.attachments).zip(&devices)
        {
            let program = object::program(&mut self.ebpf, hook.program)?;
            let attached = attachments.apply(program, &self.pins, devices);
            changes = changes.and_then(|changes| Ok(changes + attached?));
        }
        if changes.is_ok() && !std::mem::replace(&mut self.old_discarded, true) {
            let mut programs = HOOKS.map(|hook| hook.program).to_vec();
            programs.push(UNDERLAY_XDP);
            self.pins.discard_old(&programs);
        }
        changes
    }

    /// Resolves when flows, or the program in XDP, have to be seen to. Cancel-safe.
    pub async fn flows_due(&self) {
        let next = self.next_sign.into_iter().chain(self.front.next_look()).min();
        let Some(next) = next else { return std::future::pending().await };
        tokio::select! {
            () = self.flows.offered(), if self.next_sign.is_some() => {}
            () = tokio::time::sleep_until(next) => {}
        }
    }

    /// Promotes what was offered, and gives a sign of life. Returns whether
    /// [`apply`](Self::apply) has to look at the pods again.
    #[must_use]
    pub fn tend_flows(&mut self) -> bool {
        let Self { front, ebpf, pins, outcomes, .. } = self;
        if let Err(error) = front.tend(ebpf, pins, outcomes, underlay_is_shared) {
            tracing::warn!("XDP: {}", chain(&error));
        }
        if self.next_sign.is_none() {
            return false;
        }
        self.flows.consider();
        if self.next_sign.is_none_or(|next| next > Instant::now()) {
            return false;
        }
        self.next_sign = Some(Instant::now() + SIGN_OF_LIFE);
        self.flows.look_after();
        let strangers = |pod: &u32| has_strangers(&self.pins, *pod);
        let shared: Vec<u32> = self.flows.pods().filter(strangers).collect();
        let result = self.flows.leave_alone(&shared).and_then(|()| self.flows.sign_of_life());
        if let Err(error) = result {
            // Then flows take the stack again.
            tracing::warn!("flows: {}", chain(&error));
        }
        !shared.is_empty() || self.shared.iter().any(|pod| !strangers(pod))
    }

    /// Whether somebody else works on all that a device carries: shapes what it sends, or does
    /// anything there by TC.
    pub fn strangers_at(&self, ifindex: u32) -> Strangers {
        if tc_qdisc::is_shaped(ifindex).is_ok_and(|shaped| !shaped) {
            if has_strangers(&self.pins, ifindex) { Strangers::Watch } else { Strangers::None }
        } else {
            Strangers::Shape
        }
    }

    /// How much of the host's stack the programs skip: `flows`, `stack` or `off`.
    pub fn fast_path(&self) -> &'static str {
        match (self.forwards, self.bypass) {
            (true, true) => "flows",
            (true, false) => "stack",
            (false, _) => "off",
        }
    }

    /// Whether packets are taken out in XDP, and what became of packets there.
    pub fn xdp(&self) -> (bool, Vec<(&'static str, u64)>) {
        (self.front.is_attached(), self.front.packets())
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
    /// `peers_left_out`, `vteps`, `outcomes`, `xdp`, `kernel_has_decap_l4_udp`,
    /// `pins`, `problem`.
    pub fn status(&self) -> Value {
        let all = || HOOKS.iter().zip(&self.attachments);
        let attached: Vec<_> = all()
            .flat_map(|(hook, attachments)| attachments.held().map(move |held| (hook, held)))
            .map(|(hook, (ifindex, device, rung))| {
                json!({
                    "program": hook.program,
                    "device": device,
                    "ifindex": ifindex,
                    "hook": rung.word(),
                })
            })
            .chain(self.front.attached())
            .collect();
        let hook = all().find_map(|(_, held)| held.held().next()).map(|(.., rung)| rung.word());
        let why_not_tcx = self.attachments.iter().find_map(Attachments::why_not_tcx);
        let outcomes = counters::outcomes(&self.outcomes);
        let problem = self.pins_lost.clone();
        json!({
            "hook": hook,
            "why_not_tcx": why_not_tcx,
            "attached": attached,
            "peers": self.known.len(),
            "peers_left_out": self.left_out,
            "vteps": self.vteps.len(),
            "flows": self.bypass.then(|| self.flows.status()),
            "outcomes": outcomes.unwrap_or_else(|error| json!(chain(&error))),
            "xdp": self.front.status(),
            "kernel_has_decap_l4_udp": match &self.takes_merged {
                Ok(known) => json!(known),
                Err(why) => json!(why),
            },
            "pins": self.pins.path(),
            "problem": problem,
        })
    }

    /// Takes over the peers in the map. Entries that contradict each other are dropped.
    fn adopt_peers(&mut self) -> Result<(), MapError> {
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

    /// Who is there first, then what to do about it.
    fn apply_maps(&mut self, wanted: &FastPathWanted) -> Result<usize, MapError> {
        let mut changes = self.apply_peers(wanted)?;
        changes += self.apply_leases(wanted)?;
        let vteps = wanted.vteps.iter().map(|(name, remote)| {
            let tunnel = if name.v6 { VtepKey::V6 } else { VtepKey::V4 };
            let vtep = Vtep { remote: outer_address(*remote), kernel_jiffies: 0 };
            (VtepKey { mac: name.mac.0, tunnel }, vtep)
        });
        changes += self.vteps.apply(&vteps.collect())?;
        self.forwards = wanted.forward;
        let old = self.config.get(&0, 0)?;
        if old != wanted.config(old.epoch) {
            // What was learnt under other conditions is worthless.
            self.config.set(0, wanted.config(old.epoch.wrapping_add(1)), 0)?;
            self.flows.begin_epoch()?;
            changes += 1;
        }
        changes += self.flows.apply(wanted.flows.as_ref())?;
        self.bypass = wanted.flows.is_some();
        // Without pods there is nobody to keep alive for.
        let pods = wanted.flows.as_ref().is_some_and(|flows| !flows.pods.is_empty());
        let some = pods || self.bypass && !self.shared.is_empty();
        self.next_sign = some.then(|| Instant::now() + SIGN_OF_LIFE);
        Ok(changes)
    }

    fn apply_leases(&mut self, wanted: &FastPathWanted) -> Result<usize, MapError> {
        let (mut v4, mut v6) = (BTreeMap::new(), BTreeMap::new());
        for entry in &wanted.leases {
            let outer = outer_address(entry.outer);
            let Some(peer) = self.known.get(&outer) else { continue };
            let lease = Lease {
                outer,
                index: peer.index,
                vtep_mac: entry.vtep_mac.map_or([0; 6], |mac| mac.0),
                tunnelled: u8::from(entry.vtep_mac.is_some()),
                any_source: u8::from(entry.behind_nat),
            };
            match entry.subnet {
                IpNet::V4(net) => {
                    v4.insert((net.network().octets(), u32::from(net.prefix_len())), lease);
                }
                IpNet::V6(net) => {
                    v6.insert((net.network().octets(), u32::from(net.prefix_len())), lease);
                }
            }
        }
        Ok(self.subnets_v4.apply(&v4)? + self.subnets_v6.apply(&v6)?)
    }

    fn apply_peers(&mut self, wanted: &FastPathWanted) -> Result<usize, MapError> {
        let mut changes = 0;
        let peers = by_outer_address(&wanted.peers);
        let gone: Vec<_> =
            self.known.keys().filter(|outer| !peers.contains_key(*outer)).copied().collect();
        for outer in gone {
            self.forget(&outer)?;
            changes += 1;
        }
        let mut left_out = 0;
        for (outer, subnets) in peers {
            let known = self.known.get(&outer).copied();
            let Some(index) = known.map(|peer| peer.index).or_else(|| self.indexes.take()) else {
                left_out += 1;
                continue;
            };
            let peer = counters::peer(index, &subnets);
            if known == Some(peer) {
                continue;
            }
            if let Err(error) = self.learn(outer, peer, known.is_none()) {
                if known.is_none() {
                    self.indexes.give_back(index);
                }
                return Err(error);
            }
            changes += 1;
        }
        if left_out > 0 && self.left_out == 0 {
            tracing::warn!("{left_out} peers are beyond the {MAX_PEERS} that eBPF can count");
        }
        self.left_out = left_out;
        Ok(changes)
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

/// What others do at a device by TC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strangers {
    /// Nothing.
    None,
    /// They have a program or filter there.
    Watch,
    /// They shape what it sends, maybe more.
    Shape,
}

/// Whether somebody shapes a pod's device, or has a program or filter there. Not knowing counts
/// as yes.
fn has_strangers(pins: &PinDirectory, ifindex: u32) -> bool {
    let shaped = !tc_qdisc::is_shaped(ifindex).is_ok_and(|shaped| !shaped);
    shaped || [POD_INGRESS, POD_EGRESS].into_iter().any(|hook| is_shared(hook, pins, ifindex))
}

/// Whether somebody else has a program or filter where the underlay's packets come in. Not knowing
/// counts as yes.
fn underlay_is_shared(pins: &PinDirectory, ifindex: u32) -> bool {
    is_shared(UNDERLAY_INGRESS, pins, ifindex)
}

fn is_shared(hook: Hook, pins: &PinDirectory, ifindex: u32) -> bool {
    // Ours, or the one of the agent before us, whose pinned link we are about to take over.
    let ours = HOOKS
        .iter()
        .filter(|other| other.side == hook.side && pins.link(other.program, ifindex).exists());
    let ours = ours.count();
    !tcx_query::attached(hook.side, ifindex).is_ok_and(|ids| ids.len() <= ours)
        || !tc_filter::has_others(hook.side, ifindex).is_ok_and(|others| !others)
}

/// One entry per outer address. Of leases that share one, the first with a subnet of the family.
fn by_outer_address(peers: &[PeerEntry]) -> BTreeMap<OuterAddress, Subnets> {
    let mut map = BTreeMap::new();
    for PeerEntry { outer, subnets } in peers {
        let merged: &mut Subnets = map.entry(outer_address(*outer)).or_default();
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
