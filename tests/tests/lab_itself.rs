//! The lab proves itself: two VXLAN nodes made by hand talk, and what they send is what
//! `craft` builds.

use std::{fs, path::Path};

use flannel_lab::{craft, prelude::*, run::Run, traffic::MIB_16, vxlan_view::VxlanView};

fn pair(lab: &Lab) -> Result<(KernelPeer, KernelPeer)> {
    let alder = KernelPeer::new(lab.node("alder")?, PeerSpec::dual(1))?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::dual(2))?;
    for (one, other) in [(&alder, &birch), (&birch, &alder)] {
        let (key, lease) = other.lease();
        one.learn(&key, &lease)?;
    }
    Ok((alder, birch))
}

#[test]
fn pods_of_two_kernel_peers_reach_each_other_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let (alder, birch) = pair(&lab)?;
    let from = alder.node().pod(&alder.env()?)?;
    let to = birch.node().pod(&birch.env()?)?;
    traffic::assert_reaches(&from, &to)?;
    traffic::assert_reaches(&to, &from)?;
    for address in to.addresses() {
        let transfer = traffic::tcp_transfer(&from, &to, address, MIB_16)?;
        ensure!(transfer.intact && transfer.bytes == MIB_16, "{transfer:?}");
    }
    let view = VxlanView::read(alder.node().ns(), "flannel.1")?;
    let (key, lease) = birch.lease();
    let (v4, _) = flannel_lab::kernel_peer::vteps_of(&key, &lease)?;
    let wanted = VxlanView::wanted("10.77.1.0/32", &[v4.context("no IPv4")?])?;
    ensure!(view == wanted, "{view:#?}");
    Ok(())
}

#[test]
fn the_loss_meter_sees_every_lost_packet() -> Result<()> {
    let lab = Lab::new()?;
    let (alder, birch) = pair(&lab)?;
    let from = alder.node().pod(&alder.env()?)?;
    let to = birch.node().pod(&birch.env()?)?;
    let meter = LossMeter::start(from.ns(), to.ns(), to.v4()?)?;
    std::thread::sleep(Duration::from_millis(300));
    meter.stop()?.ensure_none(from.v4()?)?;

    let meter = LossMeter::start(from.ns(), to.ns(), to.v4()?)?;
    alder.node().ns().ip(&["link set flannel.1 down"])?;
    std::thread::sleep(Duration::from_millis(300));
    let loss = meter.stop()?;
    ensure!(loss.lost >= 200 && loss.lost <= loss.sent, "{loss:?}");
    ensure!(loss.ensure_none(from.v4()?).is_err(), "a loss was not complained about");
    Ok(())
}

#[test]
fn crafted_frames_are_what_the_kernel_sends() -> Result<()> {
    let lab = Lab::new()?;
    let (alder, birch) = pair(&lab)?;
    let from = alder.node().pod(&alder.env()?)?;
    let to = birch.node().pod(&birch.env()?)?;
    alder.node().run("ethtool -K eth0 tx off")?;
    for (address, outer) in [(to.v4()?, alder.node().v4()), (to.v6()?, alder.node().v6())] {
        let capture = Capture::start(birch.node().ns(), "eth0")?;
        ensure!(traffic::ping(from.ns(), address, 1)? == 1, "no echo");
        let (frame, vxlan) = capture.wait_for("the request", Duration::from_secs(2), |frame| {
            let vxlan = craft::parse(&frame.bytes, 8472).ok()??;
            (vxlan.outer.source.to_string() == outer).then(|| (frame.bytes.clone(), vxlan))
        })?;
        let rebuilt = craft::encapsulate(&vxlan.outer, &vxlan.inner)?;
        ensure!(rebuilt == frame, "{:?}", craft::difference(&frame, &rebuilt));
    }
    Ok(())
}

#[test]
fn a_run_leaves_nothing_behind_and_a_dead_one_is_swept() -> Result<()> {
    let lab = Lab::new()?;
    let prefix = lab.run().prefix().to_owned();
    let dir = lab.run().dir().to_owned();
    let node = lab.node("alder")?;
    let holder = node.holder_pid();
    ensure!(namespaces(&prefix)? == 2, "switch and node");
    drop((lab, node));
    ensure!(namespaces(&prefix)? == 0, "namespaces are left");
    ensure!(!dir.exists(), "the directory is left");
    ensure!(!Path::new(&format!("/proc/{holder}/ns/net")).exists(), "the holder is left");

    // A run whose process was killed: its lock is free, its namespace is still there.
    let dead = dir.with_file_name(format!("{prefix}dead"));
    fs::create_dir_all(&dead)?;
    fs::write(dead.join("owner"), "")?;
    let name = format!("{prefix}dead-alder");
    flannel_lab::process::output(std::process::Command::new("ip").args(["netns", "add", &name]))?;
    drop(Run::new()?);
    ensure!(namespaces(&format!("{prefix}dead"))? == 0, "the dead run's namespace is left");
    ensure!(!dead.exists(), "the dead run's directory is left");
    Ok(())
}

fn namespaces(prefix: &str) -> Result<usize> {
    let start = format!("{prefix}-");
    Ok(fs::read_dir("/run/netns")?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&start))
        .count())
}
