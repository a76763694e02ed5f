//! What a flow sends arrives in the order in which it was sent, whichever way each packet goes: a
//! merged one by the kernel's device, the small one behind it by the programs.

use std::{
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
};

use flannel_lab::{netns::Netns, outcomes, prelude::*, promoted};

/// Pairs of a merged packet and a small one.
const PAIRS: u32 = 1500;

/// Pairs on the way at a time.
const IN_FLIGHT: u32 = 16;

/// Datagrams in a merged packet, and the bytes of each.
const SEGMENTS: u32 = 6;
const SEGMENT: usize = 1200;

fn bind(ns: &Netns, address: std::net::IpAddr) -> Result<UdpSocket> {
    ns.within(move || {
        let socket = UdpSocket::bind(SocketAddr::new(address, 0))?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBuf, &(4 << 20))?;
        Ok(socket)
    })
}

/// Has what the socket sends cut into datagrams of this size; 0: not cut.
fn cut(socket: &UdpSocket, size: libc::c_int) -> Result<()> {
    // SAFETY: the kernel reads one int, which is live.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const size).cast(),
            libc::socklen_t::try_from(size_of_val(&size))?,
        )
    };
    ensure!(result == 0, "UDP_SEGMENT: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Receives the datagram that has to be next; returns the number of the one after it.
fn next(to: &UdpSocket, expected: u32) -> Result<u32> {
    let mut buffer = [0; 2048];
    to.recv(&mut buffer).with_context(|| format!("datagram {expected} is lost"))?;
    let [a, b, c, d, ..] = buffer;
    let got = u32::from_be_bytes([a, b, c, d]);
    ensure!(got == expected, "datagram {got} came before {expected}");
    Ok(expected + 1)
}

fn in_order(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, config, false, flags)?;
    let (from, to) =
        (bind(duo.theirs.ns(), duo.theirs.v4()?)?, bind(duo.ours.ns(), duo.ours.v4()?)?);
    from.connect(to.local_addr()?)?;
    to.connect(from.local_addr()?)?;
    let mut buffer = [0; 2048];
    if flags.contains(&"--fast-path=flows") {
        let port = to.local_addr()?.port();
        eventually("the flow is promoted", Duration::from_secs(15), || {
            from.send(b"ping")?;
            to.recv(&mut buffer)?;
            to.send(b"pong")?;
            from.recv(&mut buffer)?;
            Ok(promoted::flow(&duo.alder, port)?.is_some().then_some(()))
        })?;
    }
    let merged_before = outcomes::count(&duo.alder, outcomes::MERGED)?;
    let (mut number, mut expected) = (0_u32, 0_u32);
    for _ in 0..PAIRS {
        let many: Vec<u8> = (number..number + SEGMENTS)
            .flat_map(|number| {
                let mut datagram = vec![0; SEGMENT];
                datagram[..4].copy_from_slice(&number.to_be_bytes());
                datagram
            })
            .collect();
        number += SEGMENTS;
        cut(&from, libc::c_int::try_from(SEGMENT)?)?;
        from.send(&many)?;
        cut(&from, 0)?;
        from.send(&number.to_be_bytes())?;
        number += 1;
        // Some on the way at a time: what waits in queues can be overtaken there.
        while expected + IN_FLIGHT * (SEGMENTS + 1) < number {
            expected = next(&to, expected)?;
        }
        // Every now and then long enough for the programs to take the flow up again.
        if number % (100 * (SEGMENTS + 1)) == 0 {
            std::thread::sleep(Duration::from_millis(300));
            from.send(&number.to_be_bytes())?;
            number += 1;
        }
    }
    while expected < number {
        expected = next(&to, expected)?;
    }
    let merged = outcomes::count(&duo.alder, outcomes::MERGED)? - merged_before;
    ensure!(merged > u64::from(PAIRS), "only {merged} came merged");
    // In the lab one CPU does all in order; elsewhere queues are emptied in another. So what keeps
    // the order has to be seen at work as well.
    let behind = outcomes::count(&duo.alder, outcomes::BEHIND_BURST)?;
    ensure!(behind > u64::from(PAIRS / 2), "only {behind} small ones stayed behind");
    Ok(())
}

#[test]
fn small_packets_do_not_overtake_merged_ones_in_the_stack() -> Result<()> {
    in_order(&["--datapath=ebpf", "--fast-path=stack"])
}

#[test]
fn small_packets_do_not_overtake_merged_ones_in_flows() -> Result<()> {
    in_order(&["--datapath=ebpf", "--fast-path=flows"])
}
