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
pub const SCHEMA_VERSION: u32 = 3;

/// How many outer addresses `PEERS` and `PEER_COUNTERS` have room for.
pub const MAX_PEERS: u32 = 16_384;

/// Stands for the prefix length of a subnet that a peer does not have.
pub const NO_SUBNET: u8 = 0xff;

/// How many VTEPs and subnets there is room for: two families for each peer.
pub const MAX_VTEPS: u32 = 2 * MAX_PEERS;

/// What the programs may do: bits of [`Config::switches`].
pub mod switch {
    /// Encapsulate at the tunnel device's egress.
    pub const ENCAP: u32 = 1;
    /// Decapsulate at the underlay's ingress.
    pub const DECAP: u32 = 1 << 1;
    /// Drop malformed and clearly forged tunnel packets.
    pub const FILTER: u32 = 1 << 2;
    /// With `FILTER`: outer and inner source have to match one lease.
    pub const STRICT: u32 = 1 << 3;
    /// Some peer sends from an address that no lease tells (it is behind a NAT).
    pub const ANY_SOURCE: u32 = 1 << 4;
    /// Another device takes tunnel packets of other VNIs on the same port.
    pub const OTHER_VNIS: u32 = 1 << 5;
}

/// The one entry of the map `CONFIG`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Config {
    /// The tunnel's VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// Bits of [`switch`].
    pub switches: u32,
    /// The tunnel's UDP port; 0 recognises nothing.
    pub port: u16,
    /// The lowest outer source port, and the one after the highest, as the kernel's
    /// `net.ipv4.ip_local_port_range` has them.
    pub source_port_min: u16,
    /// See `source_port_min`.
    pub source_port_max: u16,
    /// Keeps the size a multiple of four; zero.
    pub reserved: u16,
    /// A new number makes everything that was learnt about flows worthless.
    pub epoch: u32,
    /// The tunnel over IPv4.
    pub v4: Tunnel,
    /// The tunnel over IPv6.
    pub v6: Tunnel,
}

/// Our end of the tunnel of one family.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Tunnel {
    /// The interface index of the kernel's VXLAN device; 0 if there is none.
    pub ifindex: u32,
    /// The device's MAC.
    pub mac: Mac,
    /// The hop limit of outer packets.
    pub hop_limit: u8,
    /// The length of `subnet`.
    pub prefix_len: u8,
    /// Where outer packets come from.
    pub local: OuterAddress,
    /// Our own subnet in network order, host bits zero; IPv4 in the first four bytes.
    pub subnet: [u8; 16],
}

/// A MAC address.
pub type Mac = [u8; 6];

/// A key of the map `VTEPS`. The devices of both families have tables of their own.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
pub struct VtepKey {
    /// The inner destination MAC.
    pub mac: Mac,
    /// [`VtepKey::V4`] or [`VtepKey::V6`]: the family of the tunnel.
    pub tunnel: u16,
}

impl VtepKey {
    /// The tunnel over IPv4.
    pub const V4: u16 = 4;
    /// The tunnel over IPv6.
    pub const V6: u16 = 6;
}

/// A value of the map `VTEPS`: mirrors one forwarding entry of the kernel's device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Vtep {
    /// Where the outer packets go.
    pub remote: OuterAddress,
    /// When a packet last went by the kernel's device, in jiffies; the programs write it, the
    /// agent starts it with 0. Without the kernel's own packets a neighbour grows stale, and a
    /// router's new MAC is noticed late.
    pub kernel_jiffies: u64,
}

/// A value of the maps `SUBNETS4` and `SUBNETS6`: who is behind an inner address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Lease {
    /// Where the peer receives outer packets.
    pub outer: OuterAddress,
    /// The peer's place in `PEER_COUNTERS`.
    pub index: u32,
    /// The MAC of the peer's tunnel device of this family.
    pub vtep_mac: Mac,
    /// 1 if the subnet is reached by the tunnel, 0 if directly.
    pub tunnelled: u8,
    /// 1 if the peer is behind a NAT: what it sends may come from any outer address.
    pub any_source: u8,
}

