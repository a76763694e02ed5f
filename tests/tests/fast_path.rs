//! The programs between the stack and the wire: they carry traffic, they come and go without a
//! packet lost, and no pod abuses the tunnel.

use std::net::{Ipv6Addr, UdpSocket};

use flannel_lab::{
    capture, craft,
    outcomes::{self, DECAPSULATED, DROP_LOCAL_POD, ENCAPSULATED, MERGED, PINS},
    prelude::*,
};
use nix::sys::signal::Signal;

fn duo(lab: &Lab) -> Result<Duo<LocalStore>> {
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let flags = ["--datapath=ebpf", "--fast-path=stack"];
    Duo::start(lab, LocalStore::new(lab)?, config, false, &flags)
}

#[test]
fn the_programs_carry_small_packets_both_ways() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let count = || -> Result<_> {
        Ok((outcomes::count(&duo.alder, ENCAPSULATED)?, outcomes::count(&duo.alder, DECAPSULATED)?))
    };
    let before = count()?;
    let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    std::thread::sleep(Duration::from_secs(1));
    let (there, back) = (there.stop()?, back.stop()?);
    there.ensure_none(duo.ours.v4()?)?;
    back.ensure_none(duo.theirs.v4()?)?;
    let after = count()?;
    let (sent, taken) = (after.0 - before.0, after.1 - before.1);
    // A few keep the neighbour's entry fresh by the kernel's device.
    ensure!(sent * 10 > there.sent * 9, "{sent} of {} sent by the programs", there.sent);
    ensure!(taken * 10 > back.sent * 9, "{taken} of {} taken out by them", back.sent);
    Ok(())
}

/// A merged packet that a program takes out keeps the tunnel's segmentation state: the bridge cuts
/// it again, one by one, and whoever merges packets of its own makes wrong ones of it.
#[test]
fn merged_packets_reach_the_pod_merged() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let before = outcomes::count(&duo.alder, MERGED)?;
    let bulk = Bulk::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    eventually("the stream is on its way", Duration::from_secs(5), || {
        Ok((bulk.received() > 16 << 20).then_some(()))
    })?;
    let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
    std::thread::sleep(Duration::from_millis(300));
    let lengths: Vec<usize> = at_pod
        .stop()?
        .iter()
        .filter(|frame| !frame.outgoing)
        .map(|frame| frame.bytes.len())
        .collect();
    let all: usize = lengths.iter().sum();
    let merged: usize = lengths.iter().filter(|len| **len > 1514).sum();
    ensure!(all > 1 << 20 && merged * 10 > all * 8, "{merged} of {all} bytes came merged");
    ensure!(
        outcomes::count(&duo.alder, MERGED)? > before,
        "no merged packet was left to the device"
    );
    Ok(())
}

#[test]
fn programs_come_and_go_without_a_packet_lost() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = duo(&lab)?;
    let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    duo.start_agent_again()?;
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    // Without agent and pins nothing holds the programs: the kernel's path is what is left.
    let ids = duo.alder.shell(&format!(
        "for pin in {PINS}/*-[0-9]*; do bpftool link show pinned $pin; done | grep -o '^[0-9]*'"
    ))?;
    let ids = String::from_utf8(ids.stdout)?;
    ensure!(ids.lines().count() == 3, "underlay, tunnel, bridge: {ids}");
    duo.alder.run(&format!("rm -r {PINS}"))?;
    eventually("the programs are gone", Duration::from_secs(5), || {
        let mut left = 0;
        for id in ids.lines() {
            left += usize::from(
                duo.alder.shell(&format!("bpftool link show id {id}"))?.status.success(),
            );
        }
        Ok((left == 0).then_some(()))
    })?;
    let address = duo.theirs.v4()?;
    ensure!(traffic::ping(duo.ours.ns(), address, 3)? == 3, "the kernel's path is broken");
    duo.start_agent_again()?;
    there.stop()?.ensure_none(duo.ours.v4()?)?;
    back.stop()?.ensure_none(duo.theirs.v4()?)?;
    Ok(())
}

