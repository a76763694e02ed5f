//! Tunnel packets taken out in XDP, before the kernel has looked at them: they arrive as by TC, others
//! keep their place at the device, and nothing in clear is taken for one of them.

use flannel_lab::{
    agent::subcommand,
    capture, craft, foreign_program,
    outcomes::{self, DECAPSULATED, DROP_TAGGED, FROM_XDP, PINS},
    prelude::*,
};
use nix::sys::signal::Signal;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48",
    "Backend":{"Type":"vxlan"}}"#;
const FLAGS: [&str; 3] = ["--datapath=ebpf", "--fast-path=stack", "--xdp=native"];

fn duo(lab: &Lab) -> Result<Duo<LocalStore>> {
    Duo::start(lab, LocalStore::new(lab)?, CONFIG, true, &FLAGS)
}

/// Packets that XDP took out and those of them that TC sent on.
fn by_xdp(node: &Node) -> Result<(u64, u64)> {
    Ok((outcomes::count_xdp(node, DECAPSULATED)?, outcomes::count(node, FROM_XDP)?))
}

/// The program's part of the agent's status.
fn front(duo: &Duo<LocalStore>) -> Result<Value> {
    Ok(duo.agent.status()?["backend"]["datapath"]["programs"]["xdp"].clone())
}

/// The number of the program in the driver of the node's `eth0`.
fn in_driver(node: &Node) -> Result<Option<u64>> {
    let link = node.link("eth0")?.context("no eth0")?;
    // 1: in the driver; 2 would be generic.
    Ok((link["xdp"]["mode"] == 1).then(|| link["xdp"]["prog"]["id"].as_u64()).flatten())
}

/// The number of the pinned link.
fn link_id(node: &Node) -> Result<Option<u64>> {
    let shown = node.shell(&format!("bpftool -j link show pinned {PINS}/underlay_xdp-*"))?;
    let link: Option<Value> = serde_json::from_slice(&shown.stdout).ok();
    Ok(link.and_then(|link| link["id"].as_u64()))
}

/// Pings our pod from the peer's, often enough that TC is seen at work; whether XDP took most of it
/// out.
fn goes_by_xdp(duo: &Duo<LocalStore>) -> Result<bool> {
    let before = by_xdp(&duo.alder)?.0;
    let mut datagrams = Datagrams::between(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    let (sent, answered) = datagrams.talk(Duration::from_millis(300))?;
    ensure!(sent == answered && sent > 20, "{answered} of {sent} answered");
    Ok((by_xdp(&duo.alder)?.0 - before) * 2 > sent)
}

#[test]
fn pods_reach_each_other_and_xdp_takes_the_packets_out() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    ensure!(front(&duo)?["mode"] == "native", "{:#}", front(&duo)?["why_not"]);
    ensure!(in_driver(&duo.alder)?.is_some(), "no program in eth0's driver");
    for (ours, theirs) in duo.ours.addresses().into_iter().zip(duo.theirs.addresses()) {
        let before = by_xdp(&duo.alder)?;
        let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), theirs)?;
        let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), ours)?;
        std::thread::sleep(Duration::from_secs(1));
        let (there, back) = (there.stop()?, back.stop()?);
        there.ensure_none(ours)?;
        back.ensure_none(theirs)?;
        let after = by_xdp(&duo.alder)?;
        let (taken, sent_on) = (after.0 - before.0, after.1 - before.1);
        ensure!(taken * 10 > back.sent * 9, "{taken} of {} in XDP: {:#}", back.sent, front(&duo)?);
        ensure!(taken == sent_on, "{taken} taken out, {sent_on} sent on");
    }
    Ok(())
}

