//! The difference between wanted and kernel: pure, so that it is tested without a kernel.
//!
//! Order matters for running traffic. What a packet needs comes before what sends it there, and
//! what is no longer needed goes last: forwarding entries, neighbours, routes, then removals in
//! the opposite order.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    hash::Hash,
    io,
    net::IpAddr,
};

use ipnet::{IpNet, Ipv6Net};

use crate::{
    mac::MacAddr,
    netlink::{
        mirror::{Keys, Tables},
        neighbour::{Forwarding, Neighbour},
        route::{OUR_PROTOCOL, Route, Via},
        socket::Request,
    },
};

/// `RTPROT_KERNEL`: routes the kernel makes for addresses.
const KERNEL_PROTOCOL: u8 = 2;

/// The metric of a route that was made without one.
const fn default_metric(destination: &IpNet) -> u32 {
    match destination {
        IpNet::V4(_) => 0,
        // IP6_RT_PRIO_USER
        IpNet::V6(_) => 1024,
    }
}

/// The metric of a black hole: whatever else leads to the subnet, a bridge's own route above all,
/// comes first. 32767 leaves room behind it.
const BLACKHOLE_METRIC: u32 = 32767;

/// What the kernel is to have of routes, neighbours and forwarding entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Where each peer's subnet leads.
    pub routes: BTreeMap<IpNet, Via>,
    /// Peers' public addresses. A route to the peer's subnet through it is ours although it lacks
    /// our protocol: flanneld's direct route.
    pub direct: BTreeMap<IpNet, IpAddr>,
    /// Permanent neighbours on our devices.
    pub neighbours: HashMap<(u32, IpAddr), MacAddr>,
    /// Permanent forwarding entries on our devices.
    pub forwarding: HashMap<(u32, MacAddr), IpAddr>,
    /// Indices of our devices.
    pub devices: Vec<u32>,
    /// The cluster's networks.
    pub networks: Vec<IpNet>,
    /// Our own subnets, to which no route of ours may lead.
    pub own: Vec<IpNet>,
    /// Whether a black hole stands behind all other routes to our own subnets
    /// (`--ip-blackhole-route`).
    pub blackhole_own: bool,
    /// Whether all peers are known. If not, nothing that may be a peer's is removed.
    pub complete: bool,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add or move a forwarding entry.
    SetForwarding(Forwarding),
    /// Add or replace a neighbour.
    SetNeighbour(Neighbour),
    /// Add or replace a route.
    SetRoute(Route),
    /// Remove a route.
    RemoveRoute(Route),
    /// Remove a neighbour.
    RemoveNeighbour(Neighbour),
    /// Remove a forwarding entry.
    RemoveForwarding(Forwarding),
}

impl Change {
    /// The request that makes this change.
    pub fn request(&self) -> Request {
        match self {
            Self::SetForwarding(entry) => entry.replace(),
            Self::SetNeighbour(entry) => entry.replace(),
            Self::SetRoute(route) => route.replace(),
            Self::RemoveRoute(route) => route.delete(),
            Self::RemoveNeighbour(entry) => entry.delete(),
            Self::RemoveForwarding(entry) => entry.delete(),
        }
    }

    /// Whether the kernel's answer means that things are as wanted: what was to go is gone.
    pub fn worked(&self, outcome: &io::Result<()>) -> bool {
        let Err(err) = outcome else { return true };
        let gone = matches!(err.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::ENODEV));
        self.is_removal() && gone
    }

    /// Whether something is to go.
    pub fn is_removal(&self) -> bool {
        matches!(self, Self::RemoveRoute(_) | Self::RemoveNeighbour(_) | Self::RemoveForwarding(_))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetForwarding(e) => write!(f, "set FDB entry {} to {}", e.mac, e.remote),
            Self::RemoveForwarding(e) => write!(f, "remove FDB entry {} to {}", e.mac, e.remote),
            Self::SetNeighbour(e) => write!(f, "set neighbour {} to {}", e.ip, e.mac),
            Self::RemoveNeighbour(e) => write!(f, "remove neighbour {} at {}", e.ip, e.mac),
            Self::SetRoute(r) => write!(f, "set route to {}", r.destination),
            Self::RemoveRoute(r) => write!(f, "remove route to {}", r.destination),
        }
    }
}

