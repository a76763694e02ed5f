//! The host side of a pod's device. At its TC ingress are the pod's packets before the stack:
//! those of promoted flows go to the tunnel's device at once, as the stack would send them there.
//! At its TC egress is what the stack delivers.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::bpf_redirect,
    programs::TcContext,
};
use flannel_common::{
    flow::{Direction, FlowRules},
    map::switch,
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    flows::{self, Family, V4, V6},
    maps,
    skb::Skb,
};

/// What the pod sends.
#[inline(always)]
pub fn ingress(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    let Some(rules) = flows::rules() else { return TC_ACT_UNSPEC };
    if !flows::is_plain(skb) {
        return TC_ACT_UNSPEC;
    }
    match skb.ethertype() {
        ETHERTYPE_IPV4 => send_v4(skb.raw(), rules),
        ETHERTYPE_IPV6 => send_v6(skb.raw(), rules),
        _ => TC_ACT_UNSPEC,
    }
}

/// What the stack delivers to the pod.
#[inline(always)]
pub fn egress(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    // What bypassed the stack proves nothing about it: or a flow would confirm itself for ever.
    if !flows::was_branded(skb)
        && let Some(rules) = flows::rules()
        && flows::is_plain(skb)
    {
        match skb.ethertype() {
            ETHERTYPE_IPV4 => delivered_v4(skb.raw(), rules),
            ETHERTYPE_IPV6 => delivered_v6(skb.raw(), rules),
            _ => 0,
        };
    }
    TC_ACT_UNSPEC
}

/// Calls, not inlined: each family has its own headers on its own stack.
#[inline(always)]
fn send_v4(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    send::<V4>(Skb::from(raw), rules)
}

#[inline(never)]
fn send_v6(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    send::<V6>(Skb::from(raw), rules)
}

#[inline(always)]
fn delivered_v4(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    flows::after::<V4>(Skb::from(raw), Direction::In, rules);
    0
}

#[inline(never)]
fn delivered_v6(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    flows::after::<V6>(Skb::from(raw), Direction::In, rules);
    0
}

/// To the tunnel's device, if the flow may bypass the stack: it encapsulates, by our program or, if
/// that has doubts, by itself.
#[inline(always)]
fn send<F: Family>(skb: Skb, rules: &FlowRules) -> i32 {
    let Some(flow) = flows::before::<F>(skb, Direction::Out, rules) else {
        return TC_ACT_UNSPEC;
    };
    let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
    let ifindex = F::tunnel(config).ifindex;
    let frame = flow.tunnel_frame;
    if config.switches & switch::ENCAP == 0 || !flows::takes(skb, ifindex, 0) {
        return TC_ACT_UNSPEC;
    }
    if !F::hop(skb) || !flows::address(skb, &frame) {
        return TC_ACT_SHOT;
    }
    flows::hash(skb, flow);
    flows::count(flow, Direction::Out);
    flows::brand(skb);
    // SAFETY: a helper without conditions.
    (unsafe { bpf_redirect(ifindex, 0) }) as i32
}
