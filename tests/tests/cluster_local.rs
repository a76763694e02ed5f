//! A cluster whose leases are files in a directory: no server needed.

use flannel_lab::{prelude::*, traffic::MIB_16};

#[test]
fn three_nodes_reach_each_other_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let plan = Plan { dual_stack: true, ..Plan::default() };
    let cluster = Cluster::start(&lab, &store, &plan)?;
    cluster.assert_full_mesh()?;
    let (from, to) = cluster.pod_pairs().next().context("no pods")?;
    for address in to.addresses() {
        let transfer = traffic::tcp_transfer(from, to, address, MIB_16)?;
        ensure!(transfer.intact && transfer.bytes == MIB_16, "{transfer:?}");
    }
    ensure!(store.leases()?.len() == 3, "{:?}", store.leases()?);
    cluster.wait_peers(2, Duration::from_secs(2))
}

#[test]
fn a_kernel_peer_among_them_is_reached_too() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let plan = Plan { agents: 2, kernel_peer: true, dual_stack: true, ..Plan::default() };
    Cluster::start(&lab, &store, &plan)?.assert_full_mesh()
}

#[test]
fn a_node_that_joins_later_is_reached_and_one_that_leaves_is_forgotten() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let cedar = KernelPeer::new(lab.node("cedar")?, PeerSpec::v4(201))?;
    cedar.learn(&duo.env.key()?, &duo.own_lease()?)?;
    let pod = cedar.node().pod(&cedar.env()?)?;
    let (key, lease) = cedar.lease();
    duo.store.put_lease(&key, &lease)?;
    traffic::wait_reaches(duo.ours.ns(), pod.v4()?, Duration::from_secs(2))?;

    duo.store.delete_lease(&key)?;
    let birch = duo.birch_vteps()?.0;
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(2))?;
    ensure!(traffic::ping(duo.ours.ns(), pod.v4()?, 1)? == 0, "a peer that left is still reached");
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    ensure!(duo.agent.process().exited()?.is_none(), "the agent ended");
    Ok(())
}

#[test]
fn agents_that_start_together_lease_different_subnets() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    // Three subnets for three nodes: any two that pick at random would collide soon.
    store.put_config(r#"{"Network":"10.77.8.0/22","Backend":{"Type":"vxlan"}}"#)?;
    let mut agents = Vec::new();
    for name in ["alder", "birch", "cedar"] {
        let node = lab.node(name)?;
        agents.push((node.agent(store.flags())?, node));
    }
    let mut subnets = std::collections::BTreeSet::new();
    for (agent, _) in &mut agents {
        subnets.insert(agent.wait_ready(READY_WITHIN)?.subnet_v4()?);
    }
    let expected: Vec<_> = subnets.iter().map(String::as_str).collect();
    ensure!(expected == ["10.77.10.0/24", "10.77.11.0/24", "10.77.9.0/24"], "{subnets:?}");
    Ok(())
}

#[test]
fn a_junk_file_among_the_leases_costs_a_warning_and_no_peer() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    std::fs::write(duo.store.dir().join("subnets/10.77.44.0-24.json"), "{\"PublicIP\":")?;
    std::fs::write(duo.store.dir().join("subnets/readme.json"), "hello")?;
    duo.agent.wait_complaint(&["10.77.44.0-24"], Duration::from_secs(3))?;
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    let bad = duo.agent.metric("flannel_store_bad_entries_total")?;
    ensure!(bad >= 1.0, "counted {bad}");
    Ok(())
}
