//! Whatever a pod sends, the other pod gets the same by the programs as by the kernel's device
//! alone, and the wire carries the same, but for the IP id and the UDP checksum over IPv4.

use std::{collections::BTreeMap, net::IpAddr, time::Instant};

use flannel_lab::{
    craft,
    generated::{self, Ends},
    outcomes,
    prelude::*,
};

/// One subnet to lease, so that every run's packets are the same.
const DUAL: &str = r#"{"Network":"10.77.0.0/16","SubnetMin":"10.77.50.0","SubnetMax":"10.77.50.0",
    "EnableIPv6":true,"IPv6Network":"fd77::/48","IPv6SubnetMin":"fd77:0:0:50::",
    "IPv6SubnetMax":"fd77:0:0:50::","Backend":{"Type":"vxlan"}}"#;

/// Packets of each family, direction and seed; at most 1024, for the ids' sake.
const COUNT: u16 = 1000;

/// Packets by what tells them: family, and id or flow label.
type Seen = BTreeMap<(u8, u32), Vec<Vec<u8>>>;

/// What arrived: at the kernel peer's pod, at ours, and on the wire to the kernel peer.
#[derive(Default)]
struct Observed {
    theirs: Seen,
    ours: Seen,
    wire: Seen,
    /// How many packets the programs sent and took out.
    by_programs: (u64, u64),
    /// How many were taken out in XDP.
    by_xdp: u64,
}

/// Sends the same packets through a network whose agent runs with these flags.
fn observe(flags: &[&str], offload: bool, seed: u64) -> Result<Observed> {
    let lab = Lab::new()?;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, DUAL, true, flags)?;
    let state = if offload { "on" } else { "off" };
    for node in [&duo.alder, duo.birch.node()] {
        node.run(&format!("ethtool -K eth0 tx {state}"))?;
        // What the receiver merges depends on the moment; XDP has veth merge, too.
        for device in ["eth0", "flannel.1", "flannel-v6.1"] {
            node.run(&format!("ethtool -K {device} gro off"))?;
        }
    }
    let mut observed = Observed::default();
    for (from, to) in [(&duo.ours, &duo.theirs), (&duo.theirs, &duo.ours)] {
        let wire = Capture::start(duo.birch.node().ns(), "eth0")?;
        let at_pod = Capture::start(to.ns(), "eth0")?;
        for address in from.addresses() {
            let (ends, peer) = match (address, to.v4()?, to.v6()?) {
                (IpAddr::V4(a), IpAddr::V4(b), _) => (Ends::V4(a, b), IpAddr::from(b)),
                (IpAddr::V6(a), _, IpAddr::V6(b)) => (Ends::V6(a, b), IpAddr::from(b)),
                _ => bail!("addresses of {} and {}", from.name(), to.name()),
            };
            let macs = (gateway_mac(from, address)?, own_mac(from)?);
            let packets = generated::packets(seed, COUNT, ends, macs, offload);
            generated::send(from.ns(), "eth0", &packets)?;
            ensure!(traffic::ping(from.ns(), peer, 1)? == 1, "{peer} is lost");
        }
        quiet(&at_pod)?;
        let sources = from.addresses();
        let outgoing = from.name() == duo.ours.name();
        let seen = if outgoing { &mut observed.theirs } else { &mut observed.ours };
        for frame in at_pod.stop()?.iter().filter(|frame| !frame.outgoing) {
            note(seen, &frame.bytes[14..], &frame.bytes[14..], &sources);
        }
        // What our pod answers to the other direction has ids by chance.
        for frame in wire.stop()?.iter().filter(|frame| outgoing && !frame.outgoing) {
            if let Some(vxlan) = craft::parse(&frame.bytes, 8472)? {
                note(&mut observed.wire, vxlan.packet(), &outer(&frame.bytes), &sources);
            }
        }
    }
    if flags.contains(&"--datapath=ebpf") {
        let count = |number| outcomes::count(&duo.alder, number);
        observed.by_programs = (count(outcomes::ENCAPSULATED)?, count(outcomes::DECAPSULATED)?);
        observed.by_xdp = count(outcomes::FROM_XDP)?;
    }
    Ok(observed)
}

fn gateway_mac(pod: &Pod, family: IpAddr) -> Result<craft::Mac> {
    let gateway = |line: &str| line.split_whitespace().nth(2).map(str::to_owned);
    let flag = if family.is_ipv4() { "-4" } else { "-6" };
    let output = pod.ns().command("ip").args([flag, "route", "show", "default"]).output()?;
    let gateway = gateway(&String::from_utf8_lossy(&output.stdout)).context("no gateway")?;
    let neighbours = pod.ns().ip_json(&format!("neigh show {gateway} dev eth0"))?;
    let mac = neighbours.first().and_then(|entry| entry["lladdr"].as_str());
    craft::mac(mac.with_context(|| format!("{gateway} has no MAC: {neighbours:?}"))?)
}

fn own_mac(pod: &Pod) -> Result<craft::Mac> {
    let links = pod.ns().ip_json("link show eth0")?;
    craft::mac(links.first().and_then(|link| link["address"].as_str()).context("no MAC")?)
}

/// Until nothing comes any more.
fn quiet(capture: &Capture) -> Result<()> {
    let (mut count, mut since) = (0, Instant::now());
    eventually("the last packet", Duration::from_secs(10), || {
        let now = capture.frames().len();
        if now != count {
            (count, since) = (now, Instant::now());
        }
        Ok((since.elapsed() > Duration::from_millis(300)).then_some(()))
    })
}

