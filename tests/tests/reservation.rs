//! A key that somebody wrote without an etcd lease is a reservation, and stays one.

use flannel_lab::prelude::*;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
const KEY: &str = "/coreos.com/network/subnets/10.77.40.0-24";

#[test]
fn a_reservation_stays_a_reservation() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let first = etcd.put(KEY, r#"{"PublicIP":"192.0.2.11"}"#)?;
    let node = lab.node("alder")?;
    // A day less 1439 minutes: were it renewed as a lease is, it would be within the test.
    let mut flags = etcd.flags();
    flags.push("--subnet-lease-renew-margin=1439".into());
    for start in 0..3 {
        let mut agent = node.agent(&flags)?;
        let env = agent.wait_ready(READY_WITHIN)?;
        ensure!(env.subnet_v4()? == "10.77.40.0/24", "start {start}: {env:?}");
        let value: Value = serde_json::from_str(&etcd.get(KEY)?.context("no key")?.value)?;
        let mac = node.link("flannel.1")?.context("no device")?["address"].clone();
        ensure!(
            value["PublicIP"] == "192.0.2.11"
                && value["BackendType"] == "vxlan"
                && value["BackendData"] == json!({"VNI": 1, "VtepMAC": mac}),
            "{value}"
        );
        std::fs::remove_file(agent.subnet_file())?;
        if start < 2 { agent.stop().map(drop)? } else { agent.kill()? }
    }
    let history = etcd.history(KEY, first - 1)?;
    ensure!(history.len() == 2, "written once by hand and once to complete it: {history:?}");
    ensure!(history.iter().all(|version| version.lease == 0), "{history:?}");
    Ok(())
}

#[test]
fn nothing_is_written_while_nothing_happens() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let mut agent = lab.node("alder")?.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let key = format!("{SUBNETS_PREFIX}{}", env.key()?);
    let revision = etcd.get(&key)?.context("no key")?.revision;
    std::thread::sleep(Duration::from_secs(6));
    ensure!(etcd.history(&key, revision)?.is_empty(), "written while idle");
    Ok(())
}

#[test]
fn somebody_elses_reservation_is_left_alone() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    // Two subnets, one of them reserved for birch.
    etcd.put_config(
        r#"{"Network":"10.77.0.0/16","SubnetMin":"10.77.40.0","SubnetMax":"10.77.41.0","Backend":{"Type":"vxlan"}}"#,
    )?;
    let revision = etcd.put(KEY, r#"{"PublicIP":"192.0.2.12"}"#)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()? == "10.77.41.0/24", "{env:?}");
    ensure!(etcd.history(KEY, revision)?.is_empty(), "birch's reservation was written");
    let status = agent.status()?;
    ensure!(status["peers_applied"] == 0, "a reservation is no peer yet: {status:#}");
    let view = flannel_lab::vxlan_view::VxlanView::read(node.ns(), "flannel.1")?;
    ensure!(view.routes.is_empty() && view.fdb.is_empty(), "{view:#?}");
    Ok(())
}
