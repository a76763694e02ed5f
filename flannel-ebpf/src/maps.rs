//! The maps. All but the last seven are pinned; their layout is `flannel_common::map`.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
    macros::btf_map,
};
use flannel_common::{
    flow::{Flow, Flow4Key, Flow6Key, FlowRules, MAX_FLOWS, Offer},
    map::{
        Config, Counters, Lease, MAX_PEERS, MAX_VTEPS, OuterAddress, Peer, Vtep, VtepKey, XdpFront,
    },
    outcome::Outcome,
    wire::Words,
};

use crate::{
    decap::BURSTS,
    encap::{WAYS as WAYS_ROOM, Way},
    flows::Reading,
    underlay_ingress::Existence,
};

const PEERS_ROOM: usize = MAX_PEERS as usize;
const VTEPS_ROOM: usize = MAX_VTEPS as usize;
const FLOWS_ROOM: usize = MAX_FLOWS as usize;

/// Room for some thousand offers, in bytes: a power of two.
const EVENTS_LEN: usize = 1 << 18;

/// What to recognise.
#[btf_map]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Outer source address → peer. Not preallocated: most clusters are small.
#[btf_map]
pub static PEERS: HashMap<OuterAddress, Peer, PEERS_ROOM, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// Inner destination MAC → where the outer packet goes: the kernel device's forwarding entries.
#[btf_map]
pub static VTEPS: HashMap<VtepKey, Vtep, VTEPS_ROOM, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// Inner IPv4 subnet → peer.
#[btf_map]
pub static SUBNETS4: LpmTrie<[u8; 4], Lease, PEERS_ROOM> = LpmTrie::new();

/// Inner IPv6 subnet → peer.
#[btf_map]
pub static SUBNETS6: LpmTrie<[u8; 16], Lease, PEERS_ROOM> = LpmTrie::new();

/// What came from each peer, by the peer's index.
#[btf_map]
pub static PEER_COUNTERS: PerCpuArray<Counters, PEERS_ROOM> = PerCpuArray::new();

/// What became of the packets sent to the tunnel's port, by the number of the outcome.
#[btf_map]
pub static OUTCOMES: PerCpuArray<Counters, { Outcome::COUNT }> = PerCpuArray::new();

/// Where packets are taken out of the tunnel in XDP.
#[btf_map]
pub static XDP_FRONT: Array<XdpFront, 1> = Array::new();

/// What became of packets in XDP, by the number of the outcome.
#[btf_map]
pub static XDP_OUTCOMES: PerCpuArray<Counters, { Outcome::COUNT }> = PerCpuArray::new();

/// What to do about flows.
#[btf_map]
pub static FLOW_RULES: Array<FlowRules, 1> = Array::new();

/// IPv4 flows, those in the middle of their proof and those promoted.
#[btf_map]
pub static FLOWS4: LruHashMap<Flow4Key, Flow, FLOWS_ROOM> = LruHashMap::new();

/// IPv6 flows.
#[btf_map]
pub static FLOWS6: LruHashMap<Flow6Key, Flow, FLOWS_ROOM> = LruHashMap::new();

/// Flows offered to the agent.
#[btf_map]
pub static EVENTS: RingBuf<Offer, EVENTS_LEN> = RingBuf::new();

/// When the last line was logged, in nanoseconds since boot.
#[btf_map]
pub static LAST_LOGGED: Array<u64, 1> = Array::new();

/// When a flow last sent a burst, in jiffies; see [`crate::decap::behind_burst`].
#[btf_map]
pub static BURST_JIFFIES: Array<u64, BURSTS> = Array::new();

/// Ways into the tunnel over IPv4, by the last bits of the flows' hashes.
#[btf_map]
pub static WAYS: PerCpuArray<Way, WAYS_ROOM> = PerCpuArray::new();

/// The tunnel's device, when it was last seen.
#[btf_map]
pub static TUNNEL_SEEN: PerCpuArray<Existence, 1> = PerCpuArray::new();

/// The clock, as flows have it.
#[btf_map]
pub static CLOCK: PerCpuArray<Reading, 1> = PerCpuArray::new();

/// When the program at TC last saw a packet of the tunnel, in jiffies; see [`crate::xdp_front`].
#[btf_map]
pub static TC_JIFFIES: Array<u64, 1> = Array::new();

/// The next IP id of outer packets.
#[btf_map]
pub static IP_IDS: PerCpuArray<u32, 1> = PerCpuArray::new();

/// Where headers over IPv6 are read and made: with all the rest they do not fit on the stack.
#[btf_map]
pub static SCRATCH: PerCpuArray<[u64; 18], 1> = PerCpuArray::new();

/// This CPU's scratch room, all zero. What was in it before is lost.
#[inline(always)]
pub fn scratch<'a, const N: usize>() -> Option<&'a mut Words<N>> {
    const { assert!(size_of::<Words<N>>() <= size_of::<[u64; 18]>()) };
    let room = SCRATCH.get_ptr_mut(0)?.cast::<Words<N>>();
    // SAFETY: this CPU's own slot, as big and as aligned, of a type that any bits fit. A program
    // has only one such room at a time.
    let words = unsafe { &mut *room };
    *words = Words::ZERO;
    Some(words)
}
