//! Recognising packets of the tunnel by their outer headers.
//!
//! Ethernet, IPv4 (RFC 791) or IPv6 (RFC 8200), UDP (RFC 768), VXLAN (RFC 7348). Every read is
//! bounded by the packet; nothing is believed that the headers contradict.

use crate::{
    map::{Config, OuterAddress},
    outcome::Outcome,
};

/// Bytes before the IP header: destination, source, type. A VLAN tag is never among them, the
/// kernel takes it out beforehand.
const ETHERNET_LEN: u32 = 14;
const ETHERTYPE_IPV4: [u8; 2] = 0x0800_u16.to_be_bytes();
const ETHERTYPE_IPV6: [u8; 2] = 0x86dd_u16.to_be_bytes();
const IPV6_LEN: u32 = 40;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_FRAGMENT: u8 = 44;
const UDP_LEN: u32 = 8;
const VXLAN_LEN: u32 = 8;
/// UDP and VXLAN headers and the smallest thing that can be inside, an Ethernet header.
const MIN_UDP_LEN: u32 = 8 + 8 + ETHERNET_LEN;
/// The I flag: the VNI is valid.
const VXLAN_FLAG_VNI: u8 = 0x08;

/// Where the bytes of a packet come from: a slice, or a BPF helper.
pub trait Packet {
    /// The bytes from `offset` on; `None` if the packet ends earlier.
    fn bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
}

impl Packet for [u8] {
    fn bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let start = usize::try_from(offset).ok()?;
        self.get(start..)?.first_chunk().copied()
    }
}

/// What a packet from the underlay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Not sent to the tunnel's port: none of our business.
    Other,
    /// Sent to the tunnel's port, but nothing to take out.
    Odd(Outcome),
    /// A packet of our tunnel, or its first fragment.
    Tunnel {
        /// The outer source address.
        source: OuterAddress,
        /// Where the inner Ethernet header begins, from the start of the packet.
        inner: u32,
        /// Whether the rest comes in fragments of their own.
        fragment: bool,
    },
}

/// The IP header, as far as it matters.
struct Ip {
    source: OuterAddress,
    /// Where UDP begins, from the start of the packet.
    udp: u32,
    /// How many bytes IP says there are from there on. 0 in an IPv6 packet means that the
    /// length is not told: the kernel merged packets into one bigger than 64 KiB.
    payload: u32,
    fragment: bool,
}

/// Looks at a packet that begins with an Ethernet header.
#[inline(always)]
pub fn recognise<P: Packet + ?Sized>(packet: &P, config: &Config) -> Seen {
    let ip = match packet.bytes(ETHERNET_LEN - 2) {
        Some(ETHERTYPE_IPV4) => ipv4(packet),
        Some(ETHERTYPE_IPV6) => ipv6(packet),
        _ => None,
    };
    let Some(ip) = ip else { return Seen::Other };
    let Some([_, _, port_high, port_low, len_high, len_low]) = packet.bytes(ip.udp) else {
        return Seen::Other;
    };
    if config.port == 0 || u16::from_be_bytes([port_high, port_low]) != config.port {
        return Seen::Other;
    }
    let len = u32::from(u16::from_be_bytes([len_high, len_low]));
    // A merged packet's UDP length is that of all of it, or 0 beyond 64 KiB. A fragment's is that
    // of all fragments.
    let beyond = !ip.fragment && ip.payload != 0 && len > ip.payload;
    if len != 0 && (len < MIN_UDP_LEN || beyond) {
        return Seen::Odd(Outcome::Malformed);
    }
    let Some([flags, _, _, _, a, b, c, _]) = packet.bytes(ip.udp + UDP_LEN) else {
        return Seen::Odd(Outcome::Malformed);
    };
    // The last byte that the lengths promise, or the last of the smallest packet.
    let whole = len != 0 && !ip.fragment;
    let last = ip.udp + if whole { len } else { MIN_UDP_LEN } - 1;
    if packet.bytes::<1>(last).is_none() {
        return Seen::Odd(Outcome::Malformed);
    }
    if flags & VXLAN_FLAG_VNI == 0 {
        return Seen::Odd(Outcome::NoVni);
    }
    if u32::from_be_bytes([0, a, b, c]) != config.vni {
        return Seen::Odd(Outcome::WrongVni);
    }
    let inner = ip.udp + UDP_LEN + VXLAN_LEN;
    Seen::Tunnel { source: ip.source, inner, fragment: ip.fragment }
}

/// Reads an IPv4 header. `None` if it is none, or carries something other than the start of a
/// UDP packet. Options are skipped, as the kernel does.
#[inline(always)]
fn ipv4<P: Packet + ?Sized>(packet: &P) -> Option<Ip> {
    let header: [u8; 20] = packet.bytes(ETHERNET_LEN)?;
    let [version_ihl, _, len_high, len_low, _, _, frag_high, frag_low, _, protocol, rest @ ..] =
        header;
    let [_, _, a, b, c, d, ..] = rest;
    let header_len = u32::from(version_ihl & 0x0f) * 4;
    let total_len = u32::from(u16::from_be_bytes([len_high, len_low]));
    let fragment = u16::from_be_bytes([frag_high, frag_low]);
    let continued = fragment & 0x1fff != 0;
    if version_ihl >> 4 != 4 || header_len < 20 || protocol != PROTOCOL_UDP || continued {
        return None;
    }
    Some(Ip {
        source: OuterAddress::from_v4([a, b, c, d]),
        udp: ETHERNET_LEN + header_len,
        // The kernel refuses a total length below the header's. 1 makes every UDP length wrong.
        payload: if total_len == 0 { 0 } else { total_len.saturating_sub(header_len).max(1) },
        fragment: fragment & 0x2000 != 0,
    })
}

/// Reads an IPv6 header. `None` if it is none, or carries something other than the start of a
/// UDP packet. Of the extension headers only the fragment header is known.
#[inline(always)]
fn ipv6<P: Packet + ?Sized>(packet: &P) -> Option<Ip> {
    let [version, _, _, _, len_high, len_low, next, _]: [u8; 8] = packet.bytes(ETHERNET_LEN)?;
    let source = OuterAddress::from_v6(packet.bytes(ETHERNET_LEN + 8)?);
    if version >> 4 != 6 {
        return None;
    }
    let payload = u32::from(u16::from_be_bytes([len_high, len_low]));
    let udp = ETHERNET_LEN + IPV6_LEN;
    if next == PROTOCOL_UDP {
        return Some(Ip { source, udp, payload, fragment: false });
    }
    if next != PROTOCOL_FRAGMENT {
        return None;
    }
    let [inner, _, frag_high, frag_low, ..]: [u8; 8] = packet.bytes(udp)?;
    let continued = u16::from_be_bytes([frag_high, frag_low]) & 0xfff8 != 0;
    (inner == PROTOCOL_UDP && !continued).then_some(Ip {
        source,
        udp: udp + 8,
        payload: 0,
        fragment: true,
    })
}

#[cfg(test)]
mod tests;
