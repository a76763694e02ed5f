use super::*;

const DEVICE: u32 = 7;

fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

fn wanted_with(peers: &[u8]) -> Wanted {
    let mut wanted = Wanted {
        devices: vec![DEVICE],
        networks: vec![net("10.77.0.0/16")],
        own: vec![net("10.77.1.0/24")],
        complete: true,
        ..Wanted::default()
    };
    for peer in peers {
        let subnet = net(&format!("10.77.{peer}.0/24"));
        let mac = MacAddr([2, 0xfa, 0, 0, 0, *peer]);
        let remote: IpAddr = format!("192.0.2.{peer}").parse().expect("an address");
        let via = Via::Gateway { link: DEVICE, gateway: subnet.network(), onlink: true };
        wanted.routes.insert(subnet, via);
        wanted.neighbours.insert((DEVICE, subnet.network()), mac);
        wanted.forwarding.insert((DEVICE, mac), remote);
        wanted.direct.insert(subnet, remote);
    }
    wanted
}

/// Does to the tables what the kernel would do.
fn make(tables: &mut Tables, changes: &[Change]) {
    for change in changes {
        match *change {
            Change::SetForwarding(e) => drop(tables.forwarding.insert((e.link, e.mac), e.remote)),
            Change::SetNeighbour(e) => drop(tables.neighbours.insert((e.link, e.ip), e.mac)),
            Change::SetRoute(route) => {
                tables.routes.retain(|old| {
                    (old.destination, old.metric) != (route.destination, route.metric)
                });
                tables.routes.insert(route);
            }
            Change::RemoveRoute(route) => assert!(tables.routes.remove(&route), "{route:?}"),
            Change::RemoveNeighbour(e) => drop(tables.neighbours.remove(&(e.link, e.ip))),
            Change::RemoveForwarding(e) => drop(tables.forwarding.remove(&(e.link, e.mac))),
        }
    }
}

fn route(destination: &str, via: Via, protocol: u8) -> Route {
    Route { destination: net(destination), via, metric: 0, protocol }
}

fn onlink(subnet: &str) -> Via {
    Via::Gateway { link: DEVICE, gateway: net(subnet).network(), onlink: true }
}

fn through(link: u32, gateway: &str) -> Via {
    Via::Gateway { link, gateway: gateway.parse().expect("an address"), onlink: false }
}

/// Plans, does it, and checks that nothing is left to do.
fn settle(wanted: &Wanted, tables: &mut Tables) -> Vec<Change> {
    let changes = wanted.plan(tables).changes;
    make(tables, &changes);
    assert_eq!(wanted.plan(tables).changes, [], "a second pass has nothing to do");
    changes
}

#[test]
fn an_empty_kernel_gets_everything_in_the_order_packets_need_it() {
    let wanted = wanted_with(&[2, 3]);
    let mut tables = Tables::default();
    let changes = settle(&wanted, &mut tables);
    let rank = |change: &Change| match change {
        Change::SetForwarding(_) => 0,
        Change::SetNeighbour(_) => 1,
        Change::SetRoute(_) => 2,
        _ => 3,
    };
    assert!(changes.is_sorted_by_key(rank), "{changes:?}");
    assert_eq!(tables.forwarding, wanted.forwarding);
    assert_eq!(tables.neighbours, wanted.neighbours);
    assert_eq!(tables.routes.len(), 2);
}

#[test]
fn what_is_no_longer_wanted_goes_only_when_all_peers_are_known() {
    let mut tables = Tables::default();
    settle(&wanted_with(&[2, 3]), &mut tables);
    let full = tables.routes.clone();
    let mut fewer = wanted_with(&[3]);
    fewer.complete = false;
    settle(&fewer, &mut tables);
    assert_eq!(tables.routes, full);
    fewer.complete = true;
    settle(&fewer, &mut tables);
    assert_eq!(tables.routes.len(), 1);
    assert_eq!(tables.forwarding, fewer.forwarding);
    assert_eq!(tables.neighbours, fewer.neighbours);
}

#[test]
fn a_route_to_our_own_subnet_goes_even_before_the_peers_are_known() {
    let mut wanted = wanted_with(&[]);
    wanted.complete = false;
    let mut tables = Tables::default();
    tables.routes.insert(route("10.77.1.0/24", onlink("10.77.1.0/24"), 3));
    settle(&wanted, &mut tables);
    assert!(tables.routes.is_empty());
}

#[test]
fn other_peoples_routes_stay() {
    let foreign = [
        route("10.77.200.0/24", through(2, "192.0.2.1"), 4),
        route("10.77.1.0/24", Via::Link(9), 2),
        route("10.77.1.0/24", Via::Blackhole, 3),
        route("10.77.0.0/16", Via::Blackhole, 4),
    ];
    let mut tables = Tables::default();
    tables.routes.extend(foreign);
    tables.neighbours.insert((9, "10.77.1.5".parse().expect("an address")), MacAddr([2; 6]));
    let before = (tables.routes.clone(), tables.neighbours.clone());
    settle(&wanted_with(&[]), &mut tables);
    assert_eq!((tables.routes, tables.neighbours), before);
}

