//! `DirectRouting` of vxlan: peers on the same link get a plain route, all others the tunnel, and
//! which of them is decided anew whenever the underlay changes. Running traffic does not notice.

use std::collections::BTreeSet;

use flannel_lab::{
    duo::wait_view, kernel_peer::vteps_of, lab::Segment, prelude::*, vxlan_view::VxlanView,
};

/// How soon a change has to be in the kernel, on a busy machine.
const SOON: Duration = Duration::from_secs(3);

/// Times there and back under one stream.
const ROUNDS: usize = 5;

fn plan() -> Plan {
    Plan {
        agents: 2,
        kernel_peer: true,
        dual_stack: true,
        backend: r#"{"Type":"vxlan","DirectRouting":true}"#.to_owned(),
        ..Plan::default()
    }
}

/// `<subnet> via <gateway>` of the routes that lead straight to other hosts.
fn direct_routes(node: &Node) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for family in ["-4", "-6"] {
        for line in node.run(&format!("ip {family} route show dev eth0"))?.lines() {
            let words: Vec<_> = line.split_whitespace().take(3).collect();
            if words[0].starts_with("10.77.") || words[0].starts_with("fd77:") {
                all.insert(words.join(" "));
            }
        }
    }
    Ok(all)
}

/// Waits until a node has direct routes to `direct` (keys of leases) and the tunnel's entries for
/// all others, and nothing else.
fn wait_split(
    store: &dyn LeaseStore,
    member: &flannel_lab::cluster::Member,
    direct: &[&str],
) -> Result<()> {
    let own = member.env().key()?;
    let (mut v4, mut v6, mut routes) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (key, lease) in store.leases()?.iter().filter(|(key, _)| **key != own) {
        let (a, b) = vteps_of(key, lease)?;
        if direct.contains(&&**key) {
            for vtep in a.into_iter().chain(b) {
                routes.insert(format!("{} via {}", vtep.subnet, vtep.public_ip));
            }
        } else {
            v4.extend(a);
            v6.extend(b);
        }
    }
    let node = member.node();
    let base = |subnet: &str| subnet.split('/').next().unwrap_or_default().to_owned();
    let own4 = format!("{}/32", base(&member.env().subnet_v4()?));
    let own6 = format!("{}/128", base(&member.env().subnet_v6()?));
    wait_view(node, "flannel.1", &VxlanView::wanted(&own4, &v4)?, SOON)?;
    wait_view(node, "flannel-v6.1", &VxlanView::wanted(&own6, &v6)?, SOON)?;
    eventually("the direct routes as wanted", SOON, || {
        let there = direct_routes(node)?;
        ensure!(there == routes, "{there:#?}, not {routes:#?}");
        Ok(Some(()))
    })
}

#[test]
fn neighbours_are_routed_to_and_the_far_node_is_tunnelled_to() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    lab.router()?;
    let cluster = Cluster::start(&lab, &etcd, &plan())?;
    let far = lab.node_at("far", Segment::B, 21)?;
    let mut agent = far.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let far_pod = far.pod(&env)?;
    cluster.wait_peers(3, READY_WITHIN)?;
    let keys: Vec<String> = cluster.members.iter().map(|m| m.env().key()).collect::<Result<_>>()?;
    wait_split(&etcd, &cluster.members[0], &[&keys[1], &keys[2]])?;
    wait_split(&etcd, &cluster.members[1], &[&keys[0], &keys[2]])?;
    ensure!(direct_routes(&far)?.is_empty(), "{:?}", direct_routes(&far)?);
    cluster.assert_full_mesh()?;
    for member in &cluster.members[..2] {
        for address in far_pod.addresses() {
            traffic::wait_reaches(member.pods()[0].ns(), address, SOON)?;
        }
        traffic::assert_reaches(&member.pods()[0], &far_pod)?;
        traffic::assert_reaches(&far_pod, &member.pods()[0])?;
    }
    // The far node goes, and its entries with it; a neighbour goes, and its direct route too.
    etcd.delete_lease(&keys[2])?;
    agent.stop()?;
    etcd.delete_lease(&env.key()?)?;
    wait_split(&etcd, &cluster.members[0], &[&keys[1]])
}

/// Streams between two members' pods, both ways, both families.
fn streams(
    members: [&flannel_lab::cluster::Member; 2],
) -> Result<Vec<(std::net::IpAddr, LossMeter)>> {
    let [a, b] = members.map(|member| &member.pods()[0]);
    let mut meters = Vec::new();
    for (from, to) in [(a, b), (b, a)] {
        for (source, target) in from.addresses().into_iter().zip(to.addresses()) {
            meters.push((source, LossMeter::start(from.ns(), to.ns(), target)?));
        }
    }
    Ok(meters)
}

