//! Frames that no pod sends: what comes over the wire with any outer header, and what is put
//! straight into the tunnel's device. The programs do with them what the kernel's device does.

use std::net::IpAddr;

use flannel_lab::{
    arrivals::{self, Arrivals},
    craft::{self, Mac, Outer},
    generated::{self, Ends, Generated, Recipe, Tuple},
    outcomes::{self, DECAPSULATED, ENCAPSULATED},
    prelude::*,
    promoted,
};

/// Packets of each family; every sixteen have all pairs of outer and inner ECN.
const COUNT: u16 = 960;

const SEED: u64 = 0x5eed_0004;

/// The ports of the flow that goes past the stack.
const OURS: u16 = 5001;
const THEIRS: u16 = 5002;

/// The frame's number says what is odd about it; see [`wrapped`].
#[derive(Clone, Copy, PartialEq)]
enum Inside {
    /// Our pods' packets only: what no filter refuses.
    Sane,
    /// With VLAN tags, other MACs, in the other family's tunnel.
    Odd,
}

fn ends(from: IpAddr, to: IpAddr) -> Result<Ends> {
    Ok(match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => Ends::V4(from, to),
        (IpAddr::V6(from), IpAddr::V6(to)) => Ends::V6(from, to),
        _ => bail!("{from} and {to}"),
    })
}

fn link_mac(node: &Node, device: &str) -> Result<Mac> {
    let link = node.link(device)?.with_context(|| format!("no {device}"))?;
    craft::mac(link["address"].as_str().context("no address")?)
}

/// Tunnel packets from the kernel peer to our pod, of one family.
fn wrapped(
    duo: &Duo<LocalStore>,
    v6: bool,
    inside: Inside,
    tuple: Option<Tuple>,
) -> Result<Vec<Generated>> {
    const BROADCAST: Mac = [0xff; 6];
    const NOBODY: Mac = [2, 0xfa, 0, 0, 0x77, 0x77];
    let (alder, birch) = (&duo.alder, duo.birch.node());
    let device = |v6: bool| if v6 { "flannel-v6.1" } else { "flannel.1" };
    let pod = |pod: &Pod| if v6 { pod.v6() } else { pod.v4() };
    let recipe = Recipe {
        seed: SEED,
        ends: ends(pod(&duo.theirs)?, pod(&duo.ours)?)?,
        macs: (link_mac(alder, device(v6))?, link_mac(birch, device(v6))?),
        merged: false,
        tagged: inside == Inside::Odd,
        open: false,
        tuple,
    };
    let (from_mac, to_mac) = (link_mac(birch, "eth0")?, link_mac(alder, "eth0")?);
    let other_family = link_mac(alder, device(!v6))?;
    let mut frames = Vec::new();
    for (number, packet) in (0_u16..).zip(generated::packets(&recipe, COUNT)) {
        let mut inner = packet.frame().to_vec();
        let mut outer_v6 = v6;
        if inside == Inside::Odd {
            match number % 32 {
                5 => inner[..6].copy_from_slice(&BROADCAST),
                11 => inner[..6].copy_from_slice(&NOBODY),
                17 => {
                    outer_v6 = !v6;
                    inner[..6].copy_from_slice(&other_family);
                }
                _ => {}
            }
        }
        let address = |node: &Node| if outer_v6 { node.v6() } else { node.v4() };
        let [_, low] = number.to_be_bytes();
        let outer = Outer {
            destination_mac: to_mac,
            source_mac: from_mac,
            source: address(birch).parse()?,
            destination: address(alder).parse()?,
            // The inner packet's ECN is the number's last two bits, the outer one's are the next.
            traffic_class: low >> 2 & 3 | low & 0xf0,
            ttl: [1, 64, 255][usize::from(number % 3)],
            dont_fragment: number % 2 == 0,
            id: number,
            flow_label: 0,
            // One each: after a burst a flow stays with the kernel's device for a while.
            source_port: 40_000 + number,
            destination_port: 8472,
            vni: 1,
            // Over IPv6 one without is refused by the kernel's device, now and then here as well.
            udp_checksum: if outer_v6 { number % 32 != 19 } else { number % 4 == 0 },
        };
        let mut frame = craft::encapsulate(&outer, &inner)?;
        if outer.udp_checksum && number % 16 == 8 {
            // Wrong outside, whatever it is inside.
            let checksum = if outer_v6 { 60 } else { 40 };
            frame[checksum + 1] ^= 0x10;
        }
        frames.push(Generated::from_frame(&frame));
    }
    Ok(frames)
}

