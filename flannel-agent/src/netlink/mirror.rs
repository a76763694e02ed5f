//! What the kernel has of the objects that concern us: read once, then kept by notifications.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::IpAddr,
};

use ipnet::IpNet;
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::unix::AsyncFd;

use super::{
    address::{self, Address},
    link::{self, Link},
    neighbour::{self, Entry, Forwarding, Neighbour},
    route::{self, OUR_PROTOCOL, OwnMtu, Route, Via},
    socket::{Requests, parse},
};
use crate::mac::MacAddr;

/// `RTNLGRP_*`: links, neighbours, addresses and routes of both families.
const GROUPS: [u32; 6] = [1, 3, 5, 7, 9, 11];

/// Room for a burst of notifications, in bytes: some thousand of them.
const RECEIVE_BUFFER: usize = 8 << 20;

/// How often a dump is repeated that the kernel's own changes interrupted or outdated.
const DUMP_TRIES: usize = 5;

/// Which objects concern us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Networks whose routes are kept.
    pub networks: Vec<IpNet>,
    /// Names of our devices, whose addresses, neighbours and forwarding entries are kept.
    pub devices: Vec<String>,
}

/// The kernel's objects as last heard of.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// All links, by index.
    pub links: BTreeMap<u32, Link>,
    /// All addresses of all links; the value says whether the address is usable yet.
    pub addresses: BTreeMap<Address, bool>,
    /// Routes of the main table inside our networks, on our devices, or marked ours.
    pub routes: BTreeSet<Route>,
    /// IPv4 routes with an MTU of their own, of any table, by destination.
    pub narrow: BTreeMap<IpNet, OwnMtu>,
    /// Permanent neighbours on our devices.
    pub neighbours: HashMap<(u32, IpAddr), MacAddr>,
    /// Permanent forwarding entries with a remote on our devices.
    pub forwarding: HashMap<(u32, MacAddr), IpAddr>,
}

impl Tables {
    /// The link of this name.
    pub fn link(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }

    /// Whether a route to an address may have a smaller MTU than its link. The kernel's own packets
    /// are cut to it; what it tells a BPF program about the way is the link's.
    pub fn is_narrow(&self, target: IpAddr) -> bool {
        self.narrow.iter().any(|(destination, own)| {
            let link = own.link.and_then(|link| self.links.get(&link));
            destination.contains(&target) && link.is_none_or(|link| own.mtu < link.mtu)
        })
    }

    /// The routes to exactly this destination.
    pub fn routes_to(&self, destination: &IpNet) -> impl Iterator<Item = &Route> {
        let destination = *destination;
        let least = Route {
            destination,
            via: Via::Gateway { link: 0, gateway: [0; 4].into(), onlink: false },
            metric: 0,
            protocol: 0,
        };
        self.routes.range(least..).take_while(move |route| route.destination == destination)
    }
}

impl Tables {
    /// Where a route leads, in the words of `ip route`.
    pub fn way_of(&self, route: &Route) -> String {
        let dev = |index: u32| {
            let link = self.links.get(&index);
            link.map_or_else(|| format!("interface {index}"), |link| format!("dev {}", link.name))
        };
        match route.via {
            Via::Gateway { link, gateway, .. } => format!("via {gateway} {}", dev(link)),
            Via::Link(link) => dev(link),
            Via::Blackhole => "blackhole".to_owned(),
        }
    }
}

/// Places in the tables: where something changed, or is to be looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// Destinations of routes.
    pub routes: BTreeSet<IpNet>,
    /// Neighbours, by link and address.
    pub neighbours: BTreeSet<(u32, IpAddr)>,
    /// Forwarding entries, by link and MAC.
    pub forwarding: BTreeSet<(u32, MacAddr)>,
}

impl Keys {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.routes.is_empty() && self.neighbours.is_empty() && self.forwarding.is_empty()
    }
}

/// What came in since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// A link, address, route, neighbour or forwarding entry in our scope changed.
    pub ours: bool,
    /// The tables were read anew: anything in them may have changed.
    pub anew: bool,
    /// Routes, neighbours and forwarding entries that changed otherwise.
    pub keys: Keys,
    /// A link, address or route outside our scope changed: decisions taken from a route look-up may
    /// differ.
    pub routing: bool,
    /// A route got or lost an MTU of its own.
    pub narrow: bool,
}

impl Heard {
    fn route(&mut self, route: &Route) {
        self.ours = true;
        self.keys.routes.insert(route.destination);
    }

