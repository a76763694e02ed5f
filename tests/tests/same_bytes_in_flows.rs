//! What goes past the host's stack arrives as it does by the kernel's path, byte for byte: packets
//! of every kind that all belong to a promoted flow, both ways, over both families.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd},
};

use flannel_lab::{
    arrivals::{self, Arrivals},
    craft,
    generated::{self, Ends, Recipe, Tuple},
    netns::Netns,
    prelude::*,
    process, promoted,
};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};

/// Longer than a leg of the story takes: once promoted, all that may go past the stack does.
const INTERVAL: &str = "--flow-interval-ms=60000";

/// Packets of each family, protocol and direction.
const COUNT: u16 = 600;

const PATIENCE: Duration = Duration::from_secs(5);

/// The ends of a connection between two pods.
enum Connection {
    Udp(UdpSocket, UdpSocket),
    Tcp(TcpStream, TcpStream),
}

impl Connection {
    fn open(from: (&Netns, SocketAddr), to: (&Netns, SocketAddr), tcp: bool) -> Result<Self> {
        let (ours, theirs) = (from.1, to.1);
        if !tcp {
            let open = |at: SocketAddr, other: SocketAddr| {
                move || {
                    let socket = UdpSocket::bind(at)?;
                    socket.connect(other)?;
                    socket.set_read_timeout(Some(PATIENCE))?;
                    Ok(socket)
                }
            };
            let ours_end = from.0.within(open(ours, theirs))?;
            return Ok(Self::Udp(ours_end, to.0.within(open(theirs, ours))?));
        }
        let listener = to.0.within(move || Ok(TcpListener::bind(theirs)?))?;
        let stream = from.0.within(move || connect_from(ours, theirs))?;
        let (accepted, _) = listener.accept()?;
        for stream in [&stream, &accepted] {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_nodelay(true)?;
        }
        Ok(Self::Tcp(stream, accepted))
    }

    /// A word there and a word back.
    fn talk(&mut self) -> Result<()> {
        let mut word = [0; 4];
        match self {
            Self::Udp(ours, theirs) => {
                ours.send(b"ping")?;
                theirs.recv(&mut word).context("no ping")?;
                theirs.send(b"pong")?;
                ours.recv(&mut word).context("no pong")?;
            }
            Self::Tcp(ours, theirs) => {
                ours.write_all(b"ping")?;
                theirs.read_exact(&mut word).context("no ping")?;
                theirs.write_all(b"pong")?;
                ours.read_exact(&mut word).context("no pong")?;
            }
        }
        Ok(())
    }
}

fn connect_from(own: SocketAddr, target: SocketAddr) -> Result<TcpStream> {
    let family = if own.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket: OwnedFd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(own))?;
    connect(socket.as_raw_fd(), &SockaddrStorage::from(target))?;
    // SAFETY: the descriptor is ours alone, and handed over.
    Ok(unsafe { TcpStream::from_raw_fd(socket.into_raw_fd()) })
}

/// Keeps the pods' own TCP from answering generated packets, which it takes for its connection's.
fn hush(pods: [&Netns; 2], quiet: bool) -> Result<()> {
    const QUIET: &[&str] = &[
        "add table inet hush",
        "add chain inet hush output { type filter hook output priority 0 ; }",
        "add rule inet hush output meta l4proto tcp drop",
    ];
    const AS_BEFORE: &[&str] = &["delete table inet hush"];
    for pod in pods {
        for line in if quiet { QUIET } else { AS_BEFORE } {
            process::output(pod.command("nft").args(line.split_whitespace()))?;
        }
    }
    Ok(())
}

/// What arrived at the pods and on the wire to the kernel peer.
#[derive(Default)]
struct Observed {
    theirs: Arrivals,
    ours: Arrivals,
    wire: Arrivals,
    /// How many went past the stack, of how many.
    bypassed: (u64, u64),
}

