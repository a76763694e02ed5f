//! What the NIC has verified, or GRO for it, stays verified: no pod sums up its packets a second time
//! because they came by a program.

use std::{
    net::{IpAddr, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
};

use flannel_lab::{
    capture, craft,
    generated::{self, Generated},
    node::Attachment,
    outcomes::{self, DECAPSULATED},
    prelude::*,
};

/// `TP_STATUS_CSUM_VALID` (`linux/if_packet.h`).
const CSUM_VALID: u32 = 1 << 7;

/// A packet socket that hears what the kernel knows of each packet.
fn open(pod: &Pod) -> Result<OwnedFd> {
    let socket = pod.ns().within(|| capture::open("eth0"))?;
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads one int, which is live.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_AUXDATA,
            (&raw const on).cast(),
            libc::socklen_t::try_from(size_of_val(&on))?,
        )
    };
    ensure!(result == 0, "no auxiliary data: {}", std::io::Error::last_os_error());
    Ok(socket)
}

/// How many TCP packets with data have been received, and of how many the checksum is known to be
/// right; of all that wait at the socket.
fn verified(socket: &OwnedFd) -> (u32, u32) {
    let (mut all, mut valid) = (0, 0);
    loop {
        let mut frame = [0_u8; 256];
        let mut control = [0_u64; 16];
        let mut part = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        // SAFETY: all zeros are valid values of these plain C structures.
        let (mut message, mut from): (libc::msghdr, libc::sockaddr_ll) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        message.msg_name = (&raw mut from).cast();
        message.msg_namelen = u32::try_from(size_of_val(&from)).unwrap_or_default();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: everything that the message points to is live, with its own length.
        let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
        let Ok(len) = usize::try_from(len) else { return (valid, all) };
        let tcp = len > 66 && frame[12..14] == [8, 0] && frame[23] == 6;
        if from.sll_pkttype == libc::PACKET_OUTGOING || !tcp {
            continue;
        }
        all += 1;
        // SAFETY: the kernel has filled the message.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if header.is_null() {
            continue;
        }
        // SAFETY: the only auxiliary data asked for; it may lie at any address.
        let status = unsafe { libc::CMSG_DATA(header).cast::<u32>().read_unaligned() };
        valid += u32::from(status & CSUM_VALID != 0);
    }
}

/// A network in which senders complete checksums and our node verifies them while it merges, as on
/// a wire.
fn start(lab: &Lab, flags: &[&str]) -> Result<Duo<LocalStore>> {
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let duo = Duo::start(lab, LocalStore::new(lab)?, config, false, flags)?;
    for node in [&duo.alder, duo.birch.node()] {
        node.run("ethtool -K eth0 tx off")?;
        node.run("ethtool -K eth0 gro on")?;
    }
    // A virtual cable merges only what its other end would not send merged.
    let Attachment { switch, port } = duo.alder.attachment();
    for (ns, device, feature) in [(duo.theirs.ns(), "eth0", "tx"), (&switch, &port, "tso")] {
        let off = ns.command("ethtool").args(["-K", device, feature, "off"]).output()?;
        ensure!(off.status.success(), "{device}: {off:?}");
    }
    Ok(duo)
}

/// The share of verified packets, in percent, and how many programs took out.
fn share(flags: &[&str]) -> Result<(u32, u64)> {
    let lab = Lab::new()?;
    let duo = start(&lab, flags)?;
    let taken = || -> Result<u64> {
        if flags.contains(&"--datapath=kernel") {
            return Ok(0);
        }
        outcomes::count(&duo.alder, DECAPSULATED)
    };
    let mut conversation = Conversation::between(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    conversation.word()?;
    let before = taken()?;
    let socket = open(&duo.ours)?;
    conversation.talk(Duration::from_millis(500))?;
    let (valid, all) = verified(&socket);
    ensure!(all > 100, "only {all} packets with data");
    Ok((valid * 100 / all, taken()? - before))
}

#[test]
fn what_is_verified_stays_verified() -> Result<()> {
    let (kernel, _) = share(&["--datapath=kernel"])?;
    ensure!(kernel > 90, "the lab verifies only {kernel} % by the kernel's path");
    let (programs, taken) = share(&["--datapath=ebpf", "--fast-path=stack"])?;
    ensure!(taken > 100, "only {taken} taken out by programs");
    ensure!(programs > 90, "{programs} % verified, {kernel} % by the kernel's path");
    Ok(())
}

/// Only the outer checksum is counted as verified, be it none at all; the pod finds the inner one
/// wrong.
#[test]
fn what_is_not_verified_is_not_trusted() -> Result<()> {
    const BAD: u16 = 50;
    let lab = Lab::new()?;
    let duo = start(&lab, &["--datapath=ebpf", "--fast-path=stack"])?;
    let (IpAddr::V4(from), IpAddr::V4(to)) = (duo.theirs.v4()?, duo.ours.v4()?) else {
        bail!("no IPv4")
    };
    let receiver = duo.ours.ns().within(move || Ok(UdpSocket::bind((to, 0))?))?;
    receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
    let port = receiver.local_addr()?.port();
    let mac = |node: &Node, device: &str| -> Result<craft::Mac> {
        let link = node.link(device)?.with_context(|| format!("no {device}"))?;
        craft::mac(link["address"].as_str().context("no address")?)
    };
    let (alder, birch) = (&duo.alder, duo.birch.node());
    let outer = craft::Outer {
        destination_mac: mac(alder, "eth0")?,
        source_mac: mac(birch, "eth0")?,
        source: birch.v4().parse()?,
        destination: alder.v4().parse()?,
        traffic_class: 0,
        ttl: 64,
        dont_fragment: false,
        id: 0,
        flow_label: 0,
        source_port: 0,
        destination_port: 8472,
        vni: 1,
        // None is as good as a verified one.
        udp_checksum: false,
    };
    let (device, peers) = (mac(alder, "flannel.1")?, mac(birch, "flannel.1")?);
    let datagram = |number: u16, payload: &[u8; 8], spoilt: u8| -> Result<Generated> {
        let ports = [5000_u16.to_be_bytes(), port.to_be_bytes()].concat();
        let mut udp = [&ports[..], &[0, 16, 0, 0], payload].concat();
        let pseudo = [&from.octets()[..], &to.octets(), &[0, 17, 0, 16]].concat();
        let sum = craft::checksum(&[&pseudo, &udp]);
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
        udp[7] ^= spoilt;
        let head = [0x45, 0, 0, 36, 0, 7, 0x40, 0, 64, 17, 0, 0];
        let mut ip = [&head[..], &from.octets(), &to.octets()].concat();
        let sum = craft::checksum(&[&ip]);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let inner = craft::ethernet(device, peers, &[ip, udp].concat())?;
        let outer = craft::Outer { source_port: 41_000 + number, id: number, ..outer.clone() };
        Ok(Generated::from_frame(&craft::encapsulate(&outer, &inner)?))
    };
    let before = outcomes::count(alder, DECAPSULATED)?;
    let mut frames = vec![];
    for number in 0..BAD {
        frames.push(datagram(number, b"bad data", 0x10)?);
    }
    frames.push(datagram(BAD, b"good one", 0)?);
    generated::send(birch.ns(), "eth0", &frames)?;
    let mut buffer = [0; 64];
    let len = receiver.recv(&mut buffer).context("nothing was received")?;
    ensure!(&buffer[..len] == b"good one", "{:?} was taken for good", &buffer[..len]);
    let taken = outcomes::count(alder, DECAPSULATED)? - before;
    ensure!(taken > u64::from(BAD / 2), "only {taken} taken out by programs");
    Ok(())
}
