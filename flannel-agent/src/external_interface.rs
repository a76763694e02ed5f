//! Which interface and addresses carry the tunnel: specification §2.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The external interface and the addresses chosen on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalInterface {
    /// Interface name.
    pub name: String,
    /// Interface index.
    pub index: u32,
    /// Interface MTU in bytes, never 0.
    pub mtu: u32,
    /// Address on the interface (`IfaceAddr`).
    pub addr: Option<Ipv4Addr>,
    /// IPv6 address on the interface (`IfaceV6Addr`).
    pub addr_v6: Option<Ipv6Addr>,
    /// Advertised IPv4 address (`ExtAddr`).
    pub public_ip: Option<Ipv4Addr>,
    /// Advertised IPv6 address (`ExtV6Addr`).
    pub public_ipv6: Option<Ipv6Addr>,
}
