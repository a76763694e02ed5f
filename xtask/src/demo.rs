//! `cargo xtask demo`: a whole cluster in namespaces of this machine.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use flannel_lab::{
    agent,
    cluster::{Cluster, Member, Plan},
    etcd::Etcd,
    kube_stub::KubeStub,
    lab::Lab,
    lease_store::{LeaseStore, LocalStore},
    node::Node,
    pod::Pod,
    process::Process,
    run, traffic,
};

use crate::tool;

/// Arguments of `demo`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Nodes of the cluster, the kernel peer included
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(2..=40))]
    nodes: u8,
    /// Where leases live
    #[arg(long, value_enum, default_value_t = Store::Local)]
    store: Store,
    /// How nodes are joined
    #[arg(long, value_enum, default_value_t = Backend::Vxlan)]
    backend: Backend,
    /// What carries the packets
    #[arg(long, value_enum, default_value_t = Datapath::Auto)]
    datapath: Datapath,
    /// IPv6 beside IPv4
    #[arg(long)]
    dual_stack: bool,
    /// Make the last node a plain kernel VXLAN peer without an agent
    #[arg(long)]
    kernel_peer: bool,
    /// Leave everything running
    #[arg(long)]
    keep: bool,
    /// Remove what --keep left running
    #[arg(long, exclusive = true)]
    clean: bool,
    /// Use the optimised build
    #[arg(long)]
    release: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Store {
    /// Files in a directory that all nodes share; needs no server
    Local,
    /// A real etcd
    Etcd,
    /// A stand-in for the Kubernetes API server, which lives in the demo's own process
    KubeStub,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// VXLAN
    Vxlan,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Datapath {
    /// The best that works here
    Auto,
    /// eBPF or nothing
    Ebpf,
    /// The kernel's VXLAN
    Kernel,
}

impl Datapath {
    fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ebpf => "ebpf",
            Self::Kernel => "kernel",
        }
    }
}

/// Builds, shows, and removes or leaves a cluster. An error if anything was not as it should.
pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.clean {
        let removed = run::remove_kept()?;
        println!("removed {} cluster(s) {}", removed.len(), removed.join(" "));
        return Ok(());
    }
    ensure!(
        tool::is_root()?,
        "the demo makes network namespaces and loads eBPF programs: run it as root"
    );
    ensure!(
        !(arguments.keep && arguments.store == Store::KubeStub),
        "--keep does not go with --store kube-stub: that server ends with the demo; use --store etcd"
    );
    let binary = tool::build_agent(arguments.release)?;
    // SAFETY: no other thread is running yet.
    unsafe { std::env::set_var("FLANNEL_AGENT", &binary) };
    let start = Instant::now();
    let lab = if arguments.keep { Lab::to_keep()? } else { Lab::new()? };
    let (local, etcd, stub);
    let store: &dyn LeaseStore = match arguments.store {
        Store::Local => {
            local = LocalStore::new(&lab)?;
            etcd = None;
            &local
        }
        Store::Etcd => {
            etcd = Some(Etcd::new(&lab)?);
            etcd.as_ref().context("etcd")?
        }
        Store::KubeStub => {
            etcd = None;
            stub = KubeStub::new(&lab)?;
            &stub
        }
    };
    let shown = show(arguments, &lab, store, start);
    match shown {
        Ok(cluster) if arguments.keep => {
            how_to_look(&lab, &cluster);
            lab.run().mark_kept()?;
            std::mem::forget((lab, cluster, etcd));
            Ok(())
        }
        Ok(cluster) => {
            drop((cluster, etcd, lab));
            println!("\nall is well; everything was removed again ({:.1} s)", seconds(start));
            Ok(())
        }
        Err(error) => Err(error.context("the demo failed; everything was removed again")),
    }
}

fn show(
    arguments: &Arguments,
    lab: &Lab,
    store: &dyn LeaseStore,
    start: Instant,
) -> Result<Cluster> {
    let plan = Plan {
        agents: usize::from(arguments.nodes) - usize::from(arguments.kernel_peer),
        kernel_peer: arguments.kernel_peer,
        dual_stack: arguments.dual_stack,
        pods: 2,
        flags: vec![format!("--datapath={}", arguments.datapath.word())],
        ..Plan::default()
    };
    heading("cluster");
    println!("network configuration: {}", plan.network_config());
    println!("each node: a namespace with eth0 on a common bridge, cni0, two pods, an agent");
    println!("every agent: flannel-agent {} {}", store.flags().join(" "), plan.flags.join(" "));
    let cluster = Cluster::start(lab, store, &plan)?;
    println!("up and all nodes joined in {:.2} s\n", seconds(start));
    println!("{:<9} {:<14} {:<18} {:<22} path", "node", "underlay", "subnet", "IPv6 subnet");
    for member in &cluster.members {
        println!(
            "{:<9} {:<14} {:<18} {:<22} {}",
            member.node().name(),
            member.node().v4(),
            member.env().subnet_v4()?,
            member.env().subnet_v6().unwrap_or_default(),
            path_of(member)
        );
    }
    let mut problems = matrix(&cluster);
    problems.extend(transfers(&cluster));
    inside(cluster.members.first().context("an empty cluster")?)?;
    problems.extend(throughput(&cluster));
    if problems.is_empty() {
        return Ok(cluster);
    }
    for problem in &problems {
        println!("PROBLEM {problem}");
    }
    bail!("{} problem(s), the first: {}", problems.len(), problems[0])
}

