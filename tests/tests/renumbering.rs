//! A node's own address changes under the running agent: the same subnet at the new address, and
//! peers know of it at once.

use flannel_lab::prelude::*;

/// A DHCP server that hands out another address: one goes, the other comes.
fn renumber(node: &Node, from: &str, to: &str) -> Result<()> {
    node.run("sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1")?;
    node.ns().ip(&[&format!("addr add {to}/24 dev eth0"), &format!("addr del {from}/24 dev eth0")])
}

/// Waits until our lease says the address, and lets the kernel peer learn it.
fn published<S: LeaseStore>(duo: &Duo<S>, address: &str, within: Duration) -> Result<()> {
    eventually("the new address is in the store", within, || {
        Ok((duo.own_lease()?["PublicIP"] == address).then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    duo.birch.learn(&duo.env.key()?, &duo.own_lease()?)
}

fn moves_and_keeps_its_subnet<S: LeaseStore>(mut duo: Duo<S>) -> Result<()> {
    let mac = duo.own_lease()?["BackendData"].clone();
    for (from, to) in [("192.0.2.11", "192.0.2.41"), ("192.0.2.41", "192.0.2.42")] {
        renumber(&duo.alder, from, to)?;
        published(&duo, to, Duration::from_secs(3))?;
        ensure!(duo.own_lease()?["BackendData"] == mac, "another MAC: {}", duo.own_lease()?);
        traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, Duration::from_secs(2))?;
        ensure!(duo.agent.wait_ready(READY_WITHIN)? == duo.env, "the env file changed");
    }
    ensure!(duo.store.leases()?.len() == 2, "{:#?}", duo.store.leases()?);
    Ok(())
}

#[test]
fn with_etcd_a_new_address_is_published_at_once_and_peers_go_on_being_followed() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    renumber(&duo.alder, "192.0.2.11", "192.0.2.40")?;
    published(&duo, "192.0.2.40", Duration::from_secs(3))?;
    // The watch was begun from the address that is gone.
    duo.store.put_lease(
        "10.77.201.0-24",
        &json!({"PublicIP": "192.0.2.77", "PublicIPv6": null, "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:00:77"}}),
    )?;
    eventually("the new peer's route", Duration::from_secs(3), || {
        let routes = duo.alder.ns().ip_json("route show dev flannel.1")?;
        Ok(routes.iter().any(|route| route["dst"] == "10.77.201.0/24").then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    duo.store.delete(&format!("{SUBNETS_PREFIX}10.77.201.0-24"))?;
    renumber(&duo.alder, "192.0.2.40", "192.0.2.11")?;
    published(&duo, "192.0.2.11", Duration::from_secs(3))?;
    moves_and_keeps_its_subnet(duo)
}

#[test]
fn with_files_a_new_address_is_published_at_once() -> Result<()> {
    let lab = Lab::new()?;
    moves_and_keeps_its_subnet(Duo::plain(&lab, LocalStore::new(&lab)?)?)
}

#[test]
fn an_address_that_cannot_be_published_yet_is_not_ready_and_is_published_later() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    duo.store.stop()?;
    renumber(&duo.alder, "192.0.2.11", "192.0.2.41")?;
    eventually("it is not ready", Duration::from_secs(6), || {
        let (ready, why) = duo.agent.readiness()?;
        Ok((!ready && why.contains("lease: peers do not know")).then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    std::thread::sleep(Duration::from_secs(4));
    duo.store.start()?;
    published(&duo, "192.0.2.41", Duration::from_secs(12))?;
    duo.agent.wait_ready(Duration::from_secs(3))?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, Duration::from_secs(2))?;
    let lines = duo.agent.complaints(&["could not publish"]);
    ensure!((1..=3).contains(&lines.len()), "a line per try? {lines:#?}");
    Ok(())
}