/// Sends the same packets, all of one connection, through a network whose agent runs with these
/// flags.
fn observe(flags: &[&str], offload: bool, tcp: bool) -> Result<Observed> {
    let lab = Lab::new()?;
    let duo = Duo::repeatable(&lab, LocalStore::new(&lab)?, flags, offload)?;
    let in_flows = flags.contains(&"--fast-path=flows");
    let mut observed = Observed::default();
    for (number, (ours, theirs)) in
        (0_u16..).zip(duo.ours.addresses().into_iter().zip(duo.theirs.addresses()))
    {
        let (source_port, destination_port) = (5001 + number * 10, 5002 + number * 10);
        let mut connection = Connection::open(
            (duo.ours.ns(), SocketAddr::new(ours, source_port)),
            (duo.theirs.ns(), SocketAddr::new(theirs, destination_port)),
            tcp,
        )?;
        let there = Tuple { tcp, source_port, destination_port };
        let back = Tuple { tcp, source_port: destination_port, destination_port: source_port };
        if in_flows {
            eventually("the flow is promoted", Duration::from_secs(15), || {
                connection.talk()?;
                Ok(promoted::flow(&duo.alder, source_port)?.is_some().then_some(()))
            })?;
        } else {
            connection.talk()?;
        }
        let pods = [duo.ours.ns(), duo.theirs.ns()];
        hush(pods, true)?;
        for (from, to, source, destination, tuple) in [
            (&duo.ours, &duo.theirs, ours, theirs, there),
            (&duo.theirs, &duo.ours, theirs, ours, back),
        ] {
            let outgoing = from.name() == duo.ours.name();
            let ends = match (source, destination) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => Ends::V4(source, destination),
                (IpAddr::V6(source), IpAddr::V6(destination)) => Ends::V6(source, destination),
                _ => bail!("{source} and {destination}"),
            };
            let recipe = Recipe {
                seed: 0x5eed_0003,
                ends,
                macs: (from.gateway_mac(source)?, from.mac()?),
                merged: offload,
                tagged: true,
                open: true,
                tuple: Some(tuple),
            };
            let packets = generated::packets(&recipe, COUNT);
            let before = promoted_packets(&duo, in_flows, source_port)?;
            let wire = Capture::start(duo.birch.node().ns(), "eth0")?;
            let at_pod = Capture::start(to.ns(), "eth0")?;
            generated::send(from.ns(), "eth0", &packets)?;
            at_pod.wait_quiet()?;
            let seen = if outgoing { &mut observed.theirs } else { &mut observed.ours };
            for frame in at_pod.stop()?.iter().filter(|frame| !frame.outgoing) {
                seen.note(&frame.bytes[14..], &frame.bytes[14..], &[source]);
            }
            for frame in wire.stop()?.iter().filter(|frame| outgoing && !frame.outgoing) {
                if let Some(vxlan) = craft::parse(&frame.bytes, 8472)? {
                    let outer = arrivals::outer(&frame.bytes);
                    observed.wire.note(vxlan.packet(), &outer, &[source]);
                }
            }
            if in_flows {
                let after = promoted_packets(&duo, true, source_port)?;
                let way = if outgoing { after.0 - before.0 } else { after.1 - before.1 };
                // What has options, is a fragment, has a VLAN tag, is too big or about to expire
                // is not for a bypass: about half.
                ensure!(
                    way > u64::from(COUNT / 4) && way < u64::from(COUNT),
                    "{source} to {destination}: {way} of {COUNT} went past the stack"
                );
                observed.bypassed.0 += way;
            }
            observed.bypassed.1 += u64::from(COUNT);
        }
        hush(pods, false)?;
        // The connection outlives all of this.
        if tcp {
            connection.talk()?;
        }
    }
    Ok(observed)
}

fn promoted_packets(duo: &Duo<LocalStore>, in_flows: bool, port: u16) -> Result<(u64, u64)> {
    if !in_flows {
        return Ok((0, 0));
    }
    ensure!(promoted::flow(&duo.alder, port)?.is_some(), "the flow is no longer promoted");
    promoted::bypassed(&duo.alder, port)
}

fn same(offload: bool, tcp: bool) -> Result<()> {
    let kernel = observe(&["--datapath=kernel"], offload, tcp)?;
    let flows = ["--datapath=ebpf", "--fast-path=flows", INTERVAL];
    let programs = observe(&flows, offload, tcp)?;
    let least = usize::from(COUNT / 2);
    let mut equal = kernel.theirs.compare("at the kernel peer's pod", &programs.theirs, least)?;
    equal += kernel.ours.compare("at our pod", &programs.ours, least)?;
    equal += kernel.wire.compare("on the wire", &programs.wire, least)?;
    let (past, all) = programs.bypassed;
    println!("{equal} packets are equal; {past} of {all} sent went past the stack");
    Ok(())
}

#[test]
fn merged_and_open_datagrams_arrive_the_same() -> Result<()> {
    same(true, false)
}

#[test]
fn datagrams_as_a_real_wire_has_them_arrive_the_same() -> Result<()> {
    same(false, false)
}

#[test]
fn merged_and_open_segments_arrive_the_same() -> Result<()> {
    same(true, true)
}

#[test]
fn segments_as_a_real_wire_has_them_arrive_the_same() -> Result<()> {
    same(false, true)
}
