//! The NIC below the tunnel goes and comes back.

use std::thread::sleep;

use flannel_lab::prelude::*;

/// How soon a usable NIC has to carry pods again.
const SOON: Duration = Duration::from_secs(3);

#[test]
fn the_nic_recreated_with_another_index_and_a_smaller_mtu() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let lease = duo.own_lease()?["BackendData"].clone();
    duo.alder.remove_eth0()?;
    sleep(Duration::from_secs(2));
    let (ready, why) = duo.agent.readiness()?;
    ensure!(!ready, "ready without a NIC: {why}");
    duo.alder.recreate_eth0(1400)?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON)?;
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v4()?, SOON)?;
    eventually("MTU 1350 everywhere", SOON, || {
        let device = duo.alder.link("flannel.1")?.context("no device")?["mtu"].clone();
        let file = duo.agent.subnet_env()?.mtu()?;
        ensure!(device == 1350 && file == 1350, "device {device}, subnet.env {file}");
        Ok(Some(()))
    })?;
    ensure!(duo.own_lease()?["BackendData"] == lease, "the lease's data changed");
    ensure!(duo.agent.process().exited()?.is_none(), "the agent ended");
    eventually("ready again", SOON, || Ok(duo.agent.readiness()?.0.then_some(())))
}
