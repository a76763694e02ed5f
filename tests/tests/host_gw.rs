//! The host-gw backend: peers' subnets are routed to their hosts, which share a link.

use flannel_lab::{cluster::Role, lab::Segment, prelude::*};
use nix::sys::signal::Signal;

/// How soon a change has to be in the kernel, on a busy machine.
const SOON: Duration = Duration::from_secs(3);

fn plan() -> Plan {
    Plan {
        kernel_peer: true,
        dual_stack: true,
        backend: r#"{"Type":"host-gw"}"#.to_owned(),
        ..Plan::default()
    }
}

/// `<subnet> via <gateway>` of all routes in the cluster's networks, but those to own pods.
fn routes(node: &Node) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for family in ["-4", "-6"] {
        for line in node.run(&format!("ip {family} route show"))?.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            if words[0].starts_with("10.77.") || words[0].starts_with("fd77:") {
                if words.get(1) == Some(&"via") {
                    all.push(words[..3].join(" "));
                } else if !line.contains("dev cni0") {
                    all.push(line.trim().to_owned());
                }
            }
        }
    }
    all.sort();
    Ok(all)
}

/// What a node has to have by the store's leases.
fn wanted(store: &dyn LeaseStore, own: &str) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for (key, lease) in store.leases()?.iter().filter(|(key, _)| *key != own) {
        if lease["BackendType"] != "host-gw" {
            continue;
        }
        let (v4, v6) = key.split_once('&').map_or((&**key, None), |(v4, v6)| (v4, Some(v6)));
        for (subnet, address) in [(Some(v4), "PublicIP"), (v6, "PublicIPv6")] {
            if let (Some(subnet), Some(via)) = (subnet, lease[address].as_str()) {
                let (base, len) = subnet.rsplit_once('-').context("no length")?;
                all.push(format!("{base}/{len} via {via}"));
            }
        }
    }
    all.sort();
    Ok(all)
}

fn wait_routes(node: &Node, wanted: &[String]) -> Result<()> {
    eventually("the routes as wanted", SOON, || {
        let there = routes(node)?;
        ensure!(there == wanted, "{}: {there:#?}, not {wanted:#?}", node.name());
        Ok(Some(()))
    })
}

fn assert_routes(cluster: &Cluster, store: &dyn LeaseStore) -> Result<()> {
    for member in cluster.members.iter().filter(|member| member.agent().is_some()) {
        wait_routes(member.node(), &wanted(store, &member.env().key()?)?)?;
    }
    Ok(())
}

/// Waits for a warning with these words.
fn told(agent: &Agent, words: &[&str]) -> Result<()> {
    eventually(&format!("a warning with {words:?}"), SOON, || {
        Ok((!agent.complaints(words).is_empty()).then_some(()))
    })
}

#[test]
fn everybody_reaches_everybody_and_a_plain_kernel_node() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan())?;
    cluster.wait_peers(3, READY_WITHIN)?;
    assert_routes(&cluster, &etcd)?;
    cluster.assert_full_mesh()?;
    for member in &cluster.members[..3] {
        ensure!(member.env().mtu()? == 1500, "{:?}", member.env());
        let lease = &etcd.leases()?[&member.env().key()?];
        ensure!(
            lease["BackendType"] == "host-gw" && lease.get("BackendData").is_none(),
            "published {lease}"
        );
        let agent = member.agent().context("an agent")?;
        ensure!(agent.complaints(&[]).is_empty(), "{:?}", agent.complaints(&[]));
    }
    // No tunnel: the receiver sees nothing but the pods' own packets.
    let (from, to) = (&cluster.members[0].pods()[0], &cluster.members[1].pods()[0]);
    let transfer = traffic::tcp_transfer(from, to, to.v4()?, traffic::MIB_16)?;
    ensure!(transfer.intact, "{transfer:?}");
    Ok(())
}

