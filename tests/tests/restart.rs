//! An agent that ends, however it ends, leaves everything forwarding; one that starts takes over
//! what is there. Running traffic does not notice.

use flannel_lab::{cluster::Role, prelude::*, vxlan_view::VxlanView};
use nix::sys::signal::Signal;

fn restart_under_traffic(signal: Signal, datapath: &str) -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = Plan {
        agents: 1,
        kernel_peer: true,
        dual_stack: true,
        flags: vec![format!("--datapath={datapath}")],
        ..Plan::default()
    };
    let cluster = Cluster::start(&lab, &etcd, &plan)?;
    cluster.assert_entries(&etcd)?;
    let [ours, theirs] = <[_; 2]>::try_from(cluster.members).ok().context("two members")?;
    let (pod, peer) = (ours.pods()[0].clone(), theirs.pods()[0].clone());
    let before_env = ours.env().clone();
    let Role::Agent(node, mut agent) = ours.into_role() else { bail!("no agent") };
    let identity = |node: &Node| -> Result<(Value, Value)> {
        let link = node.link("flannel.1")?.context("no flannel.1")?;
        Ok((link["ifindex"].clone(), link["address"].clone()))
    };
    let before = identity(&node)?;
    let lease = etcd.leases()?;

    let meters = [
        (pod.v4()?, LossMeter::start(pod.ns(), peer.ns(), peer.v4()?)?),
        (peer.v4()?, LossMeter::start(peer.ns(), pod.ns(), pod.v4()?)?),
        (pod.v6()?, LossMeter::start(pod.ns(), peer.ns(), peer.v6()?)?),
        (peer.v6()?, LossMeter::start(peer.ns(), pod.ns(), pod.v6()?)?),
    ];
    let status = agent.process().stop(signal, Duration::from_secs(10))?;
    if signal == Signal::SIGTERM {
        ensure!(status.code() == Some(0), "asked to stop: {status}\n{}", agent.log());
    }
    std::thread::sleep(Duration::from_millis(500));
    let mut agent = node.agent(etcd.flags().iter().chain(&plan.flags))?;
    let env = agent.wait_ready(READY_WITHIN)?;
    std::thread::sleep(Duration::from_millis(500));
    for (source, meter) in meters {
        meter.stop()?.ensure_none(source).with_context(|| format!("from {source}"))?;
    }
    ensure!(env == before_env, "{before_env:?} became {env:?}");
    ensure!(identity(&node)? == before, "another device after the restart");
    ensure!(etcd.leases()? == lease, "the leases changed: {:?}", etcd.leases()?);
    ensure!(agent.complaints(&[]).is_empty(), "{:?}", agent.complaints(&[]));
    Ok(())
}

#[test]
fn nothing_is_lost_when_the_agent_is_told_to_stop() -> Result<()> {
    restart_under_traffic(Signal::SIGTERM, "auto")
}

#[test]
fn nothing_is_lost_when_the_agent_is_killed() -> Result<()> {
    restart_under_traffic(Signal::SIGKILL, "auto")
}

#[test]
fn nothing_is_lost_by_the_kernel_datapath() -> Result<()> {
    restart_under_traffic(Signal::SIGTERM, "kernel")
}

#[test]
fn what_changed_while_the_agent_was_away_is_caught_up_with() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let mut cluster = Cluster::start(&lab, &etcd, &Plan { agents: 3, ..Plan::default() })?;
    let plan = Plan { agents: 3, ..Plan::default() };
    // cedar leaves and another node comes while alder's agent is down.
    let cedar = cluster.members.pop().context("cedar")?;
    let Role::Agent(_, agent) = cedar.into_role() else { bail!("no agent") };
    let env = agent.subnet_env()?;
    let new = KernelPeer::new(lab.node("byhand")?, PeerSpec::v4(201))?;
    let (key, lease) = new.lease();
    let store = &etcd;
    cluster.members[0].restart_after(store, &plan, || {
        agent.stop()?;
        store.delete_lease(&env.key()?)?;
        store.put_lease(&key, &lease)
    })?;
    cluster.wait_peers(2, READY_WITHIN)?;
    cluster.assert_entries(store)?;
    let view = VxlanView::read(cluster.members[0].node().ns(), "flannel.1")?;
    ensure!(view.routes.contains(&("10.77.201.0/24".into(), "10.77.201.0".into())), "{view:#?}");
    Ok(())
}

#[test]
fn the_mac_survives_a_reboot() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let mac = |node: &Node| -> Result<Value> {
        Ok(node.link("flannel.1")?.context("no flannel.1")?["address"].clone())
    };
    let mut agent = node.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let first = mac(&node)?;
    agent.stop()?;
    // What a reboot takes away: devices, /run, and here the lease too. The state file stays.
    node.run("ip link del flannel.1")?;
    node.run("rm -r /run/flannel")?;
    store.delete_lease(&env.key()?)?;
    node.agent(store.flags())?.wait_ready(READY_WITHIN)?;
    let second = mac(&node)?;
    ensure!(first == second, "MAC {first} became {second}");
    Ok(())
}
