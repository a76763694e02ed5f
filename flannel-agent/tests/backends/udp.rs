//! The udp backend: its device, its packets, what is in its way.

use std::{
    net::{Ipv4Addr, UdpSocket},
    time::Duration,
};

use flannel_agent::{
    backend::{
        Backend, BackendError,
        udp::{UdpBackend, UdpConfig, UdpOptions},
    },
    lease::RawJson,
    telemetry::metrics::Metrics,
};

use crate::host::{Host, external, has_link, ip, lines, link_word, on_host, peer};

/// How long anything may take to be put right.
const HEALED_WITHIN: Duration = Duration::from_secs(1);

fn backend(port: u16) -> Result<UdpBackend, BackendError> {
    let options = RawJson::from_compact(format!(r#"{{"Type":"udp","Port":{port}}}"#));
    let config = UdpConfig {
        options: UdpOptions::parse(&options)?,
        external: external(),
        ipv4_network: "10.77.0.0/16".parse().ok(),
        blackhole_route: false,
    };
    UdpBackend::new(config, Metrics::default())
}

async fn up(port: u16) -> Host<UdpBackend> {
    let mut backend = backend(port).expect("a backend");
    backend.prepare(None).await.expect("a device");
    Host::new(backend)
}

/// What the device has: its MTU, addresses and routes.
fn device() -> Vec<String> {
    if !has_link("flannel0") {
        return vec!["no device".to_owned()];
    }
    let mut all = vec![format!("mtu {}", link_word("flannel0", "mtu"))];
    let addresses = lines("-4 -o addr show dev flannel0");
    all.extend(addresses.iter().filter_map(|line| line.split(' ').nth(3).map(str::to_owned)));
    all.extend(lines("-4 route show dev flannel0"));
    all
}

const RIGHT: [&str; 3] = ["mtu 1472", "10.77.1.0/32", "10.77.0.0/16 proto 102 scope link"];

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_device_is_made_and_put_right_whatever_happens_to_it() {
    on_host(|| async {
        let mut host = up(8285).await;
        let report = host.list([peer("10.77.2.0/24", "192.0.2.12", "")]).await;
        assert_eq!((report.problems, report.device_problem), (vec![], None));
        assert_eq!((report.peers_applied, host.backend.mtu()), (1, 1472));
        assert_eq!(device(), RIGHT);
        assert_eq!(host.turn(Duration::from_millis(300)).await, 0, "passes without a reason");
        for change in [
            "link del flannel0",
            "addr del 10.77.1.0/32 dev flannel0",
            "route del 10.77.0.0/16 dev flannel0",
            "link set flannel0 down",
            "link set flannel0 mtu 1000",
            "addr add 10.77.9.0/32 dev flannel0",
        ] {
            ip(change);
            host.until(HEALED_WITHIN, change, || device() == RIGHT).await;
        }
        let forwarding = &host.backend.status()["devices"][0]["forwarding"];
        assert_eq!(*forwarding, true, "after all of it");
        // The underlay's MTU is followed.
        ip("link set eth0 mtu 1400");
        host.until(HEALED_WITHIN, "the MTU", || device()[0] == "mtu 1372").await;
        assert_eq!(host.backend.mtu(), 1372);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn packets_go_to_the_peer_that_has_their_destination_bare_and_a_hop_older() {
    on_host(|| async {
        // A peer on the same host: another address, the same port.
        ip("addr add 192.0.2.12/24 dev eth0");
        let far = UdpSocket::bind((Ipv4Addr::new(192, 0, 2, 12), 8285)).expect("bound");
        far.set_read_timeout(Some(Duration::from_secs(5))).expect("patient");
        let mut host = up(8285).await;
        host.list([
            peer("10.77.2.0/24", "192.0.2.12", ""),
            peer("10.77.3.0/24", "192.0.2.13", "vxlan"),
        ])
        .await;
        let sender = UdpSocket::bind((Ipv4Addr::new(10, 77, 1, 0), 0)).expect("our address");
        sender.send_to(b"hello", "10.77.2.9:7").expect("sent");
        let mut packet = [0; 200];
        let (length, from) = far.recv_from(&mut packet).expect("a datagram");
        assert_eq!(from.to_string(), "192.0.2.11:8285");
        // An IPv4 header (RFC 791) with one hop less than Linux starts with, a UDP header, our word.
        assert_eq!((length, packet[0], packet[8], packet[9]), (33, 0x45, 63, 17));
        assert_eq!(packet[12..20], [10, 77, 1, 0, 10, 77, 2, 9]);
        assert_eq!(&packet[28..33], b"hello");

        // And back: addresses and ports swapped, the rest as it came.
        let mut answer = packet[..length].to_vec();
        answer[12..20].rotate_left(4);
        answer[20..24].rotate_left(2);
        far.send_to(&answer, "192.0.2.11:8285").expect("sent");
        sender.set_read_timeout(Some(Duration::from_secs(5))).expect("patient");
        let mut word = [0; 10];
        let (length, from) = sender.recv_from(&mut word).expect("the answer");
        assert_eq!((&word[..length], from.to_string()), (&b"hello"[..], "10.77.2.9:7".to_owned()));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_port_in_use_and_a_route_of_somebody_else_are_named() {
    on_host(|| async {
        let taken = UdpSocket::bind((Ipv4Addr::new(192, 0, 2, 11), 8285)).expect("bound");
        let mut refused = backend(8285).expect("a backend");
        let error = refused.prepare(None).await.expect_err("taken").to_string();
        assert!(error.contains("8285") && error.contains("in use"), "{error}");
        drop(taken);
        refused.prepare(None).await.expect("free again");
        drop(refused);

        ip("route add 10.77.0.0/16 via 192.0.2.1");
        let mut host = up(8285).await;
        let report = host.list([]).await;
        let problem = report.device_problem.expect("a route in the way");
        assert!(problem.contains("10.77.0.0/16"), "{problem}");
        assert!(lines("route show 10.77.0.0/16").iter().any(|line| line.contains("192.0.2.1")));
        ip("route del 10.77.0.0/16 via 192.0.2.1");
        host.until(Duration::from_secs(3), "the way is free", || device() == RIGHT).await;
    });
}
