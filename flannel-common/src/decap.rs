//! What comes out of the tunnel: whether the sender may send it, and whether it is plain enough
//! to be taken out by a program.

use crate::{
    ecn::{self, Decapsulate},
    encap::{OVERHEAD_V4, OVERHEAD_V6, outer_checksum_fits_v4, outer_checksum_fits_v6},
    map::{Config, Lease, Mac, OuterAddress, Peer, Tunnel, switch},
    outcome::Outcome,
    wire::{
        ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, IPV4_LEN, IPV6_LEN, TCP, UDP,
        UDP_LEN, VXLAN_LEN, fold, is_fragment, mac_bytes, v4_bytes, v6_bytes,
    },
};

/// The shortest plain packet over IPv4: a bare IP header inside.
pub const MIN_LEN_V4: usize = ETHERNET_LEN + OVERHEAD_V4 + IPV4_LEN;
/// The same over IPv6.
pub const MIN_LEN_V6: usize = ETHERNET_LEN + OVERHEAD_V6 + IPV6_LEN;

/// Where the inner IP header is.
const INNER_V4: usize = ETHERNET_LEN + OVERHEAD_V4;
const INNER_V6: usize = ETHERNET_LEN + OVERHEAD_V6;

/// TCP's flag that says that this ends what was written in one go.
const PSH: u16 = 0x08;
/// TCP flags of packets that the kernel never merges.
const SYN_FIN_RST: u16 = 0x07;

/// Who is behind an address, as the maps know it.
pub trait Leases {
    /// The peer that sends from an outer address.
    fn peer(&self, outer: &OuterAddress) -> Option<&Peer>;
    /// The lease that an inner IPv4 address belongs to.
    fn lease_v4(&self, inner: &[u8; 4]) -> Option<&Lease>;
    /// The lease that an inner IPv6 address belongs to.
    fn lease_v6(&self, inner: &[u8; 16]) -> Option<&Lease>;
}

/// The inner addresses, in network order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Of an IPv4 packet.
    V4 {
        /// Who sent it.
        source: [u8; 4],
        /// Who shall have it.
        destination: [u8; 4],
    },
    /// Of an IPv6 packet.
    V6 {
        /// Who sent it.
        source: [u8; 16],
        /// Who shall have it.
        destination: [u8; 16],
    },
    /// Of something else, or of the other family's packet.
    Other,
}

/// Stands for the index of a sender who is no peer. (An `Option` would have BPF move a number
/// around that is not there, which the verifier refuses.)
pub const NO_PEER: u32 = u32::MAX;

/// Judges a packet by its outer sender, its inner frame's destination and its inner addresses.
/// Returns the peer's index, or [`NO_PEER`].
///
/// # Errors
/// What it is refused for.
#[inline(always)]
pub fn filter<L: Leases>(
    leases: &L,
    config: &Config,
    outer: &OuterAddress,
    frame_to: Mac,
    addresses: &Addresses,
) -> Result<u32, Outcome> {
    let peer = leases.peer(outer);
    let index = peer.map_or(NO_PEER, |peer| peer.index);
    if config.switches & switch::FILTER == 0 {
        return Ok(index);
    }
    let strict = config.switches & switch::STRICT != 0;
    if peer.is_none() && (strict || config.switches & switch::ANY_SOURCE == 0) {
        return Err(Outcome::DropUnknownSource);
    }
    if frame_to[0] & 1 != 0 {
        return Err(Outcome::DropBroadcast);
    }
    // Whether the destination is ours, the source ours or the sender's; else the source's lease.
    let (to_us, from_us, from_sender) = match addresses {
        Addresses::V4 { source, destination } => (
            in_own_v4(&config.v4, *destination),
            in_own_v4(&config.v4, *source),
            peer.is_some_and(|peer| in_v4(peer.subnet_v4, peer.prefix_len_v4, *source)),
        ),
        Addresses::V6 { source, destination } => (
            in_v6(&config.v6.subnet, config.v6.prefix_len, destination),
            in_v6(&config.v6.subnet, config.v6.prefix_len, source),
            peer.is_some_and(|peer| in_v6(&peer.subnet_v6, peer.prefix_len_v6, source)),
        ),
        Addresses::Other => return Err(Outcome::DropNotIp),
    };
    if !to_us {
        return Err(Outcome::DropDestination);
    }
    if from_us {
        return Err(Outcome::DropOwnSource);
    }
    if from_sender {
        return Ok(index);
    }
    let lease = match addresses {
        Addresses::V4 { source, .. } => leases.lease_v4(source),
        Addresses::V6 { source, .. } => leases.lease_v6(source),
        Addresses::Other => None,
    };
    match lease {
        // Several nodes may send from one address.
        Some(lease) if lease.outer == *outer => Ok(index),
        // Who is behind a NAT is known by nothing but the subnet.
        Some(lease) if lease.any_source == 1 && !strict => Ok(index),
        _ if peer.is_none() => Err(Outcome::DropUnknownSource),
        Some(_) => Err(Outcome::DropOtherSource),
        None if strict => Err(Outcome::DropForeignSource),
        // A node's own address, or an outside client's.
        None => Ok(index),
    }
}

