//! From leases to routes.

use std::{io, net::IpAddr};

use ipnet::IpNet;

use super::NAME;
use crate::{
    backend::{
        on_link::OnLink,
        peer_ranges::{self, PeerRanges},
    },
    lease::Subnets,
    netlink::{mirror::Mirror, route::Via},
    peer_table::PeerTable,
    reconciler::{Change, Wanted},
};

/// The external interface and what is on its link.
#[derive(Debug)]
pub struct Segment<'a> {
    name: &'a str,
    link: u32,
    /// All addresses of this host, with the link each is on.
    addresses: Vec<(u32, IpNet)>,
    on_link: &'a OnLink,
}

impl<'a> Segment<'a> {
    /// The segment as the mirror and the look-ups have it.
    ///
    /// # Errors
    /// A sentence if the interface is gone.
    pub fn new(mirror: &Mirror, name: &'a str, on_link: &'a OnLink) -> Result<Self, String> {
        let tables = mirror.tables();
        let link = tables.link(name);
        let link = link.ok_or_else(|| format!("external interface {name} is gone"))?.index;
        let addresses = tables.addresses.keys().map(|a| (a.link, a.net)).collect();
        Ok(Self { name, link, addresses, on_link })
    }

    /// An address of the external interface that a route to `subnet` would lead away from it.
    fn address_within(&self, subnet: IpNet) -> Option<IpAddr> {
        let on_ours = self.addresses.iter().filter(|(link, _)| *link == self.link);
        on_ours.map(|(_, net)| net.addr()).find(|address| subnet.contains(address))
    }

    /// The way to a peer at `public`.
    ///
    /// # Errors
    /// Why there is none, to follow "peer … is left out: ".
    fn way_to(&self, public: IpAddr) -> Result<Via, String> {
        let via = Via::Gateway { link: self.link, gateway: public, onlink: false };
        if self.addresses.iter().any(|(_, net)| net.addr() == public) {
            return Err(format!("its address {public} is our own"));
        }
        // Two interfaces may be on one link: the kernel then answers with either.
        let ours = |(link, net): &(u32, IpNet)| *link == self.link && net.contains(&public);
        match self.on_link.link(public) {
            Some(link) if link == self.link || self.addresses.iter().any(ours) => Ok(via),
            Some(_) => Err(format!(
                "its address {public} is on another link than external interface {}; choose the \
                 interface that all nodes share by --iface",
                self.name
            )),
            None => Err(format!(
                "its address {public} is not on the link of {} but behind a gateway or nowhere, \
                 and host-gw can only route to a next hop on the same link; use vxlan (with \
                 DirectRouting if some nodes share a link)",
                self.name
            )),
        }
    }
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

/// Compiles all peers' leases for the families that `networks` has.
pub fn compile(
    peers: &PeerTable,
    own: Subnets,
    networks: &[IpNet],
    segment: &Segment<'_>,
) -> Compiled {
    let own_nets = nets(own);
    let mut compiled = Compiled {
        wanted: Wanted {
            networks: networks.to_vec(),
            own: own_nets.clone(),
            complete: peers.synced(),
            ..Wanted::default()
        },
        ..Compiled::default()
    };
    let mut ranges = PeerRanges::default();
    for (subnets, attributes) in peers.peers() {
        if attributes.backend_type != NAME {
            compiled.problems.push(format!(
                "peer {subnets} uses backend {:?}, not {NAME}: it is left out",
                attributes.backend_type
            ));
            continue;
        }
        let (mut served, before) = (false, compiled.problems.len());
        for subnet in nets(*subnets) {
            let v4 = matches!(subnet, IpNet::V4(_));
            let Some(own) = own_nets.iter().find(|net| matches!(net, IpNet::V4(_)) == v4) else {
                continue;
            };
            let public = if v4 {
                attributes.public_ip.map(IpAddr::from)
            } else {
                attributes.public_ipv6.map(IpAddr::from)
            };
            match add(&mut compiled.wanted, &mut ranges, subnet, public, *own, segment) {
                Ok(()) => served = true,
                Err(problem) => compiled.problems.push(problem),
            }
        }
        if served && compiled.problems.len() == before {
            compiled.served += 1;
        }
    }
    compiled
}

fn nets(subnets: Subnets) -> Vec<IpNet> {
    subnets.v4.map(IpNet::from).into_iter().chain(subnets.v6.map(IpNet::from)).collect()
}

fn add(
    wanted: &mut Wanted,
    ranges: &mut PeerRanges,
    subnet: IpNet,
    public: Option<IpAddr>,
    own: IpNet,
    segment: &Segment<'_>,
) -> Result<(), String> {
    let public = public.ok_or_else(|| {
        format!("peer {subnet} publishes no address of its family: it is left out")
    })?;
    let left_out = |why| format!("peer {subnet} is left out: {why}");
    peer_ranges::reachable(subnet, public, segment.address_within(subnet)).map_err(left_out)?;
    ranges.check(subnet, public, own)?;
    // Also of a peer that cannot be served: what flanneld had set for it is ours.
    wanted.direct.insert(subnet, public);
    let way = segment.way_to(public);
    let via = way.map_err(left_out)?;
    ranges.insert(subnet, public);
    wanted.routes.insert(subnet, via);
    Ok(())
}

/// The kernel's word about a change, with what it usually means.
pub fn explain(change: &Change, err: &io::Error) -> String {
    let next_hop = match change {
        Change::SetRoute(route) => match route.via {
            Via::Gateway { gateway, .. } => Some(gateway),
            _ => None,
        },
        _ => None,
    };
    match (err.raw_os_error(), next_hop) {
        (Some(libc::EPERM), _) => format!("cannot {change}: {err}: the agent needs CAP_NET_ADMIN"),
        (Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EINVAL), Some(gateway)) => {
            format!("cannot {change}: {err}: the next hop {gateway} is not on the link")
        }
        (_, Some(gateway)) => format!("cannot {change} via {gateway}: {err}"),
        _ => format!("cannot {change}: {err}"),
    }
}
