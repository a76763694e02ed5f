//! What goes over the wire, byte for byte.

use std::net::IpAddr;

use flannel_lab::{
    capture::Frame,
    craft::{self, Outer, Vxlan},
    prelude::*,
};

/// Makes checksums be computed before the capture sees them.
fn no_offload<S: LeaseStore>(duo: &Duo<S>) -> Result<()> {
    let off = "ethtool -K eth0 tx off";
    duo.alder.run(off)?;
    duo.birch.node().run(off)?;
    for pod in [&duo.ours, &duo.theirs] {
        let mut words = off.split(' ');
        let mut command = pod.ns().command(words.next().context("no word")?);
        flannel_lab::process::output(command.args(words))?;
    }
    Ok(())
}

/// MAC of an interface.
fn mac_of(ns: &flannel_lab::netns::Netns, interface: &str) -> Result<craft::Mac> {
    let links = ns.ip_json(&format!("link show dev {interface}"))?;
    craft::mac(links[0]["address"].as_str().context("no address")?)
}

/// An echo request (not a reply) of either family.
fn is_request(packet: &[u8]) -> bool {
    match packet.first().map(|byte| byte >> 4) {
        Some(4) => packet.get(9) == Some(&1) && packet.get(20) == Some(&8),
        Some(6) => packet.get(6) == Some(&58) && packet.get(40) == Some(&128),
        _ => false,
    }
}

struct Way<'a> {
    sender: &'a flannel_lab::netns::Netns,
    sender_pod: &'a Pod,
    receiver: &'a flannel_lab::netns::Netns,
    destination: IpAddr,
    outer_source: String,
    outer_destination: String,
    inner_source: craft::Mac,
    inner_destination: craft::Mac,
}

/// Sends one echo request and compares the frame on the wire with what RFC 7348 asks for.
fn compare(way: &Way<'_>) -> Result<Vxlan> {
    let at_pod = Capture::start(way.sender_pod.ns(), "eth0")?;
    let on_wire = Capture::start(way.receiver, "eth0")?;
    ensure!(traffic::ping(way.sender_pod.ns(), way.destination, 1)? == 1, "no echo");
    let within = Duration::from_secs(2);
    let packet = at_pod.wait_for("the request at the pod", within, |frame: &Frame| {
        let packet = frame.bytes.get(14..)?;
        is_request(packet).then(|| packet.to_vec())
    })?;
    let (bytes, seen) = on_wire.wait_for("the request on the wire", within, |frame: &Frame| {
        let vxlan = craft::parse(&frame.bytes, 8472).ok()??;
        is_request(vxlan.packet()).then(|| (frame.bytes.clone(), vxlan))
    })?;
    let range = way.sender.sysctl("net/ipv4/ip_local_port_range")?;
    let ports: Vec<u16> = range.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(
        (ports[0]..=ports[1]).contains(&seen.outer.source_port),
        "source port {} outside of {range}",
        seen.outer.source_port
    );
    let source: IpAddr = way.outer_source.parse()?;
    let inner = craft::ethernet(way.inner_destination, way.inner_source, &craft::routed(&packet)?)?;
    let outer = Outer {
        destination_mac: mac_of(way.receiver, "eth0")?,
        source_mac: mac_of(way.sender, "eth0")?,
        source,
        destination: way.outer_destination.parse()?,
        traffic_class: 0,
        ttl: 64,
        dont_fragment: false,
        // Three values that are the sender's to choose.
        id: seen.outer.id,
        flow_label: seen.outer.flow_label,
        source_port: seen.outer.source_port,
        destination_port: 8472,
        vni: 1,
        // Over IPv4 zero is allowed; over IPv6 the sum has to be there.
        udp_checksum: source.is_ipv6() || seen.outer.udp_checksum,
    };
    let expected = craft::encapsulate(&outer, &inner)?;
    match craft::difference(&bytes, &expected) {
        None => Ok(seen),
        Some(difference) => bail!("{difference}"),
    }
}

#[test]
fn ours_to_a_kernel_peer_and_back_is_rfc_7348_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, LocalStore::new(&lab)?)?;
    no_offload(&duo)?;
    let (alder, birch) = (duo.alder.ns(), duo.birch.node().ns());
    for (device, theirs, ours, alder_ip, birch_ip) in [
        ("flannel.1", duo.theirs.v4()?, duo.ours.v4()?, duo.alder.v4(), duo.birch.node().v4()),
        ("flannel-v6.1", duo.theirs.v6()?, duo.ours.v6()?, duo.alder.v6(), duo.birch.node().v6()),
    ] {
        let (alder_mac, birch_mac) = (mac_of(alder, device)?, mac_of(birch, device)?);
        compare(&Way {
            sender: alder,
            sender_pod: &duo.ours,
            receiver: birch,
            destination: theirs,
            outer_source: alder_ip.clone(),
            outer_destination: birch_ip.clone(),
            inner_source: alder_mac,
            inner_destination: birch_mac,
        })
        .with_context(|| format!("ours to the kernel's, {device}"))?;
        compare(&Way {
            sender: birch,
            sender_pod: &duo.theirs,
            receiver: alder,
            destination: ours,
            outer_source: birch_ip,
            outer_destination: alder_ip,
            inner_source: birch_mac,
            inner_destination: alder_mac,
        })
        .with_context(|| format!("the kernel's to ours, {device}"))?;
    }
    Ok(())
}

#[test]
fn the_published_mac_is_the_devices_and_the_only_one_accepted() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let published = duo.own_lease()?["BackendData"]["VtepMAC"].clone();
    let device = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    ensure!(published == device, "published {published}, device {device}");
    let mac = craft::mac(device.as_str().context("no MAC")?)?;
    ensure!(mac[0] & 3 == 2, "{device}: not a local unicast address");
    let mut wrong = duo.own_lease()?;
    wrong["BackendData"]["VtepMAC"] = json!("02:de:ad:00:00:01");
    duo.birch.learn(&duo.env.key()?, &wrong)?;
    ensure!(traffic::ping(duo.theirs.ns(), duo.ours.v4()?, 2)? == 0, "a wrong MAC was accepted");
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
