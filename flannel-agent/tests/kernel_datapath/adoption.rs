//! What is there before the agent.

use flannel_agent::backend::Backend;

use crate::host::{
    HEALED_WITHIN, Node, entries, entries_of, ip, lines, link_word, on_host, peer, run,
};

const MAC: &str = "02:fa:00:00:00:11";
const BIRCH: (&str, &str, &str) = ("10.77.2.0/24", "02:fa:00:00:00:12", "192.0.2.12");

/// An old flannel's device, as the kernel keeps it when flanneld ends.
fn old_device() {
    ip(&format!(
        "link add flannel.1 address {MAC} mtu 1450 type vxlan id 1 dev eth0 local 192.0.2.11 dstport 8472 nolearning"
    ));
    ip("link set flannel.1 up");
}

fn old_peer(number: u8) {
    let mac = format!("02:fa:00:00:00:{:02}", number + 10);
    ip(&format!("neigh add 10.77.{number}.0 lladdr {mac} dev flannel.1 nud permanent"));
    run(
        "bridge",
        &format!("fdb add {mac} dev flannel.1 dst 192.0.2.{} self permanent", number + 10),
    );
    ip(&format!("route add 10.77.{number}.0/24 via 10.77.{number}.0 dev flannel.1 onlink"));
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn an_old_mess_is_put_right() {
    on_host(|| async {
        old_device();
        ip("addr add 10.77.66.0/32 dev flannel.1");
        ip("addr add 169.254.7.7/16 dev flannel.1");
        ip("addr add 203.0.113.77/24 dev flannel.1");
        for number in [2, 6, 7] {
            old_peer(number);
        }
        for route in [
            "10.77.1.0/24 via 10.77.1.0 dev flannel.1 onlink",
            "10.99.4.0/24 via 10.99.4.0 dev flannel.1 onlink",
            "blackhole 10.77.90.0/24",
            "blackhole 10.77.0.0/16",
            "10.77.200.0/24 via 192.0.2.1 dev eth0",
            "10.77.201.0/24 via 192.0.2.12 dev eth0",
            "172.16.0.0/12 via 10.77.2.0 dev flannel.1 onlink",
        ] {
            ip(&format!("route add {route}"));
        }
        let index = link_word("flannel.1", "qlen");
        let mut monitor = std::process::Command::new("ip")
            .args(["-o", "monitor", "route", "neigh"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a monitor");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;

        let mut node = Node::up(r#"{"MTU":1400}"#, false).await;
        let before = entries("flannel.1");
        node.apply().await;
        let after = entries("flannel.1");
        assert!(
            after.is_superset(
                &before.into_iter().filter(|line| !line.contains("10.77.1.")).collect()
            ),
            "nothing of a peer's goes before the peers are known: {after:#?}"
        );
        let report = node.list([peer(BIRCH.0, BIRCH.1, BIRCH.2)]).await;
        assert_eq!((report.problems, report.device_problem), (vec![], None));
        monitor.kill().expect("killed");
        let heard = monitor.wait_with_output().expect("output");
        let heard = String::from_utf8_lossy(&heard.stdout).into_owned();

        let mut wanted = entries_of(&[BIRCH]);
        wanted.insert("route 172.16.0.0/12 via 10.77.2.0 onlink".to_owned());
        assert_eq!(entries("flannel.1"), wanted);
        assert!(heard.contains("10.77.6.0"), "the monitor heard nothing: {heard}");
        assert!(!heard.contains("10.77.2.0 "), "what was right was touched:\n{heard}");
        assert_eq!(link_word("flannel.1", "mtu").as_deref(), Some("1350"));
        assert_eq!(link_word("flannel.1", "qlen"), index);
        assert_eq!(link_word("flannel.1", "link/ether").as_deref(), Some(MAC));
        assert_eq!((node.backend.mtu(), node.published_mac().as_str()), (1350, MAC));
        let routes = ip("route show");
        for stays in [
            "10.77.200.0/24 via 192.0.2.1",
            "10.77.201.0/24 via 192.0.2.12",
            "blackhole 10.77.0.0/16",
        ] {
            assert!(routes.contains(stays), "{stays} went:\n{routes}");
        }
        assert!(!routes.contains("10.77.90.0") && !routes.contains("10.99.4.0"), "{routes}");
        let addresses = ip("-4 -o addr show dev flannel.1");
        for stays in ["10.77.1.0/32", "169.254.7.7/16", "203.0.113.77/24"] {
            assert!(addresses.contains(stays), "{stays} is not there:\n{addresses}");
        }
        assert!(!addresses.contains("10.77.66.0"), "{addresses}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_restart_changes_nothing() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        let birch = peer(BIRCH.0, BIRCH.1, BIRCH.2);
        node.list([birch.clone()]).await;
        let mac = node.published_mac();
        node.restart("{}", false);
        node.backend.prepare(None).await.expect("devices");
        assert_eq!(node.list([birch]).await.changes, 0);
        assert_eq!(node.published_mac(), mac);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_device_that_has_to_be_made_anew_keeps_its_mac() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        node.apply().await;
        let stored = node.backend.attributes();
        let mac = node.published_mac();
        node.restart(r#"{"Port":4789}"#, false);
        node.backend.prepare(Some(&stored)).await.expect("devices");
        assert_eq!(link_word("flannel.1", "dstport").as_deref(), Some("4789"));
        assert_eq!(node.published_mac(), mac, "from the store");
        node.restart(r#"{"Port":4790}"#, false);
        node.backend.prepare(None).await.expect("devices");
        assert_eq!(node.published_mac(), mac, "from the state file");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn two_flannels_on_a_host_leave_each_other_alone() {
    on_host(|| async {
        let mut node = Node::up("{}", false).await;
        node.list([peer(BIRCH.0, BIRCH.1, BIRCH.2)]).await;
        // The other's network, its device and its direct route, all with the number we use.
        ip("link add flannel.9 type vxlan id 9 dev eth0 local 192.0.2.11 dstport 8473 nolearning");
        ip("link set flannel.9 up");
        ip("route add 10.88.2.0/24 via 10.88.2.0 dev flannel.9 onlink proto 102");
        ip("route add 10.88.3.0/24 via 192.0.2.13 dev eth0 proto 102");
        let before = lines("ip", "route show");
        node.turn(HEALED_WITHIN / 2).await;
        node.apply().await;
        node.restart("{}", false);
        node.backend.prepare(None).await.expect("devices");
        node.list([peer(BIRCH.0, BIRCH.1, BIRCH.2)]).await;
        assert_eq!(lines("ip", "route show"), before);
    });
}