#[test]
fn ipsec_policies_keep_the_programs_out_of_the_way() -> Result<()> {
    const POLICY: &str = "src 203.0.113.0/24 dst 203.0.113.0/24 dir out";
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let address = duo.theirs.v4()?;
    let sent = || outcomes::count(&duo.alder, ENCAPSULATED);
    let ping = || -> Result<()> {
        let answers = traffic::ping(duo.ours.ns(), address, 5)?;
        ensure!(answers == 5, "{answers} of 5 answers");
        Ok(())
    };
    let goes_by_programs = || -> Result<bool> {
        let before = sent()?;
        ping()?;
        Ok(sent()? > before)
    };
    ensure!(goes_by_programs()?, "the programs carry nothing to begin with");
    duo.alder.run(&format!(
        "ip xfrm policy add {POLICY} tmpl src 203.0.113.1 dst 203.0.113.2 proto esp mode tunnel"
    ))?;
    eventually("the programs leave all to the kernel's device", Duration::from_secs(3), || {
        Ok((!goes_by_programs()?).then_some(()))
    })?;
    eventually("the reason", Duration::from_secs(3), || {
        let status = duo.agent.status()?;
        let reason = status["backend"]["datapath"]["reason"].as_str().unwrap_or_default();
        Ok(reason.contains("IPsec").then_some(()))
    })?;
    duo.alder.run(&format!("ip xfrm policy delete {POLICY}"))?;
    eventually("the programs carry again", Duration::from_secs(3), || {
        Ok(goes_by_programs()?.then_some(()))
    })
}

#[test]
fn no_pod_speaks_vxlan_to_a_node() -> Result<()> {
    let lab = Lab::new()?;
    let config = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;
    let flags = ["--datapath=ebpf", "--fast-path=stack"];
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, config, true, &flags)?;
    eventually("the guard at the pods' bridge", Duration::from_secs(5), || {
        let pins = duo.alder.shell(&format!("ls {PINS}/pod_guard-*"))?;
        Ok(pins.status.success().then_some(()))
    })?;
    let (alder, birch) = (&duo.alder, duo.birch.node());
    for (any, nodes) in [("0.0.0.0", [alder.v4(), birch.v4()]), ("::", [alder.v6(), birch.v6()])] {
        let wire = Capture::start(birch.ns(), "eth0")?;
        let send = |port: u16| {
            let nodes = nodes.clone();
            duo.ours.ns().within(move || {
                let socket = UdpSocket::bind((any, 0))?;
                for node in &nodes {
                    socket.send_to(b"made by a pod", (node.as_str(), port))?;
                }
                Ok(())
            })
        };
        send(8473)?;
        wire.wait_for("what is nobody's tunnel", Duration::from_secs(3), |frame| {
            frame.bytes.windows(13).any(|bytes| bytes == b"made by a pod").then_some(())
        })?;
        let before = outcomes::count(alder, DROP_LOCAL_POD)?;
        send(8472)?;
        let dropped = outcomes::count(alder, DROP_LOCAL_POD)? - before;
        ensure!(dropped == 2, "{any}: {dropped} of 2 dropped");
        let udp = if any == "::" { 54 } else { 34 };
        let leaked = wire.stop()?.into_iter().find(|frame| {
            frame.bytes.get(udp + 2..udp + 4) == Some(&8472_u16.to_be_bytes())
                && !matches!(craft::parse(&frame.bytes, 8472), Ok(Some(_)))
        });
        ensure!(leaked.is_none(), "{leaked:?}");
    }
    let before = outcomes::count(alder, DROP_LOCAL_POD)?;
    let pod = duo.ours.v6()?;
    for depth in [1, 7, 30] {
        let packet = behind_options(&pod.to_string(), &birch.v6(), depth)?;
        let frame = craft::ethernet(duo.ours.gateway_mac(pod)?, duo.ours.mac()?, &packet)?;
        capture::inject(duo.ours.ns(), "eth0", &frame)?;
    }
    let dropped = outcomes::count(alder, DROP_LOCAL_POD)? - before;
    ensure!(dropped == 3, "behind extension headers: {dropped} of 3 dropped");
    Ok(())
}

/// A UDP packet to the tunnel's port behind so many headers with options for its destination.
fn behind_options(from: &str, to: &str, depth: usize) -> Result<Vec<u8>> {
    const UDP: u8 = 17;
    const OPTIONS: u8 = 60;
    let mut payload = Vec::new();
    for left in (0..depth).rev() {
        let next = if left == 0 { UDP } else { OPTIONS };
        // Six bytes of padding.
        payload.extend([next, 0, 1, 4, 0, 0, 0, 0]);
    }
    payload.extend([0x9c, 0x40, 0x21, 0x18, 0, 8, 0, 0]);
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(payload.len())?.to_be_bytes());
    packet.extend([OPTIONS, 64]);
    for address in [from, to] {
        packet.extend(address.parse::<Ipv6Addr>()?.octets());
    }
    packet.extend(payload);
    Ok(packet)
}
