//! Two families side by side: the trouble of one is not the other's.

use crate::host::{HEALED_WITHIN, Node, dual_peer, entries, ip, on_host};

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_family_without_an_underlay_address_does_not_hold_up_the_other() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        node.list([dual_peer(12)]).await;
        let both = [entries("flannel.1"), entries("flannel-v6.1")];
        assert_eq!(both.each_ref().map(std::collections::BTreeSet::len), [3, 3]);
        ip("-6 addr flush dev eth0");
        let report = node.list([dual_peer(12), dual_peer(13)]).await;
        assert!(report.device_problem.is_some_and(|problem| problem.contains("flannel-v6.1")));
        assert_eq!(entries("flannel.1").len(), 6, "the new peer in IPv4");
        // The device is still there, so its peers are kept up as well.
        assert_eq!(entries("flannel-v6.1").len(), 6, "the new peer in IPv6");
        ip("route del 10.77.12.0/24");
        node.until(HEALED_WITHIN, "an IPv4 route", || entries("flannel.1").len() == 6).await;

        ip("addr add 2001:db8:a::11/64 dev eth0 nodad");
        node.until(HEALED_WITHIN, "both", || entries("flannel-v6.1").len() == 6).await;
        assert_eq!(node.apply().await.device_problem, None);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_peer_with_one_unusable_half_is_served_in_the_other() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        let mut half = dual_peer(12);
        half.attributes.backend_v6_data = None;
        let report = node.list([half, dual_peer(13)]).await;
        assert_eq!((entries("flannel.1").len(), entries("flannel-v6.1").len()), (6, 3));
        assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
        assert_eq!(report.peers_applied, 1);
    });
}
