//! Between the program in XDP and the one at TC: how a packet that was taken out of the tunnel in
//! XDP is known at TC, and how XDP knows that there is somebody at TC to go on with it.
//!
//! Such a packet has a cookie before it, in metadata, where nothing from the wire can be. It is the
//! same for all of them, so that it keeps none from being merged with its like. And it has the
//! inner frame's MACs: without anybody at TC it is for another host, and the kernel drops it.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_DEC, BPF_F_INGRESS, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::{
        bpf_csum_level, bpf_jiffies64, bpf_redirect, bpf_redirect_peer, bpf_skb_change_type,
    },
};
use flannel_common::{
    flow::{Direction, Flow},
    map::{Cookie, XdpFront},
    outcome::Outcome,
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    count,
    flows::{self, Family, V4, V6},
    maps,
    skb::Skb,
};

/// So many jiffies after a packet at TC, XDP stops handing packets over to it. Whoever takes the
/// program away from TC loses what comes in this time, at any HZ less than a fifth of a second.
const ATTENDED_JIFFIES: u64 = 16;

/// `PACKET_HOST` (`linux/if_packet.h`).
const TO_HOST: u32 = 0;

/// The front of this device, if it has one.
#[inline(always)]
pub fn front(ifindex: u32) -> Option<&'static XdpFront> {
    maps::XDP_FRONT.get(0).filter(|front| front.ifindex != 0 && front.ifindex == ifindex)
}

/// TC's sign that it is at work. Written once a jiffy at most: all CPUs share it.
#[inline(always)]
pub fn attend() {
    let Some(front) = maps::XDP_FRONT.get(0) else { return };
    if front.ifindex == 0 {
        return;
    }
    let Some(seen) = maps::TC_JIFFIES.get_ptr_mut(0) else { return };
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_jiffies64() };
    // SAFETY: a valid pointer into the map. Whoever writes last is right.
    let seen = unsafe { &mut *seen };
    if *seen != now {
        *seen = now;
    }
}

/// Whether TC has been at work lately.
#[inline(always)]
pub fn attended() -> bool {
    let Some(seen) = maps::TC_JIFFIES.get(0) else { return false };
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_jiffies64() };
    // The other CPU may be a jiffy ahead.
    *seen != 0 && now.wrapping_sub(*seen).wrapping_add(1) <= ATTENDED_JIFFIES
}

/// At TC: sends on what was taken out in XDP. `None` if it is no such packet.
#[inline(always)]
pub fn handed_over(skb: Skb) -> Option<i32> {
    let front = front(skb.ifindex())?;
    if !carries(skb, &front.cookie) {
        return None;
    }
    attend();
    let (outcome, action) = send_on(skb);
    count::add(&maps::OUTCOMES, outcome.index(), skb.segments(), skb.len());
    Some(action)
}

#[inline(always)]
fn carries(skb: Skb, cookie: &Cookie) -> bool {
    let (start, end) = skb.metadata();
    if start + size_of::<Cookie>() > end {
        return false;
    }
    // SAFETY: the verifier has seen the comparison with the end.
    let word = |at: usize| unsafe { *((start + 2 * at) as *const u16) };
    word(0) == cookie[0] && word(1) == cookie[1] && word(2) == cookie[2] && word(3) == cookie[3]
}

#[inline(always)]
fn send_on(skb: Skb) -> (Outcome, i32) {
    if skb.tagged() {
        return (Outcome::DropTagged, TC_ACT_SHOT);
    }
    let Some(config) = maps::CONFIG.get(0) else { return (Outcome::NoDevice, TC_ACT_SHOT) };
    // If the NIC verified checksums, it counted the outer one, be it zero.
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_csum_level(skb.raw(), u64::from(BPF_CSUM_LEVEL_DEC)) };
    let (tunnel, action) = match skb.ethertype() {
        ETHERTYPE_IPV4 => (&config.v4, straight_v4(skb.raw())),
        ETHERTYPE_IPV6 => (&config.v6, straight_v6(skb.raw())),
        _ => return (Outcome::Malformed, TC_ACT_SHOT),
    };
    match action {
        TC_ACT_UNSPEC => {
            // SAFETY: a helper without conditions.
            let action = unsafe { bpf_redirect(tunnel.ifindex, u64::from(BPF_F_INGRESS)) };
            (Outcome::FromXdp, action as i32)
        }
        TC_ACT_SHOT => (flows::HALF_DONE, TC_ACT_SHOT),
        action => (Outcome::FromXdp, action),
    }
}

/// Calls, not inlined: each family has its own headers on its own stack.
#[inline(never)]
fn straight_v4(raw: *mut __sk_buff) -> i32 {
    straight::<V4>(Skb::from(raw))
}

#[inline(never)]
fn straight_v6(raw: *mut __sk_buff) -> i32 {
    straight::<V6>(Skb::from(raw))
}

/// To the pod, if the flow may bypass the stack; else "next": the tunnel device's ingress.
#[inline(always)]
fn straight<F: Family>(skb: Skb) -> i32 {
    let Some(flow) = find::<F>(skb) else { return TC_ACT_UNSPEC };
    let (ifindex, frame) = (flow.pod_ifindex, flow.pod_frame);
    if !flows::takes(skb, &mut flow.taken[1], ifindex, 0) {
        return TC_ACT_UNSPEC;
    }
    // Before Linux 6.15 the redirection leaves it "for another host".
    // SAFETY: the kernel passes a valid context.
    let typed = unsafe { bpf_skb_change_type(skb.raw(), TO_HOST) } == 0;
    if !typed || !F::hop(skb) || !flows::address(skb, &frame) {
        return TC_ACT_SHOT;
    }
    flows::count(flow, Direction::In);
    // SAFETY: a helper without conditions.
    (unsafe { bpf_redirect_peer(ifindex, 0) }) as i32
}

/// The flow, if it goes straight to a pod.
#[inline(always)]
fn find<F: Family>(skb: Skb) -> Option<&'static mut Flow> {
    let rules = flows::rules()?;
    if skb.gso_size() != 0 || !flows::is_plain(skb) {
        return None;
    }
    let head = F::start(skb)?;
    flows::look_inside::<F, _>(&head, flows::IP, skb.len(), rules)
}
