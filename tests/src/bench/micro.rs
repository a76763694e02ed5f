//! What one packet costs in each eBPF program, and what the verifier went through for it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, SocketAddrV4},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{
    arguments,
    bpf_programs::{Program, TestRun, attached_by_tcx},
    frames::{self, Hop},
    priority::{self, Importance},
    report::{self, Row},
    site::{Profile, Site},
    statistics::median,
    window::keep_on_cpu,
};
use crate::{craft, netns::Netns, node::Node, process, wait::eventually};

/// The tunnel's port and VNI.
const PORT: u16 = 8472;
const VNI: u32 = 1;

/// The outer source port; any will do.
const SOURCE_PORT: u16 = 50_000;

/// All programs there are.
const FLAGS: [&str; 3] = ["--datapath=ebpf", "--fast-path=flows", "--xdp=native"];

/// How long the UDP flow talks before it is measured, and how often: often enough that XDP knows
/// that TC is at work.
const FLOW_AGE: Duration = Duration::from_secs(4);
const GREETING_PAUSE: Duration = Duration::from_millis(5);

/// A program on a device of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attached {
    program: String,
    id: u32,
    ifindex: u32,
}

/// By program, the frames that it gets to see, each with a word for it.
type Frames = BTreeMap<&'static str, Vec<(&'static str, Vec<u8>)>>;

/// Measures all programs that an agent has attached, and prints the results.
pub fn run(arguments: &arguments::Micro) -> Result<()> {
    let site = Site::of_agents(&FLAGS, Profile::Virtual)?;
    let over = AtomicBool::new(false);
    let rows = thread::scope(|scope| {
        let flow = site.flow();
        let small_talk = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                flow.greet()?;
                thread::sleep(GREETING_PAUSE);
            }
            anyhow::Ok(())
        });
        thread::sleep(FLOW_AGE);
        let rows = measure(arguments, &site);
        over.store(true, Ordering::Release);
        let Ok(talked) = small_talk.join() else { bail!("a thread panicked") };
        talked?;
        rows
    })?;
    let path = &site.agents().first().context("no agent")?.status()?["backend"]["datapath"];
    println!("fast path in use: {}\n", path["fast_path"].as_str().unwrap_or("none"));
    print!("{}", report::list(&rows));
    if let Some(path) = &arguments.json {
        report::write_json(path, &rows)?;
    }
    Ok(())
}

fn measure(arguments: &arguments::Micro, site: &Site) -> Result<Vec<Row>> {
    let node = &site.nodes()[0];
    let attached = attached(node)?;
    ensure!(!attached.is_empty(), "the agent has attached no program");
    let frames = frames_for(site)?;
    let mut rows = Vec::new();
    for Attached { program: name, id, ifindex } in attached {
        let program = Program::by_id(id)?;
        // Without BTF the kernel knows only the first 15 characters.
        let seen = frames.iter().filter(|(program, _)| program.starts_with(&name));
        for (word, frame) in seen.flat_map(|(_, frames)| frames) {
            let timed = time(node.ns(), &program, frame, ifindex, arguments)
                .with_context(|| format!("{name}, {word}"))?;
            rows.push(row(&name, &format!("{word}/{}", timed.verdict), &timed.nanos, "ns/packet"));
        }
        let verified = f64::from(u32::try_from(program.verified_instructions()?)?);
        rows.push(row(&name, "verified", &[verified], "instructions"));
    }
    Ok(rows)
}

fn row(program: &str, workload: &str, values: &[f64], unit: &str) -> Row {
    Row {
        profile: "micro".to_owned(),
        candidate: program.to_owned(),
        workload: workload.to_owned(),
        median: median(values).unwrap_or_default(),
        unit: unit.to_owned(),
        ratio: None,
        rounds: values.len(),
    }
}

