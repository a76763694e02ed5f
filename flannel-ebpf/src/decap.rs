//! Taking a packet out of the tunnel.
//!
//! [`take_v4`] and [`take_v6`] read and judge; [`Taken::strip`] makes the first change. What then
//! becomes of the inner packet is the caller's choice.

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_CSUM_LEVEL_DEC, BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_ADJ_ROOM_NO_CSUM_RESET,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    btf_maps::lpm_trie::Key,
    helpers::{
        bpf_csum_level, bpf_jiffies64, bpf_skb_adjust_room, bpf_skb_ecn_set_ce, bpf_skb_pull_data,
    },
};
use flannel_common::{
    decap::{
        self as common, ArrivedV4, ArrivedV6, Leases, MIN_LEN_V4, MIN_LEN_V6, Plain, plain_v4,
        plain_v6,
    },
    ecn::Decapsulate,
    encap::{Ethernet, OVERHEAD_V4, OVERHEAD_V6},
    map::{Config, Lease, OuterAddress, Peer},
    outcome::Outcome,
    wire::{ETHERNET_LEN, IPV4_LEN, IPV6_LEN, Words},
};

use crate::{maps, skb::Skb};

/// How many flows are told apart by [`behind_burst`]; a power of two.
pub const BURSTS: usize = 8192;

/// For so many jiffies after a burst its flow stays with the kernel's device: far longer than a
/// packet waits in the device's queue, at any HZ.
const BURST_JIFFIES: u64 = 64;

/// The maps of leases.
pub struct Maps;

impl Leases for Maps {
    #[inline(always)]
    fn peer(&self, outer: &OuterAddress) -> Option<&Peer> {
        // SAFETY: the value may be replaced meanwhile, but never the index of an address in use.
        unsafe { maps::PEERS.get(outer) }
    }

    #[inline(always)]
    fn lease_v4(&self, inner: &[u8; 4]) -> Option<&Lease> {
        maps::SUBNETS4.get(&Key::new(32, *inner))
    }

    #[inline(always)]
    fn lease_v6(&self, inner: &[u8; 16]) -> Option<&Lease> {
        maps::SUBNETS6.get(&Key::new(128, *inner))
    }
}

/// A packet as it arrives, at TC or in XDP.
pub trait Arriving: Copy {
    /// The length in bytes, from the Ethernet header on.
    fn len(self) -> u32;
    /// Reads the first `LEN` bytes. Words beyond stay as they are.
    fn load<const LEN: u32, const N: usize>(self, words: &mut Words<N>) -> bool;
}

impl Arriving for Skb {
    #[inline(always)]
    fn len(self) -> u32 {
        Self::len(self)
    }

    #[inline(always)]
    fn load<const LEN: u32, const N: usize>(self, words: &mut Words<N>) -> bool {
        Self::load::<LEN, N>(self, words)
    }
}

/// Reads a packet over IPv4; `None` unless it is a plain one.
#[inline(always)]
pub fn take_v4<A: Arriving>(skb: A, config: &Config, words: &mut ArrivedV4) -> Option<Plain> {
    const SHORT: u32 = MIN_LEN_V4 as u32;
    // Not every inner packet is as long as a TCP header needs.
    let read = skb.load::<98, 49>(words)
        || skb.load::<{ SHORT + 8 }, 49>(words)
        || skb.load::<SHORT, 49>(words);
    if read { plain_v4(words, skb.len(), config) } else { None }
}

/// Reads a packet over IPv6; `None` unless it is a plain one. Whether the checksum fits has yet to be
/// said.
#[inline(always)]
pub fn take_v6<A: Arriving>(skb: A, config: &Config, words: &mut ArrivedV6) -> Option<Plain> {
    const SHORT: u32 = MIN_LEN_V6 as u32;
    let read = skb.load::<138, 69>(words)
        || skb.load::<{ SHORT + 8 }, 69>(words)
        || skb.load::<SHORT, 69>(words);
    if read { plain_v6(words, skb.len(), config) } else { None }
}

/// Whether the checksum over IPv4 fits; see [`checksum_fits_v4`]. Most have none.
#[inline(always)]
pub fn checksum_fits_v4(words: &ArrivedV4) -> bool {
    words.raw16(ETHERNET_LEN + IPV4_LEN + 6) == 0 || nonzero_checksum_fits_v4(words) != 0
}

