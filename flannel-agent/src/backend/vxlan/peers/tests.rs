use proptest::prelude::*;

use super::*;
use crate::{
    lease::Lease,
    peer_table::{Changed, LeaseChange, PeerUpdate},
};

/// A lease out of a few subnets (the last overlaps others), addresses and MACs, so that they
/// clash often.
fn lease(subnet: u8, address: u8, mac: u8) -> Lease {
    let v4 = match subnet {
        7 => "10.77.0.0/21".to_owned(),
        n => format!("10.77.{n}.0/24"),
    };
    let data = format!(r#"{{"VNI":1,"VtepMAC":"02:fa:00:00:00:{mac:02x}"}}"#);
    Lease {
        subnets: Subnets { v4: v4.parse().ok(), v6: None },
        attributes: LeaseAttributes {
            public_ip: (address != 0).then(|| [192, 0, 2, address].into()),
            backend_type: if address == 1 { "host-gw" } else { "vxlan" }.to_owned(),
            backend_data: (mac != 0).then(|| RawJson::from_compact(data)),
            ..LeaseAttributes::default()
        },
    }
}

fn tunnel(link: u32) -> Tunnel {
    Tunnel {
        family: Family::V4,
        link,
        own: "10.77.200.0/24".parse().expect("a network"),
        network: "10.77.0.0/16".parse().expect("a network"),
        local: "192.0.2.99".parse().ok(),
    }
}

fn differing(before: &Wanted, after: &Wanted) -> Keys {
    fn keys<'a, K: Ord + Copy + 'a, V: PartialEq + 'a>(
        before: impl Iterator<Item = (&'a K, &'a V)>,
        after: impl Iterator<Item = (&'a K, &'a V)>,
    ) -> BTreeSet<K> {
        let (before, after): (BTreeMap<_, _>, BTreeMap<_, _>) = (before.collect(), after.collect());
        let all = before.keys().chain(after.keys());
        all.filter(|key| before.get(*key) != after.get(*key)).map(|key| **key).collect()
    }
    Keys {
        routes: keys(before.routes.iter(), after.routes.iter()),
        neighbours: keys(before.neighbours.iter(), after.neighbours.iter()),
        forwarding: keys(before.forwarding.iter(), after.forwarding.iter()),
    }
}

proptest! {
    /// However leases change, compiling the changes comes to the same as compiling all, and
    /// wherever something differs from before is among the places that are compared.
    #[test]
    fn changes_add_up_to_the_whole(
        changes in prop::collection::vec((0_u8..8, 0_u8..6, 0_u8..6, 0_u8..4), 0..60),
    ) {
        let (tables, on_link, tunnels) = (Tables::default(), OnLink::default(), [tunnel(7)]);
        let mut peers = PeerTable::new();
        peers.apply(PeerUpdate::Snapshot(Vec::new()));
        let mut compiler = Compiler::default();
        compiler.compile(&peers, None, &tunnels, &tables, &on_link);
        for chunk in changes.chunks(2) {
            let changes = chunk.iter().map(|&(subnet, address, mac, kind)| {
                let lease = lease(subnet, address, mac);
                if kind == 0 { LeaseChange::Removed(lease.subnets) } else { LeaseChange::Put(lease) }
            });
            let Changed::Peers(changed) = peers.apply(PeerUpdate::Changes(changes.collect()))
            else {
                continue;
            };
            let before = compiler.wanted().clone();
            let keys = compiler.compile(&peers, Some(&changed), &tunnels, &tables, &on_link);
            let mut whole = Compiler::default();
            whole.compile(&peers, None, &tunnels, &tables, &on_link);
            prop_assert_eq!(compiler.wanted(), whole.wanted());
            prop_assert_eq!(compiler.served(), whole.served());
            prop_assert_eq!(compiler.problems().collect::<Vec<_>>(), whole.problems().collect::<Vec<_>>());
            if let Some(keys) = keys {
                let differing = differing(&before, compiler.wanted());
                prop_assert!(differing.routes.is_subset(&keys.routes));
                prop_assert!(differing.neighbours.is_subset(&keys.neighbours));
                prop_assert!(differing.forwarding.is_subset(&keys.forwarding));
            }
        }
    }
}

#[test]
fn another_device_or_a_first_list_is_reason_to_compile_all() {
    let (tables, on_link) = (Tables::default(), OnLink::default());
    let mut peers = PeerTable::new();
    let mut compiler = Compiler::default();
    let one = BTreeSet::from([lease(1, 2, 2).subnets]);
    let put = |n| PeerUpdate::Changes(vec![LeaseChange::Put(lease(n, 1 + n, n))]);
    peers.apply(put(1));
    assert_eq!(compiler.compile(&peers, Some(&one), &[tunnel(7)], &tables, &on_link), None);
    assert!(compiler.compile(&peers, Some(&one), &[tunnel(7)], &tables, &on_link).is_some());
    assert_eq!(compiler.compile(&peers, Some(&one), &[tunnel(8)], &tables, &on_link), None);
    peers.apply(PeerUpdate::Snapshot(vec![lease(1, 2, 1)]));
    assert_eq!(compiler.compile(&peers, Some(&one), &[tunnel(8)], &tables, &on_link), None);
    assert_eq!(compiler.served(), 1);
}