fn restart_under_traffic(signal: Signal) -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = plan();
    let mut cluster = Cluster::start(&lab, &etcd, &plan)?;
    let before = routes(cluster.members[0].node())?;
    let (byhand, birch) = (cluster.members.pop(), cluster.members.remove(1));
    let byhand = byhand.context("the kernel peer")?;
    let alder = cluster.members.remove(0);
    let ours = alder.pods()[0].clone();
    let mut meters = Vec::new();
    for other in [&birch.pods()[0], &byhand.pods()[0]] {
        for (from, to) in [(&ours, other), (other, &ours)] {
            meters.push((from.v4()?, LossMeter::start(from.ns(), to.ns(), to.v4()?)?));
            meters.push((from.v6()?, LossMeter::start(from.ns(), to.ns(), to.v6()?)?));
        }
    }
    let Role::Agent(node, mut agent) = alder.into_role() else { bail!("no agent") };
    agent.process().stop(signal, Duration::from_secs(10))?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(routes(&node)? == before, "routes went with the agent");
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    std::thread::sleep(Duration::from_millis(500));
    let mut sent = 0;
    for (source, meter) in meters {
        let loss = meter.stop()?;
        loss.ensure_none(source).with_context(|| format!("from {source}"))?;
        sent += loss.sent;
    }
    println!("{signal}: 8 streams, {sent} packets, none lost");
    ensure!(routes(&node)? == before, "{before:?} became {:?}", routes(&node)?);
    Ok(())
}

#[test]
fn a_restart_loses_nothing() -> Result<()> {
    restart_under_traffic(Signal::SIGTERM)
}

#[test]
fn a_kill_loses_nothing() -> Result<()> {
    restart_under_traffic(Signal::SIGKILL)
}

#[test]
fn peers_that_change_or_go_leave_nothing_behind() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan())?;
    let alder = &cluster.members[0];
    let own = alder.env().key()?;
    // A user's own routes, one inside the cluster's network, are nobody else's business.
    alder.node().ns().ip(&[
        "route add 10.77.250.0/24 via 192.0.2.1",
        "route add 172.31.0.0/16 via 192.0.2.12",
    ])?;
    let with_users = |mut routes: Vec<String>| {
        routes.push("10.77.250.0/24 via 192.0.2.1".to_owned());
        routes.sort();
        routes
    };
    wait_routes(alder.node(), &with_users(wanted(&etcd, &own)?))?;

    // The kernel peer moves to another address, and its pods' way moves along.
    let byhand = &cluster.members[3];
    byhand.node().ns().ip(&["addr add 192.0.2.99/24 dev eth0"])?;
    let key = byhand.env().key()?;
    let mut lease = etcd.leases()?[&key].clone();
    lease["PublicIP"] = json!("192.0.2.99");
    etcd.put_lease(&key, &lease)?;
    wait_routes(alder.node(), &with_users(wanted(&etcd, &own)?))?;
    traffic::assert_reaches(&alder.pods()[0], &byhand.pods()[0])?;

    // It becomes something else: left out, told once, everybody else is served.
    lease["BackendType"] = json!("vxlan");
    etcd.put_lease(&key, &lease)?;
    let agent = alder.agent().context("an agent")?;
    told(agent, &["10.77.200.0/24", "vxlan", "not host-gw"])?;
    wait_routes(alder.node(), &with_users(wanted(&etcd, &own)?))?;
    ensure!(agent.complaints(&["not host-gw"]).len() == 1, "{:?}", agent.complaints(&[]));

    etcd.delete_lease(&key)?;
    wait_routes(alder.node(), &with_users(wanted(&etcd, &own)?))?;
    ensure!(routes(alder.node())?.len() == 5, "{:?}", routes(alder.node())?);
    let other = alder.node().run("ip route show 172.31.0.0/16")?;
    ensure!(other.contains("192.0.2.12"), "a user's route went");
    traffic::assert_reaches(&alder.pods()[0], &cluster.members[1].pods()[0])
}

