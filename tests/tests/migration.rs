//! From flannel to ours and back, as `docs/migration.md` tells it: the node looks to the last rule
//! like one that a running flanneld has just left, and a stream of a packet per millisecond runs
//! through all of it. Once with leases in etcd, once with the annotations of a Kubernetes node.

use std::{collections::BTreeMap, fs, net::IpAddr, process::Command};

use flannel_lab::{
    cni::{PLUGINS, Runtime},
    kernel_peer::RemoteVtep,
    kube_stub::{annotate, flannel_annotations, plain_node},
    netns::Netns,
    prelude::*,
    process,
    vxlan_view::VxlanView,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
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

/// A store in which flanneld has published its node.
trait UsedByFlanneld: LeaseStore {
    /// Publishes the node as flanneld does.
    fn publish(&self, node: &Node) -> Result<()>;
    /// What is published has to be what flanneld published.
    fn check(&self, node: &Node) -> Result<()>;
}

impl UsedByFlanneld for Etcd {
    fn publish(&self, node: &Node) -> Result<()> {
        let granted = self.grant(80_000)?;
        let key = format!("{SUBNETS_PREFIX}{OWN_KEY}");
        self.put_with_lease(&key, &own_lease(node).to_string(), granted).map(drop)
    }

    fn check(&self, node: &Node) -> Result<()> {
        let lease = self.get(&format!("{SUBNETS_PREFIX}{OWN_KEY}"))?.context("no lease")?.value;
        ensure!(serde_json::from_str::<Value>(&lease)? == own_lease(node), "{lease}");
        Ok(())
    }
}

/// The Node object that flanneld leaves: its annotations, its condition, and what others wrote.
fn own_node(node: &Node) -> Value {
    let mut object = plain_node(node.name(), &["10.77.1.0/24"]);
    annotate(&mut object, &flannel_annotations(&node.v4(), OWN_MAC));
    annotate(&mut object, &json!({"node.alpha.kubernetes.io/ttl": "0"}));
    if let Some(conditions) = object["status"]["conditions"].as_array_mut() {
        conditions.push(json!({
            "type": "NetworkUnavailable", "status": "False", "reason": "FlannelIsUp",
            "message": "Flannel is running on this node",
            "lastHeartbeatTime": "2026-01-01T00:00:09Z",
            "lastTransitionTime": "2026-01-01T00:00:09Z",
        }));
    }
    object
}

impl UsedByFlanneld for KubeStub {
    fn publish(&self, node: &Node) -> Result<()> {
        self.put(own_node(node))
    }

    fn check(&self, node: &Node) -> Result<()> {
        ensure!(self.patches().is_empty(), "patched: {:#?}", self.patches());
        let (now, wanted) = (self.get(node.name())?, own_node(node));
        for field in ["spec", "status"] {
            ensure!(now[field] == wanted[field], "{now:#}");
        }
        let annotations = |node: &Value| node["metadata"]["annotations"].clone();
        ensure!(annotations(&now) == annotations(&wanted), "{now:#}");
        Ok(())
    }
}

/// A node as flanneld left it, a peer, and a pod that flannel's plugin made.
struct Scene<S> {
    lab: Lab,
    store: S,
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

fn left_by_flanneld<S: UsedByFlanneld>(lab: Lab, store: S) -> Result<Scene<S>> {
    store.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let peer = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = peer.lease();
    store.put_lease(&key, &lease)?;
    store.publish(&node)?;
    peer.learn(OWN_KEY, &own_lease(&node))?;

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
    Ok(Scene { lab, store, node, peer, pod, pod_address, there })
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
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    to_ours_and_back(&left_by_flanneld(lab, etcd)?)
}

#[test]
fn a_kubernetes_node_goes_to_ours_and_back_without_a_lost_packet_or_a_patch() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    to_ours_and_back(&left_by_flanneld(lab, stub)?)
}

fn to_ours_and_back<S: UsedByFlanneld>(scene: &Scene<S>) -> Result<()> {
    let Scene { lab, store, node, peer, pod, pod_address, there } = scene;
    let (device_before, rules_before) = (device(node)?, rules(node)?);
    let routes_before = node.run("ip route show")?;
    ensure!(rules_before.len() == 12, "{rules_before:#?}");

    let meters = [
        (*pod_address, LossMeter::start(pod, there.ns(), there.v4()?)?),
        (there.v4()?, LossMeter::start(there.ns(), pod, *pod_address)?),
    ];

    // To ours: the same flags as flanneld had.
    let mut flags = store.flags();
    flags.push("--ip-masq".into());
    let mut agent = node.agent(&flags)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(fs::read_to_string(agent.subnet_file())? == ENV, "{env:?}");
    // Longer than two rounds of the firewall's check.
    holds_for("everything is as flanneld left it", Duration::from_secs(11), || {
        ensure!(device(node)? == device_before, "{:#}", device(node)?);
        ensure!(node.run("ip route show")? == routes_before, "{}", node.run("ip route show")?);
        store.check(node)?;
        Ok(true)
    })?;
    check_rules(node, &rules_before)?;

    // A while under ours: a peer joins, a pod comes.
    let late = KernelPeer::new(lab.node("cedar")?, PeerSpec::v4(201))?;
    let (key, lease) = late.lease();
    store.put_lease(&key, &lease)?;
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
    store.check(node).context("once the agent had stopped")?;

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
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let Scene { node, pod, pod_address, .. } = &left_by_flanneld(lab, etcd)?;
    let runtime = Runtime::new(node, "0.3.1");
    ensure!(runtime.addresses_given()? == [pod_address.to_string()]);
    let container = flannel_lab::cni::Container { id: "old-pod".into(), ns: pod.clone() };
    runtime.del(&container)?;
    ensure!(runtime.addresses_given()?.is_empty(), "{:?}", runtime.addresses_given()?);
    ensure!(!runtime.scratch_dir().join("old-pod").exists(), "the scratch file stayed");
    Ok(())
}
