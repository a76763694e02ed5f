//! Two hosts whose interfaces have one address, as machines behind NAT have it.

use std::collections::BTreeSet;

use flannel_lab::prelude::*;

#[test]
fn a_lease_that_a_second_host_takes_for_its_own_is_told_of_by_the_first() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let mut agents = Vec::new();
    for name in ["alder", "birch"] {
        let node = lab.node(name)?;
        // A first interface like everybody's, beside the one that leads to etcd.
        node.ns().ip(&[
            "link add nat0 type veth peer name nat1",
            "link set nat0 up",
            "link set nat1 up",
            "addr add 10.0.2.15/24 dev nat0",
        ])?;
        let mut flags = etcd.flags();
        flags.push("--iface=nat0".into());
        let mut agent = node.agent(&flags)?;
        let subnet = agent.wait_ready(READY_WITHIN)?.subnet_v4()?;
        agents.push((agent, subnet));
    }
    let (first, second) = agents.split_at_mut(1);
    let subnets: BTreeSet<_> = first.iter().chain(&*second).map(|(_, subnet)| subnet).collect();
    ensure!(subnets.len() == 1, "flannel goes by the address: {subnets:?}");
    let (agent, subnet) = &mut first[0];
    let words = [subnet.as_str(), "10.0.2.15", "somebody else", "--iface"];
    agent.wait_complaint(&words, Duration::from_secs(3)).with_context(|| agent.log())?;
    ensure!(agent.complaints(&[]).len() == 1, "{:#?}", agent.complaints(&[]));
    Ok(())
}
