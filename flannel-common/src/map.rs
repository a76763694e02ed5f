//! The keys and values of the BPF maps.
//!
//! Every type here is laid out as C would, has no padding (bytemuck's derives refuse it) and
//! takes any bit pattern, so both sides may read what the other wrote. Addresses are bytes in
//! network order; numbers are in the host's order, so that `bpftool map dump` prints them right.

use core::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

/// The version of everything in this module and of the numbers of [`Outcome`]. Pinned maps of
/// another version are left alone, so it must change with any layout, size or meaning here.
///
/// [`Outcome`]: crate::outcome::Outcome
pub const SCHEMA_VERSION: u32 = 1;

/// How many outer addresses `PEERS` and `PEER_COUNTERS` have room for.
pub const MAX_PEERS: u32 = 16_384;

/// Stands for the prefix length of a subnet that a peer does not have.
pub const NO_SUBNET: u8 = 0xff;

/// The one entry of the map `CONFIG`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Config {
    /// The tunnel's VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// The tunnel's UDP port; 0 recognises nothing.
    pub port: u16,
    /// Keeps the size a multiple of four; zero.
    pub reserved: u16,
}

/// An outer address: IPv6, or IPv4 mapped into it (RFC 4291 section 2.5.5.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
pub struct OuterAddress {
    /// The address in network order.
    pub octets: [u8; 16],
}

impl OuterAddress {
    /// From an IPv4 address in network order.
    #[inline(always)]
    pub const fn from_v4(v4: [u8; 4]) -> Self {
        let [a, b, c, d] = v4;
        Self { octets: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] }
    }

    /// From an IPv6 address in network order.
    #[inline(always)]
    pub const fn from_v6(octets: [u8; 16]) -> Self {
        Self { octets }
    }

    /// The IPv4 address in network order, if it is one.
    #[inline(always)]
    pub const fn v4(&self) -> Option<[u8; 4]> {
        match self.octets {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => Some([a, b, c, d]),
            _ => None,
        }
    }
}

/// A value of the map `PEERS`, whose keys are [`OuterAddress`]es.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Peer {
    /// The peer's place in `PEER_COUNTERS`, below [`MAX_PEERS`].
    pub index: u32,
    /// The peer's IPv4 subnet in network order, host bits zero.
    pub subnet_v4: [u8; 4],
    /// The peer's IPv6 subnet in network order, host bits zero.
    pub subnet_v6: [u8; 16],
    /// The length of `subnet_v4`, or [`NO_SUBNET`].
    pub prefix_len_v4: u8,
    /// The length of `subnet_v6`, or [`NO_SUBNET`].
    pub prefix_len_v6: u8,
    /// Keeps the size a multiple of four; zero.
    pub reserved: u16,
}

/// A value of the per-CPU maps `PEER_COUNTERS` and `OUTCOMES`. Both numbers wrap.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Counters {
    /// Packets; one that was merged from several counts as these.
    pub packets: u64,
    /// Their bytes, with the outer Ethernet header. Of merged packets the headers count once.
    pub bytes: u64,
}

impl Counters {
    /// Adds another CPU's share.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets.wrapping_add(other.packets),
            bytes: self.bytes.wrapping_add(other.bytes),
        }
    }
}

const _: () = {
    assert!(size_of::<Config>() == 8);
    assert!(offset_of!(Config, port) == 4);
    assert!(size_of::<OuterAddress>() == 16);
    assert!(size_of::<Peer>() == 28);
    assert!(offset_of!(Peer, subnet_v4) == 4);
    assert!(offset_of!(Peer, subnet_v6) == 8);
    assert!(offset_of!(Peer, prefix_len_v4) == 24);
    assert!(offset_of!(Peer, prefix_len_v6) == 25);
    assert!(size_of::<Counters>() == 16);
    assert!(offset_of!(Counters, bytes) == 8);
};

#[cfg(feature = "user")]
mod user {
    use super::{Config, Counters, OuterAddress, Peer};

    // SAFETY: the derives of bytemuck's `Pod` checked it: no padding, any bit pattern is valid.
    unsafe impl aya::Pod for Config {}
    // SAFETY: as above.
    unsafe impl aya::Pod for OuterAddress {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Peer {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Counters {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_ipv4_address_comes_back(v4: [u8; 4]) {
            prop_assert_eq!(OuterAddress::from_v4(v4).v4(), Some(v4));
        }

        #[test]
        fn only_mapped_addresses_are_ipv4(octets: [u8; 16]) {
            let mapped = core::net::Ipv6Addr::from(octets).to_ipv4_mapped().map(|v4| v4.octets());
            prop_assert_eq!(OuterAddress::from_v6(octets).v4(), mapped);
        }
    }

    #[test]
    fn counters_wrap() {
        let full = Counters { packets: u64::MAX, bytes: 1 };
        assert_eq!(full.plus(Counters { packets: 2, bytes: 3 }), Counters { packets: 1, bytes: 4 });
    }
}
