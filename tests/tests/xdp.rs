//! Tunnel packets taken out in XDP, before the kernel has looked at them: they arrive as by TC, others
//! keep their place at the device, and nothing in clear is taken for one of them.

use flannel_lab::{
    outcomes::{self, DECAPSULATED, FROM_XDP},
    prelude::*,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48",
    "Backend":{"Type":"vxlan"}}"#;
const FLAGS: [&str; 3] = ["--datapath=ebpf", "--fast-path=stack", "--xdp=native"];

fn duo(lab: &Lab) -> Result<Duo<LocalStore>> {
    Duo::start(lab, LocalStore::new(lab)?, CONFIG, true, &FLAGS)
}

/// Packets that XDP took out and those of them that TC sent on.
fn by_xdp(node: &Node) -> Result<(u64, u64)> {
    Ok((outcomes::count_xdp(node, DECAPSULATED)?, outcomes::count(node, FROM_XDP)?))
}

/// The program's part of the agent's status.
fn front(duo: &Duo<LocalStore>) -> Result<Value> {
    Ok(duo.agent.status()?["backend"]["datapath"]["programs"]["xdp"].clone())
}

#[test]
fn pods_reach_each_other_and_xdp_takes_the_packets_out() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab)?;
    ensure!(front(&duo)?["mode"] == "native", "{:#}\n{}", duo.agent.status()?, duo.agent.log());
    for (ours, theirs) in duo.ours.addresses().into_iter().zip(duo.theirs.addresses()) {
        let before = by_xdp(&duo.alder)?;
        let there = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), theirs)?;
        let back = LossMeter::start(duo.theirs.ns(), duo.ours.ns(), ours)?;
        std::thread::sleep(Duration::from_secs(1));
        let (there, back) = (there.stop()?, back.stop()?);
        there.ensure_none(ours)?;
        back.ensure_none(theirs)?;
        let after = by_xdp(&duo.alder)?;
        let (taken, sent_on) = (after.0 - before.0, after.1 - before.1);
        ensure!(
            taken * 10 > back.sent * 9,
            "{taken} of {} taken out in XDP: {:#}",
            back.sent,
            front(&duo)?
        );
        ensure!(taken == sent_on, "{taken} taken out, {sent_on} sent on");
    }
    Ok(())
}