    fn neighbour(&mut self, link: u32, ip: IpAddr) {
        self.ours = true;
        self.keys.neighbours.insert((link, ip));
    }

    fn forwarding(&mut self, link: u32, mac: MacAddr) {
        self.ours = true;
        self.keys.forwarding.insert((link, mac));
    }
}

/// The tables and the sockets that keep them right.
pub struct Mirror {
    scope: Scope,
    tables: Tables,
    requests: Requests,
    monitor: AsyncFd<Socket>,
    /// Whether the tables have to be read anew: at first, and when notifications were lost.
    stale: bool,
}

impl Mirror {
    /// Opens the sockets; reads nothing yet.
    pub fn open(scope: Scope) -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        grow_buffer(&socket);
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        socket.set_non_blocking(true)?;
        Ok(Self {
            scope,
            tables: Tables::default(),
            requests: Requests::open()?,
            // SAFETY: the socket owns its descriptor and closes it only when it is dropped.
            monitor: unsafe { AsyncFd::register(socket) }?,
            stale: true,
        })
    }

    /// The tables as of the last [`refresh`](Self::refresh).
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The socket for requests.
    pub fn requests(&mut self) -> &mut Requests {
        &mut self.requests
    }

    /// Says that the tables are to be read anew at the next refresh.
    pub fn distrust(&mut self) {
        self.stale = true;
    }

    /// Waits until there is something to hear. Cancel-safe.
    pub async fn readable(&self) {
        loop {
            // An error here means that the runtime is going down.
            let Ok(mut guard) = self.monitor.readable().await else {
                return std::future::pending().await;
            };
            let mut peeked = [0_u8; 1];
            let waiting = guard.try_io(|monitor| {
                monitor.get_ref().recv(&mut &mut peeked[..], libc::MSG_PEEK | libc::MSG_DONTWAIT)
            });
            // "Would block" was only a stale readiness, cleared now; an error is news as well.
            if waiting.is_ok() {
                return;
            }
        }
    }

    /// Takes in all that was heard, or reads everything if too much was missed.
    pub fn refresh(&mut self) -> io::Result<Heard> {
        let mut heard = self.listen();
        // What is heard while reading may be reason to read again.
        for _ in 0..DUMP_TRIES {
            if !self.stale {
                break;
            }
            self.read_all()?;
            self.stale = false;
            heard = Heard { ours: true, routing: true, anew: true, ..Heard::default() };
            // It is in the tables already or comes on top.
            self.listen();
        }
        Ok(heard)
    }

    fn listen(&mut self) -> Heard {
        let mut heard = Heard::default();
        loop {
            let received = self.monitor.get_ref().recv_from_full();
            match received {
                Ok((bytes, sender)) => {
                    // Only the kernel's word counts.
                    if sender.port_number() != 0 {
                        continue;
                    }
                    for message in parse(&bytes) {
                        if let NetlinkPayload::InnerMessage(message) = message.payload {
                            self.fold(&message, &mut heard);
                        }
                    }
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return heard,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                // ENOBUFS: notifications were dropped.
                Err(err) => {
                    tracing::debug!("netlink notifications lost: {err}");
                    self.stale = true;
                    if err.raw_os_error() != Some(libc::ENOBUFS) {
                        return heard;
                    }
                }
            }
        }
    }

    fn is_ours(&self, link: u32) -> bool {
        let Some(link) = self.tables.links.get(&link) else { return false };
        self.scope.devices.contains(&link.name)
    }

    fn concerns_us(&self, route: &Route) -> bool {
        let inside = |network: &IpNet| network.contains(&route.destination);
        let on_ours = match route.via {
            Via::Gateway { link, .. } | Via::Link(link) => self.is_ours(link),
            Via::Blackhole => false,
        };
        on_ours || route.protocol == OUR_PROTOCOL || self.scope.networks.iter().any(inside)
    }

    fn fold(&mut self, message: &RouteNetlinkMessage, heard: &mut Heard) {
        match message {
            // What a bridge tells of its port lacks most of what the port's own message has.
            RouteNetlinkMessage::NewLink(message)
                if message.header.interface_family == AddressFamily::Bridge => {}
            RouteNetlinkMessage::NewLink(message) => {
                if let Some(link) = Link::from_message(message) {
                    let known = self.tables.links.get(&link.index);
                    heard.ours |= known != Some(&link);
                    // Going down takes IPv4 routes along, silently.
                    heard.routing |= known.is_some_and(|known| known.up != link.up);
                    if !link.up {
                        self.forget_flushed(link.index, heard);
                    }
                    self.tables.links.insert(link.index, link);
                }
            }
            // A port leaving a bridge is told as a deleted link of the bridge family.
            RouteNetlinkMessage::DelLink(message)
                if message.header.interface_family != AddressFamily::Bridge =>
            {
                heard.ours = true;
                heard.routing = true;
                self.forget(message.header.index, heard);
            }
            RouteNetlinkMessage::NewAddress(message) => {
                if let Some((address, usable)) = Address::from_message(message) {
                    let known = self.tables.addresses.insert(address, usable);
                    let changed = known != Some(usable);
                    heard.routing |= changed;
                    heard.ours |= changed;
                }
            }
            RouteNetlinkMessage::DelAddress(message) => {
                if let Some((address, _)) = Address::from_message(message) {
                    let known = self.tables.addresses.remove(&address).is_some();
                    let last = |other: &Address| {
                        other.link == address.link && matches!(other.net, IpNet::V4(_))
                    };
                    // With a link's last IPv4 address its routes go, and that is told by nothing.
                    if matches!(address.net, IpNet::V4(_))
                        && !self.tables.addresses.keys().any(last)
                    {
                        self.stale = true;
                    }
                    if !self.has_v4(address.link) {
                        self.forget_flushed(address.link, heard);
                    }
                    heard.routing |= known;
                    heard.ours |= known;
                }
            }
            RouteNetlinkMessage::NewRoute(message) => {
                if let Some((destination, own)) = OwnMtu::from_message(message) {
                    heard.narrow |= self.note_own_mtu(destination, own);
                }
                let route = Route::from_message(message).filter(|r| self.concerns_us(r));
                heard.routing |= route.is_none();
                if let Some(route) = route.filter(|route| self.add_route(*route)) {
                    heard.route(&route);
                }
            }
            RouteNetlinkMessage::DelRoute(message) => {
                if let Some((destination, Some(_))) = OwnMtu::from_message(message) {
                    heard.narrow |= self.note_own_mtu(destination, None);
                }
                let route = Route::from_message(message).filter(|r| self.concerns_us(r));
                heard.routing |= route.is_none();
                if let Some(route) = route.filter(|route| self.tables.routes.remove(route)) {
                    heard.route(&route);
                }
            }
            RouteNetlinkMessage::NewNeighbour(message) => {
                self.neighbour(Entry::from_message(message).as_ref(), true, heard);
            }
            RouteNetlinkMessage::DelNeighbour(message) => {
                self.neighbour(Entry::from_message(message).as_ref(), false, heard);
            }
            _ => {}
        }
    }

    /// What a route's message says of its own MTU; whether that is new. Of several routes to one
    /// destination the last one counts, until all are read again.
    fn note_own_mtu(&mut self, destination: IpNet, own: Option<OwnMtu>) -> bool {
        let narrow = &mut self.tables.narrow;
        let known = match own {
            Some(own) => narrow.insert(destination, own),
            None => narrow.remove(&destination),
        };
        known != own
    }

    /// A replaced IPv4 route is told as one new route: the old one of the same destination and
    /// metric is gone. (IPv6 tells the same way.)
    fn add_route(&mut self, route: Route) -> bool {
        if self.tables.routes.contains(&route) {
            return false;
        }
        let same_place = |old: &&Route| old.metric == route.metric;
        let replaced: Vec<Route> =
            self.tables.routes_to(&route.destination).filter(same_place).copied().collect();
        for old in replaced {
            self.tables.routes.remove(&old);
        }
        self.tables.routes.insert(route)
    }

    fn neighbour(&mut self, entry: Option<&Entry>, present: bool, heard: &mut Heard) {
        match entry {
            Some(&Entry::Neighbour(Neighbour { link, ip, mac }, permanent)) => {
                if !self.is_ours(link) {
                    return;
                }
                let changed = if present && permanent {
                    self.tables.neighbours.insert((link, ip), mac) != Some(mac)
                } else {
                    self.tables.neighbours.remove(&(link, ip)).is_some()
                };
                if changed {
                    heard.neighbour(link, ip);
                }
            }
            Some(&Entry::Unresolved(link, ip))
                if self.tables.neighbours.remove(&(link, ip)).is_some() =>
            {
                heard.neighbour(link, ip);
            }
            Some(&Entry::Forwarding(Forwarding { link, mac, remote }, permanent)) => {
                if !self.is_ours(link) {
                    return;
                }
                let changed = if present && permanent {
                    self.tables.forwarding.insert((link, mac), remote) != Some(remote)
                } else {
                    // An entry may have had several remotes; only the loss of ours counts.
                    let ours = self.tables.forwarding.get(&(link, mac)) == Some(&remote);
                    ours && self.tables.forwarding.remove(&(link, mac)).is_some()
                };
                if changed {
                    heard.forwarding(link, mac);
                }
            }
            Some(Entry::Unresolved(..)) | None => {}
        }
    }

    fn has_v4(&self, link: u32) -> bool {
        self.tables.addresses.keys().any(|a| a.link == link && a.net.addr().is_ipv4())
    }

    /// What the kernel drops without telling when a link goes down or loses its last IPv4
    /// address: its IPv4 routes. Neighbours are told one by one, IPv6 routes too.
    fn forget_flushed(&mut self, link: u32, heard: &mut Heard) {
        self.tables.narrow.retain(|_, own| own.link != Some(link));
        self.forget_routes(heard, |route| match route.via {
            _ if route.destination.addr().is_ipv6() => false,
            Via::Gateway { link: out, .. } | Via::Link(out) => out == link,
            Via::Blackhole => false,
        });
    }

    fn forget_routes(&mut self, heard: &mut Heard, gone: impl Fn(&Route) -> bool) {
        for route in self.tables.routes.extract_if(.., gone) {
            heard.route(&route);
        }
    }

    fn forget(&mut self, link: u32, heard: &mut Heard) {
        self.tables.narrow.retain(|_, own| own.link != Some(link));
        self.forget_routes(heard, |route| match route.via {
            Via::Gateway { link: out, .. } | Via::Link(out) => out == link,
            Via::Blackhole => false,
        });
        self.tables.links.remove(&link);
        self.tables.addresses.retain(|address, _| address.link != link);
        for ((_, ip), _) in self.tables.neighbours.extract_if(|(on, _), _| *on == link) {
            heard.neighbour(link, ip);
        }
        for ((_, mac), _) in self.tables.forwarding.extract_if(|(on, _), _| *on == link) {
            heard.forwarding(link, mac);
        }
    }

    fn read_all(&mut self) -> io::Result<()> {
        let mut last = Ok(());
        for _ in 0..DUMP_TRIES {
            self.tables = Tables::default();
            last = self.read_once();
            match &last {
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        last
    }

    fn read_once(&mut self) -> io::Result<()> {
        let mut messages = Vec::new();
        self.requests.dump(link::dump_request(), |message| messages.push(message))?;
        self.requests.dump(address::dump_request(), |message| messages.push(message))?;
        let mut families = vec![];
        families.extend(
            self.scope
                .networks
                .iter()
                .any(|n| matches!(n, IpNet::V4(_)))
                .then_some(AddressFamily::Inet),
        );
        families.extend(
            self.scope
                .networks
                .iter()
                .any(|n| matches!(n, IpNet::V6(_)))
                .then_some(AddressFamily::Inet6),
        );
        for family in families {
            self.requests.dump(route::dump_request(family), |message| messages.push(message))?;
        }
        let mut heard = Heard::default();
        for message in messages.drain(..) {
            match &message {
                // A dump lists several routes of one destination side by side.
                RouteNetlinkMessage::NewRoute(route) => {
                    if let Some((destination, Some(own))) = OwnMtu::from_message(route) {
                        self.tables.narrow.insert(destination, own);
                    }
                    let route = Route::from_message(route).filter(|r| self.concerns_us(r));
                    self.tables.routes.extend(route);
                }
                other => self.fold(other, &mut heard),
            }
        }
        let devices: Vec<u32> =
            self.tables.links.keys().copied().filter(|index| self.is_ours(*index)).collect();
        for device in devices {
            for family in [AddressFamily::Inet, AddressFamily::Inet6, AddressFamily::Bridge] {
                let request = neighbour::dump_request(family, device);
                self.requests.dump(request, |message| messages.push(message))?;
            }
        }
        for message in messages {
            self.fold(&message, &mut heard);
        }
        Ok(())
    }
}

/// The default buffer holds some hundred notifications. Beyond the limit of `net.core.rmem_max`
/// only with `CAP_NET_ADMIN`, which the agent has.
fn grow_buffer(socket: &Socket) {
    if setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        // What is missed is noticed and read anew: only slower.
        let _ = socket.set_rx_buf_sz(RECEIVE_BUFFER);
    }
}
