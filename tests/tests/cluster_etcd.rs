//! A cluster on a real etcd.

use flannel_lab::{etcd::ClientCertificates, prelude::*};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

#[test]
fn three_nodes_and_a_kernel_peer_reach_each_other() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = Plan { kernel_peer: true, dual_stack: true, ..Plan::default() };
    Cluster::start(&lab, &etcd, &plan)?.assert_full_mesh()?;
    let leases = etcd.list(SUBNETS_PREFIX)?;
    ensure!(leases.len() == 4, "{leases:?}");
    // Ours are attached to etcd leases of a day, the peer's is a reservation.
    for (key, version) in &leases {
        if key.contains("10.77.200.0-24") {
            ensure!(version.lease == 0, "{version:?}");
        } else {
            let left = etcd.time_to_live(version.lease)?;
            ensure!((86_300..=86_400).contains(&left), "{key} has {left} s left");
        }
    }
    Ok(())
}

#[test]
fn a_lease_has_the_exact_form_that_real_flannel_writes() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    let key = format!("{SUBNETS_PREFIX}{}", duo.env.key()?);
    let value = duo.store.get(&key)?.context("no lease")?.value;
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    let expected = format!(
        r#"{{"PublicIP":"192.0.2.11","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":{mac}}}}}"#
    );
    ensure!(value == expected, "{value} instead of {expected}");
    Ok(())
}

#[test]
fn a_restarted_agent_takes_the_subnet_it_had() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    let before = duo.env.clone();
    duo.agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(5))?;
    duo.start_agent_again()?;
    ensure!(duo.env == before, "{before:?} became {:?}", duo.env);
    // Also if the store forgot it: subnet.env remembers.
    duo.agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(5))?;
    duo.store.delete_lease(&before.key()?)?;
    duo.start_agent_again()?;
    ensure!(duo.env == before, "{before:?} became {:?}", duo.env);
    Ok(())
}

#[test]
fn a_junk_key_costs_a_warning_and_no_peer() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    duo.store.put(&format!("{SUBNETS_PREFIX}foo"), "bar")?;
    duo.store.put(&format!("{SUBNETS_PREFIX}10.77.44.0-24"), "{\"PublicIP\":")?;
    duo.agent.wait_complaint(&["10.77.44.0-24"], Duration::from_secs(3))?;
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    let birch = duo.birch_vteps()?.0;
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(1))
}

#[test]
fn peers_that_changed_while_history_was_compacted_away_are_right_afterwards() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    let (key, mut lease) = duo.birch.lease();
    duo.agent.process().signal(nix::sys::signal::Signal::SIGSTOP)?;
    duo.store.stop()?;
    duo.store.start()?;
    lease["PublicIP"] = json!("192.0.2.99");
    duo.store.put_lease(&key, &lease)?;
    duo.store.compact()?;
    duo.agent.process().signal(nix::sys::signal::Signal::SIGCONT)?;
    let mut birch = duo.birch_vteps()?.0;
    birch.public_ip = "192.0.2.99".to_owned();
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(8))
}

#[test]
fn etcd_with_client_certificates() -> Result<()> {
    let lab = Lab::new()?;
    let options = EtcdOptions { tls: Some(ClientCertificates::Required), ..Default::default() };
    let etcd = Etcd::with(&lab, options)?;
    etcd.put_config(CONFIG)?;
    let files = etcd.certificates()?;
    let flag = |name: &str, file: &str| format!("--etcd-{name}={}", files.file(file).display());
    let mut flags = etcd.flags();
    flags.push(flag("cafile", "ca.pem"));
    flags.push(flag("certfile", "client.pem"));
    flags.push(flag("keyfile", "client.key"));
    lab.node("alder")?.agent(flags)?.wait_ready(READY_WITHIN).map(drop)
}

#[test]
fn etcd_with_an_authority_only() -> Result<()> {
    let lab = Lab::new()?;
    let options = EtcdOptions { tls: Some(ClientCertificates::NotAsked), ..Default::default() };
    let etcd = Etcd::with(&lab, options)?;
    etcd.put_config(CONFIG)?;
    let authority = etcd.certificates()?.file("ca.pem");
    let mut flags = etcd.flags();
    flags.push(format!("--etcd-cafile={}", authority.display()));
    lab.node("alder")?.agent(flags)?.wait_ready(READY_WITHIN).map(drop)
}

#[test]
fn etcd_with_a_password_whose_tokens_run_out() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    etcd.require_password("weft", "warp-9f2")?;
    let mut flags = etcd.flags();
    flags.extend(["--etcd-username=weft".to_owned(), "--etcd-password=warp-9f2".to_owned()]);
    let node = lab.node("alder")?;
    let mut agent = node.agent(flags)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(!agent.log().contains("warp-9f2"), "the password is in the log");
    // Tokens last five seconds here; what comes after that needs a new one.
    std::thread::sleep(Duration::from_secs(7));
    etcd.log_in()?;
    etcd.put_lease(
        "10.77.201.0-24",
        &json!({"PublicIP": "192.0.2.77", "PublicIPv6": null, "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:00:77"}}),
    )?;
    eventually("the new peer's route", Duration::from_secs(5), || {
        let routes = node.ns().ip_json("route show dev flannel.1")?;
        Ok(routes.iter().any(|route| route["dst"] == "10.77.201.0/24").then_some(()))
    })?;
    ensure!(agent.subnet_env()? == env, "the lease moved");
    Ok(())
}

#[test]
fn many_etcds_prefixes_are_separate_networks() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put("/other/net/config", CONFIG)?;
    let mut flags = etcd.flags();
    flags.push("--etcd-prefix=/other/net/".to_owned());
    let env = lab.node("alder")?.agent(flags)?.wait_ready(READY_WITHIN)?;
    ensure!(etcd.get(&format!("/other/net/subnets/{}", env.key()?))?.is_some(), "no lease there");
    ensure!(etcd.list(SUBNETS_PREFIX)?.is_empty(), "a lease in the default prefix");
    Ok(())
}

#[test]
fn etcd_back_after_an_absence_is_noticed_within_seconds() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    duo.store.stop()?;
    std::thread::sleep(Duration::from_secs(8));
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    ensure!(duo.agent.process().exited()?.is_none(), "the agent ended");
    duo.store.start()?;
    let (key, mut lease) = duo.birch.lease();
    lease["PublicIP"] = json!("192.0.2.99");
    duo.store.put_lease(&key, &lease)?;
    let mut birch = duo.birch_vteps()?.0;
    birch.public_ip = "192.0.2.99".to_owned();
    duo.wait_view(&duo.wanted(&[birch])?, Duration::from_secs(3))?;
    let lines = duo.agent.complaints(&["etcd"]);
    ensure!(lines.len() <= 3, "a line per try? {lines:#?}");
    Ok(())
}
