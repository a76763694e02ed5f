//! What carries packets between two joined nodes.

use std::{fs, path::Path as FilePath, process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};

use super::{Agent, Etcd, Lab, Node, Process, SubnetEnv, rules};
use crate::{
    agent::READY_WITHIN,
    kernel_peer::{KernelPeer, PeerSpec},
    lab::Segment,
    lease_store::{LeaseStore, LocalStore},
    process,
    udp_proxy::UdpProxy,
    wait::eventually,
};

/// The cluster's network.
const NETWORK: &str = "10.77.0.0/16";

/// The network's configuration.
pub const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// The same for the udp backend.
pub const UDP_CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"udp"}}"#;

/// Two nodes and what makes a path between them. Dropped in this order.
#[derive(Debug)]
pub struct Path {
    /// Our agents.
    pub agents: Vec<Agent>,
    /// Agents of others.
    pub others: Vec<Process>,
    /// Plain proxies.
    pub _proxies: Vec<UdpProxy>,
    /// Where these find each other.
    pub _etcd: Option<Etcd>,
    /// Subnets and MTU for pods, if there are to be any.
    pub envs: Option<[SubnetEnv; 2]>,
    /// The nodes.
    pub nodes: [Node; 2],
}

impl Path {
    fn by_hand(nodes: [Node; 2], envs: Option<[SubnetEnv; 2]>) -> Self {
        Self {
            agents: Vec::new(),
            others: Vec::new(),
            _proxies: Vec::new(),
            _etcd: None,
            envs,
            nodes,
        }
    }

    /// The ends of all logs, for error messages.
    pub fn last_words(&self) -> String {
        let ours = self.agents.iter().map(|agent| process::tail(&agent.log(), 15));
        let others = self.others.iter().map(|other| other.log_tail(15));
        ours.chain(others).collect::<Vec<_>>().join("\n")
    }
}

/// No pods: from node to node.
pub fn host(nodes: [Node; 2]) -> Path {
    Path::by_hand(nodes, None)
}

/// Routes to the other's pods, as flannel's host-gw sets them.
pub fn host_gw(nodes: [Node; 2]) -> Result<Path> {
    let subnets = ["10.77.1.0/24", "10.77.2.0/24"];
    for (own, other) in [(0, 1), (1, 0)] {
        let (subnet, via) = (subnets[other], nodes[other].v4());
        nodes[own].ns().ip(&[&format!("route add {subnet} via {via} dev eth0")])?;
        rules::install_flannel(&nodes[own], NETWORK, subnets[own])?;
    }
    let [near, far] = subnets.map(|subnet| SubnetEnv::by_hand(Some(subnet), None, 1500));
    Ok(Path::by_hand(nodes, Some([near?, far?])))
}

/// Packets in UDP, carried by a plain proxy on either node.
pub fn plain_udp(nodes: [Node; 2]) -> Result<Path> {
    let subnets = ["10.77.1.0/24", "10.77.2.0/24"];
    let proxies =
        [UdpProxy::start(&nodes[0], subnets[0])?, UdpProxy::start(&nodes[1], subnets[1])?];
    for (own, other) in [(0, 1), (1, 0)] {
        let (key, lease) = proxies[other].lease();
        proxies[own].learn(&key, &lease)?;
        rules::install_flannel(&nodes[own], NETWORK, subnets[own])?;
    }
    let envs = [proxies[0].env()?, proxies[1].env()?];
    Ok(Path { _proxies: proxies.into(), ..Path::by_hand(nodes, Some(envs)) })
}

/// The device, entries and rules that a flannel makes.
pub fn kernel_vxlan(nodes: [Node; 2]) -> Result<Path> {
    let [near, far] = nodes;
    let near = KernelPeer::new(near, PeerSpec::v4(1))?;
    let far = KernelPeer::new(far, PeerSpec::v4(2))?;
    for (own, other) in [(&near, &far), (&far, &near)] {
        let (key, lease) = other.lease();
        own.learn(&key, &lease)?;
        rules::install_flannel(own.node(), NETWORK, &own.spec().subnet)?;
    }
    let envs = [near.env()?, far.env()?];
    Ok(Path::by_hand([near.into_node(), far.into_node()], Some(envs)))
}