/// Files a packet, if it is one of these senders' generated ones.
fn note(seen: &mut Seen, packet: &[u8], whole: &[u8], sources: &[IpAddr]) {
    let word = |at: usize| u32::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
    let (key, source, echo) = match packet.first().map(|byte| byte >> 4) {
        Some(4) if packet.len() >= 20 => {
            let source: [u8; 4] = packet[12..16].try_into().unwrap_or_default();
            ((4, word(4) / 64), IpAddr::from(source), packet[9] == 1 && packet.get(20) == Some(&8))
        }
        Some(6) if packet.len() >= 40 => {
            let source: [u8; 16] = packet[8..24].try_into().unwrap_or_default();
            let other = packet[6] == 58 && packet.get(40) != Some(&129);
            ((6, word(2)), IpAddr::from(source), other)
        }
        _ => return,
    };
    // Not our pings, nor what neighbours ask each other.
    if sources.contains(&source) && !echo {
        let mut bytes = whole.to_vec();
        let inner = bytes.len() - packet.len();
        settle(&mut bytes[inner..]);
        seen.entry(key).or_default().push(bytes);
    }
}

/// The outer headers without what differs from network to network, or may differ at all.
fn outer(frame: &[u8]) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    bytes[..12].fill(0);
    let ip_v4 = bytes[12..14] == [8, 0];
    let udp = if ip_v4 { 34 } else { 54 };
    if ip_v4 {
        bytes[18..20].fill(0);
        bytes[24..26].fill(0);
    }
    bytes[udp + 6..udp + 8].fill(0);
    bytes[udp + 16..udp + 28].fill(0);
    bytes
}

/// A transport checksum that is right, or open for a device to complete, is as good as another.
fn settle(packet: &mut [u8]) {
    let v6 = packet[0] >> 4 == 6;
    let (start, protocol) =
        if v6 { (40, packet[6]) } else { (usize::from(packet[0] & 15) * 4, packet[9]) };
    let at = start
        + match protocol {
            6 => 16,
            17 => 6,
            _ => return,
        };
    let end = if v6 { 40 + be(packet, 4) } else { be(packet, 2) };
    let fragment = !v6 && be(packet, 6) & 0x3fff != 0;
    if fragment || packet.len() < at + 2 || packet.len() < end || end < at + 2 {
        return;
    }
    let len = u32::try_from(end - start).unwrap_or_default();
    let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
    let pseudo = [addresses, &len.to_be_bytes(), &[0, 0, 0, protocol]].concat();
    let open = (!craft::checksum(&[&pseudo])).to_be_bytes();
    if craft::checksum(&[&pseudo, &packet[start..end]]) == 0 || packet[at..at + 2] == open {
        packet[at..at + 2].fill(0);
    }
}

fn be(packet: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]))
}

/// The first difference, if any; else how many packets are equal.
fn compare(what: &str, kernel: &Seen, programs: &Seen) -> Result<usize> {
    ensure!(kernel.len() > usize::from(COUNT / 2), "only {} kinds of packets {what}", kernel.len());
    for key in kernel.keys().chain(programs.keys()) {
        let (expected, got) = (kernel.get(key), programs.get(key));
        if expected == got {
            continue;
        }
        let count = |found: Option<&Vec<Vec<u8>>>| found.map_or(0, Vec::len);
        let first = expected.and_then(|e| e.first()).zip(got.and_then(|g| g.first()));
        let difference = first.and_then(|(expected, got)| craft::difference(got, expected));
        bail!(
            "{what}: packet {key:?}: {} by the kernel, {} by the programs; {difference:?}; {:02x?}",
            count(expected),
            count(got),
            first.map(|(expected, _)| &expected[..expected.len().min(130)])
        );
    }
    Ok(kernel.values().map(Vec::len).sum())
}

fn same(offload: bool, seed: u64) -> Result<()> {
    let kernel = observe(&["--datapath=kernel"], offload, seed)?;
    let programs = observe(&["--datapath=ebpf", "--fast-path=stack"], offload, seed)?;
    let (sent, taken) = programs.by_programs;
    let enough = u64::from(COUNT / 4);
    ensure!(sent > enough && taken > enough, "only {sent} sent by programs, {taken} taken out");
    let mut equal = compare("at the kernel peer's pod", &kernel.theirs, &programs.theirs)?;
    equal += compare("at our pod", &kernel.ours, &programs.ours)?;
    equal += compare("on the wire", &kernel.wire, &programs.wire)?;
    println!("{equal} packets are equal; programs sent {sent} and took out {taken}");
    Ok(())
}

/// Merged packets are none of XDP's: the peer's device takes them apart.
#[test]
fn packets_as_a_real_wire_has_them_arrive_the_same_by_xdp() -> Result<()> {
    let seed = 0x5eed_0003;
    let kernel = observe(&["--datapath=kernel"], false, seed)?;
    let flags = ["--datapath=ebpf", "--fast-path=stack", "--xdp=native"];
    let programs = observe(&flags, false, seed)?;
    ensure!(programs.by_xdp > u64::from(COUNT / 4), "only {} taken out in XDP", programs.by_xdp);
    let mut equal = compare("at the kernel peer's pod", &kernel.theirs, &programs.theirs)?;
    equal += compare("at our pod", &kernel.ours, &programs.ours)?;
    equal += compare("on the wire", &kernel.wire, &programs.wire)?;
    println!("{equal} packets are equal; XDP took out {}", programs.by_xdp);
    Ok(())
}

#[test]
fn merged_and_open_packets_arrive_the_same() -> Result<()> {
    same(true, 0x5eed_0001)
}

#[test]
fn packets_as_a_real_wire_has_them_arrive_the_same() -> Result<()> {
    same(false, 0x5eed_0002)
}
