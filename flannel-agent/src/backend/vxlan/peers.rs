//! From leases to routes, neighbours and forwarding entries.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{data::VxlanData, device::Family};
use crate::{
    backend::{on_link::OnLink, peer_ranges::PeerRanges},
    lease::{LeaseAttributes, RawJson, Subnets},
    mac::MacAddr,
    netlink::{mirror::Tables, route::Via},
    peer_table::PeerTable,
    reconciler::Wanted,
};

/// One of our devices as it is, with our own subnet of its family.
#[derive(Clone, Copy, Debug)]
pub struct Tunnel {
    /// Its family.
    pub family: Family,
    /// Its index.
    pub link: u32,
    /// Our own subnet.
    pub own: IpNet,
    /// The cluster's network.
    pub network: IpNet,
}

/// What the leases ask for, and what is wrong with them.
#[derive(Debug, Default)]
pub struct Compiled {
    /// The wanted state.
    pub wanted: Wanted,
    /// One sentence per peer that cannot be served as it asks.
    pub problems: Vec<String>,
    /// Peers that are served in every family they have.
    pub served: usize,
}

/// Compiles leases. Backend data is parsed once per text, not once per pass.
#[derive(Debug, Default)]
pub struct Compiler {
    macs: HashMap<RawJson, Result<MacAddr, String>>,
}

impl Compiler {
    /// Compiles all peers' leases. `tables` decides between peers that claim the same MAC: who
    /// has it in the kernel keeps it. `on_link` knows nothing unless direct routing is on.
    pub fn compile(
        &mut self,
        peers: &PeerTable,
        tunnels: &[Tunnel],
        tables: &Tables,
        on_link: &OnLink,
    ) -> Compiled {
        let mut compiled = Compiled {
            wanted: Wanted {
                devices: tunnels.iter().map(|tunnel| tunnel.link).collect(),
                networks: tunnels.iter().map(|tunnel| tunnel.network).collect(),
                own: tunnels.iter().map(|tunnel| tunnel.own).collect(),
                complete: peers.synced(),
                ..Wanted::default()
            },
            ..Compiled::default()
        };
        // Who claims what, to name both sides of a conflict.
        let mut holders: HashMap<(u32, MacAddr), (IpNet, IpAddr)> = HashMap::new();
        let mut ranges = PeerRanges::default();
        let limit = 2 * peers.peers().count() + 64;
        for (subnets, attributes) in self.in_order(peers, tables) {
            if attributes.backend_type != "vxlan" {
                compiled.problems.push(format!(
                    "peer {subnets} uses backend \"{}\", not vxlan: it is left out",
                    attributes.backend_type
                ));
                continue;
            }
            let mut served = false;
            let before = compiled.problems.len();
            for tunnel in tunnels {
                let Some(peer) = Peer::of(tunnel.family, subnets, attributes) else { continue };
                match self.add(
                    &peer,
                    tunnel,
                    &mut compiled.wanted,
                    &mut holders,
                    &mut ranges,
                    on_link,
                ) {
                    Ok(()) => served = true,
                    Err(problem) => compiled.problems.push(problem),
                }
            }
            if served && compiled.problems.len() == before {
                compiled.served += 1;
            }
        }
        if self.macs.len() > limit {
            self.macs.clear();
        }
        compiled
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

    fn add(
        &mut self,
        peer: &Peer<'_>,
        tunnel: &Tunnel,
        wanted: &mut Wanted,
        holders: &mut HashMap<(u32, MacAddr), (IpNet, IpAddr)>,
        ranges: &mut PeerRanges,
        on_link: &OnLink,
    ) -> Result<(), String> {
        let subnet = peer.subnet;
        let public = peer.public.ok_or_else(|| {
            format!("peer {subnet} publishes no address of its family: it is left out")
        })?;
        ranges.check(subnet, public, tunnel.own)?;
        wanted.direct.insert(subnet, public);
        if let Some(link) = on_link.link(public) {
            ranges.insert(subnet, public);
            let via = Via::Gateway { link, gateway: public, onlink: false };
            wanted.routes.insert(subnet, via);
            return Ok(());
        }
        let data = peer.data.ok_or_else(|| {
            format!("peer {subnet} ({public}) publishes no backend data: it is left out")
        })?;
        let mac = self
            .mac(data)
            .map_err(|why| format!("peer {subnet} ({public}) is left out: backend data: {why}"))?;
        if let Some((other, owner)) = holders.get(&(tunnel.link, mac))
            && *owner != public
        {
            return Err(format!(
                "peers {other} ({owner}) and {subnet} ({public}) publish the same VTEP MAC {mac}: \
                 only the first is served; give the second node a new MAC"
            ));
        }
        holders.entry((tunnel.link, mac)).or_insert((subnet, public));
        ranges.insert(subnet, public);
        let gateway = subnet.network();
        let via = Via::Gateway { link: tunnel.link, gateway, onlink: true };
        wanted.routes.insert(subnet, via);
        wanted.neighbours.insert((tunnel.link, gateway), mac);
        wanted.forwarding.insert((tunnel.link, mac), public);
        Ok(())
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