#[test]
fn a_peer_behind_a_router_is_its_own_problem_only() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &Plan { dual_stack: false, ..plan() })?;
    let far = lab.node_at("far", Segment::B, 21)?;
    let lease = json!({"PublicIP": far.v4(), "BackendType": "host-gw"});
    etcd.put_lease("10.77.210.0-24", &lease)?;
    let alder = &cluster.members[0];
    let agent = alder.agent().context("an agent")?;
    told(agent, &["10.77.210.0/24", &far.v4(), "eth0", "same link"])?;
    let without = |mut routes: Vec<String>| {
        routes.retain(|route| !route.contains("10.77.210.0"));
        routes
    };
    wait_routes(alder.node(), &without(wanted(&etcd, &alder.env().key()?)?))?;
    ensure!(agent.readiness()?.0, "not ready for a far peer");
    ensure!(agent.status()?["peers_applied"] == 3, "{}", agent.status()?);
    cluster.assert_full_mesh()?;
    // An address on its link makes it a neighbour: found without anybody telling.
    alder.node().ns().ip(&["addr add 198.51.100.11/24 dev eth0"])?;
    wait_routes(alder.node(), &wanted(&etcd, &alder.env().key()?)?)?;
    alder.node().ns().ip(&["addr del 198.51.100.11/24 dev eth0"])?;
    wait_routes(alder.node(), &without(wanted(&etcd, &alder.env().key()?)?))
}

#[test]
fn deleted_routes_and_a_new_nic_heal() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan())?;
    let alder = &cluster.members[0];
    let all = wanted(&etcd, &alder.env().key()?)?;
    wait_routes(alder.node(), &all)?;
    for route in &all {
        let family = if route.starts_with("fd77") { "-6 " } else { "" };
        alder.node().run(&format!("ip {family}route del {route}"))?;
        wait_routes(alder.node(), &all)?;
    }
    alder.node().run("ip link set eth0 down")?;
    alder.node().run("ip link set eth0 up")?;
    let (v6, gate) = (alder.node().v6(), Segment::A.v6(1));
    // The kernel took these with the link.
    alder.node().ns().ip(&[
        &format!("addr replace {v6}/64 dev eth0 nodad"),
        &format!("route replace default via {gate} dev eth0"),
        "route replace default via 192.0.2.1 dev eth0",
    ])?;
    wait_routes(alder.node(), &all)?;
    alder.node().remove_eth0()?;
    eventually("not ready without a NIC", SOON, || {
        Ok((!alder.agent().context("an agent")?.readiness()?.0).then_some(()))
    })?;
    alder.node().recreate_eth0(1400)?;
    wait_routes(alder.node(), &all)?;
    let agent = alder.agent().context("an agent")?;
    eventually("the new MTU", SOON, || Ok((agent.subnet_env()?.mtu()? == 1400).then_some(())))?;
    // By IPv6 the others take the old NIC's MAC for reachable up to half a minute more.
    for (from, to) in cluster.pod_pairs() {
        traffic::wait_reaches(from.ns(), to.v4()?, Duration::from_secs(10))?;
    }
    Ok(())
}

#[test]
fn what_flanneld_left_is_taken_over() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = Plan { agents: 2, ..plan() };
    let mut cluster = Cluster::start(&lab, &etcd, &plan)?;
    let all = wanted(&etcd, &cluster.members[0].env().key()?)?;
    let (from, to) = (cluster.members[0].pods()[0].clone(), cluster.members[1].pods()[0].clone());
    let ns = cluster.members[0].node().ns().clone();
    let meter = LossMeter::start(from.ns(), to.ns(), to.v4()?)?;
    cluster.members[0].restart_after(&etcd, &plan, || {
        // As flanneld makes them: main table, protocol boot.
        for route in &all {
            ns.ip(&[&format!("route replace {route} dev eth0 proto boot")])?;
        }
        Ok(())
    })?;
    let node = cluster.members[0].node();
    eventually("all routes ours", SOON, || {
        let tagged = |family| node.run(&format!("ip {family} route show proto 102"));
        let count = tagged("-4")?.lines().count() + tagged("-6")?.lines().count();
        ensure!(count == all.len() && routes(node)? == all, "{:?}", routes(node)?);
        Ok(Some(()))
    })?;
    meter.stop()?.ensure_none(from.v4()?)?;
    // Known as ours now: they go with their peer.
    etcd.delete_lease("10.77.200.0-24&fd77:0:0:200::-64")?;
    wait_routes(node, &wanted(&etcd, &cluster.members[0].env().key()?)?)
}
