//! TC egress of the tunnel device: encapsulate and send, or leave the packet to the device.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    programs::TcContext,
};
use flannel_common::{
    flow::{Direction, FlowRules},
    map::{Config, VtepKey, switch},
    outcome::Outcome,
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    count,
    encap::{self, Asker},
    flows::{self, V4, V6},
    maps,
    skb::{self, Skb},
};

/// Sends one packet.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    note(skb);
    let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
    // The headers change both; the kernel's device counts before, too.
    let (segments, len) = (skb.segments(), skb.len());
    let (outcome, action) = match send(skb, config) {
        Ok(action) => (Outcome::Encapsulated.index(), action),
        Err(outcome) if outcome == Outcome::DropNoMemory.index() => (outcome, TC_ACT_SHOT),
        // The device's queue is next.
        Err(outcome) => (outcome, TC_ACT_UNSPEC),
    };
    count::add(&maps::OUTCOMES, outcome, segments, len);
    action
}

/// The packet came out of the stack.
#[inline(always)]
fn note(skb: Skb) {
    let Some(rules) = flows::rules() else { return };
    if flows::was_branded(skb) || !flows::is_plain(skb) {
        return;
    }
    match skb.ethertype() {
        ETHERTYPE_IPV4 => after_v4(skb.raw(), rules),
        ETHERTYPE_IPV6 => after_v6(skb.raw(), rules),
        _ => 0,
    };
}

#[inline(always)]
fn after_v4(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    flows::after::<V4>(Skb::from(raw), Direction::Out, rules);
    0
}

#[inline(never)]
fn after_v6(raw: *mut __sk_buff, rules: &FlowRules) -> i32 {
    flows::after::<V6>(Skb::from(raw), Direction::Out, rules);
    0
}

/// Returns the program's result, or why not by its number.
#[inline(always)]
fn send(skb: Skb, config: &Config) -> Result<i32, u32> {
    if config.switches & switch::ENCAP == 0 {
        return Err(Outcome::EncapOff.index());
    }
    if skb.mark() != 0 || skb.tagged() {
        return Err(Outcome::Marked.index());
    }
    if skb.ifindex() == config.v4.ifindex {
        over_v4(skb, config)
    } else if skb.ifindex() == config.v6.ifindex {
        skb::unpack(over_v6(skb.raw(), config, encap::inner_sum(skb)))
    } else {
        // The device was made anew and the agent has not said so yet.
        Err(Outcome::EncapOff.index())
    }
}

/// What is not inlined below is a call for the stack's sake. Calls are not free, so that the commoner
/// family does without.
#[inline(always)]
fn over_v4(skb: Skb, config: &Config) -> Result<i32, u32> {
    let inner = encap::inspect(skb).map_err(Outcome::index)?;
    Ok(encap::send(encap::push_over_v4(skb, config, &inner, Asker::Tunnel)?))
}

#[inline(never)]
fn over_v6(raw: *mut __sk_buff, config: &Config, inner_sum: i64) -> i64 {
    let skb = Skb::from(raw);
    skb::pack(encap::inspect(skb).and_then(|inner| {
        let head = maps::scratch().ok_or(Outcome::NoRoom)?;
        let vtep = encap::vtep(&inner.frame, VtepKey::V6, Asker::Tunnel)?;
        let ifindex = encap::prepare_v6(skb, config, &inner, inner_sum, &vtep, head)?;
        encap::push_v6(skb, head)?;
        Ok(encap::send(ifindex))
    }))
}