#[test]
fn what_an_earlier_flanneld_left_is_adopted_or_removed() {
    let wanted = wanted_with(&[2]);
    let mut tables = Tables::default();
    settle(&wanted, &mut tables);
    tables.routes.clear();
    // flanneld marks its routes as everybody does.
    tables.routes.insert(route("10.77.2.0/24", onlink("10.77.2.0/24"), 3));
    assert_eq!(settle(&wanted, &mut tables), []);
    tables.routes.insert(route("10.77.6.0/24", onlink("10.77.6.0/24"), 3));
    tables.routes.insert(route("10.77.90.0/24", Via::Blackhole, 3));
    tables.forwarding.insert((DEVICE, MacAddr([2, 0, 0, 0, 0, 6])), [192, 0, 2, 16].into());
    assert_eq!(settle(&wanted, &mut tables).len(), 3);
    assert_eq!(tables.routes.len(), 1);
}

#[test]
fn a_black_hole_stands_behind_the_bridges_route_while_it_is_wanted() {
    let mut wanted = wanted_with(&[2]);
    let mut tables = Tables::default();
    let bridge = route("10.77.1.0/24", Via::Link(7), KERNEL_PROTOCOL);
    tables.routes.insert(bridge);
    settle(&wanted, &mut tables);
    wanted.blackhole_own = true;
    let changes = settle(&wanted, &mut tables);
    let [Change::SetRoute(hole)] = changes[..] else { panic!("{changes:?}") };
    assert_eq!((hole.via, hole.destination), (Via::Blackhole, bridge.destination));
    assert!(hole.metric > bridge.metric);
    assert_eq!(settle(&wanted, &mut tables), []);
    wanted.blackhole_own = false;
    assert_eq!(settle(&wanted, &mut tables), [Change::RemoveRoute(hole)]);
    assert!(tables.routes.contains(&bridge));
}

#[test]
fn a_peers_subnet_that_somebody_routes_elsewhere_is_left_to_them() {
    let wanted = wanted_with(&[2]);
    let theirs = route("10.77.2.0/24", through(2, "192.0.2.77"), 4);
    let mut tables = Tables::default();
    tables.routes.insert(theirs);
    let plan = wanted.plan(&tables);
    assert_eq!(plan.taken, [theirs]);
    make(&mut tables, &plan.changes);
    assert!(tables.routes.contains(&theirs));
}

#[test]
fn tunnel_and_direct_route_replace_each_other_in_place() {
    let mut wanted = wanted_with(&[2]);
    let mut tables = Tables::default();
    settle(&wanted, &mut tables);
    let tunnel = wanted.clone();
    wanted.routes.insert(net("10.77.2.0/24"), through(2, "192.0.2.2"));
    wanted.neighbours.clear();
    wanted.forwarding.clear();
    let changes = settle(&wanted, &mut tables);
    assert!(matches!(
        changes[..],
        [Change::SetRoute(_), Change::RemoveNeighbour(_), Change::RemoveForwarding(_)]
    ));
    let changes = settle(&tunnel, &mut tables);
    assert!(matches!(
        changes[..],
        [Change::SetForwarding(_), Change::SetNeighbour(_), Change::SetRoute(_)]
    ));
}

#[test]
fn an_ipv6_tunnel_route_gets_a_step_to_its_gateway_where_a_direct_one_is_in_the_way() {
    let subnet = net("fd77:0:0:2::/64");
    let (gateway, networks) = (subnet.network(), vec![net("fd77::/48")]);
    let via = Via::Gateway { link: DEVICE, gateway, onlink: true };
    let wanted = Wanted {
        routes: [(subnet, via)].into(),
        devices: vec![DEVICE],
        networks,
        complete: true,
        ..Wanted::default()
    };
    let mut tables = Tables::default();
    tables.routes.insert(Route {
        metric: 1024,
        ..route("fd77:0:0:2::/64", through(2, "2001:db8::2"), OUR_PROTOCOL)
    });
    let changes = settle(&wanted, &mut tables);
    let step = net("fd77:0:0:2::/128");
    assert!(matches!(
        changes[..],
        [Change::SetRoute(first), Change::SetRoute(_), Change::RemoveRoute(last)]
            if first.destination == step && first.via == Via::Link(DEVICE) && first == last
    ));
    let left: Vec<_> = tables.routes.iter().map(|route| (route.destination, route.via)).collect();
    assert_eq!(left, [(subnet, via)]);
}

