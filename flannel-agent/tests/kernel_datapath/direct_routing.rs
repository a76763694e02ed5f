//! Peers on the same link get a plain route, as long as they are on it.

use std::time::Duration;

use crate::host::{HEALED_WITHIN, Node, entries, entries_of, ip, lines, on_host, peer, set};

const DIRECT: &str = r#"{"DirectRouting":true}"#;
const BIRCH: (&str, &str, &str) = ("10.77.2.0/24", "02:fa:00:00:00:12", "192.0.2.12");
const CEDAR: (&str, &str, &str) = ("10.77.3.0/24", "02:fa:00:00:00:13", "198.51.100.13");

fn direct() -> std::collections::BTreeSet<String> {
    let inside = |line: &String| line.starts_with("10.77.");
    lines("ip", "route show dev eth0").into_iter().filter(inside).collect()
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_way_follows_the_underlays_routes() {
    on_host(|| async {
        ip("route add default via 192.0.2.1");
        let mut node = Node::up(DIRECT, false).await;
        let report = node.list([BIRCH, CEDAR].map(|(s, m, p)| peer(s, m, p))).await;
        assert_eq!(report.problems, Vec::<String>::new());
        assert_eq!(report.peers_applied, 2);
        let birch_direct = set(&["10.77.2.0/24 via 192.0.2.12 proto 102"]);
        assert_eq!(direct(), birch_direct);
        assert_eq!(entries("flannel.1"), entries_of(&[CEDAR]));

        // A gateway comes between: from now on by the tunnel.
        ip("route add 192.0.2.12/32 via 192.0.2.1");
        node.until_entries("to the tunnel", "flannel.1", &entries_of(&[BIRCH, CEDAR])).await;
        assert_eq!(direct(), set(&[]));
        // And back.
        ip("route del 192.0.2.12/32");
        node.until_entries("to the link", "flannel.1", &entries_of(&[CEDAR])).await;
        assert_eq!(direct(), birch_direct);

        // What was changed last may be looked at once more. Then nobody changes anything, so
        // nothing is done.
        node.turn(Duration::from_millis(200)).await;
        assert_eq!(node.turn(Duration::from_millis(300)).await, 0, "passes without a reason");
        ip("route del 10.77.2.0/24");
        node.until(HEALED_WITHIN, "the direct route", || direct() == birch_direct).await;

        node.list([]).await;
        assert_eq!((direct(), entries("flannel.1")), (set(&[]), set(&[])));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_direct_route_of_flanneld_goes_with_its_peer() {
    on_host(|| async {
        ip("route add 10.77.2.0/24 via 192.0.2.12 dev eth0 proto boot");
        let mut node = Node::up(DIRECT, false).await;
        node.list([BIRCH].map(|(s, m, p)| peer(s, m, p))).await;
        assert_eq!(direct().len(), 1);
        node.list([]).await;
        assert_eq!(direct(), set(&[]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn direct_routing_can_be_turned_off() {
    on_host(|| async {
        let mut node = Node::up(DIRECT, false).await;
        node.list([BIRCH].map(|(s, m, p)| peer(s, m, p))).await;
        assert_eq!(direct().len(), 1);
        node.restart("{}", false);
        flannel_agent::backend::Backend::prepare(&mut node.backend, None).await.expect("devices");
        node.list([BIRCH].map(|(s, m, p)| peer(s, m, p))).await;
        assert_eq!((direct(), entries("flannel.1")), (set(&[]), entries_of(&[BIRCH])));
    });
}
