//! Sequences of events, and what the peers are told of them.

use proptest::prelude::*;

use super::*;
use crate::peer_table::{PeerTable, PeerUpdate};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;

/// A node's text: name, version, age, CIDRs, last byte of its address and MAC.
fn text(name: &str, version: u64, year: u16, cidrs: &[&str], mac: u8) -> String {
    let cidrs = cidrs.iter().map(|cidr| format!("\"{cidr}\"")).collect::<Vec<_>>().join(",");
    let prefix = "flannel.alpha.coreos.com";
    let data = format!(r#"{{\"VNI\":1,\"VtepMAC\":\"02:fa:00:00:00:{mac:02x}\"}}"#);
    format!(
        r#"{{"metadata":{{"name":"{name}","resourceVersion":"{version}","creationTimestamp":"{year}-01-01T00:00:00Z","annotations":{{
            "{prefix}/kube-subnet-manager":"true","{prefix}/backend-type":"vxlan",
            "{prefix}/public-ip":"192.0.2.{mac}","{prefix}/backend-data":"{data}",
            "{prefix}/public-ipv6":"2001:db8::{mac:x}","{prefix}/backend-v6-data":"{data}"}}}},
            "spec":{{"podCIDRs":[{cidrs}]}}}}"#
    )
}

fn node(text: &str) -> Node<'_> {
    serde_json::from_str(text).expect("a node")
}

/// Both tables, as they work together.
struct World {
    names: AnnotationNames,
    scope: Scope,
    nodes: NodeTable,
    peers: PeerTable,
}

impl World {
    fn new() -> Self {
        let config = NetworkConfig::parse_for_kube(CONFIG).expect("good");
        let own = Subnets { v4: "10.77.1.0/24".parse().ok(), v6: "fd77:0:0:1::/64".parse().ok() };
        let mut world = Self {
            names: AnnotationNames::new("flannel.alpha.coreos.com").expect("good"),
            scope: Scope::new(&config, own),
            nodes: NodeTable::default(),
            peers: PeerTable::new(),
        };
        world.list(&[]);
        world
    }

    fn claim(&self, text: &str) -> Claim {
        Claim::read(&self.names, self.scope, &node(text))
    }

    fn list(&mut self, texts: &[String]) {
        let claims = texts.iter().map(|text| self.claim(text)).collect();
        let leases = self.nodes.replace(claims);
        self.peers.apply(PeerUpdate::Snapshot(leases));
    }

    fn put(&mut self, text: &str) -> usize {
        let claim = self.claim(text);
        let changes = self.nodes.put(claim);
        let count = changes.len();
        self.peers.apply(PeerUpdate::Changes(changes));
        count
    }

    fn delete(&mut self, text: &str) {
        let changes = self.nodes.remove(&node(text));
        self.peers.apply(PeerUpdate::Changes(changes));
    }

    /// `subnets -> IPv4 address`, one line each.
    fn peers(&self) -> Vec<String> {
        self.peers
            .peers()
            .map(|(subnets, attributes)| {
                let ip = attributes.public_ip.map(|ip| ip.to_string()).unwrap_or_default();
                format!("{subnets} -> {ip}")
            })
            .collect()
    }
}

const BIRCH: &[&str] = &["fd77:0:0:2::/64", "10.77.2.0/24"];

