//! The tuple of a packet, if it is one whose flow may bypass the stack.
//!
//! IPv4 (RFC 791) without options, IPv6 (RFC 8200) without extension headers, no fragments; TCP
//! (RFC 9293) and UDP (RFC 768). Every read is bounded by the packet.

use super::{Direction, Flow4Key, Flow6Key, Segment};
use crate::wire::{Header, IPV4_LEN, IPV6_LEN, TCP, UDP, is_fragment, v4_bytes};

/// Lengths as packets tell them.
const V4_HEADER: u32 = 20;
const V6_HEADER: u32 = 40;
const UDP_HEADER: u32 = 8;

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
    /// as long as it says, headers included, and fits the tunnel, each of its segments if it is a
    /// merged one.
    ///
    /// `length` is the packet's from the IP header on, `gso_size` that of a segment's data, 0 of a
    /// packet that is not merged.
    #[inline(always)]
    pub const fn may_bypass(&self, length: u32, gso_size: u32, mtu: u32) -> bool {
        let biggest = if gso_size == 0 { length } else { self.headers + gso_size };
        self.hop_limit > 1 && self.length == length && self.headers <= length && biggest <= mtu
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

/// What TCP and UDP have; the ports in network order.
struct Ports {
    source: [u8; 2],
    destination: [u8; 2],
    segment: Segment,
    headers: u32,
}

impl Ports {
    /// The ports in a key, as they lie in memory.
    #[inline(always)]
    fn of_key(&self, direction: Direction) -> u32 {
        let (local, remote) = match direction {
            Direction::Out => (self.source, self.destination),
            Direction::In => (self.destination, self.source),
        };
        bytemuck::cast([local, remote])
    }
}

/// The last four bytes of a key.
#[inline(always)]
fn last(protocol: u8) -> u32 {
    u32::from_ne_bytes([protocol, 0, 0, 0])
}

/// Reads an IPv4 packet that begins at an offset.
#[inline(always)]
pub fn v4<H: Header + ?Sized>(
    packet: &H,
    at: usize,
    direction: Direction,
) -> Option<Inner<Flow4Key>> {
    // The last word of the header: all of it is there.
    packet.word(at + IPV4_LEN - 2)?;
    if packet.byte(at) != 0x45 || is_fragment(packet.be16(at + 6)) {
        return None;
    }
    let protocol = packet.byte(at + 9);
    let ports = ports(packet, at + IPV4_LEN, protocol)?;
    let source = v4_bytes(&packet.words(at + 12));
    let destination = v4_bytes(&packet.words(at + 16));
    let (local, remote) = match direction {
        Direction::Out => (source, destination),
        Direction::In => (destination, source),
    };
    let [local, remote] = [local, remote].map(u32::from_ne_bytes);
    Some(Inner {
        // A field at a time, BPF would make it of single bytes.
        key: bytemuck::cast([local, remote, ports.of_key(direction), last(protocol)]),
        segment: ports.segment,
        hop_limit: packet.byte(at + 8),
        traffic_class: packet.byte(at + 1),
        length: u32::from(packet.be16(at + 2)),
        headers: V4_HEADER + ports.headers,
    })
}

/// Reads an IPv6 packet that begins at an offset.
#[inline(always)]
pub fn v6<H: Header + ?Sized>(
    packet: &H,
    at: usize,
    direction: Direction,
) -> Option<Inner<Flow6Key>> {
    packet.word(at + IPV6_LEN - 2)?;
    let first = packet.be16(at);
    if first >> 12 != 6 {
        return None;
    }
    let protocol = packet.byte(at + 6);
    let ports = ports(packet, at + IPV6_LEN, protocol)?;
    let (local_at, remote_at) = match direction {
        Direction::Out => (8, 24),
        Direction::In => (24, 8),
    };
    let [local_high, local_low]: [u64; 2] = bytemuck::cast(packet.words::<8>(at + local_at));
    let [remote_high, remote_low]: [u64; 2] = bytemuck::cast(packet.words::<8>(at + remote_at));
    let end: u64 = bytemuck::cast([ports.of_key(direction), last(protocol)]);
    let key = bytemuck::cast([local_high, local_low, remote_high, remote_low, end]);
    let payload = u32::from(packet.be16(at + 4));
    let [_, traffic_class] = (first >> 4).to_be_bytes();
    Some(Inner {
        key,
        segment: ports.segment,
        hop_limit: packet.byte(at + 7),
        traffic_class,
        length: if payload == 0 { 0 } else { V6_HEADER + payload },
        headers: V6_HEADER + ports.headers,
    })
}

#[inline(always)]
fn ports<H: Header + ?Sized>(packet: &H, at: usize, protocol: u8) -> Option<Ports> {
    let (segment, headers) = match protocol {
        UDP => {
            packet.word(at + 6)?;
            (Segment::Plain, UDP_HEADER)
        }
        TCP => {
            let [offset, flags] = packet.word(at + 12)?.to_ne_bytes();
            let headers = u32::from(offset >> 4) * 4;
            (if headers < 20 { Segment::Odd } else { segment(flags) }, headers)
        }
        _ => return None,
    };
    let (source, destination) = (packet.raw16(at), packet.raw16(at + 2));
    Some(Ports {
        source: source.to_ne_bytes(),
        destination: destination.to_ne_bytes(),
        segment,
        headers,
    })
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
