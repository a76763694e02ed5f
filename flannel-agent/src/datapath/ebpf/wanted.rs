//! What the programs shall do, in the agent's terms.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use flannel_common::map::{self, Config, OuterAddress, switch};
use ipnet::IpNet;

use super::{flows::FlowsWanted, xdp::XdpWanted};
use crate::{lease::Subnets, mac::MacAddr};

/// What the programs shall do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FastPathWanted {
    /// The underlay's devices, by interface index.
    pub underlay: Vec<u32>,
    /// Whether packets are taken out in XDP already.
    pub xdp: XdpWanted,
    /// The devices that carry our pods.
    pub pod_devices: Vec<u32>,
    /// The tunnel's VNI, 24 bits.
    pub vni: u32,
    /// The tunnel's UDP port.
    pub port: u16,
    /// The peers, one entry per outer address.
    pub peers: Vec<PeerEntry>,
    /// Our end over IPv4.
    pub v4: Option<TunnelEnd>,
    /// Our end over IPv6.
    pub v6: Option<TunnelEnd>,
    /// The forwarding entries that the kernel's devices have.
    pub vteps: BTreeMap<VtepName, IpAddr>,
    /// Who is behind each peer's subnet.
    pub leases: Vec<LeaseEntry>,
    /// The lowest outer source port and the one after the highest; equal means none.
    pub source_ports: (u16, u16),
    /// Whether programs encapsulate and decapsulate; else they only filter and count.
    pub forward: bool,
    /// Who may send to us.
    pub filter: Filter,
    /// Whether other devices take other VNIs on the same port.
    pub other_vnis: bool,
    /// Flows that bypass the host's stack; `None`: none does.
    pub flows: Option<FlowsWanted>,
}

/// Who may send tunnel packets to us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Everybody, as with the kernel's device.
    #[default]
    Off,
    /// Known peers, unless a packet is clearly forged.
    Default,
    /// Known peers, and only from their own subnets.
    Strict,
}

/// A peer as the programs know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerEntry {
    /// The address that the peer sends from.
    pub outer: IpAddr,
    /// What is behind it.
    pub subnets: Subnets,
}

/// One of our tunnel devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelEnd {
    /// Its interface index.
    pub ifindex: u32,
    /// Its MAC.
    pub mac: MacAddr,
    /// Where its outer packets come from.
    pub local: IpAddr,
    /// The hop limit of its outer packets.
    pub hop_limit: u8,
    /// Our own subnet.
    pub subnet: IpNet,
}

/// By what a forwarding entry is found. IPv4 and IPv6 have a device each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VtepName {
    /// Whether it belongs to the device over IPv6.
    pub v6: bool,
    /// The inner destination MAC.
    pub mac: MacAddr,
}

/// A peer's subnet of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseEntry {
    /// The subnet.
    pub subnet: IpNet,
    /// Where the peer receives.
    pub outer: IpAddr,
    /// The MAC of the peer's device; `None` if the subnet is reached without the tunnel.
    pub vtep_mac: Option<MacAddr>,
    /// Whether the peer is behind a NAT, so that it may send from any address.
    pub behind_nat: bool,
}

impl FastPathWanted {
    /// The value of the map `CONFIG`.
    pub(super) fn config(&self, epoch: u32) -> Config {
        let tunnels = self.v4.is_some() || self.v6.is_some();
        let mut switches = 0;
        if self.forward && tunnels {
            switches |= switch::ENCAP | switch::DECAP;
        }
        // Without knowing what is ours, everything would look foreign.
        switches |= match self.filter {
            Filter::Default if tunnels => switch::FILTER,
            Filter::Strict if tunnels => switch::FILTER | switch::STRICT,
            _ => 0,
        };
        if self.leases.iter().any(|lease| lease.behind_nat) {
            switches |= switch::ANY_SOURCE;
        }
        if self.other_vnis {
            switches |= switch::OTHER_VNIS;
        }
        Config {
            vni: self.vni,
            switches,
            port: self.port,
            source_port_min: self.source_ports.0,
            source_port_max: self.source_ports.1,
            reserved: 0,
            epoch,
            v4: self.v4.as_ref().map_or_else(none, TunnelEnd::to_map),
            v6: self.v6.as_ref().map_or_else(none, TunnelEnd::to_map),
        }
    }

    /// The tunnel devices.
    pub(super) fn tunnels(&self) -> Vec<u32> {
        self.v4.iter().chain(&self.v6).map(|end| end.ifindex).collect()
    }
}

/// No device, and no address is inside no subnet.
fn none() -> map::Tunnel {
    map::Tunnel { prefix_len: map::NO_SUBNET, ..map::Tunnel::default() }
}

impl TunnelEnd {
    fn to_map(&self) -> map::Tunnel {
        let mut subnet = [0; 16];
        match self.subnet.network() {
            IpAddr::V4(v4) => subnet[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => subnet = v6.octets(),
        }
        map::Tunnel {
            ifindex: self.ifindex,
            mac: self.mac.0,
            hop_limit: self.hop_limit,
            prefix_len: self.subnet.prefix_len(),
            local: outer_address(self.local),
            subnet,
        }
    }
}

/// The map's form of an address.
pub(super) fn outer_address(address: IpAddr) -> OuterAddress {
    match address {
        IpAddr::V4(v4) => OuterAddress::from_v4(v4.octets()),
        IpAddr::V6(v6) => OuterAddress::from_v6(v6.octets()),
    }
}

/// An address of the map.
pub(super) fn address(outer: &OuterAddress) -> IpAddr {
    outer
        .v4()
        .map_or_else(|| IpAddr::V6(Ipv6Addr::from(outer.octets)), |v4| Ipv4Addr::from(v4).into())
}
