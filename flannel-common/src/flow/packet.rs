//! The tuple of a packet, if it is one whose flow may bypass the stack.
//!
//! IPv4 (RFC 791) without options, IPv6 (RFC 8200) without extension headers, no fragments; TCP
//! (RFC 9293) and UDP (RFC 768). Every read is bounded by the packet.

use super::{Direction, Flow4Key, Flow6Key, Segment};
use crate::outer::Packet;

const TCP: u8 = 6;
const UDP: u8 = 17;
const IPV4_LEN: u32 = 20;
const IPV6_LEN: u32 = 40;
const UDP_LEN: u32 = 8;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
const URG: u8 = 0x20;

/// A packet of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner<K> {
    /// The flow.
    pub key: K,
    /// What it means for the flow.
    pub segment: Segment,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// The second byte of IPv4's header, or the same bits of IPv6's: DSCP and ECN.
    pub traffic_class: u8,
    /// What IP says the packet's length is, with its own header. 0: it does not say (a merged
    /// packet bigger than 64 KiB).
    pub length: u32,
    /// The length of the headers of IP and TCP or UDP.
    pub headers: u32,
}

impl<K> Inner<K> {
    /// Whether the packet can go on without the stack: it may be forwarded once more, and it is
    /// as long as it says and fits the tunnel, each of its segments if it is a merged one.
    ///
    /// `length` is the packet's from the IP header on, `gso_size` that of a segment's data, 0 of a
    /// packet that is not merged.
    #[inline(always)]
    pub const fn may_bypass(&self, length: u32, gso_size: u32, mtu: u32) -> bool {
        let biggest = if gso_size == 0 { length } else { self.headers + gso_size };
        self.hop_limit > 1 && self.length == length && biggest <= mtu
    }
}

/// The checksum of an IPv4 header that had this one before its time to live went down by one:
/// what the kernel's forwarding writes (RFC 1624; it has no negative zero).
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the carry is taken in")]
pub const fn checksum_after_hop(checksum: u16) -> u16 {
    let sum = checksum as u32 + 0x0100;
    (if sum >= 0xffff { sum + 1 } else { sum }) as u16
}

/// The tuple's parts in the order of the wire.
struct Ports {
    source: [u8; 2],
    destination: [u8; 2],
    segment: Segment,
    headers: u32,
}

/// Reads an IPv4 packet that begins at an offset.
#[inline(always)]
pub fn v4<P: Packet + ?Sized>(
    packet: &P,
    at: u32,
    direction: Direction,
) -> Option<Inner<Flow4Key>> {
    let header: [u8; 20] = packet.bytes(at)?;
    let [version_ihl, traffic_class, len_high, len_low, _, _, frag_high, frag_low, rest @ ..] =
        header;
    let [hop_limit, protocol, _, _, addresses @ ..] = rest;
    // More fragments, or an offset.
    if version_ihl != 0x45 || frag_high & 0x3f != 0 || frag_low != 0 {
        return None;
    }
    let ports = ports(packet, at + IPV4_LEN, protocol)?;
    let [source, destination]: [[u8; 4]; 2] = bytemuck::cast(addresses);
    let (local, remote, local_port, remote_port) = match direction {
        Direction::Out => (source, destination, ports.source, ports.destination),
        Direction::In => (destination, source, ports.destination, ports.source),
    };
    Some(Inner {
        key: Flow4Key { local, remote, local_port, remote_port, protocol, reserved: [0; 3] },
        segment: ports.segment,
        hop_limit,
        traffic_class,
        length: u32::from(u16::from_be_bytes([len_high, len_low])),
        headers: IPV4_LEN + ports.headers,
    })
}

/// Reads an IPv6 packet that begins at an offset.
#[inline(always)]
pub fn v6<P: Packet + ?Sized>(
    packet: &P,
    at: u32,
    direction: Direction,
) -> Option<Inner<Flow6Key>> {
    let [first, second, _, _, len_high, len_low, protocol, hop_limit]: [u8; 8] =
        packet.bytes(at)?;
    if first >> 4 != 6 {
        return None;
    }
    let ports = ports(packet, at + IPV6_LEN, protocol)?;
    // Read to where they stay: in BPF the stack is short.
    let (local_at, remote_at, local_port, remote_port) = match direction {
        Direction::Out => (8, 24, ports.source, ports.destination),
        Direction::In => (24, 8, ports.destination, ports.source),
    };
    let key = Flow6Key {
        local: packet.bytes(at + local_at)?,
        remote: packet.bytes(at + remote_at)?,
        local_port,
        remote_port,
        protocol,
        reserved: [0; 3],
    };
    let payload = u32::from(u16::from_be_bytes([len_high, len_low]));
    Some(Inner {
        key,
        segment: ports.segment,
        hop_limit,
        traffic_class: first << 4 | second >> 4,
        length: if payload == 0 { 0 } else { IPV6_LEN + payload },
        headers: IPV6_LEN + ports.headers,
    })
}

#[inline(always)]
fn ports<P: Packet + ?Sized>(packet: &P, at: u32, protocol: u8) -> Option<Ports> {
    match protocol {
        UDP => {
            let [a, b, c, d, ..]: [u8; 8] = packet.bytes(at)?;
            let (source, destination) = ([a, b], [c, d]);
            Some(Ports { source, destination, segment: Segment::Plain, headers: UDP_LEN })
        }
        TCP => {
            let [a, b, c, d] = packet.bytes(at)?;
            let [offset, flags]: [u8; 2] = packet.bytes(at + 12)?;
            let headers = u32::from(offset >> 4) * 4;
            let segment = if headers < 20 { Segment::Odd } else { segment(flags) };
            Some(Ports { source: [a, b], destination: [c, d], segment, headers })
        }
        _ => None,
    }
}

#[inline(always)]
const fn segment(flags: u8) -> Segment {
    if flags & SYN != 0 {
        Segment::Opening
    } else if flags & (FIN | RST) != 0 {
        Segment::Closing
    } else if flags & ACK == 0 || flags & URG != 0 {
        Segment::Odd
    } else {
        Segment::Plain
    }
}

#[cfg(test)]
mod tests;
