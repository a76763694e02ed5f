//! The first eBPF program: it counts what comes in per peer, and drops nothing.

use flannel_lab::{agent::subcommand, cluster::Role, prelude::*};
use nix::sys::signal::Signal;

/// A bpf file system takes no dots in names.
const PINS: &str = "/sys/fs/bpf/flannel/flannel:1";

fn plan(datapath: &str) -> Plan {
    Plan {
        agents: 1,
        kernel_peer: true,
        dual_stack: true,
        pods: 1,
        flags: vec![format!("--datapath={datapath}")],
        ..Plan::default()
    }
}

/// Packets and bytes counted from the only peer, summed over both families.
fn counted(node: &Node) -> Result<(u64, u64)> {
    let output = subcommand(node, &["peers", "--output=json"])?;
    let peers: Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
    // The agent names its columns for people, the pinned maps' fields are the program's.
    let sum = |agents: &str, maps: &str| -> u64 {
        let rows = peers.as_array().into_iter().flatten();
        rows.filter_map(|row| row[agents].as_u64().or_else(|| row[maps].as_u64())).sum()
    };
    Ok((sum("packets_received", "packets"), sum("bytes_received", "bytes")))
}

/// What `bpftool` prints of a pinned map.
fn dump(node: &Node, map: &str) -> Result<Value> {
    let maps = node.shell(&format!("ls -d {PINS}/v*/{map}"))?;
    let path = String::from_utf8(maps.stdout)?.trim().to_owned();
    ensure!(!path.is_empty(), "no pinned map {map} below {PINS}");
    let text = node.run(&format!("bpftool -j map dump pinned {path}"))?;
    serde_json::from_str(&text).with_context(|| text)
}

/// How many pinned links attach the program; each has to be readable with `bpftool` too.
fn links(node: &Node) -> Result<usize> {
    let pins = node.shell(&format!("ls -d {PINS}/underlay_ingress-*"))?;
    let pins = String::from_utf8(pins.stdout)?;
    for pin in pins.lines() {
        let link = node.run(&format!("bpftool link show pinned {pin}"))?;
        ensure!(link.contains("prog "), "{pin}: {link}");
    }
    Ok(pins.lines().count())
}

#[test]
fn every_packet_of_a_peer_is_counted_once() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan("ebpf"))?;
    let (ours, theirs) = (&cluster.members[0], &cluster.members[1]);
    let agent = ours.agent().context("an agent")?;
    let status = agent.status()?;
    ensure!(status["datapath"]["mode"] == "ebpf", "{status:#}");
    let from = &theirs.pods()[0];
    for (address, headers) in [
        // Outer Ethernet is no part of the count's unit below: IP, UDP, VXLAN, inner frame.
        (ours.pods()[0].v4()?, 20 + 8 + 8 + 14 + 20),
        (ours.pods()[0].v6()?, 40 + 8 + 8 + 14 + 40),
    ] {
        // Whatever neighbour discovery brings along comes before.
        ensure!(traffic::ping(from.ns(), address, 2)? == 2, "{address} does not answer");
        let before = counted(ours.node())?;
        ensure!(traffic::ping(from.ns(), address, 20)? == 20, "{address} does not answer");
        let after = counted(ours.node())?;
        let (packets, bytes) = (after.0 - before.0, after.1 - before.1);
        ensure!(packets == 20, "{packets} packets counted, not 20, from {address}");
        let size = headers + 64;
        ensure!(
            [20 * size, 20 * (size + 14)].contains(&bytes),
            "{bytes} bytes counted for 20 packets of {size} (without outer Ethernet)"
        );
    }
    cluster.assert_full_mesh()
}

#[test]
fn the_maps_are_readable_with_bpftool() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan("ebpf"))?;
    cluster.wait_peers(1, READY_WITHIN)?;
    let node = cluster.members[0].node();
    let peers = dump(node, "PEERS")?;
    let entries = peers.as_array().context("no array")?;
    // One entry for each family of the peer.
    ensure!(entries.len() == 2, "{peers:#}");
    ensure!(links(node)? == 1, "{} links", links(node)?);
    Ok(())
}

#[test]
fn the_kernel_datapath_loads_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan("kernel"))?;
    let node = cluster.members[0].node();
    ensure!(!node.path(PINS).exists(), "pins without eBPF");
    ensure!(links(node)? == 0, "{} links", links(node)?);
    cluster.assert_full_mesh()
}

#[test]
fn counting_goes_on_over_a_restart_and_without_an_agent() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let plan = plan("ebpf");
    let cluster = Cluster::start(&lab, &store, &plan)?;
    let [ours, theirs] = <[_; 2]>::try_from(cluster.members).ok().context("two members")?;
    let (pod, peer) = (ours.pods()[0].clone(), theirs.pods()[0].clone());
    let Role::Agent(node, mut agent) = ours.into_role() else { bail!("no agent") };
    let ping = |count| -> Result<()> {
        let answered = traffic::ping(peer.ns(), pod.v4()?, count)?;
        ensure!(answered == count, "{answered} of {count} answered");
        Ok(())
    };
    ping(5)?;
    let before = counted(&node)?.0;
    ensure!(before >= 5, "{before} packets counted");
    agent.process().stop(Signal::SIGKILL, Duration::from_secs(5))?;
    ping(5)?;
    // Read from the pinned maps, the agent being gone.
    ensure!(counted(&node)?.0 == before + 5, "{:?}, not {}", counted(&node)?, before + 5);
    let mut agent = node.agent(store.flags().iter().chain(&plan.flags))?;
    agent.wait_ready(READY_WITHIN)?;
    ping(5)?;
    ensure!(counted(&node)?.0 == before + 10, "{:?}, not {}", counted(&node)?, before + 10);
    ensure!(links(&node)? == 1, "{} links", links(&node)?);
    Ok(())
}
