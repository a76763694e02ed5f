//! Packets too big for the way: who says so, with what words; what may be cut arrives in pieces;
//! and outer fragments are put together again. The same in every mode.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd,
};

use flannel_lab::{netns::Netns, prelude::*, promoted};

const KERNEL: &[&str] = &["--datapath=kernel"];
const STACK: &[&str] = &["--datapath=ebpf", "--fast-path=stack"];
const FLOWS: &[&str] = &["--datapath=ebpf", "--fast-path=flows"];

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;

/// More than any tunnel takes here.
const POD_MTU: u32 = 1500;

/// Two sockets that talk to each other.
struct Sockets {
    ours: UdpSocket,
    theirs: UdpSocket,
}

impl Sockets {
    fn open(duo: &Duo<LocalStore>, v6: bool) -> Result<Self> {
        let address = |pod: &Pod| if v6 { pod.v6() } else { pod.v4() };
        let bind = |ns: &Netns, address: IpAddr| {
            ns.within(move || {
                let socket = UdpSocket::bind(SocketAddr::new(address, 0))?;
                socket.set_read_timeout(Some(Duration::from_secs(2)))?;
                Ok(socket)
            })
        };
        let ours = bind(duo.ours.ns(), address(&duo.ours)?)?;
        let theirs = bind(duo.theirs.ns(), address(&duo.theirs)?)?;
        ours.connect(theirs.local_addr()?)?;
        theirs.connect(ours.local_addr()?)?;
        Ok(Self { ours, theirs })
    }

    fn talk(&self) -> Result<()> {
        self.send(b"ping")?;
        self.theirs.recv(&mut [0; 16]).context("no ping")?;
        self.theirs.send(b"pong")?;
        self.ours.recv(&mut [0; 16]).context("no pong")?;
        Ok(())
    }

    fn promote(&self, duo: &Duo<LocalStore>, flags: &[&str]) -> Result<()> {
        if flags != FLOWS {
            return self.talk();
        }
        let port = self.ours.local_addr()?.port();
        eventually("the flow is promoted", Duration::from_secs(15), || {
            self.talk()?;
            Ok(promoted::flow(&duo.alder, port)?.is_some().then_some(()))
        })
    }

    /// Whether the kernel may cut our packets, or sends them whole whatever it knows of the way.
    fn set_whole(&self, whole: bool) -> Result<()> {
        let v6 = self.ours.local_addr()?.is_ipv6();
        let value = if whole { libc::IP_PMTUDISC_PROBE } else { libc::IP_PMTUDISC_DONT };
        let (level, name) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
        } else {
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
        };
        // SAFETY: the kernel reads one int, which is live.
        let result = unsafe {
            libc::setsockopt(
                self.ours.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                libc::socklen_t::try_from(size_of_val(&value))?,
            )
        };
        ensure!(result == 0, "{}", std::io::Error::last_os_error());
        Ok(())
    }

    /// A router's answer to an earlier packet is told as an error of this one, once.
    fn send(&self, payload: &[u8]) -> Result<()> {
        if self.ours.send(payload).is_err() {
            self.ours.send(payload)?;
        }
        Ok(())
    }

    /// Fills a packet of this length on the IP level.
    fn send_packet(&self, len: usize) -> Result<()> {
        let headers = if self.ours.local_addr()?.is_ipv6() { 48 } else { 28 };
        let payload = vec![0x5a; len - headers];
        self.send(&payload)
    }

    fn arrives(&self, len: usize) -> Result<()> {
        let headers = if self.ours.local_addr()?.is_ipv6() { 48 } else { 28 };
        let mut buffer = [0; 2048];
        let got = self.theirs.recv(&mut buffer).with_context(|| format!("{len} bytes"))?;
        ensure!(got == len - headers, "{got} bytes of payload, not {}", len - headers);
        Ok(())
    }
}

