//! The alloc backend: a subnet for every node, and not one packet or route of ours.

use flannel_lab::prelude::*;

#[test]
fn nodes_get_subnets_and_somebody_else_connects_them() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"alloc"}}"#)?;
    let mut hosts = Vec::new();
    for name in ["alder", "birch", "cedar"] {
        let node = lab.node(name)?;
        let mut agent = node.agent(etcd.flags())?;
        let env = agent.wait_ready(READY_WITHIN)?;
        ensure!(env.mtu()? == 1500, "{env:?}");
        let lease = etcd.leases()?[&env.key()?].clone();
        ensure!(lease == json!({"PublicIP": node.v4(), "PublicIPv6": null}), "published {lease}");
        let routes = node.run("ip route show")?;
        ensure!(!routes.contains("10.77."), "{routes}");
        ensure!(node.link("flannel.1")?.is_none(), "a device");
        let pod = node.pod(&env)?;
        hosts.push((node, agent, env, pod));
    }
    // The cloud's router, as it were.
    for (from, ..) in &hosts {
        for (to, _, env, _) in hosts.iter().filter(|(to, ..)| to.name() != from.name()) {
            let (subnet, via) = (env.subnet_v4()?, to.v4());
            from.ns().ip(&[&format!("route add {subnet} via {via}")])?;
        }
    }
    let pods: Vec<Pod> = hosts.iter().map(|(.., pod)| pod.clone()).collect();
    for from in &pods {
        for to in pods.iter().filter(|to| to.name() != from.name()) {
            traffic::wait_reaches(from.ns(), to.v4()?, Duration::from_secs(5))?;
        }
    }
    let (_, _, gone, _) = hosts.pop().context("cedar")?;
    let (node, agent, ..) = hosts.remove(0);
    let before = node.run("ip route show")?;
    let meter = LossMeter::start(pods[0].ns(), pods[1].ns(), pods[1].v4()?)?;
    agent.stop()?;
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    // A peer that goes takes nothing along.
    etcd.delete_lease(&gone.key()?)?;
    std::thread::sleep(Duration::from_millis(500));
    let loss = meter.stop()?;
    loss.ensure_none(pods[0].v4()?)?;
    println!("restart: {} packets, none lost", loss.sent);
    let after = node.run("ip route show")?;
    ensure!(before == after, "{before}\nbecame\n{after}");

    node.ns().ip(&["link set eth0 mtu 1400"])?;
    eventually("the interface's new MTU", Duration::from_secs(3), || {
        Ok((agent.subnet_env()?.mtu()? == 1400).then_some(()))
    })
}

#[test]
fn an_unknown_type_is_told_which_there_are() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"carrier-pigeon"}}"#)?;
    let mut agent = lab.node("alder")?.agent(store.flags())?;
    let names = ["carrier-pigeon", "alloc", "extension", "host-gw", "udp", "vxlan"];
    agent.wait_complaint_or_exit(&names, Duration::from_secs(10))?;
    let status = agent.process().wait(Duration::from_secs(10))?;
    ensure!(status.code() == Some(1), "{status}");
    Ok(())
}
