//! Peers come, change, clash and go.

use flannel_agent::{
    lease::{Lease, RawJson},
    peer_table::LeaseChange::{Put, Removed},
};

use crate::host::{Node, entries, entries_of, ip, on_host, peer, set, subnets};

const S3: &str = "10.77.3.0/24";
const S4: &str = "10.77.4.0/24";
const M13: &str = "02:fa:00:00:00:13";
const M14: &str = "02:fa:00:00:00:14";
const M33: &str = "02:fa:00:00:00:33";

fn put(lease: Lease) -> flannel_agent::peer_table::LeaseChange {
    Put(lease)
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_change_leaves_nothing_of_the_old() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        let four = (S4, M14, "192.0.2.14");
        node.list([peer(four.0, four.1, four.2)]).await;
        for (mac, public) in [
            (M13, "192.0.2.13"),
            (M13, "192.0.2.33"),
            (M33, "192.0.2.33"),
            (M13, "192.0.2.13"),
            (M33, "192.0.2.33"),
        ] {
            let report = node.change(vec![put(peer(S3, mac, public))]).await;
            assert_eq!(report.problems, Vec::<String>::new());
            assert_eq!(entries("flannel.1"), entries_of(&[(S3, mac, public), four]));
        }
        node.change(vec![Removed(subnets(S3, None))]).await;
        assert_eq!(entries("flannel.1"), entries_of(&[four]));
        node.change(vec![Removed(subnets(S4, None))]).await;
        assert_eq!(entries("flannel.1"), set(&[]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn two_peers_swap_in_every_way() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        let (p3, p4) = ("192.0.2.13", "192.0.2.14");
        node.list([peer(S3, M13, p3), peer(S4, M14, p4)]).await;
        for [(m3, a3), (m4, a4)] in [
            [(M14, p4), (M13, p3)],
            [(M13, p4), (M14, p3)],
            [(M13, p3), (M14, p4)],
            [(M14, p3), (M13, p4)],
        ] {
            let report = node.change(vec![put(peer(S3, m3, a3)), put(peer(S4, m4, a4))]).await;
            assert_eq!(report.problems, Vec::<String>::new());
            assert_eq!(entries("flannel.1"), entries_of(&[(S3, m3, a3), (S4, m4, a4)]));
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn of_two_with_one_mac_the_earlier_keeps_it() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        node.list([peer(S4, M13, "192.0.2.14")]).await;
        let report = node.change(vec![put(peer(S3, M13, "192.0.2.13"))]).await;
        assert_eq!(report.problems.len(), 1);
        for word in [S3, S4, "192.0.2.13", "192.0.2.14", M13] {
            assert!(report.problems[0].contains(word), "{word}: {}", report.problems[0]);
        }
        assert_eq!(report.peers_applied, 1);
        assert_eq!(entries("flannel.1"), entries_of(&[(S4, M13, "192.0.2.14")]));
        assert_eq!(node.apply().await.problems, report.problems, "the same sentence each time");
        // The first leaves; the second gets what it asks for.
        node.change(vec![Removed(subnets(S4, None))]).await;
        assert_eq!(entries("flannel.1"), entries_of(&[(S3, M13, "192.0.2.13")]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn an_unusable_peer_costs_nobody_else() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        let good = (S3, M13, "192.0.2.13");
        let mut windows = peer("10.77.5.0/24", "", "192.0.2.15");
        windows.attributes.backend_data =
            Some(RawJson::from_compact(r#"{"VNI":4096,"VtepMAC":""}"#));
        let mut other = peer("10.77.6.0/24", M14, "192.0.2.16");
        other.attributes.backend_type = "host-gw".to_owned();
        let bare = peer("10.77.7.0/24", M14, "no address");
        let ours = peer("10.77.0.0/23", M14, "192.0.2.17");
        let overlapping = peer("10.77.3.128/25", M33, "192.0.2.18");
        let report = node
            .list([windows, other, bare, ours, overlapping, peer(good.0, good.1, good.2)])
            .await;
        assert_eq!(report.problems.len(), 5, "{:#?}", report.problems);
        for word in ["10.77.5.0/24", "host-gw", "10.77.7.0/24", "10.77.0.0/23", "10.77.3.128/25"] {
            assert!(report.problems.iter().any(|problem| problem.contains(word)), "{word}");
        }
        assert_eq!(entries("flannel.1"), entries_of(&[good]));
        assert_eq!(report.peers_applied, 1);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_users_route_to_a_peers_subnet_wins_only_at_our_metric() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        ip("route add 10.77.3.0/24 via 192.0.2.1 dev eth0");
        ip("route add 10.77.4.0/24 via 192.0.2.1 dev eth0 metric 50");
        let theirs = ip("route show dev eth0");
        let report = node.list([peer(S3, M13, "192.0.2.13"), peer(S4, M14, "192.0.2.14")]).await;
        assert_eq!(ip("route show dev eth0"), theirs);
        assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
        assert!(report.problems[0].contains("10.77.3.0/24 via 192.0.2.1"), "{:?}", report.problems);
        assert!(entries("flannel.1").contains("route 10.77.4.0/24 via 10.77.4.0 onlink"));
        assert_eq!(report.peers_applied, 1);
        ip("route del 10.77.3.0/24 dev eth0");
        let wanted = entries_of(&[(S3, M13, "192.0.2.13"), (S4, M14, "192.0.2.14")]);
        node.until_entries("the route is free", "flannel.1", &wanted).await;
    });
}