/// An outer address: IPv6, or IPv4 mapped into it (RFC 4291 section 2.5.5.2). The alignment has BPF
/// move and compare it by words instead of bytes.
#[repr(C, align(4))]
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

    /// The same by words as they lie in a packet, of which BPF makes it in four steps, not sixteen.
    #[inline(always)]
    pub fn from_v4_words(v4: [u16; 2]) -> Self {
        let [mapped, v4] = [[0, u16::MAX], v4].map(bytemuck::cast::<[u16; 2], u32>);
        Self { octets: bytemuck::cast([0, 0, mapped, v4]) }
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

/// The one entry of the map `XDP_FRONT`: where packets are taken out of the tunnel in XDP, and how
/// the program at TC knows them for it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct XdpFront {
    /// Stands in the metadata of each packet taken out, which no packet has on the wire. A random
    /// number, so that no other program's metadata looks like it.
    pub cookie: Cookie,
    /// The underlay device with the program; 0 if there is none.
    pub ifindex: u32,
    /// That device's MAC: what goes to others is left alone.
    pub mac: Mac,
    /// Keeps the size a multiple of four; zero.
    pub reserved: u16,
}

/// A packet's metadata, as it lies in memory.
pub type Cookie = [u16; 4];

/// A value of the per-CPU maps `PEER_COUNTERS`, `OUTCOMES` and `XDP_OUTCOMES`. Both numbers wrap.
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
    assert!(size_of::<Tunnel>() == 44);
    assert!(offset_of!(Tunnel, mac) == 4);
    assert!(offset_of!(Tunnel, hop_limit) == 10);
    assert!(offset_of!(Tunnel, local) == 12);
    assert!(offset_of!(Tunnel, subnet) == 28);
    assert!(size_of::<Config>() == 108);
    assert!(offset_of!(Config, port) == 8);
    assert!(offset_of!(Config, epoch) == 16);
    assert!(offset_of!(Config, v4) == 20);
    assert!(offset_of!(Config, v6) == 64);
    assert!(size_of::<VtepKey>() == 8);
    assert!(size_of::<Vtep>() == 24);
    assert!(offset_of!(Vtep, kernel_jiffies) == 16);
    assert!(size_of::<Lease>() == 28);
    assert!(offset_of!(Lease, index) == 16);
    assert!(offset_of!(Lease, vtep_mac) == 20);
    assert!(offset_of!(Lease, any_source) == 27);
    assert!(size_of::<OuterAddress>() == 16);
    assert!(size_of::<Peer>() == 28);
    assert!(offset_of!(Peer, subnet_v4) == 4);
    assert!(offset_of!(Peer, subnet_v6) == 8);
    assert!(offset_of!(Peer, prefix_len_v4) == 24);
    assert!(offset_of!(Peer, prefix_len_v6) == 25);
    assert!(size_of::<XdpFront>() == 20);
    assert!(offset_of!(XdpFront, ifindex) == 8);
    assert!(offset_of!(XdpFront, mac) == 12);
    assert!(size_of::<Counters>() == 16);
    assert!(offset_of!(Counters, bytes) == 8);
};

#[cfg(feature = "user")]
mod user {
    use super::{Config, Counters, Lease, OuterAddress, Peer, Vtep, VtepKey, XdpFront};

    // SAFETY: the derives of bytemuck's `Pod` checked it: no padding, any bit pattern is valid.
    unsafe impl aya::Pod for Config {}
    // SAFETY: as above.
    unsafe impl aya::Pod for OuterAddress {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Peer {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Counters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for VtepKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Vtep {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Lease {}
    // SAFETY: as above.
    unsafe impl aya::Pod for XdpFront {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_ipv4_address_comes_back(v4: [u8; 4]) {
            prop_assert_eq!(OuterAddress::from_v4(v4).v4(), Some(v4));
            let words = bytemuck::cast(v4);
            prop_assert_eq!(OuterAddress::from_v4_words(words), OuterAddress::from_v4(v4));
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
