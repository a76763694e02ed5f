//! Which devices lead to pods: no CNI plugin has to tell.
//!
//! A pod's device is one end of a veth pair that is a port of the bridge which has an address of
//! our subnet, or to which a route into our subnet leads.

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::netlink::{link::Link, mirror::Tables, route::Via};

/// The host's side of the pods' devices, by interface index.
pub fn devices(tables: &Tables, subnets: &[IpNet]) -> BTreeSet<u32> {
    let ours = |net: &IpNet| subnets.iter().any(|subnet| subnet.contains(&net.addr()));
    let bridges: BTreeSet<u32> = tables
        .addresses
        .keys()
        .filter(|address| ours(&address.net))
        .map(|address| address.link)
        .collect();
    let routed: BTreeSet<u32> = tables
        .routes
        .iter()
        .filter(|route| ours(&route.destination))
        .filter_map(|route| match route.via {
            Via::Link(link) => Some(link),
            Via::Gateway { .. } | Via::Blackhole => None,
        })
        .collect();
    let is_pod = |link: &&Link| {
        let port = link.master.is_some_and(|bridge| bridges.contains(&bridge));
        let routed = link.master.is_none() && routed.contains(&link.index);
        link.veth && link.up && (port || routed)
    };
    tables.links.values().filter(is_pod).map(|link| link.index).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::netlink::{address::Address, route::Route};

    const SUBNET: &str = "10.77.1.0/24";

    fn link(index: u32, veth: bool, master: Option<u32>) -> Link {
        Link {
            index,
            name: format!("if{index}"),
            mtu: 1450,
            up: true,
            mac: None,
            vxlan: None,
            veth,
            master,
        }
    }

    fn tables(links: Vec<Link>) -> Tables {
        let mut tables = Tables::default();
        tables.links.extend(links.into_iter().map(|link| (link.index, link)));
        let net = "10.77.1.1/24".parse().expect("a network");
        tables.addresses.insert(Address { link: 9, net }, true);
        tables
    }

    fn found(tables: &Tables) -> Vec<u32> {
        devices(tables, &[SUBNET.parse().expect("a network")]).into_iter().collect()
    }

    #[test]
    fn ports_of_our_bridge_are_pods() {
        let tables = tables(vec![
            link(9, false, None),
            link(2, true, Some(9)),
            link(3, true, Some(8)),
            link(4, false, Some(9)),
            link(5, true, None),
        ]);
        assert_eq!(found(&tables), [2]);
    }

    #[test]
    fn a_device_with_a_route_into_our_subnet_is_a_pod() {
        let mut tables = tables(vec![link(5, true, None), link(6, true, None)]);
        for (link, pod) in [(5, "10.77.1.7"), (6, "10.88.1.7")] {
            let address: IpAddr = pod.parse().expect("an address");
            let destination = address.into();
            tables.routes.insert(Route {
                destination,
                via: Via::Link(link),
                metric: 0,
                protocol: 3,
            });
        }
        assert_eq!(found(&tables), [5]);
    }

    #[test]
    fn a_device_that_is_down_leads_nowhere() {
        let down = Link { up: false, ..link(3, true, Some(9)) };
        assert_eq!(found(&tables(vec![down])), [0_u32; 0]);
    }
}
