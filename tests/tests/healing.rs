//! Somebody takes away what the agent made; it comes back.

use std::thread::sleep;

use flannel_lab::prelude::*;

/// How soon what was broken has to work again.
const SOON: Duration = Duration::from_secs(3);

/// Breaks `flannel.1` by `ip` and `bridge` lines and waits for it to be whole.
fn heals(ip: &[&str], bridge: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let (birch, _) = duo.birch_vteps()?;
    let wanted = duo.wanted(&[birch])?;
    duo.wait_view(&wanted, SOON)?;
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    duo.alder.ns().ip(ip)?;
    duo.alder.ns().bridge(bridge)?;
    duo.wait_view(&wanted, SOON)?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON)?;
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v4()?, SOON)?;
    let link = duo.alder.link("flannel.1")?.context("no device")?;
    ensure!(link["address"] == mac, "MAC {} instead of {mac}", link["address"]);
    let lease = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    ensure!(lease == mac, "published {lease}, device {mac}");
    Ok(())
}

#[test]
fn the_device_deleted() -> Result<()> {
    heals(&["link del flannel.1"], &[])
}

#[test]
fn the_device_set_down() -> Result<()> {
    heals(&["link set flannel.1 down"], &[])
}

#[test]
fn a_peers_route_deleted() -> Result<()> {
    heals(&["route del 10.77.200.0/24"], &[])
}

#[test]
fn a_peers_route_bent_elsewhere() -> Result<()> {
    heals(&["route replace 10.77.200.0/24 via 192.0.2.1 dev eth0"], &[])
}

#[test]
fn a_peers_neighbour_deleted() -> Result<()> {
    heals(&["neigh del 10.77.200.0 dev flannel.1"], &[])
}

#[test]
fn a_peers_neighbour_given_another_mac() -> Result<()> {
    heals(&["neigh replace 10.77.200.0 lladdr 02:de:ad:00:00:01 dev flannel.1 nud permanent"], &[])
}

#[test]
fn a_peers_fdb_entry_deleted() -> Result<()> {
    heals(&[], &["fdb del 02:fa:00:00:04:0c dev flannel.1 dst 192.0.2.12 self"])
}

#[test]
fn a_peers_fdb_entry_sent_elsewhere() -> Result<()> {
    heals(&[], &["fdb replace 02:fa:00:00:04:0c dev flannel.1 dst 192.0.2.99 self permanent"])
}

#[test]
fn the_devices_mac_changed() -> Result<()> {
    heals(&["link set flannel.1 address 02:de:ad:00:00:01"], &[])
}

#[test]
fn the_devices_address_removed() -> Result<()> {
    heals(&["addr flush dev flannel.1 scope global"], &[])
}

#[test]
fn the_devices_mtu_changed() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    duo.alder.ns().ip(&["link set flannel.1 mtu 1200"])?;
    eventually("the MTU", SOON, || {
        Ok((duo.alder.link("flannel.1")?.context("no device")?["mtu"] == 1450).then_some(()))
    })
}

#[test]
fn five_deletions_in_a_row() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, LocalStore::new(&lab)?)?;
    for _ in 0..5 {
        // It may not be back yet from the last time.
        let _ = duo.alder.ns().ip(&["link del flannel.1"]);
        let _ = duo.alder.ns().ip(&["link del flannel-v6.1"]);
        sleep(Duration::from_millis(200));
    }
    for address in duo.theirs.addresses() {
        traffic::wait_reaches(duo.ours.ns(), address, SOON)?;
    }
    Ok(())
}

#[test]
fn only_the_ipv6_device_deleted() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, LocalStore::new(&lab)?)?;
    duo.alder.ns().ip(&["link del flannel-v6.1"])?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v6()?, SOON)?;
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v6()?, SOON).map(drop)
}

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

#[test]
fn the_nic_down_and_up() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, LocalStore::new(&lab)?)?;
    duo.alder.ns().ip(&["link set eth0 down"])?;
    sleep(Duration::from_secs(1));
    duo.alder.ns().ip(&[
        "link set eth0 up",
        "addr replace 2001:db8:a::11/64 dev eth0 nodad",
        "route replace default via 192.0.2.1 dev eth0",
        "route replace default via 2001:db8:a::1 dev eth0",
    ])?;
    for address in duo.theirs.addresses() {
        traffic::wait_reaches(duo.ours.ns(), address, SOON)?;
    }
    Ok(())
}

#[test]
fn what_others_put_on_the_device_is_left_alone() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    duo.alder.ns().ip(&[
        "route add 172.31.0.0/16 via 10.77.200.0 dev flannel.1 onlink",
        "route add 10.77.250.0/24 via 192.0.2.1 dev eth0",
        // Makes the agent look at everything.
        "route del 10.77.200.0/24",
    ])?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON)?;
    let routes = duo.alder.ns().ip_json("route show")?;
    for subnet in ["172.31.0.0/16", "10.77.250.0/24"] {
        ensure!(routes.iter().any(|route| route["dst"] == subnet), "{subnet} is gone");
    }
    Ok(())
}
