//! The network configuration (`<prefix>/config`, `net-conf.json`): specification §3.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::lease::RawJson;

/// A checked network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// IPv4 settings, if IPv4 is enabled.
    pub ipv4: Option<Ipv4Settings>,
    /// IPv6 settings, if IPv6 is enabled.
    pub ipv6: Option<Ipv6Settings>,
    /// `EnableNFTables`.
    pub enable_nftables: bool,
    /// Lower-cased `Backend.Type`; `udp` if there is no `Backend` at all.
    pub backend_type: String,
    /// Whether `Backend` (or its `Type`) was missing: worth one warning.
    pub backend_type_missing: bool,
    /// The `Backend` object as it stands, for the backend's own parser.
    pub backend: RawJson,
    /// Keys nobody knows, as paths (`Comment`, `Backend.Future`): worth one warning.
    pub unknown_keys: Vec<String>,
}

/// Which IPv4 subnets may be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Settings {
    /// The cluster's network, host bits zero.
    pub network: Ipv4Net,
    /// Prefix length of one node's subnet.
    pub subnet_len: u8,
    /// First subnet that may be leased.
    pub subnet_min: Ipv4Addr,
    /// Last subnet that may be leased.
    pub subnet_max: Ipv4Addr,
}

/// Which IPv6 subnets may be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Settings {
    /// The cluster's network, host bits zero.
    pub network: Ipv6Net,
    /// Prefix length of one node's subnet.
    pub subnet_len: u8,
    /// First subnet that may be leased.
    pub subnet_min: Ipv6Addr,
    /// Last subnet that may be leased.
    pub subnet_max: Ipv6Addr,
}