/// An answer of a router: who it is from, the MTU, and what the packet was.
fn answer(packet: &[u8]) -> Option<(IpAddr, u32, Vec<u8>)> {
    match packet.first()? >> 4 {
        4 if packet.get(9) == Some(&1) && packet.get(20..22) == Some(&[3, 4]) => {
            let source = <[u8; 4]>::try_from(packet.get(12..16)?).ok()?;
            let mtu = u16::from_be_bytes([*packet.get(26)?, *packet.get(27)?]);
            Some((source.into(), mtu.into(), packet.get(28..)?.to_vec()))
        }
        6 if packet.get(6) == Some(&58) && packet.get(40) == Some(&2) => {
            let source = <[u8; 16]>::try_from(packet.get(8..24)?).ok()?;
            let mtu = u32::from_be_bytes(packet.get(44..48)?.try_into().ok()?);
            Some((source.into(), mtu, packet.get(48..)?.to_vec()))
        }
        _ => None,
    }
}

fn too_big(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, CONFIG, true, flags)?;
    duo.alder
        .ns()
        .ip(&[&format!("link set veth0 mtu {POD_MTU}"), &format!("link set cni0 mtu {POD_MTU}")])?;
    duo.ours.ns().ip(&[&format!("link set eth0 mtu {POD_MTU}")])?;
    // The receiving pod takes what the tunnel takes.
    let other = duo.birch.node();
    other.ns().ip(&["link set veth0 mtu 1500", "link set cni0 mtu 1500"])?;
    duo.theirs.ns().ip(&["link set eth0 mtu 1500"])?;
    let gateways: [IpAddr; 2] = [
        duo.env.gateway_v4()?.context("no gateway")?.0.into(),
        duo.env.gateway_v6()?.context("no gateway")?.0.into(),
    ];
    for (v6, device, gateway) in
        [(false, "flannel.1", gateways[0]), (true, "flannel-v6.1", gateways[1])]
    {
        let mtu = duo.alder.link(device)?.context("no device")?["mtu"].as_u64().context("MTU")?;
        let sockets = Sockets::open(&duo, v6)?;
        sockets.promote(&duo, flags)?;
        sockets.set_whole(true)?;
        let longest = usize::try_from(mtu)?;
        sockets.send_packet(longest)?;
        sockets.arrives(longest).with_context(|| format!("{device}: as long as may be"))?;
        for len in [longest + 1, 1500] {
            let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
            sockets.send_packet(len).with_context(|| format!("{device}: sending {len} bytes"))?;
            let (from, said, embedded) = at_pod.wait_for(
                &format!("{device}: an answer to {len} bytes"),
                Duration::from_secs(3),
                |frame| if frame.outgoing { None } else { answer(frame.bytes.get(14..)?) },
            )?;
            ensure!(from == gateway, "{device}: {from} answers, not {gateway}");
            ensure!(u64::from(said) == mtu, "{device}: MTU {said}, not {mtu}");
            let sent = at_pod.wait_for("what was sent", Duration::from_secs(1), |frame| {
                let packet = frame.bytes.get(14..)?;
                (frame.outgoing && packet.len() == len).then(|| packet.to_vec())
            })?;
            // RFC 1812 section 4.3.2.3 and RFC 4443 section 2.4 (c): as much as fits. A checksum
            // that nobody has completed yet may be.
            let words = |bytes: &[u8]| {
                let udp = if v6 { 40 } else { 20 };
                let mut bytes = bytes.to_vec();
                bytes[udp + 6..udp + 8].fill(0);
                bytes
            };
            ensure!(embedded.len() >= 128, "{device}: {} bytes of the packet", embedded.len());
            let expected = words(&sent[..embedded.len().min(len)]);
            ensure!(words(&embedded) == expected, "{device}: another packet: {embedded:02x?}");
        }
        // It has all been answered, and nothing else arrived.
        sockets.theirs.set_read_timeout(Some(Duration::from_millis(200)))?;
        ensure!(sockets.theirs.recv(&mut [0; 2048]).is_err(), "{device}: a long packet arrived");
        sockets.theirs.set_read_timeout(Some(Duration::from_secs(2)))?;
        if !v6 {
            // Without DF routers cut it.
            sockets.set_whole(false)?;
            duo.ours.ns().ip(&["route flush cache"])?;
            sockets.promote(&duo, flags)?;
            let wire = Capture::start(duo.birch.node().ns(), "flannel.1")?;
            sockets.send_packet(1500)?;
            sockets.arrives(1500)?;
            let piece = |frame: &flannel_lab::capture::Frame| {
                let flags = frame.bytes.get(20..22).map(|b| u16::from_be_bytes([b[0], b[1]]));
                !frame.outgoing && flags.is_some_and(|flags| flags & 0x3fff != 0)
            };
            eventually("two pieces", Duration::from_secs(1), || {
                Ok((wire.frames().iter().filter(|frame| piece(frame)).count() == 2).then_some(()))
            })?;
        }
    }
    Ok(())
}

