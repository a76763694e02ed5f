//! From flannel to ours and back, as `docs/migration.md` tells it: the node looks to the last rule
//! like one that a running flanneld has just left, and a stream of a packet per millisecond runs
//! through all of it.

use std::{collections::BTreeMap, fs, net::IpAddr, process::Command};

use flannel_lab::{
    cni::{PLUGINS, Runtime},
    kernel_peer::RemoteVtep,
    netns::Netns,
    prelude::*,
    process,
    vxlan_view::VxlanView,
};

const OWN_MAC: &str = "12:c6:65:89:b4:e3";
const OWN_KEY: &str = "10.77.1.0-24";
const ENV: &str = "FLANNEL_NETWORK=10.77.0.0/16\nFLANNEL_SUBNET=10.77.1.1/24\nFLANNEL_MTU=1450\n\
                   FLANNEL_IPMASQ=true\n";

/// flanneld's rules for 10.77.1.0/24 in 10.77.0.0/16, `iptables-restore`'s text. The policy of
/// FORWARD is Docker's.
const RULES: &str = r#"*filter
:FORWARD DROP
:FLANNEL-FWD -
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.77.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.77.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
*nat
:FLANNEL-POSTRTG -
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.77.1.0/24 -d 10.77.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.77.0.0/16 -d 10.77.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.77.0.0/16 -d 10.77.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.77.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.77.0.0/16 -d 10.77.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
"#;

/// What flannel's own CNI plugin tells `bridge` and keeps for DEL.
fn delegate(addresses: &std::path::Path) -> String {
    format!(
        r#"{{"cniVersion":"0.3.1","hairpinMode":true,"ipMasq":false,"ipam":{{"dataDir":"{}","ranges":[[{{"subnet":"10.77.1.0/24"}}]],"routes":[{{"dst":"10.77.0.0/16"}}],"type":"host-local"}},"isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"cbr0","type":"bridge"}}"#,
        addresses.display()
    )
}

/// `ip` and `bridge` commands with the effect of flanneld's netlink requests for a peer. They
/// create or replace, so they are what it does at start, too.
fn program_peer(node: &Node, peer: &RemoteVtep) -> Result<()> {
    let RemoteVtep { subnet, public_ip, mac } = peer;
    let base = subnet.split_once('/').context("no length")?.0;
    node.ns().ip(&[&format!("neigh replace {base} lladdr {mac} dev flannel.1 nud permanent")])?;
    node.ns()
        .bridge(&[&format!("fdb replace {mac} dev flannel.1 dst {public_ip} self permanent")])?;
    node.ns().ip(&[&format!("route replace {subnet} via {base} dev flannel.1 onlink")])
}

