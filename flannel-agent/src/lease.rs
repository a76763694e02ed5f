//! Leases: a node's subnets and the attributes it publishes with them.
//!
//! The JSON form is a wire contract with real flannel (specification §4.1): it
//! is stored in etcd, in the local directory, and piecewise in node annotations.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::{Ipv4Net, Ipv6Net};

/// The subnets one node holds, one per address family at most.
///
/// This is the identity of a lease: everything the agent keeps about a peer is
/// keyed by it, so a peer that changes its address or MAC leaves nothing behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subnets {
    /// IPv4 subnet, host bits zero.
    pub v4: Option<Ipv4Net>,
    /// IPv6 subnet, host bits zero.
    pub v6: Option<Ipv6Net>,
}

impl fmt::Display for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.v4, self.v6) {
            (Some(v4), Some(v6)) => write!(f, "{v4} and {v6}"),
            (Some(v4), None) => v4.fmt(f),
            (None, Some(v6)) => v6.fmt(f),
            (None, None) => f.write_str("no subnet"),
        }
    }
}

/// JSON text kept as it came, in compact form: backend data is opaque to
/// everything but the backend that wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawJson(Box<str>);

impl RawJson {
    /// Wraps text that is known to be valid compact JSON.
    pub fn from_compact(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a node publishes about itself with its lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseAttributes {
    /// Outer IPv4 address peers send to; `None` is written as `0.0.0.0`.
    pub public_ip: Option<Ipv4Addr>,
    /// Outer IPv6 address peers send to.
    pub public_ipv6: Option<Ipv6Addr>,
    /// `vxlan`, `host-gw`, …; empty for `udp` and `alloc`.
    pub backend_type: String,
    /// The backend's IPv4 data, for vxlan `{"VNI":1,"VtepMAC":"…"}`.
    pub backend_data: Option<RawJson>,
    /// The backend's IPv6 data.
    pub backend_v6_data: Option<RawJson>,
}

/// A subnet and the attributes of the node that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// What is leased.
    pub subnets: Subnets,
    /// Who holds it and how to reach it.
    pub attributes: LeaseAttributes,
}
