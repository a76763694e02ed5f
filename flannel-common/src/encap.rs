//! The outer headers: the bytes a kernel VXLAN device puts there, but for the IP id.

use crate::{
    ecn,
    map::{Config, Tunnel},
    wire::{
        ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, ICMP, ICMPV6, IPV4_LEN, IPV6_LEN,
        TCP, UDP, UDP_LEN, VXLAN_LEN, Words, fold, is_fragment, v4_words, v6_words, words_in,
    },
};

/// Bytes put before an inner IP packet over IPv4: IP, UDP, VXLAN and the inner Ethernet header.
pub const OVERHEAD_V4: usize = IPV4_LEN + UDP_LEN + VXLAN_LEN + ETHERNET_LEN;
/// The same over IPv6.
pub const OVERHEAD_V6: usize = IPV6_LEN + UDP_LEN + VXLAN_LEN + ETHERNET_LEN;

/// The longest IP packet there can be.
const MAX_IP_LEN: u32 = 0xffff;

/// All headers over IPv4, the outer Ethernet header included.
pub type HeadV4 = Words<{ words_in(ETHERNET_LEN + OVERHEAD_V4) }>;
/// All headers over IPv6, the outer Ethernet header included.
pub type HeadV6 = Words<{ words_in(ETHERNET_LEN + OVERHEAD_V6) }>;

/// An Ethernet header: destination, source, type.
pub type Ethernet = [u16; words_in(ETHERNET_LEN)];

/// What the outer headers of a flow have in common.
#[derive(Clone, Copy, Debug)]
pub struct Outer<'a> {
    /// VNI and port.
    pub config: &'a Config,
    /// Our end.
    pub tunnel: &'a Tunnel,
    /// The other end, in network order; IPv4 in the last four bytes.
    pub remote: &'a [u8; 16],
    /// The source port, by [`source_port`].
    pub source_port: u16,
    /// The Ethernet header to be put inside.
    pub inner: &'a Ethernet,
    /// The next hop and our NIC.
    pub next_hop: &'a [u16; 6],
}

/// The outer source port: the kernel's formula (`udp_flow_src_port`), so that a flow keeps its
/// way through the underlay whoever encapsulates it. `None` if the packet has no hash; the kernel
/// then makes one that programs cannot know.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "below the difference of two ports")]
pub fn source_port(hash: u32, min: u16, max: u16) -> Option<u16> {
    if hash == 0 || min >= max {
        return None;
    }
    let mixed = hash ^ hash << 16;
    Some(((u64::from(mixed) * u64::from(max - min)) >> 32) as u16 + min)
}

/// The length of the outer IP packet; `None` if there can be no such packet.
#[inline(always)]
pub fn outer_len(inner_ip_len: u32, overhead: usize) -> Option<u16> {
    let len = inner_ip_len.checked_add(u32::try_from(overhead).ok()?)?;
    if len > MAX_IP_LEN {
        return None;
    }
    u16::try_from(len).ok()
}

/// What is of one packet.
#[derive(Clone, Copy, Debug)]
pub struct Each {
    /// The inner DS field.
    pub ds_field: u8,
    /// The length of the outer IP packet with its header; of a packet yet to be segmented, all
    /// of it.
    pub len: u16,
}

/// Writes what all headers over IPv4 of a flow have in common into zeros. The UDP checksum is zero
/// (RFC 7348 section 5). Returns the sum of the IP header as it is.
#[inline(always)]
#[must_use]
pub fn begin_v4(head: &mut HeadV4, outer: &Outer<'_>) -> u32 {
    head.put(0, outer.next_hop);
    head.put16(12, ETHERTYPE_IPV4);
    let ip = ETHERNET_LEN;
    head.put16(ip, 0x4500);
    // No DF: a router may fragment, as with flannel's device.
    head.put16(ip + 8, u16::from_be_bytes([outer.tunnel.hop_limit, UDP]));
    head.put(ip + 12, &last_words(&outer.tunnel.local.octets));
    head.put(ip + 16, &last_words(outer.remote));
    put_udp(head, ip + IPV4_LEN, outer, 0);
    head.sum(ip, IPV4_LEN)
}

/// Writes what is of one packet, over what is of another. `sum` is [`begin_v4`]'s.
#[inline(always)]
pub fn complete_v4(head: &mut HeadV4, sum: u32, each: Each, id: u16) {
    let ip = ETHERNET_LEN;
    let ecn = u16::from(ecn::encapsulate(each.ds_field));
    head.put16(ip, 0x4500 | ecn);
    head.put16(ip + 2, each.len);
    head.put16(ip + 4, id);
    head.put(ip + 10, &[!fold(sum + raw(ecn) + raw(each.len) + raw(id))]);
    head.put16(ip + IPV4_LEN + 4, each.len.wrapping_sub(20));
}

