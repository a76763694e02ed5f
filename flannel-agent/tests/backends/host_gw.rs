//! The host-gw backend: its routes, who is left out, what was there before.

use std::{collections::BTreeSet, time::Duration};

use flannel_agent::{
    backend::{
        Backend,
        host_gw::{HostGwBackend, HostGwConfig},
    },
    external_interface::ExternalInterface,
    lease::Lease,
    telemetry::metrics::Metrics,
};

use crate::host::{Host, external, ip, lines, on_host, peer};

/// How long anything may take to be put right.
const HEALED_WITHIN: Duration = Duration::from_secs(1);

fn config(external: ExternalInterface) -> HostGwConfig {
    HostGwConfig {
        external,
        ipv4_network: "10.77.0.0/16".parse().ok(),
        ipv6_network: "fd77::/48".parse().ok(),
        blackhole_route: false,
    }
}

async fn up() -> Host<HostGwBackend> {
    let mut backend =
        HostGwBackend::new(config(external()), Metrics::default()).expect("a backend");
    backend.prepare(None).await.expect("an interface");
    Host::new(backend)
}

/// Destination and gateway of all routes inside the cluster's networks.
fn routes() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for family in ["-4", "-6"] {
        for line in lines(&format!("{family} route show")) {
            if line.starts_with("10.77.") || line.starts_with("fd77:") {
                all.insert(line.split(' ').take(3).collect::<Vec<_>>().join(" "));
            }
        }
    }
    all
}

fn set(wanted: &[&str]) -> BTreeSet<String> {
    wanted.iter().map(|line| (*line).to_owned()).collect()
}

fn birch() -> Lease {
    peer("10.77.2.0/24", "192.0.2.12", "host-gw")
}

const BIRCH: &str = "10.77.2.0/24 via 192.0.2.12";

#[test]
#[ignore = "needs root: cargo xtask test"]
fn both_families_are_routed_and_put_back_and_go_with_their_peer() {
    on_host(|| async {
        let mut host = up().await;
        let mut dual = birch();
        dual.subnets.v6 = "fd77:0:0:2::/64".parse().ok();
        dual.attributes.public_ipv6 = "2001:db8:a::12".parse().ok();
        let report = host.list([dual]).await;
        assert_eq!((report.problems, report.peers_applied), (vec![], 1));
        let both = set(&[BIRCH, "fd77:0:0:2::/64 via 2001:db8:a::12"]);
        assert_eq!(routes(), both);
        assert_eq!(host.backend.mtu(), 1500);
        assert_eq!(host.turn(Duration::from_millis(300)).await, 0, "passes without a reason");
        for change in ["route del 10.77.2.0/24", "-6 route del fd77:0:0:2::/64"] {
            ip(change);
            host.until(HEALED_WITHIN, change, || routes() == both).await;
        }
        host.list([]).await;
        assert_eq!(routes(), set(&[]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_cannot_be_routed_to_is_named_and_costs_nobody_else() {
    on_host(|| async {
        ip("route add default via 192.0.2.1");
        let mut host = up().await;
        let report = host
            .list([
                birch(),
                peer("10.77.3.0/24", "198.51.100.13", "host-gw"),
                peer("10.77.4.0/24", "192.0.2.11", "host-gw"),
                peer("10.77.5.0/24", "192.0.2.15", "vxlan"),
                peer("10.77.1.128/25", "192.0.2.16", "host-gw"),
            ])
            .await;
        assert_eq!((routes(), report.peers_applied), (set(&[BIRCH]), 1));
        assert_eq!(report.device_problem, None);
        for words in [
            ["10.77.3.0/24", "198.51.100.13", "same link"],
            ["10.77.4.0/24", "192.0.2.11", "our own"],
            ["10.77.5.0/24", "vxlan", "not host-gw"],
            ["10.77.1.128/25", "192.0.2.16", "overlaps"],
        ] {
            let told = |problem: &String| words.iter().all(|word| problem.contains(word));
            assert!(report.problems.iter().any(told), "{words:?} in {:#?}", report.problems);
        }
        assert_eq!(report.problems.len(), 4);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn flannelds_routes_are_adopted_and_users_left_alone() {
    on_host(|| async {
        ip("route add 10.77.2.0/24 via 192.0.2.12 dev eth0 proto boot");
        ip("route add 10.77.9.0/24 via 192.0.2.1 dev eth0 proto static");
        ip("route add 10.77.3.0/24 via 192.0.2.1 dev eth0");
        let mut host = up().await;
        // Before the store has listed all, nothing goes.
        host.apply().await;
        assert!(routes().contains(BIRCH));
        let report = host.list([birch(), peer("10.77.3.0/24", "192.0.2.13", "host-gw")]).await;
        assert!(report.problems[0].contains("10.77.3.0/24 via 192.0.2.1"), "{report:?}");
        let users = ["10.77.9.0/24 via 192.0.2.1", "10.77.3.0/24 via 192.0.2.1"];
        assert_eq!(routes(), set(&[BIRCH, users[0], users[1]]));
        assert_eq!(lines("route show proto 102").len(), 1);
        // The user's route goes, and the peer's takes its place.
        ip("route del 10.77.3.0/24");
        let all = set(&[BIRCH, users[0], "10.77.3.0/24 via 192.0.2.13"]);
        host.until(HEALED_WITHIN, "the place is free", || routes() == all).await;
        host.list([]).await;
        assert_eq!(routes(), set(&users[..1]));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn an_address_that_is_not_the_interfaces_is_refused() {
    on_host(|| async {
        let nat = ExternalInterface { public_ip: "203.0.113.9".parse().ok(), ..external() };
        let error =
            HostGwBackend::new(config(nat), Metrics::default()).err().expect("NAT").to_string();
        for word in ["203.0.113.9", "192.0.2.11", "eth0"] {
            assert!(error.contains(word), "{error}");
        }
    });
}
