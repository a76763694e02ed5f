//! An agent to which nothing happens sleeps.

use flannel_lab::{
    change_meter::{ChangeMeter, MeteredPeer},
    prelude::*,
    usage::Usage,
};

/// How long it is watched.
const WATCHED: Duration = Duration::from_secs(20);

#[test]
fn it_wakes_less_than_once_a_second() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(
        r#"{"Network":"10.64.0.0/10","SubnetMin":"10.100.0.0","SubnetMax":"10.100.3.0",
            "Backend":{"Type":"vxlan"}}"#,
    )?;
    let node = lab.node("alder")?;
    let peers: Vec<_> = (0..1000).map(|n| MeteredPeer::numbered(n, 0)).collect();
    ChangeMeter::open(&etcd, &node)?.fill(&peers)?;
    let mut agent = node.agent(etcd.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    // Duplicate address detection and the like of its own devices.
    std::thread::sleep(Duration::from_secs(5));
    let before = Usage::of(agent.pid())?;
    std::thread::sleep(WATCHED);
    let used = Usage::of(agent.pid())?.since(&before);
    println!("{} wake-ups and {:?} of CPU in {WATCHED:?}", used.wake_ups, used.cpu);
    ensure!(used.wake_ups <= WATCHED.as_secs(), "{} wake-ups in {WATCHED:?}", used.wake_ups);
    Ok(())
}
