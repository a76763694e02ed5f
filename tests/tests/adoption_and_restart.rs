//! Starting over what is there, and coming back without a lost packet.

use std::thread::sleep;

use flannel_lab::{duo::wait_view, kernel_peer::vteps_of, prelude::*, vxlan_view::VxlanView};
use nix::sys::signal::Signal;

fn both_ways<S: LeaseStore>(duo: &Duo<S>) -> Result<(LossMeter, LossMeter)> {
    Ok((
        LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?,
        LossMeter::start(duo.theirs.ns(), duo.ours.ns(), duo.ours.v4()?)?,
    ))
}

fn restart_without_loss(signal: Signal, times: usize) -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let index = duo.alder.link("flannel.1")?.context("no device")?["ifindex"].clone();
    let (out, back) = both_ways(&duo)?;
    for _ in 0..times {
        let status = duo.agent.process().stop(signal, Duration::from_secs(5))?;
        if signal == Signal::SIGTERM {
            ensure!(status.code() == Some(0), "{status}:\n{}", duo.agent.log());
        }
        sleep(Duration::from_millis(200));
        let before = duo.env.clone();
        duo.start_agent_again()?;
        ensure!(duo.env == before, "{before:?} became {:?}", duo.env);
    }
    out.stop()?.ensure_none(duo.ours.v4()?).context("our pod to theirs")?;
    back.stop()?.ensure_none(duo.theirs.v4()?).context("their pod to ours")?;
    let now = duo.alder.link("flannel.1")?.context("no device")?["ifindex"].clone();
    ensure!(now == index, "the device was made anew");
    Ok(())
}

#[test]
fn a_stop_and_start_under_traffic_loses_nothing() -> Result<()> {
    restart_without_loss(Signal::SIGTERM, 3)
}

#[test]
fn a_kill_and_start_under_traffic_loses_nothing() -> Result<()> {
    restart_without_loss(Signal::SIGKILL, 3)
}

#[test]
fn peers_that_left_while_the_agent_was_down_are_gone_after_its_start() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let cedar = KernelPeer::new(lab.node("cedar")?, PeerSpec::v4(201))?;
    let (key, lease) = cedar.lease();
    duo.store.put_lease(&key, &lease)?;
    let (birch, _) = duo.birch_vteps()?;
    let cedar_vtep = vteps_of(&key, &lease)?.0.context("no IPv4 half")?;
    duo.wait_view(&duo.wanted(&[birch.clone(), cedar_vtep])?, Duration::from_secs(2))?;
    duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(5))?;
    duo.store.delete_lease(&key)?;
    let (out, back) = both_ways(&duo)?;
    duo.start_agent_again()?;
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(2))?;
    out.stop()?.ensure_none(duo.ours.v4()?)?;
    back.stop()?.ensure_none(duo.theirs.v4()?)
}

/// A node on which an older agent left a device, and others left more.
#[test]
fn an_old_mess_is_put_right_without_a_lost_packet() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}"#)?;
    let alder = lab.node("alder")?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = birch.lease();
    store.put_lease(&key, &lease)?;
    let own = json!({"PublicIP": "192.0.2.11", "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:00:11"}});
    store.put_lease("10.77.1.0-24", &own)?;
    birch.learn("10.77.1.0-24", &own)?;

    let ns = alder.ns();
    ns.ip(&[
        "link add flannel.1 address 02:fa:00:00:00:11 mtu 1450 type vxlan id 1 dev eth0 local 192.0.2.11 dstport 8472 nolearning",
        "link set flannel.1 up",
        "addr add 10.77.66.0/32 dev flannel.1",
    ])?;
    let mac = birch.mac();
    for (subnet, mac, vtep) in [
        (200, mac, "192.0.2.12"),
        (6, "02:fa:00:00:00:06", "192.0.2.16"),
        (7, "02:fa:00:00:00:07", "192.0.2.17"),
    ] {
        ns.ip(&[
            &format!("neigh replace 10.77.{subnet}.0 lladdr {mac} dev flannel.1 nud permanent"),
            &format!("route add 10.77.{subnet}.0/24 via 10.77.{subnet}.0 dev flannel.1 onlink"),
        ])?;
        ns.bridge(&[&format!("fdb add {mac} dev flannel.1 dst {vtep} self permanent")])?;
    }
    ns.ip(&[
        "route add 10.77.1.0/24 via 10.77.1.0 dev flannel.1 onlink metric 50",
        "route add blackhole 10.77.90.0/24",
        "route add 10.77.250.0/24 via 192.0.2.1 dev eth0",
    ])?;
    let env_file = alder.path("/run/flannel/subnet.env");
    std::fs::create_dir_all(env_file.parent().context("no parent")?)?;
    std::fs::write(
        &env_file,
        "FLANNEL_NETWORK=10.77.0.0/16\nFLANNEL_SUBNET=10.77.66.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
    )?;

    let env = SubnetEnv::by_hand(Some("10.77.1.0/24"), None, 1350)?;
    let (ours, theirs) = (alder.pod(&env)?, birch.node().pod(&birch.env()?)?);
    traffic::wait_reaches(ours.ns(), theirs.v4()?, Duration::from_secs(2))
        .context("the old mess does not carry traffic")?;
    let out = LossMeter::start(ours.ns(), theirs.ns(), theirs.v4()?)?;
    let back = LossMeter::start(theirs.ns(), ours.ns(), ours.v4()?)?;

    let mut agent = alder.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.get("FLANNEL_SUBNET") == Some("10.77.1.1/24"), "{env:?}");
    ensure!(env.mtu()? == 1350, "{env:?}");
    let birch_vtep = vteps_of(&key, &lease)?.0.context("no IPv4 half")?;
    let wanted = VxlanView::wanted("10.77.1.0/32", &[birch_vtep])?;
    wait_view(&alder, "flannel.1", &wanted, Duration::from_secs(3)).with_context(|| agent.log())?;
    let routes = alder.ns().ip_json("route show")?;
    let has = |subnet: &str| routes.iter().any(|route| route["dst"] == subnet);
    ensure!(has("10.77.250.0/24"), "the user's route is gone: {routes:?}");
    ensure!(!has("10.77.90.0/24"), "the stale blackhole is there: {routes:?}");
    let link = alder.link("flannel.1")?.context("no device")?;
    ensure!(link["mtu"] == 1350, "{link}");
    ensure!(link["address"] == "02:fa:00:00:00:11", "{link}");
    out.stop()?.ensure_none(ours.v4()?).context("our pod to theirs")?;
    back.stop()?.ensure_none(theirs.v4()?).context("their pod to ours")
}

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
fn a_reboot_that_lost_everything_but_the_state_dir_keeps_the_mac() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let mac = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(5))?;
    duo.alder.ns().ip(&["link del flannel.1"])?;
    duo.store.delete_lease(&duo.env.key()?)?;
    std::fs::remove_file(duo.agent.subnet_file())?;
    duo.start_agent_again()?;
    let now = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    ensure!(now == mac, "published {now}, before {mac}");
    Ok(())
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
