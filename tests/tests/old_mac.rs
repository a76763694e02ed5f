//! A peer that has missed a change of our tunnel device's MAC, as many a node behind a slow store
//! has: the kernel drops what it sends, the programs know whom it is for.

use flannel_lab::prelude::*;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48",
    "Backend":{"Type":"vxlan"}}"#;

/// Has the peer send to MACs that nobody has.
fn duo(lab: &Lab, flags: &[&str]) -> Result<Duo<LocalStore>> {
    let duo = Duo::start(lab, LocalStore::new(lab)?, CONFIG, true, flags)?;
    let own = duo.own_lease()?;
    let leases = duo.store.leases()?;
    let (key, mut lease) =
        leases.into_iter().find(|(_, lease)| *lease == own).context("no lease of ours")?;
    lease["BackendData"]["VtepMAC"] = json!("02:de:ad:00:00:05");
    lease["BackendV6Data"]["VtepMAC"] = json!("02:de:ad:00:00:06");
    duo.birch.learn(&key, &lease)?;
    Ok(duo)
}

#[test]
fn a_peer_that_uses_an_old_mac_loses_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab, &["--datapath=ebpf"])?;
    for address in duo.ours.addresses() {
        let answers = traffic::ping(duo.theirs.ns(), address, 20)?;
        ensure!(answers == 20, "{address}: {answers} of 20 answered");
        // What the NIC or the kernel merges goes by the device.
        let sent = traffic::tcp_transfer(&duo.theirs, &duo.ours, address, 4 << 20)?;
        ensure!(sent.intact, "{address}: what arrived is not what was sent");
    }
    Ok(())
}

#[test]
fn without_the_programs_the_kernel_drops_it() -> Result<()> {
    let lab = Lab::new()?;
    let duo = duo(&lab, &["--datapath=kernel"])?;
    for address in duo.ours.addresses() {
        let answers = traffic::ping(duo.theirs.ns(), address, 2)?;
        ensure!(answers == 0, "{address}: {answers} of 2 answered");
    }
    Ok(())
}
