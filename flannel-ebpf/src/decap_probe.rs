//! Run once, on a made-up tunnel packet and on no device: whether this kernel can take away what
//! merging in a tunnel leaves on a packet.

use aya_ebpf::{
    bindings::{BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC},
    helpers::bpf_skb_adjust_room,
    programs::TcContext,
};
use flannel_common::encap::OVERHEAD_V4;

use crate::skb::Skb;

/// `BPF_F_ADJ_ROOM_DECAP_L4_UDP`, on its way into Linux since August 2026. A kernel that does not know
/// the flag refuses the call (`EINVAL`).
const DECAP_L4_UDP: u64 = 1 << 10;

/// Returns 0 if it can, else 1.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO) | DECAP_L4_UDP;
    let raw = Skb::new(ctx).raw();
    // SAFETY: the kernel passes a valid context.
    let result =
        unsafe { bpf_skb_adjust_room(raw, -(OVERHEAD_V4 as i32), BPF_ADJ_ROOM_MAC, flags) };
    i32::from(result != 0)
}
