//! An etcd that does not answer: dead, mute, or hidden behind a black hole.

use flannel_lab::{prelude::*, vxlan_view::VxlanView};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

fn lease(n: u8) -> (String, Value) {
    (
        format!("10.77.{n}.0-24"),
        json!({"PublicIP": format!("192.0.2.{n}"), "PublicIPv6": null, "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:00:{n:02x}")}}),
    )
}

fn has_peer(node: &Node, n: u8) -> Result<bool> {
    let view = VxlanView::read(node.ns(), "flannel.1")?;
    let subnet = format!("10.77.{n}.0/24");
    Ok(view.routes.iter().any(|(to, _)| *to == subnet))
}

#[test]
fn traffic_goes_on_while_etcd_is_away_and_changes_are_caught_up_with() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = Plan { agents: 1, kernel_peer: true, ..Plan::default() };
    let cluster = Cluster::start(&lab, &etcd, &plan)?;
    let (ours, theirs) = (&cluster.members[0], &cluster.members[1]);
    let agent = ours.agent().context("an agent")?;
    let (pod, peer) = (&ours.pods()[0], &theirs.pods()[0]);
    let meter = LossMeter::start(pod.ns(), peer.ns(), peer.v4()?)?;
    etcd.stop()?;
    std::thread::sleep(Duration::from_secs(4));
    ensure!(agent.readiness()?.0, "a lease of a day is not lost in 4 s");
    etcd.start()?;
    let (key, value) = lease(101);
    etcd.put_lease(&key, &value)?;
    eventually("a new peer is there", Duration::from_secs(3), || {
        Ok(has_peer(ours.node(), 101)?.then_some(()))
    })
    .with_context(|| agent.log())?;
    meter.stop()?.ensure_none(pod.v4()?)?;
    let lines = agent.complaints(&["etcd"]);
    ensure!(lines.len() <= 2, "a line per try: {lines:#?}");
    Ok(())
}

#[test]
fn a_mute_etcd_at_the_start_is_said_and_waited_for() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    etcd.freeze()?;
    let mut agent = lab.node("alder")?.agent(etcd.flags())?;
    agent.wait_complaint(&["192.0.2.5:2379"], Duration::from_secs(10))?;
    ensure!(!agent.readiness()?.0, "ready without a store");
    etcd.thaw()?;
    agent.wait_ready(Duration::from_secs(10))?;
    Ok(())
}

#[test]
fn an_endpoint_that_is_a_black_hole_is_passed_over() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    // Somebody has the address and drops everything.
    let hole = lab.node_at("hole", flannel_lab::lab::Segment::A, 21)?;
    hole.run("iptables -A INPUT -p tcp -j DROP")?;
    let flags = [format!("--etcd-endpoints=http://192.0.2.21:2379,{}", etcd.endpoint())];
    let mut agent = node.agent(flags)?;
    agent.wait_ready(Duration::from_secs(10))?;
    let (key, value) = lease(102);
    etcd.put_lease(&key, &value)?;
    eventually(
        "a peer is there",
        Duration::from_secs(5),
        || Ok(has_peer(&node, 102)?.then_some(())),
    )
    .with_context(|| agent.log())
}

#[test]
fn packets_that_are_dropped_on_the_way_do_not_deafen_the_agent() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    node.run("iptables -I OUTPUT -p tcp --dport 2379 -j DROP")?;
    node.run("iptables -I INPUT -p tcp --sport 2379 -j DROP")?;
    let (key, value) = lease(103);
    etcd.put_lease(&key, &value)?;
    std::thread::sleep(Duration::from_secs(5));
    ensure!(!has_peer(&node, 103)?, "heard through a wall");
    node.run("iptables -D OUTPUT -p tcp --dport 2379 -j DROP")?;
    node.run("iptables -D INPUT -p tcp --sport 2379 -j DROP")?;
    eventually("a peer is there", Duration::from_secs(10), || {
        Ok(has_peer(&node, 103)?.then_some(()))
    })
    .with_context(|| agent.log())?;
    ensure!(etcd.leases()?.len() == 2, "another lease was taken: {:?}", etcd.leases()?);
    Ok(())
}