#[test]
fn bulk_arrives_whole_though_xdp_takes_merging_from_the_sender() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let before = by_xdp(&duo.alder)?.0;
    for (from, to) in [(&duo.theirs, &duo.ours), (&duo.ours, &duo.theirs)] {
        for address in to.addresses() {
            let transfer = traffic::tcp_transfer(from, to, address, 20 << 20)?;
            ensure!(transfer.intact, "{} to {address} is garbled", from.name());
        }
    }
    ensure!(by_xdp(&duo.alder)?.0 > before, "XDP took nothing out");
    Ok(())
}

#[test]
fn promoted_flows_go_straight_to_the_pod() -> Result<()> {
    let lab = Lab::new()?;
    let flags = ["--datapath=ebpf", "--fast-path=flows", "--xdp=native"];
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, CONFIG, true, &flags)?;
    for (ours, theirs) in duo.ours.addresses().into_iter().zip(duo.theirs.addresses()) {
        let mut conversation = Conversation::between(duo.ours.ns(), duo.theirs.ns(), theirs)?;
        let port = conversation.port()?;
        let bypassed = || -> Result<u64> {
            let output = subcommand(&duo.alder, &["flows", "--output=json"])?;
            let flows: Value = serde_json::from_slice(&output.stdout)?;
            let end = format!(":{port}");
            let ours = flows.as_array().into_iter().flatten();
            let ours = ours.filter(|f| f["pod"].as_str().is_some_and(|pod| pod.ends_with(&end)));
            Ok(ours.filter_map(|flow| flow["packets_in"].as_u64()).sum())
        };
        eventually("the flow is promoted", Duration::from_secs(10), || {
            conversation.talk(Duration::from_millis(50))?;
            Ok((bypassed()? > 0).then_some(()))
        })
        .with_context(|| format!("{ours}"))?;
        let (before, in_xdp) = (bypassed()?, by_xdp(&duo.alder)?.0);
        let words = conversation.talk(Duration::from_secs(1))?;
        let (straight, in_xdp) = (bypassed()? - before, by_xdp(&duo.alder)?.0 - in_xdp);
        ensure!(
            straight * 10 > words * 8,
            "{ours}: {straight} of {words} words bypassed the stack"
        );
        ensure!(in_xdp * 10 > words * 8, "{ours}: {in_xdp} of {words} words taken out in XDP");
    }
    Ok(())
}

#[test]
fn somebody_elses_program_stays_and_is_named() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let duo = Duo::start_after(&lab, store, CONFIG, true, &FLAGS, |alder| {
        foreign_program::attach_xdp(alder, "eth0")
    })?;
    let theirs = in_driver(&duo.alder)?.context("no foreign program")?;
    let status = front(&duo)?;
    let why = status["why_not"].as_str().unwrap_or_default();
    ensure!(status["mode"] == "off" && why.contains(foreign_program::NAME), "{status:#}");
    ensure!(why.contains(&theirs.to_string()), "{why:?} does not say {theirs}");
    ensure!(!duo.agent.complaints(&[foreign_program::NAME]).is_empty(), "{}", duo.agent.log());
    ensure!(!goes_by_xdp(&duo)?, "XDP takes packets out");
    ensure!(in_driver(&duo.alder)? == Some(theirs), "the foreign program is gone");
    ensure!(duo.agent.metric("flannel_datapath_xdp")? < 0.5, "the metric says XDP");
    foreign_program::detach_xdp(&duo.alder, "eth0")?;
    eventually("our program at its place", Duration::from_secs(3), || {
        Ok((front(&duo)?["mode"] == "native").then_some(()))
    })?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP");
    ensure!(duo.agent.metric("flannel_datapath_xdp")? > 0.5, "the metric says no XDP");
    let taken = "flannel_xdp_packets_total{outcome=\"decapsulated\"}";
    ensure!(duo.agent.metric(taken)? > 20.0, "the metric counts nothing");
    Ok(())
}

