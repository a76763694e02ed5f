//! What the agent itself costs and how fast it is: start, many peers, changes, idling.

mod daemon;

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::daemon::{Daemon, Kind};
use super::{
    arguments, priority,
    report::{self, Row},
    statistics::{median, ratio_by_round},
};
use crate::{
    change_meter::{Change, ChangeMeter, MeteredPeer, Timing, percentile},
    etcd::Etcd,
    lab::Lab,
    lease_store::LeaseStore,
    node::Node,
    pod::Pod,
    traffic,
    usage::Usage,
    vxlan_view::VxlanView,
};

/// Room for thousands of peers, and a corner for the nodes' own subnets.
const CONFIG: &str = r#"{"Network":"10.64.0.0/10","SubnetMin":"10.100.0.0","SubnetMax":"10.100.3.0",
    "Backend":{"Type":"vxlan"}}"#;

/// How long an echo is waited for before the next one is sent.
const ECHO: Duration = Duration::from_millis(3);

/// How often the kernel's routes are counted.
const LOOK: Duration = Duration::from_millis(2);

/// How long anything may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// Values by daemon and by figure: name and unit.
type Values = BTreeMap<(Kind, (&'static str, &'static str)), Vec<Option<f64>>>;

/// Measures, and prints progress and results.
pub fn run(arguments: &arguments::ControlPlane) -> Result<()> {
    let mut kinds = vec![Kind::Ours];
    if let Some(path) = &arguments.flanneld {
        kinds.push(Kind::Flanneld(fs::canonicalize(path).context("--flanneld")?));
    }
    priority::raise_group()?;
    let mut values = Values::new();
    first_echo(arguments, &kinds, &mut values)?;
    many_peers(arguments, &kinds, &mut values)?;
    let rows = rows(&values);
    println!();
    print!("{}", report::list(&rows));
    println!("\nless is better; ratio of ours to flanneld's, median of rounds");
    if let Some(path) = &arguments.json {
        report::write_json(path, &rows)?;
    }
    Ok(())
}

fn rows(values: &Values) -> Vec<Row> {
    let flanneld = |figure| {
        values.iter().find_map(|((kind, other), values)| {
            (matches!(kind, Kind::Flanneld(_)) && *other == figure).then_some(values)
        })
    };
    values
        .iter()
        .filter_map(|((kind, (name, unit)), series)| {
            let present: Vec<f64> = series.iter().copied().flatten().collect();
            Some(Row {
                profile: "control-plane".to_owned(),
                candidate: kind.name().to_owned(),
                workload: (*name).to_owned(),
                median: median(&present)?,
                unit: (*unit).to_owned(),
                ratio: flanneld((*name, *unit)).and_then(|base| ratio_by_round(series, base)),
                rounds: present.len(),
            })
        })
        .collect()
}

fn note(values: &mut Values, kind: &Kind, figure: (&'static str, &'static str), value: f64) {
    values.entry((kind.clone(), figure)).or_default().push(Some(value));
}

/// From the start of an agent whose lease is held, but whose device and rules are gone, to the
/// first echo from pod to pod.
fn first_echo(
    arguments: &arguments::ControlPlane,
    kinds: &[Kind],
    values: &mut Values,
) -> Result<()> {
    let mut stages = kinds.iter().map(Stage::pair).collect::<Result<Vec<_>>>()?;
    for round in 1..=arguments.rounds {
        for stage in &mut stages {
            stage.near.stop()?;
            wipe(&stage.near_node)?;
            let target = stage.far_pod.v4()?;
            let start = Instant::now();
            stage.near = Daemon::start(&stage.kind, &stage.near_node, &stage.etcd)?;
            while traffic::ping_within(stage.near_pod.ns(), target, 1, ECHO)? == 0 {
                ensure!(start.elapsed() < PATIENCE, "no echo: {}", stage.near.last_words());
            }
            let wall = start.elapsed();
            let used = Usage::of(stage.near.pid())?;
            note(values, &stage.kind, ("first_echo", "ms"), millis(wall));
            note(values, &stage.kind, ("first_echo_cpu", "ms"), millis(used.cpu));
            stage.near.wait_ready(PATIENCE)?;
        }
        println!("first echo: round {round} of {}", arguments.rounds);
    }
    Ok(())
}

