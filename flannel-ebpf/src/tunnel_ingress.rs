//! TC ingress of the tunnel device: what the kernel or a program has taken out of the tunnel,
//! before the stack. Packets of promoted flows go to the pod at once, merged ones too: the kernel
//! has undone what merging them in a tunnel left behind.
//!
//! They are sent out of the host's side of the pod's device, not put in at the pod's side. So
//! they wait in the same queue as those that come by the stack, and none overtakes another.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::bpf_redirect,
    programs::TcContext,
};
use flannel_common::{
    flow::{Direction, FlowRules},
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    flows::{self, Family, V4, V6},
    skb::Skb,
};

/// Looks at one packet.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    let Some(rules) = flows::rules() else { return TC_ACT_UNSPEC };
    // The stack forwards no broadcast.
    if !flows::is_plain(skb) || !skb.for_this_host() {
        return TC_ACT_UNSPEC;
    }
    match skb.ethertype() {
        ETHERTYPE_IPV4 => v4(skb.raw(), rules),
        ETHERTYPE_IPV6 => v6(skb.raw(), rules),
        _ => TC_ACT_UNSPEC,
    }
}

#[inline(always)]
fn v4(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    deliver::<V4>(Skb::from(raw), rules)
}

#[inline(never)]
fn v6(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    deliver::<V6>(Skb::from(raw), rules)
}

#[inline(always)]
fn deliver<F: Family>(skb: Skb, rules: &FlowRules) -> i32 {
    let Some(flow) = flows::before::<F>(skb, Direction::In, rules) else {
        return TC_ACT_UNSPEC;
    };
    let (ifindex, frame) = (flow.pod_ifindex, flow.pod_frame);
    if !flows::takes(skb, &mut flow.taken[1], ifindex, 0) {
        return TC_ACT_UNSPEC;
    }
    if !F::hop(skb) || !flows::address(skb, &frame) {
        return TC_ACT_SHOT;
    }
    flows::count(flow, Direction::In);
    flows::brand(skb);
    // SAFETY: a helper without conditions.
    (unsafe { bpf_redirect(ifindex, 0) }) as i32
}
