//! Whatever a pod sends, the other pod gets the same by the programs as by the kernel's device
//! alone, and the wire carries the same, but for the IP id and the UDP checksum over IPv4.

use std::net::IpAddr;

use flannel_lab::{
    arrivals::{self, Arrivals},
    craft,
    generated::{self, Ends, Recipe},
    outcomes,
    prelude::*,
};

/// Packets of each family, direction and seed; at most 1024, for the ids' sake.
const COUNT: u16 = 1000;

/// What arrived: at the kernel peer's pod, at ours, and on the wire to the kernel peer.
#[derive(Default)]
struct Observed {
    theirs: Arrivals,
    ours: Arrivals,
    wire: Arrivals,
    /// How many packets the programs sent and took out.
    by_programs: (u64, u64),
    /// How many were taken out in XDP.
    by_xdp: u64,
}

/// Sends the same packets through a network whose agent runs with these flags.
fn observe(flags: &[&str], offload: bool, merged: bool, seed: u64) -> Result<Observed> {
    let lab = Lab::new()?;
    let duo = Duo::repeatable(&lab, LocalStore::new(&lab)?, flags, offload)?;
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
            let macs = (from.gateway_mac(address)?, from.mac()?);
            let recipe = Recipe { seed, ends, macs, merged, tagged: true, open: true, tuple: None };
            generated::send(from.ns(), "eth0", &generated::packets(&recipe, COUNT))?;
            ensure!(traffic::ping(from.ns(), peer, 1)? == 1, "{peer} is lost");
        }
        at_pod.wait_quiet()?;
        let sources = from.addresses();
        let outgoing = from.name() == duo.ours.name();
        let seen = if outgoing { &mut observed.theirs } else { &mut observed.ours };
        for frame in at_pod.stop()?.iter().filter(|frame| !frame.outgoing) {
            seen.note(&frame.bytes[14..], &frame.bytes[14..], &sources);
        }
        // What our pod answers to the other direction has ids by chance.
        for frame in wire.stop()?.iter().filter(|frame| outgoing && !frame.outgoing) {
            if let Some(vxlan) = craft::parse(&frame.bytes, 8472)? {
                observed.wire.note(vxlan.packet(), &arrivals::outer(&frame.bytes), &sources);
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

fn same(offload: bool, merged: bool, seed: u64) -> Result<()> {
    let kernel = observe(&["--datapath=kernel"], offload, merged, seed)?;
    let programs = observe(&["--datapath=ebpf", "--fast-path=stack"], offload, merged, seed)?;
    let (sent, taken) = programs.by_programs;
    let enough = u64::from(COUNT / 4);
    ensure!(sent > enough && taken > enough, "only {sent} sent by programs, {taken} taken out");
    let least = usize::from(COUNT / 2);
    let mut equal = kernel.theirs.compare("at the kernel peer's pod", &programs.theirs, least)?;
    equal += kernel.ours.compare("at our pod", &programs.ours, least)?;
    equal += kernel.wire.compare("on the wire", &programs.wire, least)?;
    println!("{equal} packets are equal; programs sent {sent} and took out {taken}");
    Ok(())
}

/// Merged packets are none of XDP's: the peer's device takes them apart.
#[test]
fn packets_as_a_real_wire_has_them_arrive_the_same_by_xdp() -> Result<()> {
    let seed = 0x5eed_0003;
    let kernel = observe(&["--datapath=kernel"], false, false, seed)?;
    let flags = ["--datapath=ebpf", "--fast-path=stack", "--xdp=native"];
    let programs = observe(&flags, false, false, seed)?;
    ensure!(programs.by_xdp > u64::from(COUNT / 4), "only {} taken out in XDP", programs.by_xdp);
    let least = usize::from(COUNT / 2);
    let mut equal = kernel.theirs.compare("at the kernel peer's pod", &programs.theirs, least)?;
    equal += kernel.ours.compare("at our pod", &programs.ours, least)?;
    equal += kernel.wire.compare("on the wire", &programs.wire, least)?;
    println!("{equal} packets are equal; XDP took out {}", programs.by_xdp);
    Ok(())
}

#[test]
fn merged_and_open_packets_arrive_the_same() -> Result<()> {
    same(true, true, 0x5eed_0001)
}

#[test]
fn packets_as_a_real_wire_has_them_arrive_the_same() -> Result<()> {
    same(false, false, 0x5eed_0002)
}

/// The NIC can neither cut tunnel packets nor complete their checksums: the kernel does it last, by
/// what it was told of the packet.
#[test]
fn merged_packets_are_cut_the_same() -> Result<()> {
    same(false, true, 0x5eed_0005)
}
