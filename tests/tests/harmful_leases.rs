//! Leases that would cut nodes off if they were believed: a subnet that holds the nodes' own
//! addresses, an address that is nobody's.

use flannel_lab::prelude::*;
use nix::sys::signal::Signal;

const VXLAN: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// Subnet, address, and what the complaint about it names.
const HARMFUL: [(&str, &str, &str); 8] = [
    ("192.0.2.0-24", "198.51.100.13", "192.0.2.11"),
    ("198.51.100.0-24", "198.51.100.14", "198.51.100.14"),
    ("127.0.0.0-8", "198.51.100.15", "127.0.0.0/8"),
    ("224.0.0.0-4", "198.51.100.16", "224.0.0.0/4"),
    ("10.77.61.0-24", "127.0.0.1", "127.0.0.1"),
    ("10.77.62.0-24", "224.0.0.5", "224.0.0.5"),
    ("10.77.63.0-24", "255.255.255.255", "255.255.255.255"),
    ("10.77.64.0-24", "192.0.2.11", "our own"),
];

fn lease(backend: &str, public_ip: &str, n: usize) -> Value {
    let mut lease = json!({"PublicIP": public_ip, "PublicIPv6": null, "BackendType": backend});
    if backend == "vxlan" {
        lease["BackendData"] = json!({"VNI": 1, "VtepMAC": format!("02:fa:00:00:01:{n:02x}")});
    }
    lease
}

#[test]
fn a_lease_over_the_underlay_costs_a_warning_and_neither_peers_nor_etcd() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::start(&lab, Etcd::new(&lab)?, VXLAN, false, &[])?;
    let birch = duo.birch_vteps()?.0;
    for (n, (key, public_ip, _)) in HARMFUL.into_iter().enumerate() {
        duo.store.put_lease(key, &lease("vxlan", public_ip, n))?;
    }
    for (_, public_ip, named) in HARMFUL {
        duo.agent.wait_complaint(&[public_ip, named, "left out"], Duration::from_secs(3))?;
    }
    duo.wait_view(&duo.wanted(std::slice::from_ref(&birch))?, Duration::from_secs(2))?;
    ensure!(duo.agent.complaints(&["cannot set"]).is_empty(), "tried nevertheless");
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    // The way to etcd is open, and a start in this mess is a start like any other.
    duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(3))?;
    duo.start_agent_again()?;
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(2))?;
    traffic::assert_reaches(&duo.ours, &duo.theirs)
}

#[test]
fn host_gw_believes_them_no_more_than_vxlan() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"host-gw"}}"#)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let before = node.run("ip -4 route show")?;
    // On our link, so that nothing but the subnet speaks against it.
    store.put_lease("192.0.2.0-24", &lease("host-gw", "192.0.2.13", 0))?;
    store.put_lease("10.77.61.0-24", &lease("host-gw", "127.0.0.1", 1))?;
    agent.wait_complaint(&["192.0.2.0/24", "left out"], Duration::from_secs(3))?;
    agent.wait_complaint(&["10.77.61.0/24", "127.0.0.1", "left out"], Duration::from_secs(3))?;
    let after = node.run("ip -4 route show")?;
    ensure!(after == before, "{before}\nbecame\n{after}");
    Ok(())
}

#[test]
fn what_a_lease_says_stays_on_one_line_of_the_log() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(VXLAN)?;
    let mut agent = lab.node("alder")?.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let forged = "x\n2026-01-01T00:00:00Z ERROR agent: forged \u{1b}[2J";
    store.put_lease("10.77.61.0-24", &lease(forged, "192.0.2.13", 0))?;
    agent.wait_complaint(&["10.77.61.0/24", "forged"], Duration::from_secs(3))?;
    let log = agent.log();
    ensure!(!log.lines().any(|line| line.starts_with("2026-01-01T00:00:00Z")), "{log}");
    ensure!(!log.contains('\u{1b}'), "a terminal's code:\n{log}");
    Ok(())
}