#[test]
fn a_program_that_was_detached_is_attached_again() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let theirs = duo.ours.v4()?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), theirs)?;
    for _ in 0..2 {
        let before = link_id(&duo.alder)?;
        ensure!(before.is_some(), "no link");
        duo.alder.shell(&format!("bpftool link detach pinned {PINS}/underlay_xdp-*"))?;
        eventually("the program by another link", Duration::from_secs(2), || {
            let now = link_id(&duo.alder)?.filter(|now| Some(*now) != before);
            Ok(in_driver(&duo.alder)?.filter(|_| now.is_some()))
        })?;
    }
    back.stop()?.ensure_none(duo.theirs.v4()?)?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP");
    Ok(())
}

#[test]
fn agents_come_and_go_without_a_packet_lost() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = duo(&lab)?;
    let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    let before = in_driver(&duo.alder)?;
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP without an agent");
    duo.start_agent_again()?;
    eventually("another program in the same link", Duration::from_secs(5), || {
        let now = in_driver(&duo.alder)?;
        ensure!(now.is_some(), "no program in between");
        Ok((now != before).then_some(()))
    })?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP after a restart");
    // What is not wanted any more goes, too.
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    duo.flags.retain(|flag| flag != "--xdp=native");
    duo.start_agent_again()?;
    eventually("no program in XDP", Duration::from_secs(5), || {
        Ok(in_driver(&duo.alder)?.is_none().then_some(()))
    })?;
    ensure!(front(&duo)?["why_not"] == "--xdp off", "{:#}", front(&duo)?["why_not"]);
    ensure!(!goes_by_xdp(&duo)?, "XDP takes packets out");
    // Nor does anything outlive a change to the kernel's path.
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    duo.flags.push("--xdp=native".to_owned());
    duo.start_agent_again()?;
    eventually("the program again", Duration::from_secs(5), || in_driver(&duo.alder))?;
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    duo.flags.push("--datapath=kernel".to_owned());
    duo.flags.retain(|flag| flag != "--datapath=ebpf");
    duo.start_agent_again()?;
    eventually("no program in XDP, and no links", Duration::from_secs(5), || {
        let links = duo.alder.shell(&format!("ls {PINS} | grep -- -"))?;
        Ok((in_driver(&duo.alder)?.is_none() && links.stdout.is_empty()).then_some(()))
    })?;
    there.stop()?.ensure_none(duo.ours.v4()?)?;
    back.stop()?.ensure_none(duo.theirs.v4()?)?;
    Ok(())
}

#[test]
fn without_a_program_at_tc_xdp_leaves_all_to_the_kernel() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = duo(&lab)?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP to begin with");
    duo.agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    duo.alder.shell(&format!("bpftool link detach pinned {PINS}/underlay_ingress-*"))?;
    // What a packet handed over in vain would be: lost.
    std::thread::sleep(Duration::from_millis(500));
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    ensure!(!goes_by_xdp(&duo)?, "XDP takes packets out that nobody takes");
    back.stop()?.ensure_none(duo.theirs.v4()?)
}

#[test]
fn a_program_of_others_at_tc_keeps_xdp_away() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    foreign_program::attach_tc(&duo.alder, "eth0")?;
    eventually("no program in XDP", Duration::from_secs(3), || {
        Ok(in_driver(&duo.alder)?.is_none().then_some(()))
    })?;
    ensure!(!goes_by_xdp(&duo)?, "XDP takes packets out");
    let why = front(&duo)?["why_not"].clone();
    ensure!(why.as_str().is_some_and(|why| why.contains("TC ingress")), "{why:#}");
    foreign_program::detach_tc(&duo.alder, "eth0")?;
    eventually("the program again", Duration::from_secs(3), || in_driver(&duo.alder))?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP");
    Ok(())
}

