//! Run once, on a made-up packet and on no device: whether this kernel takes the calls that the
//! other programs make, and does with the packet what they expect.

use aya_ebpf::programs::TcContext;
use flannel_common::{
    ecn::Decapsulate,
    encap::{HeadV4, HeadV6, OVERHEAD_V4, OVERHEAD_V6},
    outcome::Outcome,
    wire::{ETHERNET_LEN, ETHERTYPE_IPV4, Header, Words},
};

use crate::{decap, encap, skb::Skb};

/// Returns 0 if all is well, else the number of what went wrong.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    let is_v4 = skb.ethertype() == ETHERTYPE_IPV4;
    let overhead = if is_v4 { OVERHEAD_V4 } else { OVERHEAD_V6 } as u32;
    let len = skb.len();
    let Some(before) = first(skb) else { return 1 };
    let pushed = if is_v4 { push_v4(skb, &before) } else { push_v6(skb, &before) };
    if pushed.is_err() {
        return 2;
    }
    if skb.len() != len + overhead {
        return 3;
    }
    let frame = before.words(0);
    let stripped = if is_v4 {
        decap::strip(skb, OVERHEAD_V4, &frame, Decapsulate::Keep)
    } else {
        decap::strip(skb, OVERHEAD_V6, &frame, Decapsulate::Keep)
    };
    if stripped.is_err() {
        return 4;
    }
    if skb.len() != len {
        return 5;
    }
    if first(skb) == Some(before) { 0 } else { 6 }
}

/// The Ethernet header and some of what follows.
#[inline(always)]
fn first(skb: Skb) -> Option<Words<16>> {
    let mut words = Words::ZERO;
    skb.load::<32, 16>(&mut words).then_some(words)
}

/// The outer frame is the inner one once more.
#[inline(always)]
fn push_v4(skb: Skb, before: &Words<16>) -> Result<(), Outcome> {
    let mut head = HeadV4::ZERO;
    head.put::<{ ETHERNET_LEN / 2 }>(0, &before.words(0));
    encap::push_v4(skb, &head)
}

#[inline(always)]
fn push_v6(skb: Skb, before: &Words<16>) -> Result<(), Outcome> {
    let mut head = HeadV6::ZERO;
    head.put::<{ ETHERNET_LEN / 2 }>(0, &before.words(0));
    encap::push_v6(skb, &head)
}
