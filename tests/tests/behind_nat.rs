//! A node behind a NAT: its operator has told peers an address by hand, and what it sends may come
//! from another. The default filter takes that, from this node's subnet only.

use flannel_lab::{
    craft::{self, Mac, Outer},
    generated::{self, Generated},
    kube_stub::annotate,
    outcomes,
    prelude::*,
};

/// As the programs count it.
const UNKNOWN_SOURCE: u32 = 31;

fn link_mac(node: &Node, device: &str) -> Result<Mac> {
    let link = node.link(device)?.with_context(|| format!("no {device}"))?;
    craft::mac(link["address"].as_str().context("no address")?)
}

/// A bare IPv4 packet with an unknown protocol.
fn packet(from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let mut packet = [&[0x45, 0, 0, 28, 0, 1, 0, 0, 64, 253, 0, 0][..], &from, &to].concat();
    let sum = craft::checksum(&[&packet]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend([0; 8]);
    packet
}

#[test]
fn a_peer_behind_a_nat_may_send_from_any_address() -> Result<()> {
    const OVERWRITE: &str = "flannel.alpha.coreos.com/public-ip-overwrite";
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let flags = ["--datapath=ebpf", "--fast-path=stack"];
    let duo = Duo::start(&lab, stub, config, false, &flags)?;
    let nat = lab.node("nat")?;
    let (std::net::IpAddr::V4(ours), std::net::IpAddr::V4(theirs)) =
        (duo.ours.v4()?, duo.theirs.v4()?)
    else {
        bail!("no IPv4")
    };
    let outer = Outer {
        destination_mac: link_mac(&duo.alder, "eth0")?,
        source_mac: link_mac(&nat, "eth0")?,
        source: nat.v4().parse()?,
        destination: duo.alder.v4().parse()?,
        traffic_class: 0,
        ttl: 64,
        dont_fragment: false,
        id: 1,
        flow_label: 0,
        source_port: 45_000,
        destination_port: 8472,
        vni: 1,
        udp_checksum: false,
    };
    let device = link_mac(&duo.alder, "flannel.1")?;
    let peers = link_mac(duo.birch.node(), "flannel.1")?;
    let delivered = |from: [u8; 4]| -> Result<(bool, u64)> {
        let before = outcomes::count(&duo.alder, UNKNOWN_SOURCE)?;
        let inner = craft::ethernet(device, peers, &packet(from, ours.octets()))?;
        let frame = craft::encapsulate(&outer, &inner)?;
        let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
        generated::send(nat.ns(), "eth0", &[Generated::from_frame(&frame)])?;
        at_pod.wait_quiet()?;
        let got = at_pod.stop()?.iter().any(|frame| frame.bytes.get(23) == Some(&253));
        Ok((got, outcomes::count(&duo.alder, UNKNOWN_SOURCE)? - before))
    };
    let theirs = theirs.octets();
    ensure!(delivered(theirs)? == (false, 1), "a stranger's packet");
    let name = {
        let (key, _) = duo.birch.lease();
        flannel_lab::kube_stub::node_of(&key)
    };
    let mut node = duo.store.get(&name)?;
    annotate(&mut node, &json!({ OVERWRITE: duo.birch.node().v4() }));
    duo.store.put(node)?;
    eventually("the node behind the NAT is let in", Duration::from_secs(5), || {
        Ok(delivered(theirs)?.0.then_some(()))
    })?;
    // Nobody else is, and this node's name opens no other door.
    ensure!(delivered([203, 0, 113, 9])? == (false, 1), "somebody else's source");
    ensure!(!delivered([ours.octets()[0], 77, ours.octets()[2], 99])?.0, "one of our own");
    traffic::assert_reaches(&duo.ours, &duo.theirs)
}