#[test]
fn a_frame_in_clear_is_not_taken_for_one_out_of_the_tunnel() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let mac_of = |device: &str| -> Result<craft::Mac> {
        let link = duo.alder.link(device)?.with_context(|| format!("no {device}"))?;
        craft::mac(link["address"].as_str().context("no MAC")?)
    };
    // What the peer's pod sends, as it looks inside.
    let seen = Capture::start(duo.birch.node().ns(), "eth0")?;
    let mut datagrams = Datagrams::between(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    datagrams.talk(Duration::from_millis(50))?;
    let inner = seen.wait_for("a packet to our pod", Duration::from_secs(3), |frame| {
        let vxlan = craft::parse(&frame.bytes, 8472).ok().flatten()?;
        let udp = vxlan.packet().get(9) == Some(&17);
        (frame.outgoing && udp).then_some(vxlan.inner)
    })?;
    seen.stop()?;
    // A mark that nothing else has.
    let marker: [u8; 8] = *b"in clear";
    let mut inner = inner;
    let end = inner.len();
    inner[end - 8..].copy_from_slice(&marker);
    ensure!(inner[..6] == mac_of("flannel.1")?, "not to our tunnel device");
    let at_pod = Capture::start(duo.ours.ns(), "eth0")?;
    let at_tunnel = Capture::start(duo.alder.ns(), "flannel.1")?;
    let before = by_xdp(&duo.alder)?;
    for _ in 0..20 {
        capture::inject(duo.birch.node().ns(), "eth0", &inner)?;
    }
    // They have come by then.
    datagrams.talk(Duration::from_millis(300))?;
    let after = by_xdp(&duo.alder)?;
    ensure!(after.0 - before.0 == after.1 - before.1, "{before:?}, {after:?}");
    for (place, capture) in [("the pod", at_pod), ("flannel.1", at_tunnel)] {
        let frames = capture.stop()?;
        let marked = frames.iter().filter(|f| f.bytes.windows(8).any(|bytes| bytes == marker));
        ensure!(marked.count() == 0, "a frame in clear reached {place}");
    }
    Ok(())
}

/// In XDP the tag is not to be seen: the NIC has taken it off. The kernel has no such VLAN here, and
/// drops these packets, too.
#[test]
fn what_came_in_a_vlan_is_refused_though_xdp_took_it_out() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?;
    foreign_program::attach_tagger(duo.birch.node(), "eth0")?;
    let before = (by_xdp(&duo.alder)?, outcomes::count(&duo.alder, DROP_TAGGED)?);
    std::thread::sleep(Duration::from_millis(300));
    let after = (by_xdp(&duo.alder)?, outcomes::count(&duo.alder, DROP_TAGGED)?);
    back.stop()?;
    ensure!(after.1 - before.1 > 20, "{before:?}, {after:?}");
    ensure!(after.0.1 == before.0.1, "tagged packets were sent on: {before:?}, {after:?}");
    Ok(())
}

#[test]
fn cleanup_leaves_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = duo(&lab)?;
    ensure!(goes_by_xdp(&duo)?, "nothing goes by XDP");
    duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(5))?;
    ensure!(in_driver(&duo.alder)?.is_some(), "a stop took the program away");
    let state = format!("--state-dir={}", duo.alder.state_dir().display());
    let output = subcommand(&duo.alder, &["cleanup", "--output=json", &state])?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(in_driver(&duo.alder)?.is_none(), "the program is left");
    let pins = duo.alder.run("find /sys/fs/bpf -mindepth 1 -name *flannel*")?;
    ensure!(pins.trim().is_empty(), "{pins}");
    Ok(())
}

#[test]
fn auto_tells_why_it_does_not_take_this_driver() -> Result<()> {
    let lab = Lab::new()?;
    let flags = ["--datapath=ebpf", "--fast-path=stack", "--xdp=auto"];
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, CONFIG, true, &flags)?;
    let why = front(&duo)?["why_not"].clone();
    ensure!(why.as_str().is_some_and(|why| why.contains("driver veth")), "{why:#}");
    ensure!(in_driver(&duo.alder)?.is_none(), "a program all the same");
    Ok(())
}
