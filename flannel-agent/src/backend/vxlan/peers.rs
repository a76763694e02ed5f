//! From leases to routes, neighbours and forwarding entries.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{data::VxlanData, device::Family};
use crate::{
    backend::{
        on_link::OnLink,
        peer_ranges::{self, PeerRanges},
    },
    lease::{LeaseAttributes, RawJson, Subnets},
    mac::MacAddr,
    netlink::{
        mirror::{Keys, Tables},
        route::Via,
    },
    peer_table::PeerTable,
    reconciler::Wanted,
};

/// One of our devices as it is, with our own subnet of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Its family.
    pub family: Family,
    /// Its index.
    pub link: u32,
    /// Our own subnet.
    pub own: IpNet,
    /// The cluster's network.
    pub network: IpNet,
    /// Our address that outer packets come from.
    pub local: Option<IpAddr>,
}

/// Compiles leases, and keeps what it made of them: when some change, the rest is not compiled
/// again. Backend data is parsed once per text.
#[derive(Debug, Default)]
pub struct Compiler {
    macs: HashMap<RawJson, Result<MacAddr, String>>,
    /// Whether our own subnets get blackhole routes (`--ip-blackhole-route`).
    blackhole_own: bool,
    tunnels: Vec<Tunnel>,
    wanted: Wanted,
    /// Who claims what, to name both sides of a conflict.
    holders: HashMap<(u32, MacAddr), Holder>,
    ranges: PeerRanges,
    /// One sentence per peer and family that cannot be served as it asks.
    problems: BTreeMap<Subnets, Vec<String>>,
    /// Peers that are served in every family they have.
    served: BTreeSet<Subnets>,
    /// Whether a peer is left out because of another: then every change of a peer may be to the
    /// good of a third.
    conflict: bool,
}

/// A node that sends from one address and has one MAC; it may hold several subnets.
#[derive(Debug)]
struct Holder {
    public: IpAddr,
    subnets: BTreeSet<IpNet>,
}

/// Why a peer is not served.
enum Refusal {
    /// By its own fault.
    Unusable(String),
    /// Because of another peer.
    Conflict(String),
}

impl Compiler {
    /// A compiler that has seen no lease. `blackhole_own`: our own subnets get blackhole routes.
    pub fn new(blackhole_own: bool) -> Self {
        Self { blackhole_own, ..Self::default() }
    }

    /// What the kernel is to have.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// One sentence per peer that cannot be served as it asks.
    pub fn problems(&self) -> impl Iterator<Item = &String> {
        self.problems.values().flatten()
    }

    /// How many peers are served in every family they have.
    pub fn served(&self) -> usize {
        self.served.len()
    }

    /// Compiles the leases of the peers that changed, or of all if need be. Returns where the
    /// wanted state may differ from before; `None` stands for everywhere.
    ///
    /// `tables` decides between peers that claim the same MAC: who has it in the kernel keeps it.
    /// `on_link` knows nothing unless direct routing is on.
    pub fn compile(
        &mut self,
        peers: &PeerTable,
        changed: Option<&BTreeSet<Subnets>>,
        tunnels: &[Tunnel],
        tables: &Tables,
        on_link: &OnLink,
    ) -> Option<Keys> {
        if self.macs.len() > 4 * peers.len() + 64 {
            self.macs.clear();
        }
        let same_ground = self.tunnels == tunnels && self.wanted.complete == peers.synced();
        if let Some(changed) = changed.filter(|_| same_ground && !self.conflict) {
            let mut keys = Keys::default();
            for subnets in changed {
                self.retract(subnets, &mut keys);
            }
            for subnets in changed {
                if let Some(attributes) = peers.peer(subnets) {
                    self.enter(subnets, attributes, on_link, &mut keys);
                }
            }
            if !self.conflict {
                return Some(keys);
            }
        }
        self.compile_all(peers, tunnels, tables, on_link);
        None
    }