/// The data path a node uses, in its own words.
fn path_of(member: &Member) -> String {
    let Some(agent) = member.agent() else { return "kernel, made by hand".to_owned() };
    match agent.status() {
        Ok(status) => {
            let mode = status["datapath"]["mode"].as_str().unwrap_or("kernel");
            let hook = status["backend"]["datapath"]["programs"]["hook"].as_str();
            let mode = hook.map_or_else(|| mode.to_owned(), |hook| format!("{mode} by {hook}"));
            match status["datapath"]["reason"].as_str().filter(|reason| !reason.is_empty()) {
                Some(reason) => format!("{mode} ({reason})"),
                None => mode,
            }
        }
        Err(error) => format!("unknown: {error:#}"),
    }
}

/// Pings from every pod to every pod of another node.
fn matrix(cluster: &Cluster) -> Vec<String> {
    heading("who reaches whom (3 echo requests each; rows send)");
    let pods: Vec<(usize, &Pod)> = cluster
        .members
        .iter()
        .enumerate()
        .flat_map(|(node, member)| member.pods().iter().map(move |pod| (node, pod)))
        .collect();
    let width = pods.iter().map(|(_, pod)| pod.name().len()).max().unwrap_or(0) + 2;
    print!("{:width$}", "");
    for (_, pod) in &pods {
        print!("{:width$}", pod.name());
    }
    println!();
    let mut problems = Vec::new();
    for (from_node, from) in &pods {
        print!("{:width$}", from.name());
        for (to_node, to) in &pods {
            let cell = if from_node == to_node {
                "-".to_owned()
            } else {
                let cells: Vec<_> = to
                    .addresses()
                    .into_iter()
                    .map(|address| {
                        let family = if address.is_ipv4() { "v4" } else { "v6" };
                        match traffic::ping(from.ns(), address, 3) {
                            Ok(3) => family.to_owned(),
                            other => {
                                problems.push(format!(
                                    "{} pings {} ({address}): {}",
                                    from.name(),
                                    to.name(),
                                    match other {
                                        Ok(n) => format!("{n} of 3 answered"),
                                        Err(error) => format!("{error:#}"),
                                    }
                                ));
                                format!("{family}:NO")
                            }
                        }
                    })
                    .collect();
                cells.join("+")
            };
            print!("{cell:width$}");
        }
        println!();
    }
    problems
}

/// One transfer per ordered pair of nodes and family, from the first pod to the last.
fn transfers(cluster: &Cluster) -> Vec<String> {
    heading("TCP, 16 MiB each, compared by hash");
    let mut problems = Vec::new();
    for (from, to) in cluster.node_pairs() {
        let (Some(from), Some(to)) = (from.pods().first(), to.pods().last()) else { continue };
        for address in to.addresses() {
            let what = format!("{} -> {} ({address})", from.name(), to.name());
            match traffic::tcp_transfer(from, to, address, traffic::MIB_16) {
                Ok(transfer) if transfer.intact && transfer.bytes == traffic::MIB_16 => {
                    println!("{what}: hash equal, {:.0} ms", transfer.time.as_secs_f64() * 1e3);
                }
                Ok(transfer) => problems.push(format!("{what}: hash differs: {transfer:?}")),
                Err(error) => problems.push(format!("{what}: {error:#}")),
            }
        }
    }
    problems
}

/// Device, routes and maps of a node.
fn inside(member: &Member) -> Result<()> {
    let node = member.node();
    for line in [
        "ip -d link show flannel.1",
        "ip route show",
        "ip neigh show dev flannel.1",
        "bridge fdb show dev flannel.1",
    ] {
        heading(&format!("{}: {line}", node.name()));
        print!("{}", node.run(line)?);
    }
    if member.env().get("FLANNEL_IPV6_SUBNET").is_some() {
        heading(&format!("{}: ip -6 route show dev flannel-v6.1", node.name()));
        print!("{}", node.run("ip -6 route show dev flannel-v6.1")?);
    }
    maps(node)?;
    heading(&format!("{}: flannel-agent peers", node.name()));
    let peers = agent::subcommand(node, &["peers"])?;
    print!("{}", String::from_utf8_lossy(&peers.stdout));
    ensure!(
        peers.status.success(),
        "flannel-agent peers: {}: {}",
        peers.status,
        String::from_utf8_lossy(&peers.stderr).trim()
    );
    Ok(())
}

