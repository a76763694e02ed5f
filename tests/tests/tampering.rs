//! One thing of the agent's is changed by somebody else, under the eyes of a strange peer: it is
//! put right, and both ends still agree.

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
fn a_peers_subnet_routed_elsewhere_by_somebody_is_told_and_left_until_they_take_it_back()
-> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let (birch, _) = duo.birch_vteps()?;
    let wanted = duo.wanted(&[birch])?;
    duo.alder.ns().ip(&["route replace 10.77.200.0/24 via 192.0.2.1 dev eth0"])?;
    duo.agent.wait_complaint(&["10.77.200.0/24"], SOON)?;
    let routes = duo.alder.ns().ip_json("route show 10.77.200.0/24")?;
    ensure!(routes.len() == 1 && routes[0]["dev"] == "eth0", "their route was touched: {routes:?}");
    duo.alder.ns().ip(&["route del 10.77.200.0/24"])?;
    duo.wait_view(&wanted, SOON)?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON)?;
    let told = duo.agent.complaints(&["10.77.200.0/24"]);
    ensure!(told.len() == 1, "told more than once: {told:#?}");
    Ok(())
}

#[test]
fn a_peers_neighbour_given_another_mac() -> Result<()> {
    heals(&["neigh replace 10.77.200.0 lladdr 02:de:ad:00:00:01 dev flannel.1 nud permanent"], &[])
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

#[test]
fn the_devices_mac_changed_as_soon_as_it_is_made() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    duo.agent.process().kill()?;
    duo.alder.ns().ip(&["link del flannel.1"])?;
    // As a MAC policy of the host's does.
    let thief = "ip monitor link | grep -m 1 --line-buffered 'flannel.1:' > /dev/null
        ip link set flannel.1 address 02:de:ad:00:00:01 && echo done";
    let mut command = duo.alder.command("sh");
    command.args(["-c", thief]);
    let log = duo.alder.dir().join("thief.log");
    let mut thief = flannel_lab::process::Process::spawn(command, &log, false)?;
    sleep(Duration::from_millis(300));
    duo.start_agent_again()?;
    // Its second event ends the monitor.
    duo.alder.ns().ip(&["link set eth0 alias x"])?;
    thief.wait(SOON)?;
    ensure!(thief.log().contains("done"), "{}", thief.log());
    eventually("the MAC is the published one again", SOON, || {
        let there = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
        ensure!(there == mac, "{there} instead of {mac}");
        Ok(Some(()))
    })?;
    ensure!(duo.own_lease()?["BackendData"]["VtepMAC"] == mac, "another MAC was published");
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON).map(drop)
}

#[test]
fn a_wrong_mac_in_our_own_lease_is_put_right() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    let mut wrong = duo.own_lease()?;
    wrong["BackendData"]["VtepMAC"] = json!("02:de:ad:00:00:03");
    duo.store.put_lease(&duo.env.key()?, &wrong)?;
    eventually("device and lease agree", SOON, || {
        let there = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
        let told = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
        ensure!(there == mac && told == mac, "device {there}, lease {told}");
        Ok(Some(()))
    })?;
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v4()?, SOON).map(drop)
}

#[test]
fn foreign_addresses_on_the_device_outlive_a_restart_and_ours_is_back() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let own = format!("{}/32", duo.env.subnet_v4()?.trim_end_matches("/24"));
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    duo.agent.process().kill()?;
    duo.alder.ns().ip(&[
        "addr add 169.254.7.7/16 dev flannel.1",
        "addr add 192.0.2.77/24 dev flannel.1",
        &format!("addr del {own} dev flannel.1"),
    ])?;
    duo.start_agent_again()?;
    let (birch, _) = duo.birch_vteps()?;
    let mut wanted = duo.wanted(&[birch])?;
    wanted.addresses.extend(["169.254.7.7/16".to_owned(), "192.0.2.77/24".to_owned()]);
    duo.wait_view(&wanted, SOON)?;
    let link = duo.alder.link("flannel.1")?.context("no device")?;
    ensure!(link["address"] == mac, "MAC {} instead of {mac}", link["address"]);
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON).map(drop)
}
