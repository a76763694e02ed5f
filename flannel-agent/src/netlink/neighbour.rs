//! Neighbours (ARP, NDP) and forwarding entries (FDB) of VXLAN devices.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
    },
};

use super::socket::Request;
use crate::mac::MacAddr;

/// A permanent neighbour entry: which MAC an address on a link has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// Index of the link.
    pub link: u32,
    /// The neighbour's address.
    pub ip: IpAddr,
    /// Its MAC.
    pub mac: MacAddr,
}

/// A forwarding entry of a VXLAN device: which remote a MAC is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Forwarding {
    /// Index of the VXLAN device.
    pub link: u32,
    /// Inner destination MAC.
    pub mac: MacAddr,
    /// Outer destination address.
    pub remote: IpAddr,
}

/// What a neighbour message is about.
pub(super) enum Entry {
    /// A neighbour; the flag says whether it is permanent.
    Neighbour(Neighbour, bool),
    /// A neighbour without a MAC: gone or unresolved.
    Unresolved(u32, IpAddr),
    /// A forwarding entry; the flag says whether it is permanent.
    Forwarding(Forwarding, bool),
}

impl Entry {
    pub(super) fn from_message(message: &NeighbourMessage) -> Option<Self> {
        let (mut ip, mut mac) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                    ip = Some(IpAddr::from(*v4));
                }
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                    ip = Some(IpAddr::from(*v6));
                }
                // In bridge entries the address's family is told by its length.
                NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                    ip = <[u8; 4]>::try_from(bytes.as_slice())
                        .map(IpAddr::from)
                        .or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from))
                        .ok();
                }
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    mac = <[u8; 6]>::try_from(bytes.as_slice()).ok().map(MacAddr);
                }
                _ => {}
            }
        }
        let link = message.header.ifindex;
        // `bridge fdb add … permanent` sets NUD_NOARP as well.
        let permanent = u16::from(message.header.state) & u16::from(NeighbourState::Permanent) != 0;
        match message.header.family {
            AddressFamily::Bridge => {
                Some(Self::Forwarding(Forwarding { link, mac: mac?, remote: ip? }, permanent))
            }
            AddressFamily::Inet | AddressFamily::Inet6 => Some(match mac {
                Some(mac) => Self::Neighbour(Neighbour { link, ip: ip?, mac }, permanent),
                None => Self::Unresolved(link, ip?),
            }),
            _ => None,
        }
    }
}

impl Neighbour {
    fn message(self) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = self.link;
        message.header.state = NeighbourState::Permanent;
        message.header.family = match self.ip {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        };
        message.attributes = vec![
            NeighbourAttribute::Destination(self.ip.into()),
            NeighbourAttribute::LinkLayerAddress(self.mac.0.to_vec()),
        ];
        message
    }

    /// Adds the entry or replaces the address's old one.
    pub fn replace(self) -> Request {
        set(self.message())
    }

    /// Removes the address's entry.
    pub fn delete(self) -> Request {
        remove(self.message())
    }
}

impl Forwarding {
    fn message(self) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        message.header.ifindex = self.link;
        message.header.state = NeighbourState::Permanent;
        // NTF_SELF: the entry is the VXLAN device's own, not a bridge's.
        message.header.flags = NeighbourFlags::Own;
        message.attributes = vec![
            NeighbourAttribute::Destination(self.remote.into()),
            NeighbourAttribute::LinkLayerAddress(self.mac.0.to_vec()),
        ];
        message
    }

    /// Adds the entry or moves the MAC to this remote.
    pub fn replace(self) -> Request {
        set(self.message())
    }

    /// Removes the entry.
    pub fn delete(self) -> Request {
        remove(self.message())
    }
}

fn set(message: NeighbourMessage) -> Request {
    let message = RouteNetlinkMessage::NewNeighbour(message);
    Request { message, flags: NLM_F_CREATE | NLM_F_REPLACE }
}

fn remove(message: NeighbourMessage) -> Request {
    Request { message: RouteNetlinkMessage::DelNeighbour(message), flags: 0 }
}

pub(super) fn dump_request(family: AddressFamily, link: u32) -> RouteNetlinkMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family;
    if family == AddressFamily::Bridge {
        message.header.ifindex = link;
    } else {
        message.attributes.push(NeighbourAttribute::IfIndex(link));
    }
    RouteNetlinkMessage::GetNeighbour(message)
}