#[test]
fn what_a_vxlan_device_of_before_was_used_for_goes_when_there_is_none() {
    let wanted = Wanted { devices: Vec::new(), ..wanted_with(&[]) };
    let mut tables = Tables::default();
    tables.routes.insert(route("10.77.6.0/24", onlink("10.77.6.0/24"), 3));
    tables.routes.insert(route("10.77.7.0/24", through(2, "192.0.2.1"), 3));
    settle(&wanted, &mut tables);
    let left: Vec<_> = tables.routes.iter().map(|route| route.destination).collect();
    assert_eq!(left, [net("10.77.7.0/24")]);
}

#[test]
fn peers_that_swap_macs_need_neighbours_only() {
    let mut wanted = wanted_with(&[2, 3]);
    let mut tables = Tables::default();
    settle(&wanted, &mut tables);
    let (two, three) = (net("10.77.2.0/24").network(), net("10.77.3.0/24").network());
    wanted.neighbours.insert((DEVICE, two), MacAddr([2, 0xfa, 0, 0, 0, 3]));
    wanted.neighbours.insert((DEVICE, three), MacAddr([2, 0xfa, 0, 0, 0, 2]));
    let changes = settle(&wanted, &mut tables);
    assert!(changes.iter().all(|change| matches!(change, Change::SetNeighbour(_))), "{changes:?}");
    assert_eq!(changes.len(), 2);
}

proptest::proptest! {
    /// Whatever is there: afterwards all that is wanted is there, nothing of ours besides, and
    /// what is not ours is as it was.
    #[test]
    fn any_state_settles(
        peers in proptest::collection::btree_set(2_u8..60, 0..20),
        stale in proptest::collection::vec((1_u8..60, 0_u8..6), 0..30),
    ) {
        let peers: Vec<u8> = peers.into_iter().collect();
        let wanted = wanted_with(&peers);
        let mut tables = Tables::default();
        for (peer, kind) in stale {
            let subnet = format!("10.77.{peer}.0/24");
            let mac = MacAddr([2, 0xee, 0, 0, kind, peer]);
            match kind {
                0 => drop(tables.routes.insert(route(&subnet, onlink(&subnet), 3))),
                1 => drop(tables.routes.insert(route(&subnet, through(2, "192.0.2.9"), OUR_PROTOCOL))),
                2 => drop(tables.forwarding.insert((DEVICE, mac), [192, 0, 2, 200].into())),
                3 => drop(tables.neighbours.insert((DEVICE, net(&subnet).network()), mac)),
                4 => drop(tables.routes.insert(route(&subnet, Via::Link(9), 2))),
                _ => drop(tables.forwarding.insert((9, mac), [192, 0, 2, 201].into())),
            }
        }
        let foreign: Vec<Route> =
            tables.routes.iter().filter(|route| !wanted.ours(route)).copied().collect();
        let plan = wanted.plan(&tables);
        let everywhere = Keys {
            routes: wanted.routes.keys().copied().chain(tables.routes.iter().map(|r| r.destination)).collect(),
            neighbours: wanted.neighbours.keys().chain(tables.neighbours.keys()).copied().collect(),
            forwarding: wanted.forwarding.keys().chain(tables.forwarding.keys()).copied().collect(),
        };
        let sorted = |plan: &Plan| {
            let mut changes: Vec<String> = plan.changes.iter().map(|c| format!("{c:?}")).collect();
            changes.sort();
            changes
        };
        let by_key = wanted.plan_at(&tables, Some(&everywhere));
        proptest::prop_assert_eq!(sorted(&by_key), sorted(&plan));
        proptest::prop_assert_eq!(&by_key.taken, &plan.taken);
        let nowhere = wanted.plan_at(&tables, Some(&Keys::default()));
        proptest::prop_assert_eq!(nowhere, Plan::default());
        let taken: BTreeSet<IpNet> = plan.taken.iter().map(|route| route.destination).collect();
        make(&mut tables, &plan.changes);
        proptest::prop_assert_eq!(wanted.plan(&tables).changes, vec![]);
        for route in &foreign {
            proptest::prop_assert!(tables.routes.contains(route));
        }
        for (destination, via) in &wanted.routes {
            let there = tables.routes.iter().any(|r| r.destination == *destination && r.via == *via);
            proptest::prop_assert!(there || taken.contains(destination));
        }
        for route in tables.routes.iter().filter(|route| wanted.ours(route)) {
            proptest::prop_assert_eq!(wanted.routes.get(&route.destination), Some(&route.via));
        }
        for (key, remote) in &tables.forwarding {
            proptest::prop_assert!(key.0 == 9 || wanted.forwarding.get(key) == Some(remote));
        }
        proptest::prop_assert_eq!(&tables.neighbours, &wanted.neighbours);
    }
}
