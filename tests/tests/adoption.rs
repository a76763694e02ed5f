//! A node on which something ran before: an old flannel, or an old version of ourselves.

use flannel_lab::{kernel_peer::RemoteVtep, prelude::*, process::Process, vxlan_view::VxlanView};

const OWN_MAC: &str = "02:fa:00:00:00:11";

/// What an old flannel left, as 10.77.1.0/24 with one peer that still is, two that are no more,
/// an address of another time, and a route to its own subnet.
fn old_mess(node: &Node, peer: &KernelPeer) -> Result<()> {
    let (mac, ip) = (peer.mac(), peer.node().v4());
    node.ns().ip(&[
        &format!(
            "link add flannel.1 address {OWN_MAC} mtu 1450 type vxlan id 1 dev eth0 local {} dstport 8472 nolearning",
            node.v4()
        ),
        "addr add 10.77.66.0/32 dev flannel.1",
        "link set flannel.1 up",
        &format!("neigh replace 10.77.200.0 lladdr {mac} dev flannel.1 nud permanent"),
        "route add 10.77.200.0/24 via 10.77.200.0 dev flannel.1 onlink",
        "neigh replace 10.77.6.0 lladdr 02:fa:00:00:00:06 dev flannel.1 nud permanent",
        "route add 10.77.6.0/24 via 10.77.6.0 dev flannel.1 onlink",
        "neigh replace 10.77.7.0 lladdr 02:fa:00:00:00:07 dev flannel.1 nud permanent",
        "route add 10.77.7.0/24 via 10.77.7.0 dev flannel.1 onlink",
        "route add 10.77.1.0/24 via 10.77.1.0 dev flannel.1 onlink metric 7",
        "route add blackhole 10.77.90.0/24",
        "route add 10.77.210.0/24 via 192.0.2.1 dev eth0",
    ])?;
    node.ns().bridge(&[
        &format!("fdb add {mac} dev flannel.1 dst {ip} self permanent"),
        "fdb add 02:fa:00:00:00:06 dev flannel.1 dst 192.0.2.16 self permanent",
        "fdb add 02:fa:00:00:00:07 dev flannel.1 dst 192.0.2.17 self permanent",
    ])
}

#[test]
fn an_old_mess_is_put_right_and_traffic_does_not_notice() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","MTU":1400}}"#)?;
    let node = lab.node("alder")?;
    let peer = KernelPeer::new(lab.node("byhand")?, PeerSpec::v4(200))?;
    let (key, lease) = peer.lease();
    etcd.put_lease(&key, &lease)?;
    let own = json!({"PublicIP": node.v4(), "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": OWN_MAC}});
    let granted = etcd.grant(86_400)?;
    etcd.put_with_lease(&format!("{SUBNETS_PREFIX}10.77.1.0-24"), &own.to_string(), granted)?;
    peer.learn("10.77.1.0-24", &own)?;
    old_mess(&node, &peer)?;
    let old_env = "FLANNEL_NETWORK=10.77.0.0/16\nFLANNEL_SUBNET=10.77.66.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
    let file = node.path("/run/flannel/subnet.env");
    std::fs::create_dir_all(file.parent().context("no directory")?)?;
    std::fs::write(&file, old_env)?;

    let pod = node.pod(&"FLANNEL_SUBNET=10.77.1.1/24\nFLANNEL_MTU=1350\n".parse()?)?;
    let there = peer.node().pod(&peer.env()?)?;
    traffic::assert_reaches(&pod, &there)?;
    let ifindex = node.link("flannel.1")?.context("no device")?["ifindex"].clone();
    let out = LossMeter::start(pod.ns(), there.ns(), there.v4()?)?;
    let back = LossMeter::start(there.ns(), pod.ns(), pod.v4()?)?;
    let watcher = watch_file(&lab, &file)?;
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    std::thread::sleep(Duration::from_millis(500));

    for (source, meter) in [(pod.v4()?, out), (there.v4()?, back)] {
        meter
            .stop()?
            .ensure_none(source)
            .with_context(|| format!("from {source}; the agent:\n{}", agent.log()))?;
    }
    let vtep = RemoteVtep {
        subnet: "10.77.200.0/24".into(),
        public_ip: peer.node().v4(),
        mac: peer.mac().into(),
    };
    let view = VxlanView::read(node.ns(), "flannel.1")?;
    let wanted = VxlanView::wanted("10.77.1.0/32", &[vtep])?;
    ensure!(view == wanted, "{view:#?}, not {wanted:#?}");
    let link = node.link("flannel.1")?.context("no device")?;
    ensure!(link["ifindex"] == ifindex && link["address"] == OWN_MAC, "{link:#}");
    ensure!(link["mtu"] == 1350, "{link:#}");
    let routes = node.run("ip route show")?;
    ensure!(routes.contains("10.77.210.0/24 via 192.0.2.1"), "a user's route went:\n{routes}");
    ensure!(!routes.contains("blackhole"), "a stale blackhole stayed:\n{routes}");

    // The env file was the old one, then none, then the right one: never anything else.
    let right = std::fs::read_to_string(&file)?;
    ensure!(right.contains("FLANNEL_SUBNET=10.77.1.1/24\nFLANNEL_MTU=1350\n"), "{right}");
    let seen = std::fs::read_to_string(watcher.log_path())?;
    for state in seen.split('\0').filter(|state| !state.is_empty()) {
        ensure!([old_env, "absent", &right].contains(&state), "the env file once was {state:?}");
    }
    ensure!(seen.contains(&right), "the watcher saw nothing: {seen:?}");
    Ok(())
}

/// Writes each state that a file goes through to the process's log, NUL behind each.
fn watch_file(lab: &Lab, file: &std::path::Path) -> Result<Process> {
    const SCRIPT: &str = r#"while :; do cat "$1" 2>/dev/null || printf absent; printf '\0'; done"#;
    let mut command = std::process::Command::new("sh");
    command.args(["-c", SCRIPT, "watch"]).arg(file);
    Process::spawn(command, &lab.run().dir().join("watch.log"), false)
}

#[test]
fn a_device_of_another_kind_is_replaced() -> Result<()> {
    for old in [
        "type vxlan id 1 dev eth0 local 192.0.2.11 dstport 4789 nolearning",
        "type vxlan id 7 dev eth0 local 192.0.2.11 dstport 8472 nolearning",
        "type vxlan id 1 dev eth0 local 192.0.2.11 dstport 8472",
        "type bridge",
    ] {
        let lab = Lab::new()?;
        let store = LocalStore::new(&lab)?;
        store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
        let node = lab.node("alder")?;
        node.ns().ip(&[&format!("link add flannel.1 {old}")])?;
        let mut agent = node.agent(store.flags())?;
        agent.wait_ready(READY_WITHIN).with_context(|| old)?;
        let link = node.link("flannel.1")?.context("no device")?;
        let data = &link["linkinfo"]["info_data"];
        ensure!(
            data["id"] == 1 && data["port"] == 8472 && data["learning"] == false,
            "after {old}: {link:#}"
        );
    }
    Ok(())
}
