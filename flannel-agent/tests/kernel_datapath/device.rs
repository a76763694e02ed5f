//! The device, what it stands on and what stands in its way.

use std::time::Duration;

use flannel_agent::backend::{Backend, BackendError};

use crate::host::{
    HEALED_WITHIN, Node, dual_peer, entries, has_link, ip, link_word, on_host, plug_in_underlay,
};

async fn refused(node: &mut Node) -> String {
    match node.backend.prepare(None).await {
        Err(BackendError::Kernel(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_device_is_as_flannel_makes_it() {
    on_host(|| async {
        let node = Node::up("{}", true).await;
        let v4 = ip("-d link show flannel.1");
        for words in [
            "mtu 1450",
            "vxlan id 1 local 192.0.2.11 dev eth0",
            "dstport 8472 nolearning",
            "ttl auto",
            "noudp6zerocsumtx noudp6zerocsumrx",
        ] {
            assert!(v4.contains(words), "{words} is not in\n{v4}");
        }
        assert!(!v4.contains("gbp") && !v4.contains("noudpcsum"), "{v4}");
        let v6 = ip("-d link show flannel-v6.1");
        assert!(v6.contains("mtu 1430") && v6.contains("local 2001:db8:a::11 dev eth0"), "{v6}");
        for device in ["flannel.1", "flannel-v6.1"] {
            let accept_ra = format!("/proc/sys/net/ipv6/conf/{device}/accept_ra");
            assert_eq!(std::fs::read_to_string(accept_ra).expect("a setting").trim(), "0");
        }
        assert_eq!(node.backend.mtu(), 1430, "the smaller of both");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn options_reach_the_kernel_and_changes_need_no_new_device_where_that_can_be() {
    on_host(|| async {
        let mut node = Node::up(r#"{"VNI":7,"Port":8500,"GBP":true,"MTU":1300}"#, false).await;
        let link = ip("-d link show flannel.7");
        for words in ["mtu 1250", "vxlan id 7", "dstport 8500", "nolearning", "gbp"] {
            assert!(link.contains(words), "{words} is not in\n{link}");
        }
        let index = link.split(':').next().expect("an index").to_owned();
        node.restart(r#"{"VNI":7,"Port":8500,"GBP":true,"Learning":true}"#, false);
        node.backend.prepare(None).await.expect("devices");
        let link = ip("-d link show flannel.7");
        assert!(!link.contains("nolearning") && link.contains("mtu 1450"), "{link}");
        assert_eq!(link.split(':').next(), Some(index.as_str()), "not the same device");
        node.restart(r#"{"VNI":7,"Port":8500,"Learning":true}"#, false);
        node.backend.prepare(None).await.expect("devices");
        let link = ip("-d link show flannel.7");
        assert!(!link.contains("gbp"), "{link}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn an_mtu_that_the_underlay_cannot_carry_is_the_underlays() {
    on_host(|| async {
        let mut node = Node::up(r#"{"MTU":9000}"#, false).await;
        let report = node.list([]).await;
        assert_eq!(report.device_problem, None);
        assert_eq!(link_word("flannel.1", "mtu").as_deref(), Some("1450"));
        assert_eq!(node.backend.mtu(), 1450);
        assert!(
            report.problems.iter().any(|p| p.contains("Backend.MTU 9000") && p.contains("1500")),
            "{:?}",
            report.problems
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_is_in_the_way_is_named() {
    for (theirs, words) in [
        ("link add vxlan9 type vxlan external dstport 8472", ["vxlan9", "8472"]),
        (
            "link add other type vxlan id 1 dev eth0 local 192.0.2.11 dstport 8472",
            ["other", "8472"],
        ),
        (
            "link add other type vxlan id 5 gbp dev eth0 local 192.0.2.11 dstport 8472",
            ["other", "8472"],
        ),
    ] {
        on_host(move || async move {
            ip(theirs);
            let name = words[0];
            ip(&format!("link set {name} up"));
            let mut node = Node::new("{}", false);
            let reason = refused(&mut node).await;
            assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
            assert!(!has_link("flannel.1"), "a half-made device is left");
            assert!(has_link(name), "somebody else's device is gone");
            ip(&format!("link del {name}"));
            node.backend.prepare(None).await.expect("nothing is in the way");
        });
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_port_in_use_is_named() {
    on_host(|| async {
        let socket = std::net::UdpSocket::bind("0.0.0.0:8472").expect("a socket");
        let mut node = Node::new("{}", false);
        let reason = refused(&mut node).await;
        assert!(reason.contains("8472") && reason.contains("in use"), "{reason}");
        drop(socket);
        node.backend.prepare(None).await.expect("nothing is in the way");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_mac_is_put_back() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        node.list([dual_peer(12)]).await;
        let mac = node.published_mac();
        let entries_before = entries("flannel.1");
        ip("link set flannel.1 address 02:de:ad:00:00:01");
        node.until(HEALED_WITHIN, "the MAC", || {
            link_word("flannel.1", "link/ether").as_ref() == Some(&mac)
        })
        .await;
        node.until_entries("the entries", "flannel.1", &entries_before).await;
        assert_eq!(node.published_mac(), mac);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn an_underlay_made_anew_gets_its_tunnels_back() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        node.list((12..32).map(dual_peer)).await;
        let (v4, v6) = (entries("flannel.1"), entries("flannel-v6.1"));
        assert_eq!((v4.len(), v6.len()), (60, 60));
        let published = node.backend.attributes();
        ip("link del eth0");
        assert!(!has_link("flannel.1"), "the kernel takes the tunnels along");
        node.turn(Duration::from_millis(300)).await;
        // Another index and a smaller MTU.
        ip("link add br0 type bridge");
        plug_in_underlay(1400);
        node.until_entries("IPv4", "flannel.1", &v4).await;
        node.until_entries("IPv6", "flannel-v6.1", &v6).await;
        assert_eq!(node.backend.mtu(), 1330);
        assert_eq!(link_word("flannel.1", "mtu").as_deref(), Some("1350"));
        assert_eq!(link_word("flannel-v6.1", "mtu").as_deref(), Some("1330"));
        assert_eq!(node.backend.attributes(), published);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_mtu_follows_the_underlay() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        node.list([dual_peer(12)]).await;
        for (underlay, tunnel) in [(1400, "1350"), (1500, "1450")] {
            ip(&format!("link set eth0 mtu {underlay}"));
            let there = || link_word("flannel.1", "mtu").as_deref() == Some(tunnel);
            node.until(HEALED_WITHIN, "the MTU", there).await;
            assert_eq!(node.backend.mtu(), underlay - 70);
        }
    });
}