#[test]
fn a_node_comes_changes_and_goes() {
    let mut world = World::new();
    let first = text("birch", 5, 2025, BIRCH, 12);
    world.put(&first);
    assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.12"]);
    // A heartbeat, and the same event once more.
    assert_eq!(world.put(&text("birch", 6, 2025, BIRCH, 12)), 0);
    assert_eq!(world.put(&text("birch", 6, 2025, BIRCH, 12)), 0);
    assert_eq!(world.put(&text("birch", 7, 2025, BIRCH, 13)), 1);
    assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
    world.put(&text("birch", 8, 2025, &["10.77.9.0/24", "fd77:0:0:2::/64"], 13));
    assert_eq!(world.peers(), ["10.77.9.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
    // What is late changes nothing.
    world.put(&first);
    world.delete(&first);
    assert_eq!(world.peers(), ["10.77.9.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
    world.delete(&text("birch", 9, 2025, BIRCH, 13));
    assert!(world.peers().is_empty());
    world.put(&first);
    assert!(world.peers().is_empty(), "an event of before its deletion brought it back");
    world.put(&text("birch", 20, 2026, BIRCH, 14));
    assert_eq!(world.peers().len(), 1);
}

#[test]
fn a_subnet_given_on_before_its_old_node_is_gone_ends_with_the_living() {
    for old_goes_first in [false, true] {
        let mut world = World::new();
        let old = text("birch", 5, 2025, BIRCH, 12);
        let new = text("cedar", 6, 2026, BIRCH, 13);
        world.put(&old);
        if old_goes_first {
            world.delete(&text("birch", 7, 2025, BIRCH, 12));
            world.put(&new);
        } else {
            world.put(&new);
            assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
            // The old node's kubelet may still have a word to say.
            world.put(&text("birch", 7, 2025, BIRCH, 12));
            world.delete(&text("birch", 8, 2025, BIRCH, 12));
        }
        assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
    }
}

#[test]
fn families_are_decided_one_by_one() {
    let mut world = World::new();
    world.put(&text("birch", 5, 2025, BIRCH, 12));
    world.put(&text("cedar", 6, 2026, &["10.77.2.0/24", "fd77:0:0:3::/64"], 13));
    assert_eq!(
        world.peers(),
        ["fd77:0:0:2::/64 -> 192.0.2.12", "10.77.2.0/24 and fd77:0:0:3::/64 -> 192.0.2.13"]
    );
    world.delete(&text("cedar", 9, 2026, &["10.77.2.0/24", "fd77:0:0:3::/64"], 13));
    assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.12"]);
}

#[test]
fn nobody_gets_our_own_subnet() {
    let mut world = World::new();
    world.put(&text("birch", 5, 2026, &["10.77.1.0/24", "fd77:0:0:2::/64"], 12));
    assert_eq!(world.peers(), ["fd77:0:0:2::/64 -> 192.0.2.12"]);
    world.put(&text("cedar", 6, 2026, &["10.77.0.0/20"], 13));
    assert_eq!(world.peers(), ["fd77:0:0:2::/64 -> 192.0.2.12"]);
}

#[test]
fn rubbish_takes_a_node_out_and_sense_brings_it_back() {
    let mut world = World::new();
    let good = text("birch", 5, 2026, BIRCH, 12);
    world.put(&good);
    for (version, cidrs) in [
        (6, &[][..]),
        (7, &["10.77.2.0/24", "10.77.3.0/24", "10.77.4.0/24"]),
        (8, &["rubbish"]),
        (9, &["10.77.2.0/33"]),
    ] {
        world.put(&text("birch", version, 2026, cidrs, 12));
        assert!(world.peers().is_empty(), "{cidrs:?}");
        world.put(&text("birch", version, 2026, BIRCH, 12));
        assert_eq!(world.peers().len(), 1, "{cidrs:?}");
    }
    let unmanaged = good.replace("\"true\"", "\"false\"").replace("\"5\"", "\"10\"");
    world.put(&unmanaged);
    assert!(world.peers().is_empty());
}

#[test]
fn a_list_replaces_all_and_keeps_who_came_last() {
    let mut world = World::new();
    let old = text("birch", 5, 2026, BIRCH, 12);
    let new = text("cedar", 6, 2026, BIRCH, 13);
    world.put(&old);
    world.put(&new);
    let before = world.peers();
    assert_eq!(before, ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.13"]);
    for order in [[&old, &new], [&new, &old]] {
        world.list(&order.map(Clone::clone));
        assert_eq!(world.peers(), before);
    }
    world.list(&[old]);
    assert_eq!(world.peers(), ["10.77.2.0/24 and fd77:0:0:2::/64 -> 192.0.2.12"]);
}

#[derive(Clone, Debug)]
enum Step {
    Put { node: u8, net: u8, mac: u8 },
    Delete { node: u8 },
    List,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..4u8, 2..5u8, 11..13u8).prop_map(|(node, net, mac)| Step::Put { node, net, mac }),
        3 => (0..4u8).prop_map(|node| Step::Delete { node }),
        1 => Just(Step::List),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    /// Whatever happens: each subnet that a living node has goes to one living node that has it.
    #[test]
    fn every_subnet_goes_to_a_living_node(steps in steps()) {
        let mut world = World::new();
        let mut living = BTreeMap::new();
        let cidr = |net: u8| format!("10.77.{net}.0/24");
        for (index, step) in steps.into_iter().enumerate() {
            let version = u64::try_from(index).expect("few steps") + 10;
            let name = |node: u8| format!("node{node}");
            match step {
                Step::Put { node, net, mac } => {
                    world.put(&text(&name(node), version, 2026, &[&cidr(net)], mac));
                    living.insert(node, (net, mac, version));
                }
                Step::Delete { node } => {
                    if let Some((net, mac, _)) = living.remove(&node) {
                        world.delete(&text(&name(node), version, 2026, &[&cidr(net)], mac));
                    }
                }
                Step::List => {
                    let texts: Vec<_> = living
                        .iter()
                        .map(|(node, (net, mac, version))| {
                            text(&name(*node), *version, 2026, &[&cidr(*net)], *mac)
                        })
                        .collect();
                    world.list(&texts);
                }
            }
            let mut wanted: Vec<_> = living.values().map(|(net, _, _)| *net).collect();
            wanted.sort_unstable();
            wanted.dedup();
            let peers = world.peers();
            prop_assert_eq!(peers.len(), wanted.len(), "{:?} for {:?}", &peers, &living);
            for peer in &peers {
                let fits = living.values().any(|(net, mac, _)| {
                    *peer == format!("{} -> 192.0.2.{mac}", cidr(*net))
                });
                prop_assert!(fits, "{} for {:?}", peer, &living);
            }
        }
    }
}