/// A plain tunnel packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// The outer source.
    pub source: OuterAddress,
    /// Where the inner frame goes.
    pub frame_to: Mac,
    /// Whence the inner frame comes.
    pub frame_from: Mac,
    /// The inner addresses.
    pub addresses: Addresses,
    /// The outer DS field.
    pub outer_ds_field: u8,
    /// The inner DS field.
    pub inner_ds_field: u8,
    /// Whether the outer checksum says nothing, or is right if the inner one is.
    pub checksum_fits: bool,
    /// Whether the kernel may merge this with its neighbours.
    pub mergeable: bool,
}

/// Reads a packet over IPv4 of `len` bytes, of which at least [`MIN_LEN_V4`] are there. `None` if anything about
/// the outer headers is unusual; nothing is known of it then, not even whether it is ours. The
/// checksum is yet to be looked at: [`checksum_fits_v4`].
#[inline(always)]
pub fn plain_v4<H: Header + ?Sized>(words: &H, len: u32, config: &Config) -> Option<Plain> {
    let ip = ETHERNET_LEN;
    let udp = ip + IPV4_LEN;
    let total_len = u32::from(words.be16(ip + 2));
    if words.byte(ip) != 0x45
        || is_fragment(words.be16(ip + 6))
        || total_len + 14 != len
        || u32::from(words.be16(udp + 4)) + 20 != total_len
        || fold(words.sum(ip, IPV4_LEN)) != 0xffff
        || !plain_vxlan(words, udp + UDP_LEN, config)
    {
        return None;
    }
    let frame = udp + UDP_LEN + VXLAN_LEN;
    let is_ip = words.be16(frame + 12) == ETHERTYPE_IPV4 && words.byte(INNER_V4) >> 4 == 4;
    let addresses = if is_ip {
        Addresses::V4 {
            source: v4_bytes(&words.words(INNER_V4 + 12)),
            destination: v4_bytes(&words.words(INNER_V4 + 16)),
        }
    } else {
        Addresses::Other
    };
    // With options, TCP is further on: what may be, is.
    let tcp = words.byte(INNER_V4 + 9) == TCP && !is_fragment(words.be16(INNER_V4 + 6));
    let inner_len = words.be16(INNER_V4 + 2);
    Some(Plain {
        source: OuterAddress::from_v4_words(words.words(ip + 12)),
        frame_to: mac_bytes(&words.words(frame)),
        frame_from: mac_bytes(&words.words(frame + 6)),
        addresses,
        outer_ds_field: words.byte(ip + 1),
        inner_ds_field: words.byte(INNER_V4 + 1),
        checksum_fits: false,
        mergeable: tcp
            && (words.byte(INNER_V4) != 0x45
                || mid_burst(words, INNER_V4 + IPV4_LEN, inner_len.wrapping_sub(20))),
    })
}

/// The same over IPv6.
#[inline(always)]
pub fn plain_v6<H: Header + ?Sized>(words: &H, len: u32, config: &Config) -> Option<Plain> {
    let ip = ETHERNET_LEN;
    let udp = ip + IPV6_LEN;
    let payload_len = words.be16(ip + 4);
    if words.byte(ip) >> 4 != 6
        || words.byte(ip + 6) != UDP
        || u32::from(payload_len) + 54 != len
        || words.be16(udp + 4) != payload_len
        || !plain_vxlan(words, udp + UDP_LEN, config)
    {
        return None;
    }
    let frame = udp + UDP_LEN + VXLAN_LEN;
    let is_ip = words.be16(frame + 12) == ETHERTYPE_IPV6 && words.byte(INNER_V6) >> 4 == 6;
    let addresses = if is_ip {
        Addresses::V6 {
            source: v6_bytes(&words.words(INNER_V6 + 8)),
            destination: v6_bytes(&words.words(INNER_V6 + 24)),
        }
    } else {
        Addresses::Other
    };
    let tcp = words.byte(INNER_V6 + 6) == TCP;
    let ds_field = |at: usize| {
        let [_, low] = (words.be16(at) >> 4).to_be_bytes();
        low
    };
    Some(Plain {
        source: OuterAddress::from_v6(v6_bytes(&words.words(ip + 8))),
        frame_to: mac_bytes(&words.words(frame)),
        frame_from: mac_bytes(&words.words(frame + 6)),
        addresses,
        outer_ds_field: ds_field(ip),
        inner_ds_field: ds_field(INNER_V6),
        checksum_fits: false,
        mergeable: tcp && mid_burst(words, INNER_V6 + IPV6_LEN, words.be16(INNER_V6 + 4)),
    })
}