/// The same, and a flowtable that takes established flows past the rules.
pub fn kernel_flowtable(nodes: [Node; 2]) -> Result<Path> {
    let path = kernel_vxlan(nodes)?;
    for (node, env) in path.nodes.iter().zip(path.envs.iter().flatten()) {
        // The devices have to be there: the pod brings the bridge.
        node.pod(env)?;
        nft(node, FLOWTABLE)?;
    }
    Ok(path)
}

/// Behind flannel's and kube-proxy's rules: a flow that these have let through is offloaded.
const FLOWTABLE: &str = "table ip bench {
    flowtable fast { hook ingress priority filter; devices = { veth0, flannel.1 }; }
    chain forward {
        type filter hook forward priority filter + 10; policy accept;
        ct state established flow add @fast
    }
}
";

fn nft(node: &Node, ruleset: &str) -> Result<()> {
    let file = node.dir().join("flowtable.nft");
    fs::write(&file, ruleset)?;
    node.run(&format!("nft -f {}", file.display())).map(drop)
}

/// Whether the running kernel knows flowtables. Asked for in a namespace of its own.
pub fn has_flowtables() -> Result<bool> {
    let ruleset = "add table ip probe; add flowtable ip probe fast \
                   { hook ingress priority 0; devices = { lo }; }";
    let status = std::process::Command::new("unshare")
        .args(["--net", "nft", ruleset])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run unshare")?;
    Ok(status.success())
}

/// Our agent on both nodes, with these flags, this configuration and a directory as the store.
pub fn ours(lab: &Lab, nodes: [Node; 2], flags: &[&str], config: &str) -> Result<Path> {
    let store = LocalStore::new(lab)?;
    store.put_config(config)?;
    let mut all = store.flags();
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    all.push("--ip-masq".to_owned());
    let [near, far] = &nodes;
    let mut agents = [near.agent(&all)?, far.agent(&all)?];
    let [first, second] = &mut agents;
    let envs = [first.wait_ready(READY_WITHIN)?, second.wait_ready(READY_WITHIN)?];
    for (node, env) in nodes.iter().zip(&envs) {
        if !rules::has_flannel(node)? {
            rules::install_flannel(node, NETWORK, &env.subnet_v4()?)?;
        }
    }
    Ok(Path { agents: agents.into(), ..Path::by_hand(nodes, Some(envs)) })
}

/// A real flanneld on both nodes, with an etcd that is reached beside the cable.
pub fn flanneld(lab: &Lab, nodes: [Node; 2], binary: &FilePath) -> Result<Path> {
    let binary = fs::canonicalize(binary)
        .with_context(|| format!("--flanneld names {}", binary.display()))?;
    let etcd = Etcd::new(lab)?;
    etcd.put_config(CONFIG)?;
    let (etcd_address, mut others, mut envs) = (etcd.node().v4(), Vec::new(), Vec::new());
    for (number, node) in (111..).zip(&nodes) {
        lab.plug(node.ns(), Segment::A, "etcd0", 1500)?;
        let own = Segment::A.v4(number);
        node.ns().ip(&[
            &format!("addr add {own}/32 dev etcd0"),
            &format!("route add {etcd_address} dev etcd0 src {own}"),
        ])?;
        let mut command = node.command(&binary);
        command.arg(format!("-etcd-endpoints={}", etcd.endpoint())).args([
            "-iface=eth0",
            "-ip-masq",
            "-subnet-file=/run/flannel/subnet.env",
        ]);
        others.push(Process::spawn(command, &node.dir().join("flanneld.log"), false)?);
    }
    for (node, process) in nodes.iter().zip(&mut others) {
        let file = node.path("/run/flannel/subnet.env");
        envs.push(eventually("flanneld's env file", READY_WITHIN, || {
            let ended = process.exited()?;
            ensure!(ended.is_none(), "flanneld has ended:\n{}", process.log_tail(20));
            Ok(fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()))
        })?);
    }
    for (node, process) in nodes.iter().zip(&others) {
        eventually("flanneld's route to the other", Duration::from_secs(10), || {
            let routes = node.ns().ip_json("route show dev flannel.1")?;
            ensure!(!routes.is_empty(), "{}", process.log_tail(20));
            Ok(Some(()))
        })?;
    }
    let envs = <[SubnetEnv; 2]>::try_from(envs).ok().context("two env files")?;
    Ok(Path { others, _etcd: Some(etcd), ..Path::by_hand(nodes, Some(envs)) })
}
