//! A stranger on the nodes' network sends what nobody may send, as fast as it can: each frame is
//! refused for its reason, and a peer's stream does not notice.

use flannel_lab::{
    craft::{self, Mac, Outer},
    generated::{self, Generated},
    outcomes,
    prelude::*,
};

/// How often each bad frame is sent.
const TIMES: u32 = 400;

/// Numbers of the refusals, as the programs count them.
const MALFORMED: u32 = 28;
const NO_VNI: u32 = 29;
const WRONG_VNI: u32 = 30;
const UNKNOWN_SOURCE: u32 = 31;
const BROADCAST: u32 = 32;
const NOT_IP: u32 = 33;
const DESTINATION: u32 = 34;
const OWN_SOURCE: u32 = 35;
const OTHER_SOURCE: u32 = 36;
const FOREIGN_SOURCE: u32 = 37;
const CONGESTED: u32 = 38;

fn link_mac(node: &Node, device: &str) -> Result<Mac> {
    let link = node.link(device)?.with_context(|| format!("no {device}"))?;
    craft::mac(link["address"].as_str().context("no address")?)
}

/// A bare IPv4 packet with an unknown protocol.
fn packet(from: [u8; 4], to: [u8; 4], tos: u8) -> Vec<u8> {
    let mut packet = [&[0x45, tos, 0, 28, 0, 1, 0, 0, 64, 253, 0, 0][..], &from, &to].concat();
    let sum = craft::checksum(&[&packet]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend([0; 8]);
    packet
}

/// Bad frames, by what they are refused for.
fn bad(duo: &Duo<LocalStore>, stranger: &Node) -> Result<Vec<(u32, Vec<u8>)>> {
    let (pod, peers_pod) = (octets(&duo.ours)?, octets(&duo.theirs)?);
    let [a, b, c, _] = pod;
    let (device, peers_device) =
        (link_mac(&duo.alder, "flannel.1")?, link_mac(duo.birch.node(), "flannel.1")?);
    let outer = Outer {
        destination_mac: link_mac(&duo.alder, "eth0")?,
        source_mac: link_mac(stranger, "eth0")?,
        // Whoever knows a peer's address can claim to be it.
        source: duo.birch.node().v4().parse()?,
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
    let inside = |to: Mac, packet: &[u8]| craft::ethernet(to, peers_device, packet);
    let good = inside(device, &packet(peers_pod, pod, 0))?;
    let frame = |outer: &Outer, inner: &[u8]| craft::encapsulate(outer, inner);
    let mut no_vni = frame(&outer, &good)?;
    no_vni[42] = 0;
    let mut arp = good.clone();
    arp[12..14].copy_from_slice(&[0x08, 0x06]);
    let stranger = Outer { source: stranger.v4().parse()?, ..outer.clone() };
    Ok(vec![
        // Ends within the inner frame's addresses.
        (MALFORMED, frame(&outer, &good[..8])?),
        (NO_VNI, no_vni),
        (WRONG_VNI, frame(&Outer { vni: 2, ..outer.clone() }, &good)?),
        (UNKNOWN_SOURCE, frame(&stranger, &good)?),
        (BROADCAST, frame(&outer, &inside([0xff; 6], &packet(peers_pod, pod, 0))?)?),
        (NOT_IP, frame(&outer, &arp)?),
        (DESTINATION, frame(&outer, &inside(device, &packet(peers_pod, [a, b, c ^ 1, 9], 0))?)?),
        (OWN_SOURCE, frame(&outer, &inside(device, &packet([a, b, c, 99], pod, 0))?)?),
        (OTHER_SOURCE, frame(&outer, &inside(device, &packet([a, b, 201, 9], pod, 0))?)?),
        (CONGESTED, frame(&Outer { traffic_class: 3, ..outer }, &good)?),
    ])
}

fn octets(pod: &Pod) -> Result<[u8; 4]> {
    match pod.v4()? {
        std::net::IpAddr::V4(v4) => Ok(v4.octets()),
        std::net::IpAddr::V6(v6) => bail!("{v6} for IPv4"),
    }
}

fn start(lab: &Lab, flags: &[&str]) -> Result<(Duo<LocalStore>, Node)> {
    let store = LocalStore::new(lab)?;
    // A third node, whose subnet somebody may claim.
    store.put_lease(
        "10.77.201.0-24",
        &json!({"PublicIP": "192.0.2.201", "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:02:01"}}),
    )?;
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let duo = Duo::start(lab, store, config, false, flags)?;
    Ok((duo, lab.node("stranger")?))
}

fn a_flood(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let (duo, stranger) = start(&lab, flags)?;
    let bad = bad(&duo, &stranger)?;
    let count = || -> Result<Vec<u64>> {
        bad.iter().map(|(reason, _)| outcomes::count(&duo.alder, *reason)).collect()
    };
    let before = count()?;
    let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    let mut datagrams = Datagrams::between(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
    let frames: Vec<Generated> =
        bad.iter().map(|(_, frame)| Generated::from_frame(frame)).collect();
    let (sent, answered) = std::thread::scope(|scope| -> Result<_> {
        let talk = scope.spawn(|| datagrams.talk(Duration::from_secs(2)));
        for _ in 0..TIMES {
            generated::send(stranger.ns(), "eth0", &frames)?;
        }
        talk.join().map_err(|_| anyhow::anyhow!("the conversation panicked"))?
    })?;
    ensure!(sent == answered, "{answered} of {sent} datagrams answered");
    there.stop()?.ensure_none(duo.ours.v4()?)?;
    back.stop()?.ensure_none(duo.theirs.v4()?)?;
    for ((reason, _), (after, before)) in bad.iter().zip(count()?.into_iter().zip(before)) {
        ensure!(
            after - before == u64::from(TIMES),
            "{} of {TIMES} refused for reason {reason}",
            after - before
        );
    }
    let through = at_pod.stop()?;
    let through = through.iter().find(|frame| frame.bytes.get(23) == Some(&253));
    ensure!(through.is_none(), "the pod got {through:?}");
    Ok(())
}

#[test]
fn a_flood_of_bad_frames_costs_a_peers_stream_nothing() -> Result<()> {
    a_flood(&["--datapath=ebpf", "--fast-path=stack"])
}

#[test]
fn a_flood_of_bad_frames_costs_flows_nothing() -> Result<()> {
    a_flood(&["--datapath=ebpf", "--fast-path=flows"])
}

#[test]
fn with_the_programs_only_filtering_it_is_the_same() -> Result<()> {
    let lab = Lab::new()?;
    let (duo, stranger) = start(&lab, &["--datapath=ebpf", "--fast-path=off"])?;
    let bad = bad(&duo, &stranger)?;
    // Without decapsulation the kernel's device sees to congestion.
    for (reason, frame) in bad.iter().filter(|(reason, _)| *reason != CONGESTED) {
        let before = outcomes::count(&duo.alder, *reason)?;
        generated::send(stranger.ns(), "eth0", &[Generated::from_frame(frame)])?;
        eventually(&format!("refused for reason {reason}"), Duration::from_secs(2), || {
            Ok((outcomes::count(&duo.alder, *reason)? == before + 1).then_some(()))
        })?;
    }
    traffic::assert_reaches(&duo.ours, &duo.theirs)
}

/// What the default filter lets pass and the strict one does not: a source that belongs to nobody.
#[test]
fn the_strict_filter_takes_only_the_senders_own() -> Result<()> {
    for (filter, delivered) in [("default", true), ("strict", false), ("off", true)] {
        let lab = Lab::new()?;
        let filter = format!("--peer-filter={filter}");
        let (duo, stranger) = start(&lab, &["--datapath=ebpf", "--fast-path=stack", &filter])?;
        let bad = bad(&duo, &stranger)?;
        let (_, template) =
            bad.iter().find(|(reason, _)| *reason == OTHER_SOURCE).context("none")?;
        let inner = packet([203, 0, 113, 9], octets(&duo.ours)?, 0);
        let mut frame = template.clone();
        frame[64..].copy_from_slice(&inner);
        let before = outcomes::count(&duo.alder, FOREIGN_SOURCE)?;
        let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
        generated::send(stranger.ns(), "eth0", &[Generated::from_frame(&frame)])?;
        at_pod.wait_quiet()?;
        let got = at_pod.stop()?.iter().any(|frame| frame.bytes.get(23) == Some(&253));
        let refused = outcomes::count(&duo.alder, FOREIGN_SOURCE)? - before;
        ensure!(got == delivered, "{filter}: delivered: {got}");
        ensure!(refused == u64::from(!delivered), "{filter}: {refused} refused");
    }
    Ok(())
}
