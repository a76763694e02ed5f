//! TC ingress of the devices that carry our pods: no pod speaks VXLAN to a node.
//!
//! Masquerading would make such a packet look like the node's own, and the node's own device would
//! take one to the node itself for a peer's.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    programs::TcContext,
};
use flannel_common::{
    decap::{in_own_v4, in_v6},
    map::{Config, OuterAddress, switch},
    outcome::Outcome,
    outer::Packet,
    wire::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, UDP},
};

use crate::{count, maps, skb::Skb};

/// IPv6's extension headers, by their IP protocol numbers.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// How many of them are looked behind.
const MAX_EXTENSIONS: usize = 8;

/// Looks at one packet.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
    if config.switches & switch::FILTER == 0 || config.port == 0 || !speaks_vxlan(skb, config) {
        return TC_ACT_UNSPEC;
    }
    count::add(&maps::OUTCOMES, Outcome::DropLocalPod.index(), skb.segments(), skb.len());
    TC_ACT_SHOT
}

/// Whether it is a UDP packet of a pod to the tunnel's port of a node.
#[inline(always)]
fn speaks_vxlan(skb: Skb, config: &Config) -> bool {
    let ip = ETHERNET_LEN as u32;
    match skb.ethertype() {
        ETHERTYPE_IPV4 => {
            let Some([version_ihl, _, _, _, _, _, _, _, _, protocol]) = skb.bytes(ip) else {
                return false;
            };
            protocol == UDP
                && to_port(skb, config, ip + u32::from(version_ihl & 0x0f) * 4)
                && skb.bytes(ip + 12).is_some_and(|from| in_own_v4(&config.v4, from))
                && skb.bytes(ip + 16).is_some_and(|to| is_node(config, OuterAddress::from_v4(to)))
        }
        ETHERTYPE_IPV6 => {
            may_be_to_port_v6(skb, config, ip)
                && skb
                    .bytes(ip + 8)
                    .is_some_and(|from| in_v6(&config.v6.subnet, config.v6.prefix_len, &from))
                && skb.bytes(ip + 24).is_some_and(|to| is_node(config, OuterAddress::from_v6(to)))
        }
        _ => false,
    }
}

#[inline(always)]
fn to_port(skb: Skb, config: &Config, udp: u32) -> bool {
    skb.bytes(udp + 2).is_some_and(|port| u16::from_be_bytes(port) == config.port)
}

/// The same behind IPv6's extension headers (RFC 8200 section 4), which the kernel takes in any
/// number and order. So many that nobody sends them count as a disguise.
#[inline(always)]
fn may_be_to_port_v6(skb: Skb, config: &Config, ip: u32) -> bool {
    let Some([mut next]) = skb.bytes(ip + 6) else { return false };
    let mut at = ip + 40;
    for _ in 0..MAX_EXTENSIONS {
        let header: Option<[u8; 4]> = skb.bytes(at);
        let Some([following, length, offset_high, offset_low]) = header else { return false };
        match next {
            UDP => return u16::from_be_bytes([offset_high, offset_low]) == config.port,
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => at += (u32::from(length) + 1) * 8,
            // What has no port in its first fragment is refused by the kernel.
            FRAGMENT if u16::from_be_bytes([offset_high, offset_low]) & !7 == 0 => at += 8,
            _ => return false,
        }
        next = following;
    }
    true
}

#[inline(always)]
fn is_node(config: &Config, address: OuterAddress) -> bool {
    address == config.v4.local
        || address == config.v6.local
        // SAFETY: only whether there is one counts.
        || unsafe { maps::PEERS.get(address) }.is_some()
}