/// Whether the outer checksum says nothing, or is right if the inner one is.
#[inline(always)]
pub fn checksum_fits_v4<H: Header + ?Sized>(words: &H) -> bool {
    words.raw16(ETHERNET_LEN + IPV4_LEN + 6) == 0 || outer_checksum_fits_v4(words)
}

/// Whether the outer checksum, which has to be there over IPv6, is right if the inner one is.
#[inline(always)]
pub fn checksum_fits_v6<H: Header + ?Sized>(words: &H) -> bool {
    words.raw16(ETHERNET_LEN + IPV6_LEN + 6) != 0 && outer_checksum_fits_v6(words)
}

impl Plain {
    /// Whether a program may take the packet out, and what then becomes of its ECN bits.
    ///
    /// # Errors
    /// Why the kernel's device has to do it, or that nobody may.
    #[inline(always)]
    pub fn decapsulate(
        &self,
        tunnel: &Tunnel,
        drop_congested: bool,
    ) -> Result<Decapsulate, Outcome> {
        if self.addresses == Addresses::Other {
            return Err(Outcome::Unusual);
        }
        if self.frame_to != tunnel.mac || self.frame_from == tunnel.mac {
            return Err(Outcome::InnerMac);
        }
        if !self.checksum_fits {
            return Err(Outcome::VerifyChecksum);
        }
        match ecn::decapsulate(self.outer_ds_field, self.inner_ds_field) {
            Decapsulate::Drop if drop_congested => Err(Outcome::DropCongested),
            // No helper sets ECT(1).
            Decapsulate::SetEct1 | Decapsulate::Drop => Err(Outcome::Unusual),
            ecn => Ok(ecn),
        }
    }
}

/// The I flag alone, our VNI, and zero wherever something is reserved.
#[inline(always)]
fn plain_vxlan<H: Header + ?Sized>(words: &H, vxlan: usize, config: &Config) -> bool {
    words.be32(vxlan) == 0x0800_0000 && words.be32(vxlan + 4) == config.vni << 8
}

/// Whether a TCP segment carries data that goes on in the next: the kernel would hold and merge it.
#[inline(always)]
fn mid_burst<H: Header + ?Sized>(words: &H, tcp: usize, len: u16) -> bool {
    let offset_flags = words.be16(tcp + 12);
    let header_len = offset_flags >> 12 << 2;
    len > header_len && offset_flags & (PSH | SYN_FIN_RST) == 0
}

/// Whether an address is in our own IPv4 subnet.
#[inline(always)]
pub fn in_own_v4(tunnel: &Tunnel, address: [u8; 4]) -> bool {
    let [a, b, c, d, ..] = tunnel.subnet;
    in_v4([a, b, c, d], tunnel.prefix_len, address)
}

/// Whether an address is in a subnet.
#[inline(always)]
pub fn in_v4(subnet: [u8; 4], prefix_len: u8, address: [u8; 4]) -> bool {
    let differ = u32::from_be_bytes(subnet) ^ u32::from_be_bytes(address);
    prefix_len <= 32 && u64::from(differ) >> (32 - u32::from(prefix_len)) == 0
}

/// Whether an address is in a subnet.
#[inline(always)]
pub fn in_v6(subnet: &[u8; 16], prefix_len: u8, address: &[u8; 16]) -> bool {
    // No subnet included.
    if prefix_len > 128 {
        return false;
    }
    let [subnet, address]: [[u64; 2]; 2] = [bytemuck::cast(*subnet), bytemuck::cast(*address)];
    let [high, low] = prefix_masks(prefix_len);
    let differ = [0, 1].map(|half| u64::from_be(subnet[half] ^ address[half]));
    differ[0] & high | differ[1] & low == 0
}

/// The halves of a mask with so many leading ones, up to 128. Without a branch, as BPF's verifier
/// goes both ways of every one.
#[inline(always)]
const fn prefix_masks(len: u8) -> [u64; 2] {
    let halves = (len >> 6) as u64;
    let first_whole = 0_u64.wrapping_sub((halves | halves >> 1) & 1);
    let both_whole = 0_u64.wrapping_sub(halves >> 1);
    let part = !(u64::MAX >> (len & 63));
    [part | first_whole, part & first_whole | both_whole]
}

#[cfg(test)]
mod tests;
