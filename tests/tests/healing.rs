//! Somebody meddles with what the agent made: it comes back, and what is not ours is left alone.

use flannel_lab::{prelude::*, vxlan_view::VxlanView};

const HEALED_WITHIN: Duration = Duration::from_secs(5);

fn cluster(lab: &Lab, store: &LocalStore) -> Result<Cluster> {
    let plan = Plan { agents: 1, kernel_peer: true, dual_stack: true, ..Plan::default() };
    let cluster = Cluster::start(lab, store, &plan)?;
    cluster.assert_entries(store)?;
    Ok(cluster)
}

fn healed(cluster: &Cluster, store: &LocalStore) -> Result<()> {
    eventually("the entries are as they were", HEALED_WITHIN, || {
        cluster.assert_entries(store).map(Some)
    })
}

#[test]
fn deleted_entries_come_back() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = cluster(&lab, &store)?;
    let node = cluster.members[0].node();
    let peer_mac = "02:fa:00:00:04:0b";
    for damage in [
        "ip route del 10.77.200.0/24 dev flannel.1".to_owned(),
        "ip -6 route del fd77:0:0:200::/64 dev flannel-v6.1".to_owned(),
        "ip neigh del 10.77.200.0 dev flannel.1".to_owned(),
        format!("bridge fdb del {peer_mac} dev flannel.1 dst 192.0.2.11 self"),
        "ip addr flush dev flannel.1".to_owned(),
        "ip link set flannel.1 down".to_owned(),
        "ip link del flannel-v6.1".to_owned(),
        "ip link del flannel.1".to_owned(),
    ] {
        node.run(&damage)?;
        healed(&cluster, &store).with_context(|| damage)?;
        cluster.assert_full_mesh()?;
    }
    Ok(())
}

#[test]
fn the_devices_settings_come_back() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = cluster(&lab, &store)?;
    let node = cluster.members[0].node();
    for device in ["flannel.1", "flannel-v6.1"] {
        let mtu =
            || -> Result<Value> { Ok(node.link(device)?.context("no device")?["mtu"].clone()) };
        let before = mtu()?;
        node.run(&format!("ip link set {device} mtu 1300"))?;
        eventually("the MTU is back", HEALED_WITHIN, || Ok((mtu()? == before).then_some(())))?;
    }
    cluster.assert_full_mesh()
}

#[test]
fn a_device_that_comes_back_has_the_mac_that_peers_know() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = cluster(&lab, &store)?;
    let node = cluster.members[0].node();
    let mac = |node: &Node| -> Result<Option<Value>> {
        Ok(node.link("flannel.1")?.map(|link| link["address"].clone()))
    };
    let before = mac(node)?;
    node.run("ip link del flannel.1")?;
    healed(&cluster, &store)?;
    ensure!(mac(node)? == before, "{before:?} became {:?}", mac(node)?);
    Ok(())
}

#[test]
fn an_underlay_that_comes_back_is_used_again() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = cluster(&lab, &store)?;
    let node = cluster.members[0].node();
    node.run("ip link set eth0 down")?;
    std::thread::sleep(Duration::from_millis(300));
    // Going down took the IPv6 address along, as it does on any host.
    node.ns().ip(&[
        "link set eth0 up",
        &format!("addr replace {}/64 dev eth0 nodad", node.v6()),
        "route replace default via 192.0.2.1 dev eth0",
        "route replace default via 2001:db8:a::1 dev eth0",
    ])?;
    healed(&cluster, &store)?;
    eventually("everybody reaches everybody", HEALED_WITHIN, || {
        cluster.assert_full_mesh().map(Some)
    })
}

#[test]
fn what_others_made_stays() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let mut cluster = cluster(&lab, &store)?;
    let plan = Plan { agents: 1, kernel_peer: true, dual_stack: true, ..Plan::default() };
    let theirs = [
        "route add 10.200.0.0/16 via 192.0.2.1 dev eth0",
        "route add 10.77.250.0/24 via 192.0.2.1 dev eth0 metric 50",
        "link add user0 type bridge",
        "addr add 10.201.0.1/24 dev user0",
    ];
    let node = cluster.members[0].node();
    node.ns().ip(&theirs)?;
    let view = |node: &Node| -> Result<(String, String)> {
        Ok((node.run("ip route show dev eth0")?, node.run("ip addr show dev user0")?))
    };
    let before = view(node)?;
    let entries = VxlanView::read(node.ns(), "flannel.1")?;
    cluster.members[0].restart(&store, &plan)?;
    let node = cluster.members[0].node();
    store.delete_lease("10.77.200.0-24&fd77:0:0:200::-64")?;
    eventually("the peer is gone", HEALED_WITHIN, || {
        let now = VxlanView::read(node.ns(), "flannel.1")?;
        Ok((now != entries && now.routes.is_empty()).then_some(()))
    })?;
    ensure!(view(node)? == before, "{before:?} became {:?}", view(node)?);
    Ok(())
}