/// Writes the headers over IPv6 into zeros. `inner_sum` is [`inner_sum`] of the packet to be put inside: over IPv6 a
/// checksum of zero would be refused (RFC 7348 section 5, RFC 6936).
#[inline(always)]
pub fn head_v6(head: &mut HeadV6, outer: &Outer<'_>, each: Each, inner_sum: u32) {
    head.put(0, outer.next_hop);
    head.put16(12, ETHERTYPE_IPV6);
    let ip = ETHERNET_LEN;
    head.put16(ip, 0x6000 | u16::from(ecn::encapsulate(each.ds_field)) << 4);
    let udp_len = each.len.wrapping_sub(40);
    head.put16(ip + 4, udp_len);
    head.put16(ip + 6, u16::from_be_bytes([UDP, outer.tunnel.hop_limit]));
    head.put(ip + 8, &v6_words(&outer.tunnel.local.octets));
    head.put(ip + 24, &v6_words(outer.remote));
    let udp = ip + IPV6_LEN;
    put_udp(head, udp, outer, udp_len);
    // Addresses, length and protocol once more: the pseudo header (RFC 8200 section 8.1).
    let pseudo = head.sum(ip + 8, 32) + raw(udp_len) + raw(u16::from(UDP));
    let headers = head.sum(udp, UDP_LEN + VXLAN_LEN + ETHERNET_LEN);
    let checksum = !fold(pseudo + headers + inner_sum);
    // Zero would mean "none".
    head.put(udp + 6, &[if checksum == 0 { 0xffff } else { checksum }]);
}

#[inline(always)]
fn put_udp<const N: usize>(head: &mut Words<N>, udp: usize, outer: &Outer<'_>, udp_len: u16) {
    head.put16(udp, outer.source_port);
    head.put16(udp + 2, outer.config.port);
    head.put16(udp + 4, udp_len);
    let vxlan = udp + UDP_LEN;
    head.put16(vxlan, 0x0800);
    let [_, a, b, c] = outer.config.vni.to_be_bytes();
    head.put16(vxlan + 4, u16::from_be_bytes([a, b]));
    head.put16(vxlan + 6, u16::from_be_bytes([c, 0]));
    head.put(vxlan + VXLAN_LEN, outer.inner);
}

/// The sum of an inner IPv6 packet that somebody later completes (`CHECKSUM_PARTIAL`): its header
/// and, for the rest, the complement of its pseudo header, whatever the payload is. `None` if
/// the packet is not of that kind, so that its bytes would have to be summed.
#[inline(always)]
pub fn inner_sum<H: Header + ?Sized>(inner: &H) -> Option<u32> {
    let ip = ETHERNET_LEN;
    let next = inner.byte(ip + 6);
    let checksum = match next {
        TCP => inner.raw16(ip + IPV6_LEN + 16),
        UDP => inner.raw16(ip + IPV6_LEN + 6),
        _ => return None,
    };
    let pseudo = fold(pseudo_sum(inner, ip));
    // What is to be completed later begins with exactly this.
    if checksum != pseudo {
        return None;
    }
    Some(inner.sum(ip, IPV6_LEN) + u32::from(!pseudo))
}

/// Whether an outer UDP checksum over IPv6 is right, given that the inner transport checksum is
/// (which the receiver checks). `words` begin with the outer Ethernet header. `false` too if the
/// inner packet has no such checksum.
#[inline(always)]
pub fn outer_checksum_fits_v6<H: Header + ?Sized>(words: &H) -> bool {
    let inner_ip = ETHERNET_LEN + OVERHEAD_V6;
    if !matches!(words.byte(inner_ip + 6), TCP | UDP | ICMPV6) {
        return false;
    }
    let outer = pseudo_sum(words, ETHERNET_LEN);
    let headers = words.sum(ETHERNET_LEN + IPV6_LEN, UDP_LEN + VXLAN_LEN + ETHERNET_LEN);
    let inner = words.sum(inner_ip, IPV6_LEN) + u32::from(!fold(pseudo_sum(words, inner_ip)));
    fold(outer + headers + inner) == 0xffff
}

/// The same over IPv4.
#[inline(always)]
pub fn outer_checksum_fits_v4<H: Header + ?Sized>(words: &H) -> bool {
    let (ip, inner_ip) = (ETHERNET_LEN, ETHERNET_LEN + OVERHEAD_V4);
    let udp = ip + IPV4_LEN;
    if words.byte(inner_ip) != 0x45 || is_fragment(words.be16(inner_ip + 6)) {
        return false;
    }
    let next = words.byte(inner_ip + 9);
    let transport_len = words.be16(inner_ip + 2).wrapping_sub(20);
    let pseudo = words.sum(inner_ip + 12, 8) + raw(u16::from(next)) + raw(transport_len);
    let payload = match next {
        TCP => !fold(pseudo),
        UDP if words.raw16(inner_ip + IPV4_LEN + 6) != 0 => !fold(pseudo),
        // Its checksum has no pseudo header.
        ICMP => 0xffff,
        _ => return false,
    };
    let outer = words.sum(ip + 12, 8) + raw(u16::from(UDP)) + u32::from(words.raw16(udp + 4));
    let headers = words.sum(udp, UDP_LEN + VXLAN_LEN + ETHERNET_LEN);
    fold(outer + headers + words.sum(inner_ip, IPV4_LEN) + u32::from(payload)) == 0xffff
}

/// The pseudo header of what follows the IPv6 header at an offset.
#[inline(always)]
fn pseudo_sum<H: Header + ?Sized>(words: &H, ip: usize) -> u32 {
    let next = raw(u16::from(words.byte(ip + 6)));
    words.sum(ip + 8, 32) + u32::from(words.raw16(ip + 4)) + next
}

/// A number as it would lie in a packet.
#[inline(always)]
fn raw_word(value: u16) -> u16 {
    value.to_be()
}

#[inline(always)]
fn raw(value: u16) -> u32 {
    u32::from(raw_word(value))
}

/// The IPv4 address in a mapped one.
#[inline(always)]
fn last_words(octets: &[u8; 16]) -> [u16; 2] {
    let [.., a, b, c, d] = *octets;
    v4_words(&[a, b, c, d])
}

#[cfg(test)]
mod tests;
