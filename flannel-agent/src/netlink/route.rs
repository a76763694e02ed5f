//! Routes of the main table.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{
        RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
        RouteProtocol, RouteScope, RouteType,
    },
};

use super::socket::{Request, Requests};

/// The protocol number on routes we make, so that `ip route show proto 102` lists them and a
/// later run knows them from a user's. Free in `/etc/iproute2/rt_protos`.
pub const OUR_PROTOCOL: u8 = 102;

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Via {
    /// Through a gateway on a link. `onlink`: the gateway counts as reachable whatever the
    /// addresses on the link say.
    Gateway {
        /// Index of the outgoing link.
        link: u32,
        /// The gateway.
        gateway: IpAddr,
        /// `RTNH_F_ONLINK`.
        onlink: bool,
    },
    /// Straight onto a link.
    Link(u32),
    /// Nowhere: packets are dropped silently.
    Blackhole,
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gateway { gateway, .. } => write!(f, "via {gateway}"),
            Self::Link(link) => write!(f, "on the link with index {link}"),
            Self::Blackhole => f.write_str("to a black hole"),
        }
    }
}

/// A route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// Destination, host bits zero.
    pub destination: IpNet,
    /// Where it leads.
    pub via: Via,
    /// Metric, 0 for IPv4's default.
    pub metric: u32,
    /// Who made it (`RTPROT_*`).
    pub protocol: u8,
}

impl Route {
    /// Reads a message; `None` for what is not a plain route of the main table.
    pub(super) fn from_message(message: &RouteMessage) -> Option<Self> {
        let header = &message.header;
        let mut table = u32::from(header.table);
        let (mut destination, mut gateway, mut link, mut metric) = (None, None, None, 0);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(number) => table = *number,
                RouteAttribute::Destination(address) => destination = ip(address),
                RouteAttribute::Gateway(address) => gateway = ip(address),
                RouteAttribute::Oif(index) => link = Some(*index),
                RouteAttribute::Priority(value) => metric = *value,
                RouteAttribute::MultiPath(_) => return None,
                _ => {}
            }
        }
        if table != u32::from(RouteHeader::RT_TABLE_MAIN) {
            return None;
        }
        let unspecified = match header.address_family {
            AddressFamily::Inet => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            AddressFamily::Inet6 => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            _ => return None,
        };
        let destination = destination.unwrap_or(unspecified);
        let via = match (header.kind, link, gateway) {
            (RouteType::BlackHole, ..) => Via::Blackhole,
            (RouteType::Unicast, Some(link), Some(gateway)) => {
                Via::Gateway { link, gateway, onlink: header.flags.contains(RouteFlags::Onlink) }
            }
            (RouteType::Unicast, Some(link), None) => Via::Link(link),
            _ => return None,
        };
        Some(Self {
            destination: IpNet::new(destination, header.destination_prefix_length).ok()?,
            via,
            metric,
            protocol: header.protocol.into(),
        })
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = family(self.destination.addr());
        message.header.destination_prefix_length = self.destination.prefix_len();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::from(self.protocol);
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message.attributes.push(RouteAttribute::Destination(self.destination.addr().into()));
        match self.via {
            Via::Gateway { link, gateway, onlink } => {
                if onlink {
                    message.header.flags = RouteFlags::Onlink;
                }
                message.attributes.push(RouteAttribute::Gateway(gateway.into()));
                message.attributes.push(RouteAttribute::Oif(link));
            }
            Via::Link(link) => {
                message.header.scope = RouteScope::Link;
                message.attributes.push(RouteAttribute::Oif(link));
            }
            Via::Blackhole => message.header.kind = RouteType::BlackHole,
        }
        if self.metric != 0 {
            message.attributes.push(RouteAttribute::Priority(self.metric));
        }
        message
    }

    /// Adds the route, or replaces the one to the same destination with the same metric.
    pub fn replace(&self) -> Request {
        Request {
            message: RouteNetlinkMessage::NewRoute(self.message()),
            flags: NLM_F_CREATE | NLM_F_REPLACE,
        }
    }

    /// Removes exactly this route.
    pub fn delete(&self) -> Request {
        let mut message = self.message();
        // The kernel compares the scope of IPv4 routes unless it is "nowhere".
        message.header.scope = RouteScope::NoWhere;
        Request { message: RouteNetlinkMessage::DelRoute(message), flags: 0 }
    }
}

/// An MTU that somebody gave to an IPv4 route, for packets that this host sends. A locked one holds
/// for those that it forwards, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMtu {
    /// Index of the outgoing link; `None` if there are several.
    pub link: Option<u32>,
    /// In bytes.
    pub mtu: u32,
}

impl OwnMtu {
    /// The destination of an IPv4 route of any table, and its MTU if it has one of its own that is
    /// not locked.
    pub(super) fn from_message(message: &RouteMessage) -> Option<(IpNet, Option<Self>)> {
        /// `RTAX_MTU` (`linux/rtnetlink.h`), as a bit of `RTAX_LOCK`.
        const LOCKED: u32 = 1 << 2;
        if message.header.address_family != AddressFamily::Inet {
            return None;
        }
        let (mut destination, mut link) = (IpAddr::from(Ipv4Addr::UNSPECIFIED), None);
        let (mut mtu, mut locked) = (None, 0);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Destination(address) => destination = ip(address)?,
                RouteAttribute::Oif(index) => link = Some(*index),
                RouteAttribute::Metrics(metrics) => {
                    for metric in metrics {
                        match metric {
                            RouteMetric::Mtu(value) => mtu = Some(*value),
                            RouteMetric::Lock(bits) => locked = *bits,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        let destination = IpNet::new(destination, message.header.destination_prefix_length).ok()?;
        let mtu = mtu.filter(|_| locked & LOCKED == 0);
        Some((destination, mtu.map(|mtu| Self { link, mtu })))
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}

fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

pub(super) fn dump_request(family: AddressFamily) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    RouteNetlinkMessage::GetRoute(message)
}

/// The link on which the kernel reaches an address without a gateway; `None` if it goes through
/// one, or nowhere.
pub fn on_link(requests: &mut Requests, target: IpAddr) -> io::Result<Option<u32>> {
    let mut message = RouteMessage::default();
    message.header.address_family = family(target);
    message.header.destination_prefix_length = if target.is_ipv4() { 32 } else { 128 };
    message.attributes.push(RouteAttribute::Destination(target.into()));
    let answer = match requests.get(RouteNetlinkMessage::GetRoute(message)) {
        Ok(RouteNetlinkMessage::NewRoute(answer)) => answer,
        Ok(_) => return Ok(None),
        Err(err) if matches!(err.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH)) => {
            return Ok(None);
        }
        Err(err) => return Err(err),
    };
    let (mut link, mut gateway) = (None, false);
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => gateway = true,
            _ => {}
        }
    }
    let unicast = answer.header.kind == RouteType::Unicast;
    Ok(link.filter(|_| unicast && !gateway))
}
