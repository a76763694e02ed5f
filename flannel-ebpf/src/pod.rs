//! The host side of a pod's device. At its TC ingress are the pod's packets before the stack:
//! those of promoted flows go into the tunnel at once, with the frame that the stack would give them.
//! At its TC egress is what the stack delivers.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::bpf_redirect,
    programs::TcContext,
};
use flannel_common::{
    flow::{Direction, FlowRules},
    map::{Config, switch},
    outcome::Outcome,
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    count,
    encap::{self, Asker},
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

/// Into the tunnel, if the flow may bypass the stack.
#[inline(always)]
fn send<F: Family>(skb: Skb, rules: &FlowRules) -> i32 {
    let Some(flow) = flows::before::<F>(skb, Direction::Out, rules) else {
        return TC_ACT_UNSPEC;
    };
    let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
    let ifindex = F::tunnel(config).ifindex;
    let frame = flow.tunnel_frame;
    if config.switches & switch::ENCAP == 0 || !flows::takes(skb, &mut flow.taken[0], ifindex, 0) {
        return TC_ACT_UNSPEC;
    }
    if !F::hop(skb) || !flows::address(skb, &frame) {
        return TC_ACT_SHOT;
    }
    flows::hash::<F>(skb, flow);
    flows::count(flow, Direction::Out);
    if F::ETHERTYPE == ETHERTYPE_IPV4
        && let Some(action) = straight(skb, config)
    {
        return action;
    }
    // Our program there encapsulates it or, if that has doubts, the device itself.
    flows::brand(skb);
    // SAFETY: a helper without conditions.
    (unsafe { bpf_redirect(ifindex, 0) }) as i32
}

/// From here to the NIC, as the tunnel device's program would send it.
#[inline(always)]
fn straight(skb: Skb, config: &Config) -> Option<i32> {
    let (segments, len) = (skb.segments(), skb.len());
    let inner = encap::inspect(skb).ok()?;
    let (outcome, action) = match encap::push_over_v4(skb, config, &inner, Asker::Pod) {
        Ok(ifindex) => (Outcome::Encapsulated, encap::send(ifindex)),
        Err(outcome) if outcome == Outcome::DropNoMemory.index() => {
            (Outcome::DropNoMemory, TC_ACT_SHOT)
        }
        Err(_) => return None,
    };
    count::add(&maps::OUTCOMES, outcome.index(), segments, len);
    Some(action)
}