/// What to change, in order, and what cannot be had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The changes, in the order in which to make them.
    pub changes: Vec<Change>,
    /// Subnets whose route is taken by a route of somebody else.
    pub taken: Vec<Route>,
}

impl Wanted {
    fn inside(&self, destination: &IpNet) -> bool {
        self.networks.iter().any(|network| network.contains(destination))
    }

    /// Whether a route is one that this agent or a flanneld before it made.
    ///
    /// Our protocol number alone does not tell: another agent on this host, for another network,
    /// uses it as well.
    fn ours(&self, route: &Route) -> bool {
        if route.protocol == KERNEL_PROTOCOL {
            return false;
        }
        let inside = self.inside(&route.destination);
        let tagged = route.protocol == OUR_PROTOCOL;
        match route.via {
            // Of another time's network too, if it looks as only flannel's routes do.
            Via::Gateway { link, gateway, onlink } if self.devices.contains(&link) => {
                inside || tagged || (onlink && gateway == route.destination.network())
            }
            Via::Link(link) if self.devices.contains(&link) => inside || tagged,
            // Over another device: a direct route, or what a vxlan of before left.
            Via::Gateway { gateway, onlink, .. } => {
                let direct = self.direct.get(&route.destination) == Some(&gateway);
                let tunnel = onlink && gateway == route.destination.network();
                inside && (tagged || direct || tunnel)
            }
            Via::Link(_) => inside && tagged,
            // Left by `--ip-blackhole-route` of another subnet; our own subnet's and the whole
            // network's are somebody's wish.
            Via::Blackhole => {
                inside
                    && (tagged
                        || !(self.own.contains(&route.destination)
                            || self.networks.contains(&route.destination)))
            }
        }
    }

    /// Whether a route does what is wanted and will be known as ours when it no longer is.
    fn right(&self, route: &Route, via: &Via) -> bool {
        let on_ours = match route.via {
            Via::Gateway { link, .. } | Via::Link(link) => self.devices.contains(&link),
            Via::Blackhole => false,
        };
        route.via == *via && (on_ours || route.protocol == OUR_PROTOCOL)
    }

    /// Compares with the kernel's tables.
    pub fn plan(&self, tables: &Tables) -> Plan {
        self.plan_at(tables, None)
    }

    /// Compares with the kernel's tables at these places; everywhere if there are none given.
    pub fn plan_at(&self, tables: &Tables, keys: Option<&Keys>) -> Plan {
        let mut plan = Plan::default();
        let changes = &mut plan.changes;
        let forwarding = at(&self.forwarding, keys.map(|keys| &keys.forwarding));
        changes.extend(forwarding.filter(|(k, v)| tables.forwarding.get(k) != Some(v)).map(
            |(&(link, mac), &remote)| Change::SetForwarding(Forwarding { link, mac, remote }),
        ));
        let neighbours = at(&self.neighbours, keys.map(|keys| &keys.neighbours));
        changes.extend(
            neighbours
                .filter(|(k, v)| tables.neighbours.get(k) != Some(v))
                .map(|(&(link, ip), &mac)| Change::SetNeighbour(Neighbour { link, ip, mac })),
        );
        let routes: &mut dyn Iterator<Item = (&IpNet, &Via)> = match keys {
            None => &mut self.routes.iter(),
            Some(keys) => &mut keys.routes.iter().filter_map(|key| self.routes.get_key_value(key)),
        };
        for (destination, via) in routes {
            if tables.routes_to(destination).any(|route| self.right(route, via)) {
                continue;
            }
            let ours = tables.routes_to(destination).find(|route| self.ours(route));
            let metric = ours.map_or_else(|| default_metric(destination), |route| route.metric);
            let before_ours = |route: &&Route| route.metric <= metric && !self.ours(route);
            if let Some(foreign) = tables.routes_to(destination).find(before_ours) {
                plan.taken.push(*foreign);
                continue;
            }
            let route =
                Route { destination: *destination, via: *via, metric, protocol: OUR_PROTOCOL };
            let stone = stepping_stone(tables, &route);
            changes.extend(stone.map(Change::SetRoute));
            changes.push(Change::SetRoute(route));
            changes.extend(stone.map(Change::RemoveRoute));
        }
        if self.blackhole_own {
            let holes = |own: &&IpNet| {
                keys.is_none_or(|keys| keys.routes.contains(*own))
                    && !tables.routes_to(own).any(|route| matches!(route.via, Via::Blackhole))
            };
            changes.extend(self.own.iter().filter(holes).map(|own| {
                Change::SetRoute(Route {
                    destination: *own,
                    via: Via::Blackhole,
                    metric: BLACKHOLE_METRIC,
                    protocol: OUR_PROTOCOL,
                })
            }));
        }
        self.plan_removals(tables, keys, changes);
        plan
    }