/// A call of its own, for the stack's sake.
#[inline(never)]
fn nonzero_checksum_fits_v4(words: &ArrivedV4) -> u64 {
    u64::from(common::checksum_fits_v4(words))
}

/// Whether the checksum over IPv6 fits; see [`common::checksum_fits_v6`]. A call of its own, for the stack's
/// sake, and not from within a deep one.
#[inline(never)]
pub fn checksum_fits_v6(raw: *mut __sk_buff) -> u64 {
    const SHORT: u32 = MIN_LEN_V6 as u32;
    let Some(words) = maps::scratch() else { return 0 };
    u64::from(Skb::from(raw).load::<SHORT, 69>(words) && common::checksum_fits_v6(words))
}

/// Takes the outer headers away, leaving a frame that begins with `frame`. On an error nothing was
/// changed, but for `DropNoMemory`.
#[inline(always)]
pub fn strip(skb: Skb, overhead: usize, frame: &Ethernet, ecn: Decapsulate) -> Result<(), Outcome> {
    let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET);
    // SAFETY: the kernel passes a valid context.
    let result =
        unsafe { bpf_skb_adjust_room(skb.raw(), -(overhead as i32), BPF_ADJ_ROOM_MAC, flags) };
    if result != 0 {
        return Err(Outcome::Unusual);
    }
    if !skb.store(&Words(*frame)) {
        return Err(Outcome::DropNoMemory);
    }
    // If the NIC verified checksums, it counted the outer one, be it zero.
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_csum_level(skb.raw(), u64::from(BPF_CSUM_LEVEL_DEC)) };
    if ecn == Decapsulate::SetCe {
        let header = if overhead == OVERHEAD_V4 { IPV4_LEN } else { IPV6_LEN };
        // SAFETY: the kernel passes a valid context. The header has to be in one piece.
        let marked = unsafe {
            bpf_skb_pull_data(skb.raw(), (ETHERNET_LEN + header) as u32) == 0
                && bpf_skb_ecn_set_ce(skb.raw()) == 1
        };
        if !marked {
            return Err(Outcome::DropNoMemory);
        }
    }
    Ok(())
}

/// The inner Ethernet header of a packet over IPv4.
#[inline(always)]
pub fn frame_v4(words: &ArrivedV4) -> Ethernet {
    words.words(OVERHEAD_V4)
}

/// The inner Ethernet header of a packet over IPv6.
#[inline(always)]
pub fn frame_v6(words: &ArrivedV6) -> Ethernet {
    words.words(OVERHEAD_V6)
}

/// What is remembered of a flow: when one of its packets last was left to the kernel's device.
///
/// That device holds and merges packets; one that a program takes out right after could overtake
/// them. So a flow that sent a burst stays with the device until long after. A flow is told by
/// its outer sender and source port; two that look the same only lose speed.
pub struct Flow {
    last: *mut u64,
    now: u64,
}

impl Flow {
    /// Looks the flow up.
    #[inline(always)]
    pub fn of(source: &OuterAddress, source_port: u16) -> Option<Self> {
        let [.., a, b, c, d] = source.octets;
        let mixed = u32::from_ne_bytes([a, b, c, d]).wrapping_mul(0x9e37_79b1) >> 16;
        let slot = (mixed ^ u32::from(source_port)) & (BURSTS as u32 - 1);
        let last = maps::BURST_JIFFIES.get_ptr_mut(slot)?;
        // SAFETY: a helper without conditions.
        Some(Self { last, now: unsafe { bpf_jiffies64() } })
    }

    /// Whether a packet may be in the device's hands still.
    #[inline(always)]
    pub fn behind_burst(&self) -> bool {
        // SAFETY: a valid pointer into the map. Two CPUs may both write the time.
        self.now.wrapping_sub(unsafe { *self.last }) <= BURST_JIFFIES
    }

    /// This packet is left to the device.
    #[inline(always)]
    pub fn leave(&self) {
        // SAFETY: as above.
        unsafe { *self.last = self.now };
    }
}
