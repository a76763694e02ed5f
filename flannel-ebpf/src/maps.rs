//! The maps. All but the last are pinned; their layout is `flannel_common::map`.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::{Array, HashMap, PerCpuArray},
    macros::btf_map,
};
use flannel_common::{
    map::{Config, Counters, MAX_PEERS, OuterAddress, Peer},
    outcome::Outcome,
};

const PEERS_ROOM: usize = MAX_PEERS as usize;

/// What to recognise.
#[btf_map]
pub static CONFIG: Array<Config, 1> = Array::new();

/// Outer source address → peer. Not preallocated: most clusters are small.
#[btf_map]
pub static PEERS: HashMap<OuterAddress, Peer, PEERS_ROOM, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// What came from each peer, by the peer's index.
#[btf_map]
pub static PEER_COUNTERS: PerCpuArray<Counters, PEERS_ROOM> = PerCpuArray::new();

/// What became of the packets sent to the tunnel's port, by the number of the outcome.
#[btf_map]
pub static OUTCOMES: PerCpuArray<Counters, { Outcome::COUNT }> = PerCpuArray::new();

/// When the last line was logged, in nanoseconds since boot.
#[btf_map]
pub static LAST_LOGGED: Array<u64, 1> = Array::new();