/// What of these reaches our pod, and how many of them programs took out; in a flow: how many went
/// straight to the pod.
fn received(flags: &[&str], inside: Inside, in_flow: bool) -> Result<(Arrivals, u64)> {
    const LONG: &str = "--flow-interval-ms=60000";
    let lab = Lab::new()?;
    let flags: Vec<&str> = flags.iter().copied().chain(in_flow.then_some(LONG)).collect();
    let duo = Duo::repeatable(&lab, LocalStore::new(&lab)?, &flags, true)?;
    let by_kernel = flags.contains(&"--datapath=kernel");
    let count = || -> Result<u64> {
        match (by_kernel, in_flow) {
            (true, _) => Ok(0),
            (false, true) => Ok(promoted::bypassed(&duo.alder, OURS)?.1),
            (false, false) => outcomes::count(&duo.alder, DECAPSULATED),
        }
    };
    let (mut arrived, mut by_programs) = (Arrivals::default(), 0);
    for (ours, theirs) in duo.ours.addresses().into_iter().zip(duo.theirs.addresses()) {
        let (from, to) = (duo.ours.ns(), duo.theirs.ns());
        let mut datagrams = Datagrams::on_ports(from, to, theirs, (OURS, THEIRS))?;
        if in_flow && !by_kernel {
            // The other family's has the same port.
            let end = if ours.is_ipv6() { format!("[{ours}]") } else { ours.to_string() };
            eventually("the flow is promoted", Duration::from_secs(15), || {
                datagrams.talk(Duration::from_millis(50))?;
                let all = promoted::flows(&duo.alder)?;
                let ours = |row: &Value| row["pod"].as_str().is_some_and(|p| p.starts_with(&end));
                Ok(all.iter().any(ours).then_some(()))
            })?;
        }
        let tuple = Tuple { tcp: false, source_port: THEIRS, destination_port: OURS };
        let frames = wrapped(&duo, ours.is_ipv6(), inside, in_flow.then_some(tuple))?;
        let before = count()?;
        let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
        generated::send(duo.birch.node().ns(), "eth0", &frames)?;
        at_pod.wait_quiet()?;
        by_programs += count()? - before;
        for frame in at_pod.stop()?.iter().filter(|frame| !frame.outgoing) {
            arrived.note(&frame.bytes[14..], &frame.bytes[14..], &[theirs]);
        }
    }
    Ok((arrived, by_programs))
}

fn same_from_the_wire(flags: &[&str], inside: Inside, in_flow: bool) -> Result<()> {
    let (kernel, _) = received(&["--datapath=kernel"], inside, in_flow)?;
    let (programs, taken) = received(flags, inside, in_flow)?;
    let equal = kernel.compare("at our pod", &programs, usize::from(COUNT / 2))?;
    ensure!(taken > u64::from(COUNT / 5), "only {taken} taken out by programs");
    println!("{equal} packets are equal; {taken} were taken out by programs");
    Ok(())
}

#[test]
fn any_outer_header_gives_the_same_inside() -> Result<()> {
    same_from_the_wire(&["--datapath=ebpf", "--fast-path=stack"], Inside::Sane, false)
}

#[test]
fn any_outer_header_gives_the_same_straight_into_the_pod() -> Result<()> {
    same_from_the_wire(&["--datapath=ebpf", "--fast-path=flows"], Inside::Sane, true)
}

#[test]
fn without_a_filter_odd_frames_are_the_kernels() -> Result<()> {
    let flags = ["--datapath=ebpf", "--fast-path=stack", "--peer-filter=off"];
    same_from_the_wire(&flags, Inside::Odd, false)
}

#[test]
fn without_a_filter_odd_frames_of_a_flow_are_the_kernels() -> Result<()> {
    let flags = ["--datapath=ebpf", "--fast-path=flows", "--peer-filter=off"];
    same_from_the_wire(&flags, Inside::Odd, true)
}

