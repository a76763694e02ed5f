//! Coming back when the lease went to someone else, or to nobody.

use flannel_lab::{agent::Agent, prelude::*, vxlan_view::VxlanView};
use nix::sys::signal::Signal;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
const OWN: &str = "/coreos.com/network/subnets/10.77.1.0-24";

fn of_birch() -> String {
    json!({"PublicIP": "192.0.2.12", "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:00:12"}})
    .to_string()
}

/// alder with the lease of 10.77.1.0/24.
fn alder_with_a_lease(lab: &Lab, etcd: &Etcd) -> Result<(Node, Agent)> {
    etcd.put_config(CONFIG)?;
    etcd.put_with_lease(
        OWN,
        r#"{"PublicIP":"192.0.2.11","PublicIPv6":null}"#,
        etcd.grant(86_400)?,
    )?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()? == "10.77.1.0/24", "{env:?}");
    Ok((node, agent))
}

/// Waits until alder has another subnet everywhere.
fn wait_moved(etcd: &Etcd, node: &Node, agent: &Agent, within: Duration) -> Result<()> {
    let subnet = eventually("another subnet is leased", within, || {
        let (ready, why) = agent.readiness()?;
        ensure!(ready, "{why}");
        let subnet = agent.subnet_env()?.subnet_v4()?;
        Ok((subnet != "10.77.1.0/24").then_some(subnet))
    })
    .with_context(|| agent.log())?;
    let leases = etcd.leases()?;
    let lease = leases.get(&subnet.replace('/', "-")).with_context(|| format!("{leases:?}"))?;
    ensure!(lease["PublicIP"] == "192.0.2.11", "{lease}");
    let base = subnet.split('/').next().unwrap_or_default();
    // Its old subnet is a peer's now.
    eventually("the device is the new subnet's", Duration::from_secs(2), || {
        let view = VxlanView::read(node.ns(), "flannel.1")?;
        ensure!(view.addresses == [format!("{base}/32")].into(), "{view:#?}");
        ensure!(view.routes == [("10.77.1.0/24".into(), "10.77.1.0".into())].into(), "{view:#?}");
        Ok(Some(()))
    })
}

fn assert_birch_keeps_it(etcd: &Etcd, since: i64) -> Result<()> {
    let later = etcd.history(OWN, since)?;
    ensure!(later.is_empty(), "written after birch's: {later:?}");
    let now = etcd.get(OWN)?.context("birch's key is gone")?;
    ensure!(now.value == of_birch(), "{now:?}");
    Ok(())
}

#[test]
fn a_lease_taken_while_frozen_is_not_taken_back() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let (node, mut agent) = alder_with_a_lease(&lab, &etcd)?;
    agent.process().signal(Signal::SIGSTOP)?;
    let held = etcd.get(OWN)?.context("no lease")?;
    etcd.revoke(held.lease)?;
    let revision = etcd.put_with_lease(OWN, &of_birch(), etcd.grant(86_400)?)?;
    std::thread::sleep(Duration::from_secs(2));
    agent.process().signal(Signal::SIGCONT)?;
    wait_moved(&etcd, &node, &agent, Duration::from_secs(5))?;
    assert_birch_keeps_it(&etcd, revision)?;
    let told = agent.complaints(&["192.0.2.11", "192.0.2.12"]);
    ensure!(told.len() == 1, "both owners in one line: {told:?}");
    Ok(())
}

#[test]
fn a_lease_taken_under_its_eyes_is_given_up() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let (node, agent) = alder_with_a_lease(&lab, &etcd)?;
    let revision = etcd.put_with_lease(OWN, &of_birch(), etcd.grant(86_400)?)?;
    wait_moved(&etcd, &node, &agent, Duration::from_secs(5))?;
    assert_birch_keeps_it(&etcd, revision)
}

#[test]
fn an_old_env_file_claims_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let (node, agent) = alder_with_a_lease(&lab, &etcd)?;
    agent.stop()?;
    let held = etcd.get(OWN)?.context("no lease")?;
    etcd.revoke(held.lease)?;
    let revision = etcd.put_with_lease(OWN, &of_birch(), etcd.grant(86_400)?)?;
    let mut agent = node.agent(etcd.flags())?;
    let env = agent.wait_ready(Duration::from_secs(5))?;
    ensure!(env.subnet_v4()? != "10.77.1.0/24", "{env:?}");
    wait_moved(&etcd, &node, &agent, Duration::from_secs(1))?;
    assert_birch_keeps_it(&etcd, revision)?;
    let told = agent.complaints(&["10.77.1.", "192.0.2.12"]);
    ensure!(told.len() == 1, "subnet and owner in one line: {told:?}");
    Ok(())
}

#[test]
fn a_lease_that_only_ended_is_leased_again() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let (node, mut agent) = alder_with_a_lease(&lab, &etcd)?;
    // While frozen, and before its eyes.
    for frozen in [true, false] {
        if frozen {
            agent.process().signal(Signal::SIGSTOP)?;
        }
        let held = etcd.get(OWN)?.context("no lease")?;
        etcd.revoke(held.lease)?;
        if frozen {
            std::thread::sleep(Duration::from_secs(1));
            agent.process().signal(Signal::SIGCONT)?;
        }
        eventually("the same subnet is leased again", Duration::from_secs(5), || {
            let lease = etcd.get(OWN)?.context("no key")?;
            let (ready, why) = agent.readiness()?;
            ensure!(ready, "{why}");
            Ok((lease.lease != 0 && lease.lease != held.lease).then_some(()))
        })
        .with_context(|| agent.log())?;
        ensure!(agent.subnet_env()?.subnet_v4()? == "10.77.1.0/24", "another subnet");
    }
    ensure!(etcd.leases()?.len() == 1, "{:?}", etcd.leases()?);
    drop(node);
    Ok(())
}

#[test]
fn a_deleted_key_is_written_again() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let (_node, agent) = alder_with_a_lease(&lab, &etcd)?;
    etcd.delete(OWN)?;
    eventually("the key is back", Duration::from_secs(5), || {
        Ok(etcd.get(OWN)?.filter(|held| held.lease != 0).map(drop))
    })
    .with_context(|| agent.log())?;
    ensure!(agent.subnet_env()?.subnet_v4()? == "10.77.1.0/24", "another subnet");
    Ok(())
}

#[test]
fn in_a_local_store_a_taken_lease_is_given_up_too() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let mut agent = lab.node("alder")?.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let birch: Value = serde_json::from_str(&of_birch())?;
    store.put_lease(&env.key()?, &birch)?;
    eventually("another subnet is leased", Duration::from_secs(5), || {
        let (ready, why) = agent.readiness()?;
        ensure!(ready, "{why}");
        Ok((agent.subnet_env()?.subnet_v4()? != env.subnet_v4()?).then_some(()))
    })
    .with_context(|| agent.log())?;
    ensure!(store.leases()?.get(&env.key()?) == Some(&birch), "{:?}", store.leases()?);
    Ok(())
}
