//! Links: what the kernel has, and requests to make, change and delete VXLAN devices.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};

use super::socket::Request;
use crate::mac::MacAddr;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Ethernet address, if it has one.
    pub mac: Option<MacAddr>,
    /// VXLAN parameters, if it is a VXLAN device.
    pub vxlan: Option<Vxlan>,
    /// Whether it is an end of a veth pair.
    pub veth: bool,
    /// Index of the bridge (or bond) it belongs to.
    pub master: Option<u32>,
}

/// Parameters of a VXLAN device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vxlan {
    /// Network identifier, 24 bits.
    pub vni: u32,
    /// UDP destination port.
    pub port: u16,
    /// Index of the underlay interface, 0 if none is set.
    pub parent: u32,
    /// Local outer address.
    pub local: Option<IpAddr>,
    /// Remote address or multicast group that unknown destinations go to.
    pub group: Option<IpAddr>,
    /// Whether forwarding entries are learnt from received packets.
    pub learning: bool,
    /// Group policy extension.
    pub gbp: bool,
    /// External (collect metadata) mode: takes every VNI on its port.
    pub external: bool,
}

impl Link {
    pub(super) fn from_message(message: &LinkMessage) -> Option<Self> {
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mtu: 0,
            up: message.header.flags.contains(LinkFlags::Up),
            mac: None,
            vxlan: None,
            veth: false,
            master: None,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::Address(bytes) => {
                    link.mac = <[u8; 6]>::try_from(bytes.as_slice()).ok().map(MacAddr);
                }
                LinkAttribute::LinkInfo(infos) => {
                    link.vxlan = vxlan(infos);
                    link.veth = infos.contains(&LinkInfo::Kind(InfoKind::Veth));
                }
                LinkAttribute::Controller(index) => {
                    link.master = Some(*index).filter(|index| *index != 0);
                }
                _ => {}
            }
        }
        (!link.name.is_empty()).then_some(link)
    }
}

fn vxlan(infos: &[LinkInfo]) -> Option<Vxlan> {
    infos.iter().find_map(|info| {
        let LinkInfo::Data(InfoData::Vxlan(attributes)) = info else { return None };
        let mut vxlan = Vxlan::default();
        for attribute in attributes {
            match *attribute {
                InfoVxlan::Id(vni) => vxlan.vni = vni,
                InfoVxlan::Port(port) => vxlan.port = port,
                InfoVxlan::Link(parent) => vxlan.parent = parent,
                InfoVxlan::Local(ip) => vxlan.local = Some(ip.into()),
                InfoVxlan::Local6(ip) => vxlan.local = Some(ip.into()),
                InfoVxlan::Group(ip) => vxlan.group = Some(ip.into()),
                InfoVxlan::Group6(ip) => vxlan.group = Some(ip.into()),
                InfoVxlan::Learning(on) => vxlan.learning = on,
                InfoVxlan::Gbp => vxlan.gbp = true,
                InfoVxlan::CollectMetadata(on) => vxlan.external = on,
                _ => {}
            }
        }
        Some(vxlan)
    })
}

/// Creates a VXLAN device, down. The MAC is set with it: setting it later would leave a moment in
/// which udev takes the device for one with a random address and changes it.
pub fn create_vxlan(name: &str, mac: MacAddr, mtu: u32, vxlan: &Vxlan) -> Request {
    let mut data = vec![
        InfoVxlan::Id(vxlan.vni),
        InfoVxlan::Link(vxlan.parent),
        InfoVxlan::Port(vxlan.port),
        InfoVxlan::Learning(vxlan.learning),
    ];
    match vxlan.local {
        Some(IpAddr::V4(ip)) => data.push(InfoVxlan::Local(ip)),
        Some(IpAddr::V6(ip)) => data.push(InfoVxlan::Local6(ip)),
        None => {}
    }
    if vxlan.gbp {
        data.push(InfoVxlan::Gbp);
    }
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Address(mac.0.to_vec()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vxlan),
            LinkInfo::Data(InfoData::Vxlan(data)),
        ]),
    ];
    Request { message: RouteNetlinkMessage::NewLink(message), flags: NLM_F_CREATE | NLM_F_EXCL }
}

/// What to change on an existing link; `None` leaves a property alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Ethernet address.
    pub mac: Option<MacAddr>,
    /// Bring it up.
    pub up: bool,
    /// Learning of a VXLAN device (changeable since Linux 5.1).
    pub learning: Option<bool>,
}

/// Changes properties of a link in place.
pub fn change(index: u32, change: &Change) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    if change.up {
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
    }
    message.attributes.extend(change.mtu.map(LinkAttribute::Mtu));
    message.attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    if let Some(learning) = change.learning {
        let data = InfoData::Vxlan(vec![InfoVxlan::Learning(learning)]);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vxlan),
            LinkInfo::Data(data),
        ]));
    }
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// Deletes a link.
pub fn delete(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Request { message: RouteNetlinkMessage::DelLink(message), flags: 0 }
}

pub(super) fn dump_request() -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.interface_family = AddressFamily::Unspec;
    RouteNetlinkMessage::GetLink(message)
}
