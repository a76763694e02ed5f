use std::net::IpAddr;

use super::*;

/// A packet as the rules see it.
struct Packet {
    source: IpAddr,
    destination: IpAddr,
    mark: u32,
    udp_port: Option<u16>,
    from_here: bool,
}

impl Packet {
    fn new(source: &str, destination: &str) -> Self {
        Self {
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            mark: 0,
            udp_port: None,
            from_here: false,
        }
    }

    fn meets(&self, matched: &Match) -> bool {
        match matched {
            Match::MarkBit(bit) => self.mark & bit == *bit,
            Match::Source(net) => net.contains(&self.source),
            Match::SourceNot(net) => !net.contains(&self.source),
            Match::Destination(net) => net.contains(&self.destination),
            Match::DestinationNot(net) => !net.contains(&self.destination),
            Match::UdpPort(port) => self.udp_port == Some(*port),
            Match::LocalSource => self.from_here,
        }
    }

    fn masqueraded(&self, rules: &[Rule]) -> bool {
        let decides = rules.iter().find(|rule| rule.matches.iter().all(|m| self.meets(m)));
        matches!(decides.map(|rule| rule.verdict), Some(Verdict::Masquerade { .. }))
    }
}

fn wanted() -> FirewallWanted {
    let family = |network: &str, subnet: &str| FamilyWanted {
        network: network.parse().unwrap(),
        subnet: subnet.parse().unwrap(),
    };
    FirewallWanted {
        masquerade: true,
        fully_random: true,
        forward: ForwardPosition::Last,
        exclude: vec!["198.51.100.0/24".parse().unwrap(), "2001:db8:b::/64".parse().unwrap()],
        tunnel_port: Some(8472),
        families: vec![
            family("10.77.0.0/16", "10.77.1.0/24"),
            family("fd77::/48", "fd77:0:0:1::/64"),
        ],
    }
}

#[test]
fn who_is_masqueraded_on_the_way_where() {
    let rows = [
        ("10.77.1.2", "10.77.1.3", false, "own pod to own pod"),
        ("10.77.1.2", "10.77.2.2", false, "own pod to remote pod"),
        ("10.77.2.2", "10.77.1.2", false, "remote pod to own pod"),
        ("10.77.1.2", "203.0.113.80", true, "own pod to the outside"),
        ("10.77.2.2", "203.0.113.80", true, "remote pod to the outside through us"),
        ("10.77.1.2", "224.0.0.251", false, "own pod to multicast"),
        ("10.77.1.2", "198.51.100.7", false, "own pod to an excluded range"),
        ("192.0.2.11", "10.77.2.2", true, "host to remote pod"),
        ("192.0.2.11", "203.0.113.80", false, "host to the outside"),
        ("192.0.2.99", "10.77.1.2", false, "stranger to own pod"),
        ("192.0.2.99", "10.77.2.2", true, "stranger to remote pod"),
        ("fd77:0:0:1::2", "fd77:0:0:2::2", false, "own pod to remote pod, IPv6"),
        ("fd77:0:0:1::2", "2001:db8:c::80", true, "own pod to the outside, IPv6"),
        ("fd77:0:0:1::2", "ff05::fb", false, "own pod to multicast, IPv6"),
        ("fd77:0:0:1::2", "2001:db8:b::7", false, "own pod to an excluded range, IPv6"),
        ("2001:db8:a::11", "fd77:0:0:2::2", true, "host to remote pod, IPv6"),
        ("2001:db8:a::99", "fd77:0:0:1::2", false, "stranger to own pod, IPv6"),
    ];
    let sets = wanted().rule_sets(Lacks::default());
    for (source, destination, masqueraded, what) in rows {
        let packet = Packet::new(source, destination);
        let set = &sets[usize::from(packet.source.is_ipv6())];
        assert_eq!(packet.masqueraded(&set.masquerade), masqueraded, "{what}");
    }
}

#[test]
fn kube_proxys_bit_counts_whatever_other_bits_are_set() {
    let rules = &wanted().rule_sets(Lacks::default())[0].masquerade;
    for (mark, masqueraded) in [(0, true), (0x4000, false), (0xc001, false), (0x8000, true)] {
        let packet = Packet { mark, ..Packet::new("10.77.1.2", "203.0.113.80") };
        assert_eq!(packet.masqueraded(rules), masqueraded, "mark {mark:#x}");
    }
}

#[test]
fn outer_packets_keep_their_source_even_where_nodes_live_in_the_clusters_network() {
    let rules = &wanted().rule_sets(Lacks::default())[0].masquerade;
    let outer = Packet {
        udp_port: Some(8472),
        from_here: true,
        ..Packet::new("10.77.255.11", "192.0.2.12")
    };
    assert!(!outer.masqueraded(rules));
    let pods = Packet { from_here: false, ..outer };
    assert!(pods.masqueraded(rules), "a pod that talks to that port somewhere outside");
}

#[test]
fn a_family_not_in_use_has_no_rules() {
    let mut wanted = wanted();
    wanted.families.truncate(1);
    let sets = wanted.rule_sets(Lacks::default());
    assert!(!sets[0].masquerade.is_empty() && !sets[0].forward.is_empty());
    assert!(sets[1].masquerade.is_empty() && sets[1].forward.is_empty());
}
