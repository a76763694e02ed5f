//! TC ingress of the underlay device: recognise, count, pass on.

use aya_ebpf::{
    EbpfContext,
    bindings::TC_ACT_UNSPEC,
    btf_maps::PerCpuArray,
    helpers::{bpf_ktime_get_ns, bpf_skb_load_bytes},
    programs::TcContext,
};
use aya_log_ebpf::{
    info,
    macro_support::{Level, level_enabled},
};
use flannel_common::{
    map::{Counters, OuterAddress},
    outcome::Outcome,
    outer::{self, Packet, Seen},
};

use crate::maps;

/// "Next": whoever else is at this hook has a say, and then the kernel.
const NEXT: i32 = TC_ACT_UNSPEC;

/// `PACKET_OTHERHOST` (`linux/if_packet.h`): the frame was sent to another host's MAC.
const OTHER_HOST: u32 = 3;

/// At most one log line a second.
const LOG_INTERVAL_NS: u64 = 1_000_000_000;

/// Counts one packet.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    // SAFETY: the kernel passes a valid context; the verifier checks the access.
    let (kind, tagged) = unsafe { ((*ctx.skb.skb).pkt_type, (*ctx.skb.skb).vlan_present) };
    // What belongs to another host, or to a VLAN device on top, is not the tunnel's.
    if kind == OTHER_HOST || tagged != 0 {
        return NEXT;
    }
    let Some(config) = maps::CONFIG.get(0) else { return NEXT };
    let outcome = match outer::recognise(&Skb(ctx), config) {
        Seen::Other => return NEXT,
        Seen::Odd(outcome) => outcome,
        Seen::Tunnel { source } => {
            if let Some(index) = peer_index(&source) {
                count(&maps::PEER_COUNTERS, index, ctx);
                Outcome::FromPeer
            } else {
                log_unknown(ctx, &source);
                Outcome::UnknownSource
            }
        }
    };
    count(&maps::OUTCOMES, outcome.index(), ctx);
    NEXT
}

#[inline(always)]
fn peer_index(source: &OuterAddress) -> Option<u32> {
    // SAFETY: the value may be replaced meanwhile, but never the index of an address in use.
    unsafe { maps::PEERS.get(source) }.map(|peer| peer.index)
}

/// Adds the packet to a counter of this CPU.
#[inline(always)]
fn count<const N: usize>(map: &PerCpuArray<Counters, N>, index: u32, ctx: &TcContext) {
    let Some(counters) = map.get_ptr_mut(index) else { return };
    // SAFETY: the kernel passes a valid context; the verifier checks the access.
    let segments = unsafe { (*ctx.skb.skb).gso_segs };
    // SAFETY: this CPU's own slot, and nothing else of ours runs on this CPU in between.
    let counters = unsafe { &mut *counters };
    *counters = counters
        .plus(Counters { packets: u64::from(segments.max(1)), bytes: u64::from(ctx.len()) });
}

/// Says who it was. The level is a constant that the loader sets: below it, the verifier takes
/// all of this out.
#[inline(always)]
fn log_unknown(ctx: &TcContext, source: &OuterAddress) {
    if !level_enabled(Level::Info) {
        return;
    }
    let Some(last) = maps::LAST_LOGGED.get_ptr_mut(0) else { return };
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a valid pointer into the map. Two CPUs may both win the race: two lines, no harm.
    let last = unsafe { &mut *last };
    if *last != 0 && now.wrapping_sub(*last) < LOG_INTERVAL_NS {
        return;
    }
    *last = now;
    if let Some(v4) = source.v4() {
        info!(ctx, "tunnel packet from {:i}, which is no peer", u32::from_be_bytes(v4));
    } else {
        info!(ctx, "tunnel packet from {:i}, which is no peer", source.octets);
    }
}

/// A packet in the kernel's hands: its parts may lie in several places.
struct Skb<'a>(&'a TcContext);

impl Packet for Skb<'_> {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "N is the length of a header")]
    fn bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the helper writes N bytes to a buffer of N bytes, or fails.
        let result = unsafe {
            bpf_skb_load_bytes(self.0.as_ptr(), offset, bytes.as_mut_ptr().cast(), N as u32)
        };
        (result == 0).then_some(bytes)
    }
}