fn ensure_nothing_lost(what: &str, meters: Vec<(std::net::IpAddr, LossMeter)>) -> Result<()> {
    let (mut sent, mut gap) = (0, Duration::ZERO);
    let streams = meters.len();
    for (source, meter) in meters {
        let loss = meter.stop()?;
        loss.ensure_none(source).with_context(|| format!("{what}: from {source}"))?;
        sent += loss.sent;
        gap = gap.max(loss.longest_gap);
    }
    println!("{what}: {streams} streams, {sent} packets, none lost, longest gap {gap:?}");
    Ok(())
}

#[test]
fn a_changed_route_moves_a_peer_to_the_tunnel_and_back_without_loss() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    lab.router()?;
    let cluster = Cluster::start(&lab, &etcd, &plan())?;
    cluster.wait_peers(2, READY_WITHIN)?;
    let (alder, birch) = (&cluster.members[0], &cluster.members[1]);
    let (birch_key, byhand_key) = (birch.env().key()?, cluster.members[2].env().key()?);
    wait_split(&etcd, alder, &[&birch_key, &byhand_key])?;
    let meters = streams([alder, birch])?;
    let (v4, v6) = (birch.node().v4(), birch.node().v6());
    for _ in 0..ROUNDS {
        alder.node().ns().ip(&[
            &format!("route add {v4}/32 via 192.0.2.1"),
            &format!("route add {v6}/128 via {}", Segment::A.v6(1)),
        ])?;
        wait_split(&etcd, alder, &[&byhand_key])?;
        alder.node().ns().ip(&[&format!("route del {v4}/32"), &format!("route del {v6}/128")])?;
        wait_split(&etcd, alder, &[&birch_key, &byhand_key])?;
    }
    ensure_nothing_lost(&format!("{ROUNDS} times to the tunnel and back"), meters)
}

#[test]
fn an_address_makes_a_peer_a_neighbour_and_back_without_loss() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    // A second network on the same switch, which only the router and one host are in.
    lab.router()?.ip(&["addr add 203.0.113.1/24 dev eth0"])?;
    let mut plan = plan();
    // The one made by hand goes on sending from the address it had: a stranger's by its new lease.
    plan.flags.push("--peer-filter=off".to_owned());
    let cluster = Cluster::start(&lab, &etcd, &plan)?;
    let (alder, birch, byhand) = (&cluster.members[0], &cluster.members[1], &cluster.members[2]);
    let (birch_key, key) = (birch.env().key()?, byhand.env().key()?);
    byhand.node().ns().ip(&["addr add 203.0.113.5/24 dev eth0"])?;
    let mut lease = etcd.leases()?[&key].clone();
    lease["PublicIP"] = json!("203.0.113.5");
    // Both families move, or the IPv6 half stays a neighbour.
    let v6 = byhand.node().v6();
    alder.node().ns().ip(&[&format!("route add {v6}/128 via {}", Segment::A.v6(1))])?;
    etcd.put_lease(&key, &lease)?;
    wait_split(&etcd, alder, &[&birch_key])?;
    let meters = streams([alder, byhand])?;
    for _ in 0..ROUNDS {
        alder
            .node()
            .ns()
            .ip(&["addr add 203.0.113.11/24 dev eth0", &format!("route del {v6}/128")])?;
        wait_split(&etcd, alder, &[&birch_key, &key])?;
        alder.node().ns().ip(&[
            "addr del 203.0.113.11/24 dev eth0",
            &format!("route add {v6}/128 via {}", Segment::A.v6(1)),
        ])?;
        wait_split(&etcd, alder, &[&birch_key])?;
    }
    ensure_nothing_lost(&format!("{ROUNDS} times a neighbour and back"), meters)
}

#[test]
fn a_restart_between_direct_routes_loses_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    lab.router()?;
    let mut cluster = Cluster::start(&lab, &etcd, &plan())?;
    let keys: Vec<String> = cluster.members.iter().map(|m| m.env().key()).collect::<Result<_>>()?;
    wait_split(&etcd, &cluster.members[0], &[&keys[1], &keys[2]])?;
    let meters = streams([&cluster.members[0], &cluster.members[1]])?;
    let (ns, v4) = (cluster.members[0].node().ns().clone(), cluster.members[1].node().v4());
    cluster.members[0].restart(&etcd, &plan())?;
    wait_split(&etcd, &cluster.members[0], &[&keys[1], &keys[2]])?;
    // What changes while no agent runs is decided at the next start.
    let gateway = format!("route add {v4}/32 via 192.0.2.1");
    cluster.members[0].restart_after(&etcd, &plan(), || ns.ip(&[&gateway]))?;
    eventually("IPv4 by the tunnel", SOON, || {
        Ok((!direct_routes(cluster.members[0].node())?.iter().any(|route| route.contains(&v4)))
            .then_some(()))
    })?;
    ensure_nothing_lost("two restarts", meters)
}
