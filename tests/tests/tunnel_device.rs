//! The tunnel device and what the network configuration makes of it.

use flannel_lab::{craft, prelude::*};

#[test]
fn the_published_mac_is_the_devices() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let published = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    let device = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    ensure!(published == device, "published {published}, device {device}");
    let mac = craft::mac(device.as_str().context("no MAC")?)?;
    ensure!(mac[0] & 3 == 2, "{device}: not a local unicast address");
    Ok(())
}

#[test]
fn the_device_is_the_one_that_flannel_makes() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, LocalStore::new(&lab)?)?;
    for (device, local) in [("flannel.1", duo.alder.v4()), ("flannel-v6.1", duo.alder.v6())] {
        let link = duo.alder.link(device)?.with_context(|| format!("no {device}"))?;
        let data = &link["linkinfo"]["info_data"];
        let expected = [
            ("id", json!(1)),
            ("port", json!(8472)),
            ("link", json!("eth0")),
            ("learning", json!(false)),
        ];
        for (key, value) in expected {
            ensure!(data[key] == value, "{device}: {key} is {}, not {value}: {link}", data[key]);
        }
        let found = data["local"].as_str().or(data["local6"].as_str());
        ensure!(found == Some(local.as_str()), "{device}: local {found:?}, not {local}");
        ensure!(data["udp_zero_csum6_tx"] != true && data["udp_zero_csum6_rx"] != true, "{link}");
        let flags = link["flags"].as_array().context("no flags")?;
        ensure!(flags.contains(&json!("UP")), "{device} is down");
    }
    let mtu = duo.alder.link("flannel.1")?.context("no device")?["mtu"].clone();
    ensure!(mtu == 1450, "MTU {mtu}");
    Ok(())
}

#[test]
fn another_vni_port_and_mtu_go_on_the_wire() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(
        r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","VNI":7777,"Port":4789,"MTU":1400}}"#,
    )?;
    let spec = PeerSpec { vni: 7777, port: 4789, ..PeerSpec::v4(200) };
    let birch = KernelPeer::new(lab.node("birch")?, spec)?;
    let (key, lease) = birch.lease();
    store.put_lease(&key, &lease)?;
    let alder = lab.node("alder")?;
    let mut agent = alder.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.mtu()? == 1350, "MTU {}", env.mtu()?);
    let own = store.leases()?.remove(&env.key()?).context("no lease")?;
    ensure!(own["BackendData"]["VNI"] == 7777, "{own}");
    birch.learn(&env.key()?, &own)?;
    let (ours, theirs) = (alder.pod(&env)?, birch.node().pod(&birch.env()?)?);
    let capture = Capture::start(birch.node().ns(), "eth0")?;
    traffic::wait_reaches(ours.ns(), theirs.v4()?, Duration::from_secs(5))?;
    let vni = capture.wait_for("a VXLAN frame", Duration::from_secs(1), |frame| {
        Some(craft::parse(&frame.bytes, 4789).ok()??.outer.vni)
    })?;
    ensure!(vni == 7777, "VNI {vni}");
    Ok(())
}

#[test]
fn peers_behind_a_router_are_tunnelled_and_those_beside_us_routed_directly() -> Result<()> {
    use flannel_lab::lab::Segment;

    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(
        r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","DirectRouting":true}}"#,
    )?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let cedar = KernelPeer::new(lab.node_at("cedar", Segment::B, 13)?, PeerSpec::v4(201))?;
    for peer in [&birch, &cedar] {
        let (key, lease) = peer.lease();
        store.put_lease(&key, &lease)?;
    }
    let alder = lab.node("alder")?;
    let mut agent = alder.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let own = store.leases()?.remove(&env.key()?).context("no lease")?;
    cedar.learn(&env.key()?, &own)?;
    // The kernel peer beside us routes directly as well.
    birch.node().ns().ip(&[&format!("route add {} via {}", env.subnet_v4()?, alder.v4())])?;
    let ours = alder.pod(&env)?;
    for peer in [&birch, &cedar] {
        let pod = peer.node().pod(&peer.env()?)?;
        traffic::wait_reaches(ours.ns(), pod.v4()?, Duration::from_secs(5))?;
    }
    let route = |subnet: &str| -> Result<Value> {
        let routes = alder.ns().ip_json("route show")?;
        routes.into_iter().find(|r| r["dst"] == subnet).with_context(|| format!("no {subnet}"))
    };
    let beside = route("10.77.200.0/24")?;
    ensure!(beside["dev"] == "eth0" && beside["gateway"] == birch.node().v4(), "{beside}");
    let behind = route("10.77.201.0/24")?;
    ensure!(behind["dev"] == "flannel.1" && behind["gateway"] == "10.77.201.0", "{behind}");
    Ok(())
}