/// Each program once, by the first device that has it.
fn attached(node: &Node) -> Result<Vec<Attached>> {
    let bpftool = |words: &[&str]| -> Result<Value> {
        let text = process::output(node.command("bpftool").arg("-j").args(words))?;
        serde_json::from_str(&text).with_context(|| format!("bpftool {words:?} printed {text}"))
    };
    let name = |id: u32| -> Result<String> {
        let shown = bpftool(&["prog", "show", "id", &id.to_string()])?;
        Ok(shown["name"].as_str().unwrap_or_default().to_owned())
    };
    let mut found = by_net(&bpftool(&["net", "show"])?)?;
    for unnamed in found.iter_mut().filter(|one| one.program.is_empty()) {
        unnamed.program = name(unnamed.id)?;
    }
    for link in node.ns().ip_json("link show")? {
        let ifindex = u32::try_from(link["ifindex"].as_u64().context("no ifindex")?)?;
        for id in node.ns().within(|| attached_by_tcx(ifindex))? {
            found.push(Attached { program: name(id)?, id, ifindex });
        }
    }
    let mut once: Vec<Attached> = Vec::new();
    for one in found {
        if !once.iter().any(|other| other.program == one.program) {
            once.push(one);
        }
    }
    Ok(once)
}

/// What `bpftool net show` tells of: XDP, without names, and clsact; newer ones also TCX.
fn by_net(shown: &Value) -> Result<Vec<Attached>> {
    let mut found = Vec::new();
    for hooks in shown.as_array().context("no list")? {
        let kinds = ["xdp", "tc"].iter().filter_map(|kind| hooks[kind].as_array());
        for entry in kinds.flatten() {
            let id = entry["prog_id"].as_u64().or(entry["id"].as_u64()).context("no id")?;
            let ifindex = entry["ifindex"].as_u64().context("no ifindex")?;
            found.push(Attached {
                program: entry["name"].as_str().unwrap_or_default().to_owned(),
                id: u32::try_from(id)?,
                ifindex: u32::try_from(ifindex)?,
            });
        }
    }
    Ok(found)
}

/// Frames of the site's flow, as they pass the client's node.
fn frames_for(site: &Site) -> Result<Frames> {
    let [here, there] = site.nodes();
    let cable = Hop { from: mac(there.ns(), "eth0")?, to: mac(here.ns(), "eth0")? };
    let tunnel = Hop { from: mac(there.ns(), "flannel.1")?, to: mac(here.ns(), "flannel.1")? };
    let ends = site.ends([0, 0]);
    let pod = Hop { from: mac(here.ns(), "cni0")?, to: mac(ends.client, "eth0")? };
    let (client, server) = site.flow().addresses()?;
    let (client, server) = (v4(client)?, v4(server)?);
    let stranger = SocketAddrV4::new(*server.ip(), server.port() ^ 1);
    let outer = |ip: &str, port| -> Result<SocketAddrV4> {
        Ok(SocketAddrV4::new(ip.parse().context("a node's address")?, port))
    };
    let (far, near) = (outer(&there.v4(), SOURCE_PORT)?, outer(&here.v4(), PORT)?);
    let mut all = Frames::new();
    for (word, other, payload) in
        [("udp64", server, 64), ("udp1400", server, 1400), ("udp64-new-flow", stranger, 64)]
    {
        let out = frames::udp(client, other, payload)?;
        let back = frames::udp(other, client, payload)?;
        let inner = tunnel.frame(&back)?;
        let wire = frames::tunnelled(cable, far, near, VNI, &inner)?;
        for (program, frame) in [
            ("pod_ingress", pod.reversed().frame(&out)?),
            ("tunnel_egress", tunnel.reversed().frame(&out)?),
            ("underlay_ingress", wire.clone()),
            ("underlay_xdp", wire),
            ("tunnel_ingress", inner),
            ("pod_egress", pod.frame(&back)?),
        ] {
            all.entry(program).or_default().push((word, frame));
        }
    }
    let foreign = frames::udp(far, outer(&here.v4(), 53)?, 64)?;
    for program in ["underlay_ingress", "underlay_xdp"] {
        all.entry(program).or_default().push(("no-tunnel", cable.frame(&foreign)?));
    }
    Ok(all)
}

fn v4(address: SocketAddr) -> Result<SocketAddrV4> {
    match (address, address.ip()) {
        (SocketAddr::V4(address), IpAddr::V4(_)) => Ok(address),
        _ => bail!("{address} is not IPv4"),
    }
}

fn mac(ns: &Netns, device: &str) -> Result<craft::Mac> {
    let links = ns.ip_json("link show")?;
    let link = links.iter().find(|link| link["ifname"] == device);
    let link = link.with_context(|| format!("no {device} in {}", ns.name()))?;
    craft::mac(link["address"].as_str().context("a link without address")?)
}

