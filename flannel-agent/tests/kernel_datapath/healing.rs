//! Somebody meddles: it comes back within a second, and is counted.

use std::time::Duration;

use crate::host::{HEALED_WITHIN, Node, dual_peer, entries, ip, on_host, run};

#[test]
#[ignore = "needs root: cargo xtask test"]
fn every_object_comes_back() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        node.list([dual_peer(12), dual_peer(13)]).await;
        let (v4, v6) = (entries("flannel.1"), entries("flannel-v6.1"));
        assert_eq!((v4.len(), v6.len()), (6, 6));
        for (program, damage) in [
            ("ip", "route del 10.77.12.0/24 dev flannel.1"),
            ("ip", "route replace 10.77.12.0/24 via 10.77.13.0 dev flannel.1 onlink"),
            ("ip", "route flush dev flannel.1"),
            ("ip", "-6 route del fd77:0:0:12::/64 dev flannel-v6.1"),
            ("ip", "-6 route flush dev flannel-v6.1"),
            ("ip", "neigh del 10.77.12.0 dev flannel.1"),
            ("ip", "neigh change 10.77.12.0 lladdr 02:de:ad:00:00:01 dev flannel.1 nud permanent"),
            ("ip", "neigh change 10.77.12.0 lladdr 02:fa:00:00:04:12 dev flannel.1 nud reachable"),
            ("ip", "neigh flush dev flannel-v6.1 nud permanent"),
            ("bridge", "fdb del 02:fa:00:00:04:12 dev flannel.1 dst 192.0.2.12 self"),
            ("bridge", "fdb replace 02:fa:00:00:04:12 dev flannel.1 dst 192.0.2.99 self permanent"),
            ("bridge", "fdb del 02:fa:00:00:06:12 dev flannel-v6.1 dst 2001:db8:a::12 self"),
            ("ip", "addr del 10.77.1.0/32 dev flannel.1"),
            ("ip", "addr flush dev flannel-v6.1"),
            ("ip", "addr add 10.77.55.0/32 dev flannel.1"),
            ("ip", "route add 10.77.55.0/24 via 10.77.55.0 dev flannel.1 onlink"),
            ("ip", "link set flannel.1 down"),
            ("ip", "link set flannel-v6.1 down"),
            ("ip", "link del flannel.1"),
            ("ip", "link del flannel-v6.1"),
        ] {
            let before = node.metrics.repairs.get();
            run(program, damage);
            // The loop must notice by itself, whatever it looks like meanwhile.
            assert_ne!(node.turn(Duration::from_millis(30)).await, 0, "{damage}: not noticed");
            node.until_entries(damage, "flannel.1", &v4).await;
            node.until_entries(damage, "flannel-v6.1", &v6).await;
            let addresses = ip("-o addr show");
            assert!(addresses.contains("10.77.1.0/32") && addresses.contains("fd77:0:0:1::/128"));
            assert!(!addresses.contains("10.77.55.0"), "{addresses}");
            assert!(node.metrics.repairs.get() > before, "{damage}: not counted");
        }
        assert_eq!(node.turn(Duration::from_millis(300)).await, 0, "passes without a reason");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn five_deletions_in_two_seconds() {
    on_host(|| async {
        let mut node = Node::up("{}", true).await;
        node.list((12..32).map(dual_peer)).await;
        let (v4, v6) = (entries("flannel.1"), entries("flannel-v6.1"));
        let mac = node.published_mac();
        for _ in 0..5 {
            for device in ["flannel.1", "flannel-v6.1"] {
                // It may be away still.
                let _ = std::process::Command::new("ip").args(["link", "del", device]).output();
            }
            node.turn(Duration::from_millis(380)).await;
        }
        node.until_entries("IPv4", "flannel.1", &v4).await;
        node.until_entries("IPv6", "flannel-v6.1", &v6).await;
        assert_eq!(node.published_mac(), mac);
    });
}

/// What somebody removes while a pass is at work is noticed too.
#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_deletion_in_the_middle_of_a_pass_is_not_missed() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        let namespace = std::fs::File::open("/proc/thread-self/ns/net").expect("a namespace");
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let meddler = std::thread::spawn(move || {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("entered");
            let mut removed = 0;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let output = std::process::Command::new("ip")
                    .args(["route", "flush", "dev", "flannel.1"])
                    .output()
                    .expect("ip");
                removed += u32::from(output.status.success());
            }
            removed
        });
        for round in 0..60 {
            let peers = (12..=250).map(|n| {
                let mac = format!("02:fa:00:00:{round:02x}:{n:02x}");
                crate::host::peer(&format!("10.77.{n}.0/24"), &mac, &format!("192.0.2.{n}"))
            });
            node.list(peers).await;
            node.turn(Duration::from_millis(5)).await;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_ne!(meddler.join().expect("the meddler"), 0);
        let routes = || entries("flannel.1").iter().filter(|e| e.starts_with("route")).count();
        node.until(HEALED_WITHIN, "all routes", || routes() == 239).await;
    });
}
