//! Many peers in etcd, and one of them changes: the kernel follows, and nothing is left over. Times are printed, not judged: machines differ.

use flannel_lab::{
    change_meter::{Change, ChangeMeter, MeteredPeer, Timing, percentile},
    prelude::*,
    usage::Usage,
    vxlan_view::VxlanView,
};

/// How many peers there are; `FLANNEL_LAB_PEERS` makes it another number.
const PEERS: u16 = 250;

const CONFIG: &str = r#"{"Network":"10.64.0.0/10","SubnetMin":"10.100.0.0","SubnetMax":"10.100.3.0",
    "Backend":{"Type":"vxlan"}}"#;

#[test]
fn every_change_of_a_peer_is_followed_and_leaves_nothing_behind() -> Result<()> {
    let number = |name: &str, usual: u16| std::env::var(name).map_or(Ok(usual), |n| n.parse());
    let (count, rounds) = (number("FLANNEL_LAB_PEERS", PEERS)?, number("FLANNEL_LAB_ROUNDS", 30)?);
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let meter = ChangeMeter::open(&etcd, &node)?;
    let mut peers: Vec<_> = (0..count).map(|n| MeteredPeer::numbered(n, 0)).collect();
    meter.fill(&peers)?;
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let settled = |wanted: usize| {
        eventually("one route, neighbour and FDB entry per peer", Duration::from_secs(5), || {
            let view = VxlanView::read(node.ns(), "flannel.1")?;
            let found = [view.routes.len(), view.neighbours.len(), view.fdb.len()];
            ensure!(found == [wanted; 3], "{found:?} of {wanted}");
            Ok(Some(()))
        })
    };
    settled(peers.len())?;

    let mut timings: Vec<(&str, Timing)> = Vec::new();
    let before = Usage::of(agent.pid())?;
    for round in 0..rounds {
        let new = MeteredPeer::numbered(count + round, 0);
        timings.push(("add", meter.measure(&Change::Add(new))?));
        let at = usize::from(round) % peers.len();
        let from = peers[at];
        let to = MeteredPeer::numbered(u16::try_from(at)?, round + 1);
        timings.push(("move", meter.measure(&Change::Move { from, to })?));
        peers[at] = to;
        timings.push(("remove", meter.measure(&Change::Remove(new))?));
    }
    let used = Usage::of(agent.pid())?.since(&before);
    settled(peers.len())?;
    for (kind, timing) in &timings {
        ensure!(timing.cleaned.is_some(), "{kind}: something stale stayed: {timing:?}");
    }
    for kind in ["add", "move", "remove"] {
        let of = |value: fn(&Timing) -> Duration| -> Vec<Duration> {
            timings.iter().filter(|(k, _)| *k == kind).map(|(_, t)| value(t)).collect()
        };
        let (mut latency, mut reply) = (of(Timing::latency), of(|t| t.etcd_replied));
        println!(
            "{count} peers, {kind}: event to kernel {:?} (p50) {:?} (p99); etcd replied after \
             {:?} (p50)",
            percentile(&mut latency, 50),
            percentile(&mut latency, 99),
            percentile(&mut reply, 50),
        );
    }
    println!("CPU of one change: {:?}", used.cpu / u32::try_from(timings.len())?);
    Ok(())
}
