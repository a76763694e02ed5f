//! The programs between the stack and the wire: they carry traffic, they come and go without a
//! packet lost, and no pod abuses the tunnel.

use std::net::UdpSocket;

use flannel_lab::{
    craft,
    outcomes::{self, DECAPSULATED, DROP_LOCAL_POD, ENCAPSULATED, PINS},
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
    let duo = duo(&lab)?;
    eventually("the guard at the pods' bridge", Duration::from_secs(5), || {
        let pins = duo.alder.shell(&format!("ls {PINS}/pod_guard-*"))?;
        Ok(pins.status.success().then_some(()))
    })?;
    let wire = Capture::start(duo.birch.node().ns(), "eth0")?;
    let nodes = [duo.alder.v4(), duo.birch.node().v4()];
    let send = |port: u16| {
        let nodes = nodes.clone();
        duo.ours.ns().within(move || {
            let socket = UdpSocket::bind(("0.0.0.0", 0))?;
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
    let before = outcomes::count(&duo.alder, DROP_LOCAL_POD)?;
    send(8472)?;
    let dropped = outcomes::count(&duo.alder, DROP_LOCAL_POD)? - before;
    ensure!(dropped == 2, "{dropped} of 2 dropped");
    let leaked = wire.stop()?.into_iter().find(|frame| {
        frame.bytes.get(36..38) == Some(&8472_u16.to_be_bytes())
            && !matches!(craft::parse(&frame.bytes, 8472), Ok(Some(_)))
    });
    ensure!(leaked.is_none(), "{leaked:?}");
    Ok(())
}
