//! A cluster without any server: leases are files in a directory that all nodes share.

use flannel_lab::{prelude::*, traffic::MIB_16};

fn plan(datapath: &str) -> Plan {
    Plan {
        agents: 2,
        kernel_peer: true,
        dual_stack: true,
        pods: 1,
        flags: vec![format!("--datapath={datapath}")],
        ..Plan::default()
    }
}

/// Two agents and a plain kernel node: everybody reaches everybody, at every address.
fn everybody_reaches_everybody(datapath: &str) -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan(datapath))?;
    cluster.wait_peers(2, READY_WITHIN)?;
    cluster.assert_entries(&store)?;
    cluster.assert_full_mesh()?;
    for (from, to) in cluster.pod_pairs() {
        for address in to.addresses() {
            let transfer = traffic::tcp_transfer(from, to, address, MIB_16 / 4)?;
            ensure!(transfer.intact, "{} to {address}: {transfer:?}", from.name());
        }
    }
    Ok(())
}

#[test]
fn everybody_reaches_everybody_by_the_best_datapath() -> Result<()> {
    everybody_reaches_everybody("auto")
}

#[test]
fn everybody_reaches_everybody_by_the_kernel_datapath() -> Result<()> {
    everybody_reaches_everybody("kernel")
}

#[test]
fn a_node_gets_what_flannel_gives_it() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &Plan { agents: 1, pods: 0, ..Plan::default() })?;
    let alder = &cluster.members[0];
    let (node, env) = (alder.node(), alder.env());
    ensure!(env.get("FLANNEL_NETWORK") == Some("10.77.0.0/16"), "{env:?}");
    ensure!(env.mtu()? == 1450, "{env:?}");
    ensure!(env.get("FLANNEL_IPMASQ") == Some("false"), "{env:?}");
    let subnet = env.subnet_v4()?;
    ensure!(subnet.starts_with("10.77.") && subnet.ends_with(".0/24"), "{subnet}");
    ensure!(subnet != "10.77.0.0/24", "the first subnet is never leased");

    let link = node.link("flannel.1")?.context("no flannel.1")?;
    let data = &link["linkinfo"]["info_data"];
    ensure!(link["mtu"] == 1450 && data["id"] == 1 && data["port"] == 8472, "{link:#}");
    ensure!(data["local"] == "192.0.2.11" && data["link"] == "eth0", "{link:#}");
    ensure!(data["learning"] == false, "{link:#}");

    let leases = store.leases()?;
    let lease = leases.get(&env.key()?).with_context(|| format!("no own lease in {leases:?}"))?;
    ensure!(lease["PublicIP"] == "192.0.2.11" && lease["BackendType"] == "vxlan", "{lease}");
    ensure!(lease["BackendData"]["VtepMAC"] == link["address"], "{lease} and {link:#}");
    ensure!(leases.len() == 1, "one node, one lease: {leases:?}");
    Ok(())
}

#[test]
fn nodes_that_come_and_go_are_followed() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let mut cluster = Cluster::start(&lab, &store, &Plan { agents: 2, ..Plan::default() })?;
    let late = lab.node("cedar")?;
    let mut agent = late.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let pod = late.pod(&env)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    for member in &cluster.members {
        traffic::wait_reaches(pod.ns(), member.pods()[0].v4()?, Duration::from_secs(5))?;
        traffic::assert_reaches(&member.pods()[0], &pod)?;
    }
    // Stopping an agent is no departure: its lease and everybody's way to it stay.
    agent.stop()?;
    cluster.members[0].agent().context("an agent")?.status()?;
    traffic::assert_reaches(&cluster.members[0].pods()[0], &pod)?;
    // The lease going is.
    store.delete_lease(&env.key()?)?;
    cluster.wait_peers(1, READY_WITHIN)?;
    cluster.assert_entries(&store)?;
    let plan = Plan { agents: 2, ..Plan::default() };
    cluster.members[1].restart(&store, &plan)?;
    cluster.wait_peers(1, READY_WITHIN)?;
    cluster.assert_entries(&store)
}

#[test]
fn many_nodes_at_once_lease_different_subnets() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    // As many subnets as nodes: every collision has to be resolved.
    store.put_config(
        r#"{"Network":"10.77.0.0/24","SubnetLen":26,"SubnetMin":"10.77.0.64","Backend":{"Type":"vxlan"}}"#,
    )?;
    let mut agents = Vec::new();
    for name in ["alder", "birch", "cedar"] {
        agents.push(lab.node(name)?.agent(store.flags())?);
    }
    let mut subnets = Vec::new();
    for agent in &mut agents {
        subnets.push(agent.wait_ready(READY_WITHIN)?.subnet_v4()?);
    }
    subnets.sort();
    ensure!(subnets == ["10.77.0.128/26", "10.77.0.192/26", "10.77.0.64/26"], "{subnets:?}");
    // A fourth has to wait, and says for what.
    let mut fourth = lab.node("dogwood")?.agent(store.flags())?;
    fourth.wait_complaint(&["3"], Duration::from_secs(5))?;
    let (ready, _) = fourth.readiness()?;
    ensure!(!ready, "ready without a subnet");
    store.delete_lease("10.77.0.128-26")?;
    Ok(())
}