/// Removes device and rules, as after a reboot.
fn wipe(node: &Node) -> Result<()> {
    node.ns().ip(&["link del flannel.1"])?;
    let done = node.shell("nft flush ruleset")?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// Two nodes with a pod each and a daemon of one kind.
struct Stage {
    kind: Kind,
    near: Daemon,
    _far: Daemon,
    near_pod: Pod,
    far_pod: Pod,
    near_node: Node,
    _far_node: Node,
    etcd: Etcd,
    _lab: Lab,
}

impl Stage {
    fn pair(kind: &Kind) -> Result<Self> {
        let lab = Lab::new()?;
        let etcd = Etcd::new(&lab)?;
        etcd.put_config(CONFIG)?;
        let (near_node, far_node) = (lab.node("near")?, lab.node("far")?);
        let mut near = Daemon::start(kind, &near_node, &etcd)?;
        let mut far = Daemon::start(kind, &far_node, &etcd)?;
        let near_pod = near_node.pod(&near.wait_ready(PATIENCE)?)?;
        let far_pod = far_node.pod(&far.wait_ready(PATIENCE)?)?;
        traffic::wait_reaches(near_pod.ns(), far_pod.v4()?, PATIENCE)?;
        let kind = kind.clone();
        Ok(Self {
            kind,
            near,
            _far: far,
            near_pod,
            far_pod,
            near_node,
            _far_node: far_node,
            etcd,
            _lab: lab,
        })
    }
}

/// A node among many peers: cold start, changes, idling.
fn many_peers(
    arguments: &arguments::ControlPlane,
    kinds: &[Kind],
    values: &mut Values,
) -> Result<()> {
    let peers: Vec<_> = (0..arguments.peers).map(|n| MeteredPeer::numbered(n, 0)).collect();
    let mut stages = Vec::new();
    for kind in kinds {
        let lab = Lab::new()?;
        let etcd = Etcd::new(&lab)?;
        etcd.put_config(CONFIG)?;
        let node = lab.node("node")?;
        ChangeMeter::open(&etcd, &node)?.fill(&peers)?;
        stages.push((kind, node, etcd, lab));
    }
    let mut running = Vec::new();
    for round in 1..=arguments.rounds {
        for (kind, node, etcd, _) in &stages {
            let mut daemon = cold_start(kind, node, etcd, peers.len(), values)?;
            // The next round starts from nothing; the last one is gone on with.
            if round == arguments.rounds {
                running.push(daemon);
            } else {
                daemon.stop()?;
                wipe(node)?;
            }
        }
        println!("cold start, {} peers: round {round} of {}", peers.len(), arguments.rounds);
    }
    for ((kind, node, etcd, _), daemon) in stages.iter().zip(&running) {
        let meter = ChangeMeter::open(etcd, node)?;
        changes(kind, &meter, daemon, &peers, arguments.changes, values)?;
        println!("{}: {} changes of each kind", kind.name(), arguments.changes);
    }
    let before =
        running.iter().map(|daemon| Usage::of(daemon.pid())).collect::<Result<Vec<_>>>()?;
    let time = Duration::from_secs(arguments.idle);
    std::thread::sleep(time);
    for (((kind, ..), daemon), before) in stages.iter().zip(&running).zip(&before) {
        let used = Usage::of(daemon.pid())?.since(before);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let wake_ups = used.wake_ups as f64 * 30.0 / time.as_secs_f64();
        note(values, kind, ("idle_wake_ups", "per 30 s"), wake_ups);
        let cpu = millis(used.cpu) * 30.0 / time.as_secs_f64();
        note(values, kind, ("idle_cpu", "ms per 30 s"), cpu);
    }
    Ok(())
}

/// From the start to the last route.
fn cold_start(
    kind: &Kind,
    node: &Node,
    etcd: &Etcd,
    peers: usize,
    values: &mut Values,
) -> Result<Daemon> {
    let start = Instant::now();
    let mut daemon = Daemon::start(kind, node, etcd)?;
    while routes(node)? < peers {
        ensure!(start.elapsed() < PATIENCE, "routes are missing: {}", daemon.last_words());
        std::thread::sleep(LOOK);
    }
    let wall = start.elapsed();
    let used = Usage::of(daemon.pid())?;
    note(values, kind, ("cold_start", "ms"), millis(wall));
    note(values, kind, ("cold_start_cpu", "ms"), millis(used.cpu));
    daemon.wait_ready(PATIENCE)?;
    note(values, kind, ("anonymous_memory", "MiB"), daemon.anonymous_memory()?);
    let view = VxlanView::read(node.ns(), "flannel.1")?;
    let found = [view.routes.len(), view.neighbours.len(), view.fdb.len()];
    ensure!(found == [peers; 3], "{found:?} routes, neighbours, FDB entries for {peers} peers");
    Ok(daemon)
}

/// Routes over the tunnel's device to other nodes, as the kernel lists them.
fn routes(node: &Node) -> Result<usize> {
    let table = node.ns().within(|| {
        fs::read_to_string("/proc/thread-self/net/route").context("cannot read the routes")
    })?;
    Ok(table.lines().filter(|line| line.starts_with("flannel.1\t")).count())
}

fn changes(
    kind: &Kind,
    meter: &ChangeMeter<'_>,
    daemon: &Daemon,
    peers: &[MeteredPeer],
    count: u16,
    values: &mut Values,
) -> Result<()> {
    let new = u16::try_from(peers.len())?;
    let mut peers = peers.to_vec();
    let mut timings = BTreeMap::<_, Vec<Timing>>::new();
    let before = Usage::of(daemon.pid())?;
    for round in 0..count {
        let added = MeteredPeer::numbered(new + round, 0);
        let at = usize::from(round) % peers.len();
        let to = MeteredPeer::numbered(u16::try_from(at)?, 1 + round % 200);
        let moved = Change::Move { from: peers[at], to };
        peers[at] = to;
        for (names, change) in
            [(ADD, Change::Add(added)), (MOVE, moved), (REMOVE, Change::Remove(added))]
        {
            timings.entry(names).or_default().push(meter.measure(&change)?);
        }
    }
    let used = Usage::of(daemon.pid())?.since(&before);
    for ([p50, p99, total, reply], timings) in &timings {
        let of = |value: fn(&Timing) -> Duration, percent| {
            let mut values: Vec<_> = timings.iter().map(value).collect();
            millis(percentile(&mut values, percent))
        };
        note(values, kind, (p50, "ms"), of(Timing::latency, 50));
        note(values, kind, (p99, "ms"), of(Timing::latency, 99));
        note(values, kind, (total, "ms"), of(|timing| timing.in_kernel, 50));
        note(values, kind, (reply, "ms"), of(|timing| timing.etcd_replied, 50));
    }
    let changes = f64::from(count) * 3.0;
    note(values, kind, ("change_cpu", "ms"), millis(used.cpu) / changes);
    Ok(())
}

/// Names of the figures of each kind of change: from the event's arrival to the kernel, p50 and
/// p99; from the write's begin to the kernel; from the write's begin to etcd's reply.
const ADD: [&str; 4] = ["add_p50", "add_p99", "add_total_p50", "add_etcd_reply_p50"];
const MOVE: [&str; 4] = ["move_p50", "move_p99", "move_total_p50", "move_etcd_reply_p50"];
const REMOVE: [&str; 4] = ["remove_p50", "remove_p99", "remove_total_p50", "remove_etcd_reply_p50"];

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