/// What flanneld does at each start: its chains flushed, its jumps deleted if they are there, all
/// rules added, one transaction a table.
fn add_rules(node: &Node, again: bool) -> Result<()> {
    let file = node.dir().join("rules");
    let mut text = String::new();
    for line in RULES.lines() {
        if again && line.contains("-j FLANNEL-") {
            text.extend([&line.replacen("-A", "-D", 1), "\n"]);
        }
        text.extend([line, "\n"]);
    }
    fs::write(&file, text)?;
    let output = node.shell(&format!("iptables-restore --noflush < {}", file.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// flannel's rules as they stand, with how often each stands there.
fn rules(node: &Node) -> Result<BTreeMap<String, usize>> {
    let mut rules = BTreeMap::new();
    for table in ["filter", "nat"] {
        for line in node.run(&format!("iptables -w -t {table} -S"))?.lines() {
            if line.contains("FLANNEL") {
                *rules.entry(format!("{table} {line}")).or_default() += 1;
            }
        }
    }
    Ok(rules)
}

/// flannel's rules have to stand as they did, each once. Ours may stand beside them in flannel's
/// chains, which flanneld flushes.
fn check_rules(node: &Node, before: &BTreeMap<String, usize>) -> Result<()> {
    let now = rules(node)?;
    for (rule, count) in before {
        ensure!(now.get(rule) == Some(count), "{rule} stands {:?} times", now.get(rule));
    }
    for rule in now.keys().filter(|rule| !before.contains_key(*rule)) {
        ensure!(rule.contains(" -A FLANNEL-"), "new: {rule}");
    }
    Ok(())
}

/// A node as flanneld left it, a peer, and a pod that flannel's plugin made.
struct Scene {
    lab: Lab,
    etcd: Etcd,
    node: Node,
    peer: KernelPeer,
    pod: Netns,
    pod_address: IpAddr,
    there: Pod,
}

fn vtep(peer: &KernelPeer, n: u8) -> RemoteVtep {
    RemoteVtep {
        subnet: format!("10.77.{n}.0/24"),
        public_ip: peer.node().v4(),
        mac: peer.mac().to_owned(),
    }
}

fn own_lease(node: &Node) -> Value {
    json!({"PublicIP": node.v4(), "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": OWN_MAC}})
}

fn left_by_flanneld() -> Result<Scene> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let peer = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = peer.lease();
    etcd.put_lease(&key, &lease)?;
    let own = own_lease(&node);
    let granted = etcd.grant(80_000)?;
    etcd.put_with_lease(&format!("{SUBNETS_PREFIX}{OWN_KEY}"), &own.to_string(), granted)?;
    peer.learn(OWN_KEY, &own)?;

    node.ns().ip(&[
        &format!(
            "link add flannel.1 address {OWN_MAC} mtu 1450 type vxlan id 1 dev eth0 local {} dstport 8472 nolearning",
            node.v4()
        ),
        "addr add 10.77.1.0/32 dev flannel.1",
        "link set flannel.1 up",
    ])?;
    program_peer(&node, &vtep(&peer, 200))?;
    add_rules(&node, false)?;
    let env = node.path("/run/flannel/subnet.env");
    fs::create_dir_all(env.parent().context("no directory")?)?;
    fs::write(&env, ENV)?;

    let pod = Netns::new(lab.run(), "old-pod")?;
    let runtime = Runtime::new(&node, "0.3.1");
    let config = delegate(&runtime.address_dir());
    fs::create_dir_all(runtime.scratch_dir())?;
    fs::write(runtime.scratch_dir().join("old-pod"), &config)?;
    let result: Value = serde_json::from_str(&bridge(&node, "ADD", "old-pod", &pod, &config)?)?;
    let address = result["ips"][0]["address"].as_str().context("no address")?;
    let pod_address = address.split('/').next().context("no address")?.parse()?;
    let there = peer.node().pod(&peer.env()?)?;
    traffic::wait_reaches(&pod, there.v4()?, Duration::from_secs(5))?;
    Ok(Scene { lab, etcd, node, peer, pod, pod_address, there })
}

/// Calls Debian's `bridge` as flannel's plugin does.
fn bridge(node: &Node, command: &str, id: &str, pod: &Netns, config: &str) -> Result<String> {
    let file = node.dir().join("delegate.json");
    fs::write(&file, config)?;
    let line = format!("{PLUGINS}/bridge < {}", file.display());
    let mut call: Command = node.command("sh");
    call.args(["-c", &line]).env("CNI_COMMAND", command).env("CNI_CONTAINERID", id);
    call.env("CNI_NETNS", pod.path()).env("CNI_IFNAME", "eth0").env("CNI_PATH", PLUGINS);
    process::output(&mut call)
}

/// The device as `ip` prints it, without what traffic changes.
fn device(node: &Node) -> Result<Value> {
    let mut link = node.link("flannel.1")?.context("no device")?;
    let fields = link.as_object_mut().context("no object")?;
    fields.retain(|key, _| !key.starts_with("stats"));
    Ok(link)
}

#[test]
fn to_ours_and_back_without_a_lost_packet() -> Result<()> {
    let scene = left_by_flanneld()?;
    let Scene { lab, etcd, node, peer, pod, pod_address, there } = &scene;
    let (device_before, rules_before) = (device(node)?, rules(node)?);
    let routes_before = node.run("ip route show")?;
    let lease_key = format!("{SUBNETS_PREFIX}{OWN_KEY}");
    let lease_before = etcd.get(&lease_key)?.context("no lease")?;
    ensure!(rules_before.len() == 12, "{rules_before:#?}");

    let meters = [
        (*pod_address, LossMeter::start(pod, there.ns(), there.v4()?)?),
        (there.v4()?, LossMeter::start(there.ns(), pod, *pod_address)?),
    ];

    // To ours: the same flags as flanneld had.
    let mut flags = etcd.flags();
    flags.push("--ip-masq".into());
    let mut agent = node.agent(&flags)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(fs::read_to_string(agent.subnet_file())? == ENV, "{env:?}");
    // Longer than two rounds of the firewall's check.
    holds_for("everything is as flanneld left it", Duration::from_secs(11), || {
        ensure!(device(node)? == device_before, "{:#}", device(node)?);
        ensure!(node.run("ip route show")? == routes_before, "{}", node.run("ip route show")?);
        let lease = etcd.get(&lease_key)?.context("no lease")?;
        ensure!(
            serde_json::from_str::<Value>(&lease.value)? == own_lease(node),
            "{} became {}",
            lease_before.value,
            lease.value
        );
        Ok(true)
    })?;
    check_rules(node, &rules_before)?;

    // A while under ours: a peer joins, a pod comes.
    let late = KernelPeer::new(lab.node("cedar")?, PeerSpec::v4(201))?;
    let (key, lease) = late.lease();
    etcd.put_lease(&key, &lease)?;
    late.learn(OWN_KEY, &own_lease(node))?;
    let far = late.node().pod(&late.env()?)?;
    let runtime = Runtime::new(node, "0.3.1");
    let young = runtime.container()?;
    let (addresses, _) = runtime.add(&young)?;
    traffic::wait_reaches(&young.ns, far.v4()?, Duration::from_secs(5))?;
    traffic::wait_reaches(pod, far.v4()?, Duration::from_secs(5))?;

    // Back: our agent stops. What is left is what flanneld adopts.
    let status = agent.stop()?;
    ensure!(status.code() == Some(0), "{status}");
    ensure!(device(node)? == device_before, "{:#}", device(node)?);
    let wanted = VxlanView::wanted("10.77.1.0/32", &[vtep(peer, 200), vtep(&late, 201)])?;
    let view = VxlanView::read(node.ns(), "flannel.1")?;
    ensure!(view == wanted, "{view:#?}, not {wanted:#?}");
    ensure!(fs::read_to_string(node.path("/run/flannel/subnet.env"))? == ENV);
    check_rules(node, &rules_before)?;
    let lease = etcd.get(&lease_key)?.context("the lease went with the agent")?;
    ensure!(serde_json::from_str::<Value>(&lease.value)? == own_lease(node), "{}", lease.value);

    // flanneld starts: it finds the device in its way and compares, then writes everything again.
    let refused = node.run("ip link add flannel.1 type vxlan id 1 dev eth0 dstport 8472");
    ensure!(refused.is_err(), "there was no device to adopt");
    for peer in [vtep(peer, 200), vtep(&late, 201)] {
        program_peer(node, &peer)?;
    }
    add_rules(node, true)?;
    ensure!(rules(node)? == rules_before, "{:#?}", rules(node)?);
    ensure!(VxlanView::read(node.ns(), "flannel.1")? == wanted, "flanneld's entries double ours");
    let routes = node.run("ip route show")?;
    ensure!(routes.matches("via 10.77.201.0").count() == 1, "{routes}");
    ensure!(!routes.contains("proto 102"), "{routes}");

    // Either plugin ends what the other began.
    let theirs = fs::read_to_string(runtime.scratch_dir().join(&young.id))?;
    ensure!(theirs == delegate(&runtime.address_dir()), "{theirs}");
    bridge(node, "DEL", &young.id, &young.ns, &theirs)?;
    ensure!(!runtime.addresses_given()?.contains(&addresses[0].to_string()));

    let mut figures = Vec::new();
    for (source, meter) in meters {
        let loss = meter.stop()?;
        loss.ensure_none(source).with_context(|| format!("from {source}"))?;
        figures.push(format!("from {source}: {loss:?}"));
    }
    println!("{}", figures.join("\n"));
    Ok(())
}

#[test]
fn a_pod_that_flannels_plugin_made_ends_with_ours() -> Result<()> {
    let Scene { node, pod, pod_address, .. } = &left_by_flanneld()?;
    let runtime = Runtime::new(node, "0.3.1");
    ensure!(runtime.addresses_given()? == [pod_address.to_string()]);
    let container = flannel_lab::cni::Container { id: "old-pod".into(), ns: pod.clone() };
    runtime.del(&container)?;
    ensure!(runtime.addresses_given()?.is_empty(), "{:?}", runtime.addresses_given()?);
    ensure!(!runtime.scratch_dir().join("old-pod").exists(), "the scratch file stayed");
    Ok(())
}
