//! Which peer has an address.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use crate::peer_table::PeerTable;

/// Peers' subnets, none overlapping another, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRoutes(Vec<(Ipv4Net, Ipv4Addr)>);

impl PeerRoutes {
    /// Compiles leases. The backend a peer says it has is not looked at: `udp` publishes none.
    /// `own` are our subnet and our public address. Returns one sentence per peer that cannot be
    /// served as well.
    pub fn compile(peers: &PeerTable, own: (Ipv4Net, Option<Ipv4Addr>)) -> (Self, Vec<String>) {
        let mut problems = Vec::new();
        let mut routes: Vec<(Ipv4Net, Ipv4Addr)> = Vec::new();
        // In the order of their subnets, so that only the last one can overlap the next.
        for (subnets, attributes) in peers.peers() {
            let Some(subnet) = subnets.v4 else { continue };
            let Some(public) = attributes.public_ip else {
                problems.push(format!("peer {subnet} has no PublicIP: it cannot be reached"));
                continue;
            };
            if Some(public) == own.1 {
                problems.push(format!(
                    "peer {subnet} has our own public address {public}: it cannot be reached"
                ));
                continue;
            }
            let last = routes.last().map(|(last, _)| *last);
            let overlaps = |other: &Ipv4Net| other.contains(&subnet) || subnet.contains(other);
            if let Some(other) = last.into_iter().chain([own.0]).find(overlaps) {
                problems.push(format!(
                    "peer {subnet} at {public} overlaps the subnet {other}: it is left out"
                ));
                continue;
            }
            routes.push((subnet, public));
        }
        (Self(routes), problems)
    }

    /// The public address of the peer whose subnet holds `destination`.
    pub fn find(&self, destination: Ipv4Addr) -> Option<Ipv4Addr> {
        let after = self.0.partition_point(|(subnet, _)| subnet.network() <= destination);
        let (subnet, public) = self.0.get(after.checked_sub(1)?)?;
        subnet.contains(&destination).then_some(*public)
    }

    /// How many peers there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        lease::{Lease, LeaseAttributes, Subnets},
        peer_table::PeerUpdate,
    };

    fn net(text: &str) -> Ipv4Net {
        text.parse().expect("a subnet")
    }

    fn compile(leases: &[(Ipv4Net, Option<Ipv4Addr>, &str)]) -> (PeerRoutes, Vec<String>) {
        let leases = leases.iter().map(|(subnet, public_ip, backend)| Lease {
            subnets: Subnets { v4: Some(*subnet), v6: None },
            attributes: LeaseAttributes {
                public_ip: *public_ip,
                backend_type: (*backend).to_owned(),
                ..LeaseAttributes::default()
            },
        });
        let mut table = PeerTable::new();
        table.apply(PeerUpdate::Snapshot(leases.collect()));
        PeerRoutes::compile(&table, (net("10.5.1.0/24"), Some(Ipv4Addr::new(192, 0, 2, 1))))
    }

    #[test]
    fn peers_of_any_backend_are_found_and_nobody_else() {
        let ip = |last| Some(Ipv4Addr::new(192, 0, 2, last));
        let (routes, problems) =
            compile(&[(net("10.5.9.0/24"), ip(9), ""), (net("10.5.2.0/24"), ip(2), "vxlan")]);
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(routes.len(), 2);
        for (destination, public) in [
            ([10, 5, 1, 255], None),
            ([10, 5, 2, 0], ip(2)),
            ([10, 5, 2, 255], ip(2)),
            ([10, 5, 3, 0], None),
            ([10, 5, 9, 7], ip(9)),
            ([10, 5, 10, 0], None),
            ([0, 0, 0, 0], None),
            ([255, 255, 255, 255], None),
        ] {
            assert_eq!(routes.find(destination.into()), public, "{destination:?}");
        }
    }

    #[test]
    fn who_cannot_be_served_is_named_and_harms_nobody() {
        let ip = |last| Some(Ipv4Addr::new(192, 0, 2, last));
        let (routes, problems) = compile(&[
            (net("10.5.2.0/24"), None, ""),
            (net("10.5.3.0/24"), ip(1), ""),
            (net("10.5.4.0/23"), ip(4), ""),
            (net("10.5.5.0/24"), ip(5), ""),
            (net("10.5.1.128/25"), ip(6), ""),
            (net("10.5.7.0/24"), ip(7), ""),
        ]);
        assert_eq!(routes.len(), 2, "{routes:?}");
        assert_eq!(routes.find([10, 5, 5, 1].into()), ip(4));
        assert_eq!(routes.find([10, 5, 7, 1].into()), ip(7));
        for subnet in ["10.5.2.0/24", "10.5.3.0/24", "10.5.5.0/24", "10.5.1.128/25"] {
            assert!(problems.iter().any(|text| text.contains(subnet)), "{subnet}: {problems:?}");
        }
        assert_eq!(problems.len(), 4);
    }

    proptest! {
        /// The search finds what looking at every peer finds.
        #[test]
        fn the_search_is_right(
            peers in proptest::collection::btree_map(2_u8.., 2_u8.., 0..40),
            third in any::<u8>(),
        ) {
            let public = |last| Ipv4Addr::new(192, 0, 2, last);
            let leases: Vec<_> = peers.iter().map(|(third, last)| {
                let subnet = Ipv4Net::new_assert(Ipv4Addr::new(10, 5, *third, 0), 24);
                (subnet, Some(public(*last)), "")
            }).collect();
            let (routes, _) = compile(&leases);
            let found = routes.find(Ipv4Addr::new(10, 5, third, 77));
            prop_assert_eq!(found, peers.get(&third).map(|last| public(*last)));
        }
    }
}