#[test]
fn what_is_too_big_is_answered_by_the_kernels_path() -> Result<()> {
    too_big(KERNEL)
}

#[test]
fn what_is_too_big_is_answered_with_the_stacks_programs() -> Result<()> {
    too_big(STACK)
}

#[test]
fn what_is_too_big_is_answered_in_flows() -> Result<()> {
    too_big(FLOWS)
}

/// Outer fragments on a device, received and sent.
fn fragments(capture: &Capture, outgoing: bool) -> usize {
    let is = |frame: &flannel_lab::capture::Frame| {
        frame.outgoing == outgoing
            && frame.bytes.get(12..14) == Some(&[8, 0])
            && frame
                .bytes
                .get(20)
                .zip(frame.bytes.get(21))
                .is_some_and(|(high, low)| u16::from_be_bytes([*high, *low]) & 0x3fff != 0)
    };
    capture.frames().iter().filter(|frame| is(frame)).count()
}

/// The peer's NIC takes less than its tunnel device: it sends long packets in outer fragments. The
/// way to it, as we learn, takes less too: so do we.
fn outer_fragments(flags: &[&str], lock: &str) -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, CONFIG, true, flags)?;
    duo.birch.node().ns().ip(&["link set eth0 mtu 1400", "link set flannel.1 mtu 1450"])?;
    let peer = duo.birch.node().v4();
    duo.alder.ns().ip(&[&format!("route add {peer}/32 dev eth0 mtu {lock} 1400")])?;
    let sockets = Sockets::open(&duo, false)?;
    sockets.promote(&duo, flags)?;
    let mut buffer = [0; 2048];
    eventually("the new way is followed", Duration::from_secs(1), || {
        sockets.theirs.set_read_timeout(Some(Duration::from_millis(100)))?;
        sockets.ours.send(&[0x5a; 1380])?;
        Ok(sockets.theirs.recv(&mut buffer).is_ok().then_some(()))
    })?;
    sockets.theirs.set_read_timeout(Some(Duration::from_secs(2)))?;
    let wire = Capture::start(duo.alder.ns(), "eth0")?;
    for _ in 0..20 {
        sockets.ours.send(&[0x5a; 1380])?;
        let got = sockets.theirs.recv(&mut buffer).context("a long packet to the peer")?;
        ensure!(got == 1380, "{got} bytes to the peer");
        sockets.theirs.send(&[0xa5; 1390])?;
        let got = sockets.ours.recv(&mut buffer).context("a long packet from the peer")?;
        ensure!(got == 1390, "{got} bytes from the peer");
    }
    eventually("outer fragments", Duration::from_secs(1), || {
        let (received, sent) = (fragments(&wire, false), fragments(&wire, true));
        ensure!(received == 40 && sent == 40, "{received} received, {sent} sent");
        Ok(Some(()))
    })?;
    for (from, to) in [(&duo.ours, &duo.theirs), (&duo.theirs, &duo.ours)] {
        let sent = traffic::tcp_transfer(from, to, to.v4()?, 4 << 20)?;
        ensure!(sent.intact && sent.time < Duration::from_secs(5), "{}: {sent:?}", from.name());
    }
    Ok(())
}

#[test]
fn outer_fragments_are_received_and_sent_by_the_kernels_path() -> Result<()> {
    outer_fragments(KERNEL, "lock")?;
    outer_fragments(KERNEL, "")
}

#[test]
fn outer_fragments_are_received_and_sent_with_the_stacks_programs() -> Result<()> {
    outer_fragments(STACK, "lock")?;
    outer_fragments(STACK, "")
}

#[test]
fn outer_fragments_are_received_and_sent_in_flows() -> Result<()> {
    outer_fragments(FLOWS, "lock")?;
    outer_fragments(FLOWS, "")
}