/// What is pinned on a node.
fn maps(node: &Node) -> Result<()> {
    const SHOWN: usize = 24;
    let script = "find /sys/fs/bpf/flannel -type f 2>/dev/null | sort";
    let pins = String::from_utf8_lossy(&node.shell(script)?.stdout).into_owned();
    heading(&format!("{}: pinned eBPF objects", node.name()));
    if pins.is_empty() {
        println!("none: packets go by the kernel path");
        return Ok(());
    }
    print!("{pins}");
    for pin in pins.lines() {
        // Programs and links are pinned too; they are no maps and have been listed.
        let Ok(map) = node.run(&format!("bpftool map show pinned {pin}")) else { continue };
        // A dump of an array shows every element, used or not.
        if map.contains("array") && max_entries(&map).is_some_and(|entries| entries > 64) {
            println!("{pin}: one entry for each possible peer; see `flannel-agent peers` below");
            continue;
        }
        let dump = node.run(&format!("bpftool map dump pinned {pin}"))?;
        heading(&format!("{}: bpftool map dump pinned {pin}", node.name()));
        let lines: Vec<_> = dump.lines().collect();
        for line in lines.iter().take(SHOWN) {
            println!("{line}");
        }
        if lines.len() > SHOWN {
            println!("... {} more lines", lines.len() - SHOWN);
        }
    }
    Ok(())
}

/// How many entries a map can have, by what `bpftool map show` prints.
fn max_entries(shown: &str) -> Option<u64> {
    shown.split_whitespace().skip_while(|word| *word != "max_entries").nth(1)?.parse().ok()
}

/// iperf3 for two seconds between the first two nodes.
fn throughput(cluster: &Cluster) -> Option<String> {
    heading("throughput");
    let (from, to) = cluster.pod_pairs().next()?;
    if Command::new("iperf3").arg("--version").output().is_err() {
        println!("iperf3 is not installed: left out");
        return None;
    }
    match iperf(from, to) {
        Ok(gigabits) => {
            println!("{} -> {}: {gigabits:.1} Gb/s (one TCP flow, 2 s)", from.name(), to.name());
            None
        }
        Err(error) => Some(format!("iperf3 from {} to {}: {error:#}", from.name(), to.name())),
    }
}

fn iperf(from: &Pod, to: &Pod) -> Result<f64> {
    let address = to.v4()?.to_string();
    let log = from.ns().run().dir().join("iperf3.log");
    let mut server = to.ns().command("iperf3");
    server.args(["-s", "-1", "--forceflush", "-B", &address]);
    let mut server = Process::spawn(server, &log, false)?;
    flannel_lab::wait::eventually("iperf3 listens", Duration::from_secs(5), || {
        Ok(server.log().contains("listening").then_some(()))
    })?;
    let mut client = from.ns().command("iperf3");
    client.args(["-c", &address, "-t", "2", "-f", "g"]);
    let text = flannel_lab::process::output(&mut client)?;
    server.wait(Duration::from_secs(5))?;
    let line = text.lines().find(|line| line.trim_end().ends_with("receiver"));
    line.and_then(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let unit = words.iter().position(|word| *word == "Gbits/sec")?;
        words.get(unit.checked_sub(1)?)?.parse().ok()
    })
    .with_context(|| format!("no figure in:\n{text}"))
}

fn how_to_look(lab: &Lab, cluster: &Cluster) {
    heading("left running");
    println!("files and logs: {}", lab.run().dir().display());
    for member in &cluster.members {
        let node = member.node();
        println!(
            "{:<9} nsenter --target {} --net --mount    (log: {})",
            node.name(),
            node.holder_pid(),
            node.dir().join("agent.log").display()
        );
        for pod in member.pods() {
            let addresses: Vec<_> = pod.addresses().iter().map(ToString::to_string).collect();
            println!(
                "          ip netns exec {} bash    ({})",
                pod.ns().name(),
                addresses.join(" ")
            );
        }
    }
    println!("on a node: flannel-agent status, flannel-agent peers, bpftool net, ip -d link");
    println!("remove it: cargo xtask demo --clean");
}

fn heading(text: &str) {
    println!("\n== {text}");
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::max_entries;

    #[test]
    fn a_maps_size_is_read() {
        let shown = "7: percpu_array  name PEER_COUNTERS  flags 0x0\n\tkey 4B  value 16B  \
                     max_entries 16384  memlock 1048B";
        assert_eq!(max_entries(shown), Some(16_384));
        assert_eq!(max_entries("Error: get by fd: Invalid argument"), None);
    }
}
