//! Addresses on links.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
};

use super::socket::Request;

/// An address on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Index of the link.
    pub link: u32,
    /// Address with its prefix length, host bits kept.
    pub net: IpNet,
}

impl Address {
    /// The address and whether it can be used yet: not tentative, not a duplicate.
    pub(super) fn from_message(message: &AddressMessage) -> Option<(Self, bool)> {
        let (mut local, mut other) = (None, None);
        let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
        for attribute in &message.attributes {
            match attribute {
                AddressAttribute::Local(ip) => local = Some(*ip),
                AddressAttribute::Address(ip) => other = Some(*ip),
                AddressAttribute::Flags(all) => flags = *all,
                _ => {}
            }
        }
        let net = IpNet::new(local.or(other)?, message.header.prefix_len).ok()?;
        let pending =
            flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
        let usable = !pending && !flags.contains(AddressFlags::Dadfailed);
        Some((Self { link: message.header.index, net }, usable))
    }

    fn message(self) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.family = match self.net {
            IpNet::V4(_) => AddressFamily::Inet,
            IpNet::V6(_) => AddressFamily::Inet6,
        };
        message.header.prefix_len = self.net.prefix_len();
        message.header.index = self.link;
        message.header.scope = AddressScope::Universe;
        message.attributes.push(AddressAttribute::Address(self.net.addr()));
        match self.net.addr() {
            IpAddr::V4(ip) => message.attributes.push(AddressAttribute::Local(ip.into())),
            // Nobody else can have a tunnel's address: nothing to detect.
            IpAddr::V6(_) => message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad)),
        }
        message
    }

    /// Adds the address.
    pub fn add(self) -> Request {
        Request {
            message: RouteNetlinkMessage::NewAddress(self.message()),
            flags: NLM_F_CREATE | NLM_F_REPLACE,
        }
    }

    /// Removes the address.
    pub fn delete(self) -> Request {
        Request { message: RouteNetlinkMessage::DelAddress(self.message()), flags: 0 }
    }
}

pub(super) fn dump_request() -> RouteNetlinkMessage {
    RouteNetlinkMessage::GetAddress(AddressMessage::default())
}