    fn plan_removals(&self, tables: &Tables, keys: Option<&Keys>, changes: &mut Vec<Change>) {
        let set: BTreeSet<(IpNet, u32)> = changes
            .iter()
            .filter_map(|change| match change {
                Change::SetRoute(route) => Some((route.destination, route.metric)),
                _ => None,
            })
            .collect();
        let routes: &mut dyn Iterator<Item = &Route> = match keys {
            None => &mut tables.routes.iter(),
            Some(keys) => &mut keys.routes.iter().flat_map(|key| tables.routes_to(key)),
        };
        for route in routes.filter(|route| self.ours(route)) {
            let own = self.own.contains(&route.destination);
            let replaced = set.contains(&(route.destination, route.metric));
            let hole = own && self.blackhole_own && matches!(route.via, Via::Blackhole);
            let wanted = hole || self.routes.get(&route.destination) == Some(&route.via);
            if !wanted && !replaced && (self.complete || own) {
                changes.push(Change::RemoveRoute(*route));
            }
        }
        if !self.complete {
            return;
        }
        let on_ours = |link: u32| self.devices.contains(&link);
        for (&(link, ip), &mac) in at(&tables.neighbours, keys.map(|keys| &keys.neighbours)) {
            if on_ours(link) && !self.neighbours.contains_key(&(link, ip)) {
                changes.push(Change::RemoveNeighbour(Neighbour { link, ip, mac }));
            }
        }
        for (&(link, mac), &remote) in at(&tables.forwarding, keys.map(|keys| &keys.forwarding)) {
            // The all-zero entry is the default destination: nothing flannel ever sets.
            if on_ours(link) && mac.is_station() && !self.forwarding.contains_key(&(link, mac)) {
                changes.push(Change::RemoveForwarding(Forwarding { link, mac, remote }));
            }
        }
    }
}

/// The entries of a map at these keys; all of them if there are no keys given.
fn at<'a, K: Eq + Hash + Ord, V>(
    map: &'a HashMap<K, V>,
    keys: Option<&'a BTreeSet<K>>,
) -> Box<dyn Iterator<Item = (&'a K, &'a V)> + 'a> {
    match keys {
        None => Box::new(map.iter()),
        Some(keys) => Box::new(keys.iter().filter_map(|key| map.get_key_value(key))),
    }
}

/// A route to the gateway alone that has to be there while `route` takes the place of one over
/// another link. The kernel looks an IPv6 gateway up although it is said to be on the link, and
/// refuses it if the way there is another: here the very route that is to be replaced.
fn stepping_stone(tables: &Tables, route: &Route) -> Option<Route> {
    let Via::Gateway { link, gateway: IpAddr::V6(gateway), onlink: true } = route.via else {
        return None;
    };
    let elsewhere = |other: &Route| match other.via {
        Via::Gateway { link: out, .. } | Via::Link(out) => out != link,
        Via::Blackhole => true,
    };
    let needed = tables.routes_to(&route.destination).any(elsewhere);
    needed.then(|| Route {
        destination: Ipv6Net::from(gateway).into(),
        via: Via::Link(link),
        metric: route.metric,
        protocol: OUR_PROTOCOL,
    })
}

#[cfg(test)]
mod tests;