/// What a program takes for a packet.
struct Timed {
    /// A value for each round.
    nanos: Vec<f64>,
    /// What it decides.
    verdict: &'static str,
}

/// A program that leaves the packet alone is run many times on it. One that changes it would see
/// its own work the second time: it gets a new packet for each run, and what an empty program
/// takes in the same way is taken off.
fn time(
    ns: &Netns,
    program: &Program,
    frame: &[u8],
    ifindex: u32,
    arguments: &arguments::Micro,
) -> Result<Timed> {
    ns.within(|| {
        keep_on_cpu(1.min(thread::available_parallelism()?.get() - 1))?;
        priority::raise_thread(Importance::RealTime)?;
        let first = usual_run(program, frame, ifindex)?;
        let rounds = 0..arguments.rounds;
        let nanos = if first.packet == frame {
            let run = |_| Ok(nanos(program.test_run(frame, ifindex, arguments.repeat)?.time));
            rounds.map(run).collect::<Result<_>>()?
        } else {
            let empty = Program::empty_like(program)?;
            let once = |program: &Program, usual: Option<&TestRun>| {
                let mut times = Vec::new();
                for _ in 0..arguments.repeat.min(SINGLE_RUNS) {
                    let run = program.test_run(frame, ifindex, 1)?;
                    if usual.is_none_or(|usual| alike(usual) == alike(&run)) {
                        times.push(nanos(run.time));
                    }
                }
                anyhow::Ok(median(&times))
            };
            let round = |_| {
                // Packets that end here prove nothing of their flow; it may have to begin anew.
                let time = eventually("the same verdict as before", SAME_VERDICT_WITHIN, || {
                    once(program, Some(&first))
                })?;
                Ok(time - once(&empty, None)?.context("no run")?)
            };
            rounds.map(round).collect::<Result<_>>()?
        };
        Ok(Timed { nanos, verdict: verdict(program, first.returned, first.packet == frame) })
    })
}

/// One of the many runs that end alike: now and then a packet is to take another way.
fn usual_run(program: &Program, frame: &[u8], ifindex: u32) -> Result<TestRun> {
    let runs = (0..TRIALS).map(|_| program.test_run(frame, ifindex, 1));
    let mut runs = runs.collect::<Result<Vec<_>>>()?;
    runs.sort_by_key(alike);
    // More than half of them: then it is in the middle.
    Ok(runs.swap_remove(TRIALS / 2))
}

/// Runs that end alike have this in common. (In XDP "pass" is said of what was taken out, too.)
fn alike(run: &TestRun) -> (u32, usize) {
    (run.returned, run.packet.len())
}

/// How many runs it takes to tell what is usual.
const TRIALS: usize = 15;

/// How many new packets a round is made of.
const SINGLE_RUNS: u32 = 2_000;

/// How long a flow may take to be promoted again.
const SAME_VERDICT_WITHIN: Duration = Duration::from_secs(8);

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// A program's result in a word (`linux/pkt_cls.h`, `enum xdp_action` in `linux/bpf.h`).
fn verdict(program: &Program, returned: u32, unchanged: bool) -> &'static str {
    if program.in_xdp() {
        return match returned {
            1 => "drop",
            2 if unchanged => "next",
            2 => "taken-out",
            _ => "other",
        };
    }
    match returned {
        0 => "ok",
        2 => "drop",
        7 => "redirect",
        u32::MAX => "next",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn programs_are_found_in_what_bpftool_shows() {
        let shown = json!([{
            "xdp": [{"devname": "eth0", "ifindex": 2, "mode": "driver", "id": 9}],
            "tc": [
                {"devname": "veth0", "ifindex": 5, "kind": "tcx/ingress", "name": "a", "prog_id": 7},
                {"devname": "veth1", "ifindex": 6, "kind": "tcx/ingress", "name": "a", "prog_id": 7},
            ],
            "flow_dissector": [],
        }]);
        let found = by_net(&shown).unwrap();
        let of = |program: &str, id, ifindex| Attached { program: program.into(), id, ifindex };
        assert_eq!(found, [of("", 9, 2), of("a", 7, 5), of("a", 7, 6)]);
    }
}
