//! What an agent finds of another one: its device, or itself still running.

use flannel_lab::prelude::*;
use nix::sys::signal::Signal;

#[test]
fn a_device_that_does_not_fit_is_made_anew_with_the_published_mac() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let mac = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(5))?;
    // Another VNI under our name: somebody's leftover.
    duo.alder.ns().ip(&[
        "link del flannel.1",
        "link add flannel.1 address 02:be:ef:00:00:01 type vxlan id 99 dev eth0 local 192.0.2.11 dstport 8472",
    ])?;
    duo.start_agent_again()?;
    let link = duo.alder.link("flannel.1")?.context("no device")?;
    ensure!(link["linkinfo"]["info_data"]["id"] == 1, "{link}");
    ensure!(
        link["address"] == mac,
        "MAC {} instead of {mac}; log:\n{}",
        link["address"],
        duo.agent.log()
    );
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v4()?, Duration::from_secs(2)).map(drop)
}

#[test]
fn two_agents_on_one_node_do_not_fight() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let second = duo.alder.agent(&duo.flags)?;
    let (status, log) = second.wait_exit(Duration::from_secs(10))?;
    ensure!(!status.success(), "the second agent ended with {status}");
    ensure!(log.contains("another"), "it does not say why:\n{log}");
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    ensure!(duo.agent.process().exited()?.is_none(), "the first agent ended");
    ensure!(duo.agent.subnet_env()? == duo.env, "subnet.env changed");
    Ok(())
}