/// Frames for the tunnel's device itself.
fn into_the_tunnel(duo: &Duo<LocalStore>, device: &str, v6: bool) -> Result<Vec<Generated>> {
    let pod = |pod: &Pod| if v6 { pod.v6() } else { pod.v4() };
    let peer = link_mac(duo.birch.node(), device)?;
    let recipe = Recipe {
        seed: SEED,
        ends: ends(pod(&duo.ours)?, pod(&duo.theirs)?)?,
        macs: (peer, link_mac(&duo.alder, device)?),
        merged: true,
        tagged: true,
        open: true,
        tuple: None,
    };
    let mut packets = generated::packets(&recipe, COUNT);
    let (_, from) = recipe.macs;
    for (number, packet) in (0_u16..).zip(&mut packets) {
        match number % 16 {
            3 => packet.readdress([0xff; 6]),
            7 => packet.readdress([1, 0, 0x5e, 0, 0, 0xfb]),
            11 => packet.readdress([2, 0xfa, 0, 0, 0x77, 0x77]),
            // ARP, LLDP, and nothing at all behind the header.
            13 => {
                let kind = [[0x08, 0x06], [0x88, 0xcc], [0x08, 0x00]][usize::from(number / 16 % 3)];
                let body = if number / 16 % 3 == 2 { 0 } else { 28 + usize::from(number / 64) };
                let filling = vec![number.to_be_bytes()[1]; body];
                let frame = [&peer[..], &from, &kind, &filling].concat();
                *packet = Generated::from_frame(&frame);
            }
            _ => {}
        }
    }
    Ok(packets)
}

/// What these become on the wire: IP packets, other frames, and how many the programs sent.
fn sent(flags: &[&str]) -> Result<(Arrivals, Vec<Vec<u8>>, u64)> {
    let lab = Lab::new()?;
    let duo = Duo::repeatable(&lab, LocalStore::new(&lab)?, flags, true)?;
    let (mut packets, mut others) = (Arrivals::default(), Vec::new());
    for (device, v6) in [("flannel.1", false), ("flannel-v6.1", true)] {
        let frames = into_the_tunnel(&duo, device, v6)?;
        let wire = Capture::start(duo.birch.node().ns(), "eth0")?;
        generated::send(duo.alder.ns(), device, &frames)?;
        wire.wait_quiet()?;
        let from = link_mac(&duo.alder, device)?;
        for frame in wire.stop()?.iter().filter(|frame| !frame.outgoing) {
            let Some(vxlan) = craft::parse(&frame.bytes, 8472)? else { continue };
            let outer = arrivals::outer(&frame.bytes);
            match vxlan.inner.get(12..14) {
                Some([8, 0] | [0x86, 0xdd]) if vxlan.packet().len() > 19 => {
                    packets.note(vxlan.packet(), &outer, &duo.ours.addresses());
                }
                _ if vxlan.inner.get(6..12) == Some(&from[..]) => others.push(outer),
                _ => {}
            }
        }
    }
    others.sort();
    let by_kernel = flags.contains(&"--datapath=kernel");
    let by_programs = if by_kernel { 0 } else { outcomes::count(&duo.alder, ENCAPSULATED)? };
    Ok((packets, others, by_programs))
}

#[test]
fn whatever_enters_the_tunnels_device_leaves_it_the_same() -> Result<()> {
    let (kernel, kernels_others, _) = sent(&["--datapath=kernel"])?;
    let (programs, others, by_programs) = sent(&["--datapath=ebpf", "--fast-path=stack"])?;
    let equal = kernel.compare("on the wire", &programs, usize::from(COUNT / 2))?;
    ensure!(kernels_others.len() > usize::from(COUNT / 16), "{} others", kernels_others.len());
    for (expected, got) in kernels_others.iter().zip(&others) {
        ensure!(expected == got, "{:?}", craft::difference(got, expected));
    }
    ensure!(kernels_others.len() == others.len(), "{} others", others.len());
    ensure!(by_programs > u64::from(COUNT / 4), "only {by_programs} sent by programs");
    println!(
        "{equal} packets and {} other frames are equal; programs sent {by_programs}",
        others.len()
    );
    Ok(())
}