    fn compile_all(
        &mut self,
        peers: &PeerTable,
        tunnels: &[Tunnel],
        tables: &Tables,
        on_link: &OnLink,
    ) {
        *self = Self {
            macs: std::mem::take(&mut self.macs),
            blackhole_own: self.blackhole_own,
            tunnels: tunnels.to_vec(),
            wanted: Wanted {
                devices: tunnels.iter().map(|tunnel| tunnel.link).collect(),
                networks: tunnels.iter().map(|tunnel| tunnel.network).collect(),
                own: tunnels.iter().map(|tunnel| tunnel.own).collect(),
                complete: peers.synced(),
                blackhole_own: self.blackhole_own,
                ..Wanted::default()
            },
            ..Self::default()
        };
        let mut keys = Keys::default();
        for (subnets, attributes) in self.in_order(peers, tables) {
            self.enter(subnets, attributes, on_link, &mut keys);
        }
    }

    /// Peers in the order of their subnets, but those first whose MAC the kernel has at their
    /// address already: on a conflict the earlier holder keeps it.
    fn in_order<'a>(
        &mut self,
        peers: &'a PeerTable,
        tables: &Tables,
    ) -> Vec<(&'a Subnets, &'a LeaseAttributes)> {
        let holding: HashSet<(MacAddr, IpAddr)> =
            tables.forwarding.iter().map(|(&(_, mac), &remote)| (mac, remote)).collect();
        let (mut first, mut rest) = (Vec::new(), Vec::new());
        for (subnets, attributes) in peers.peers() {
            let v4 = attributes.public_ip.map(IpAddr::from);
            let v6 = attributes.public_ipv6.map(IpAddr::from);
            let families = [(&attributes.backend_data, v4), (&attributes.backend_v6_data, v6)];
            let holds = families.into_iter().any(|(data, remote)| {
                let mac = data.as_ref().and_then(|data| self.mac(data).ok());
                mac.zip(remote).is_some_and(|key| holding.contains(&key))
            });
            if holds { &mut first } else { &mut rest }.push((subnets, attributes));
        }
        first.append(&mut rest);
        first
    }

    fn mac(&mut self, data: &RawJson) -> Result<MacAddr, String> {
        if let Some(known) = self.macs.get(data) {
            return known.clone();
        }
        let mac = VxlanData::parse(data).map(|data| data.vtep_mac).map_err(|err| err.to_string());
        self.macs.insert(data.clone(), mac.clone());
        mac
    }

    /// Takes a peer in.
    fn enter(
        &mut self,
        subnets: &Subnets,
        attributes: &LeaseAttributes,
        on_link: &OnLink,
        keys: &mut Keys,
    ) {
        let mut problems = Vec::new();
        let mut served = false;
        if attributes.backend_type == "vxlan" {
            for at in 0..self.tunnels.len() {
                let tunnel = self.tunnels[at];
                let Some(peer) = Peer::of(tunnel.family, subnets, attributes) else { continue };
                match self.enter_family(&peer, &tunnel, on_link, keys) {
                    Ok(()) => served = true,
                    Err(Refusal::Unusable(problem)) => problems.push(problem),
                    Err(Refusal::Conflict(problem)) => {
                        self.conflict = true;
                        problems.push(problem);
                    }
                }
            }
        } else {
            problems.push(format!(
                "peer {subnets} uses backend {:?}, not vxlan: it is left out",
                attributes.backend_type
            ));
        }
        if !problems.is_empty() {
            self.problems.insert(*subnets, problems);
        } else if served {
            self.served.insert(*subnets);
        }
    }

    fn enter_family(
        &mut self,
        peer: &Peer<'_>,
        tunnel: &Tunnel,
        on_link: &OnLink,
        keys: &mut Keys,
    ) -> Result<(), Refusal> {
        let subnet = peer.subnet;
        let public = peer.public.ok_or_else(|| {
            Refusal::Unusable(format!(
                "peer {subnet} publishes no address of its family: it is left out"
            ))
        })?;
        peer_ranges::reachable(subnet, public, tunnel.local).map_err(|why| {
            Refusal::Unusable(format!("peer {subnet} ({public}) is left out: {why}"))
        })?;
        if let Some(link) = on_link.link(public) {
            self.ranges.check(subnet, public, tunnel.own).map_err(Refusal::Conflict)?;
            let via = Via::Gateway { link, gateway: public, onlink: false };
            self.lead(subnet, public, via, keys);
            return Ok(());
        }
        let data = peer.data.ok_or_else(|| {
            Refusal::Unusable(format!(
                "peer {subnet} ({public}) publishes no backend data: it is left out"
            ))
        })?;
        let mac = self.mac(data).map_err(|why| {
            Refusal::Unusable(format!("peer {subnet} ({public}) is left out: backend data: {why}"))
        })?;
        self.ranges.check(subnet, public, tunnel.own).map_err(Refusal::Conflict)?;
        let holder = self
            .holders
            .entry((tunnel.link, mac))
            .or_insert_with(|| Holder { public, subnets: BTreeSet::new() });
        if holder.public != public {
            let other = holder.subnets.first().map(ToString::to_string).unwrap_or_default();
            return Err(Refusal::Conflict(format!(
                "peers {other} ({}) and {subnet} ({public}) publish the same VTEP MAC {mac}: \
                 only the first is served; give the second node a new MAC",
                holder.public
            )));
        }
        holder.subnets.insert(subnet);
        let gateway = subnet.network();
        let via = Via::Gateway { link: tunnel.link, gateway, onlink: true };
        self.lead(subnet, public, via, keys);
        self.wanted.neighbours.insert((tunnel.link, gateway), mac);
        self.wanted.forwarding.insert((tunnel.link, mac), public);
        keys.neighbours.insert((tunnel.link, gateway));
        keys.forwarding.insert((tunnel.link, mac));
        Ok(())
    }

    fn lead(&mut self, subnet: IpNet, public: IpAddr, via: Via, keys: &mut Keys) {
        self.ranges.insert(subnet, public);
        self.wanted.direct.insert(subnet, public);
        self.wanted.routes.insert(subnet, via);
        keys.routes.insert(subnet);
    }

    /// Takes back all that came of a peer. Without conflicts all at its subnets is its own.
    fn retract(&mut self, subnets: &Subnets, keys: &mut Keys) {
        self.problems.remove(subnets);
        self.served.remove(subnets);
        for tunnel in &self.tunnels {
            let subnet: Option<IpNet> = match tunnel.family {
                Family::V4 => subnets.v4.map(Into::into),
                Family::V6 => subnets.v6.map(Into::into),
            };
            let Some(subnet) = subnet else { continue };
            // A peer that is not served has nothing, but may share its base with one that is.
            if self.wanted.routes.remove(&subnet).is_none() {
                continue;
            }
            self.ranges.remove(&subnet);
            self.wanted.direct.remove(&subnet);
            keys.routes.insert(subnet);
            let neighbour = (tunnel.link, subnet.network());
            let Some(mac) = self.wanted.neighbours.remove(&neighbour) else { continue };
            keys.neighbours.insert(neighbour);
            let place = (tunnel.link, mac);
            keys.forwarding.insert(place);
            if let Some(holder) = self.holders.get_mut(&place) {
                holder.subnets.remove(&subnet);
                if holder.subnets.is_empty() {
                    self.holders.remove(&place);
                    self.wanted.forwarding.remove(&place);
                }
            }
        }
    }
}

/// A peer's side of one family.
struct Peer<'a> {
    subnet: IpNet,
    public: Option<IpAddr>,
    data: Option<&'a RawJson>,
}

impl<'a> Peer<'a> {
    fn of(family: Family, subnets: &Subnets, attributes: &'a LeaseAttributes) -> Option<Self> {
        Some(match family {
            Family::V4 => Self {
                subnet: subnets.v4?.into(),
                public: attributes.public_ip.map(Into::into),
                data: attributes.backend_data.as_ref(),
            },
            Family::V6 => Self {
                subnet: subnets.v6?.into(),
                public: attributes.public_ipv6.map(Into::into),
                data: attributes.backend_v6_data.as_ref(),
            },
        })
    }
}

#[cfg(test)]
mod tests;
