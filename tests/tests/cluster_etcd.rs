//! A cluster by way of a real etcd.

use flannel_lab::{etcd::ClientCertificates, lease_store::CONFIG_KEY, prelude::*};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

#[test]
fn everybody_reaches_everybody_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = Plan { agents: 2, kernel_peer: true, dual_stack: true, ..Plan::default() };
    let cluster = Cluster::start(&lab, &etcd, &plan)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    cluster.assert_entries(&etcd)?;
    cluster.assert_full_mesh()
}

#[test]
fn a_lease_ends_a_day_after_its_node_is_gone() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let mut agent = lab.node("alder")?.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let key = format!("{SUBNETS_PREFIX}{}", env.key()?);
    let held = etcd.get(&key)?.with_context(|| format!("no {key}"))?;
    ensure!(held.lease != 0, "a key that never goes: {held:?}");
    let left = etcd.time_to_live(held.lease)?;
    ensure!((86_000..=86_400).contains(&left), "{left} s left, not a day");
    agent.stop()?;
    let after = etcd.get(&key)?.context("the key went with the agent")?;
    ensure!(after == held, "{after:?}, not {held:?}");
    Ok(())
}

#[test]
fn the_same_subnet_comes_back_after_a_restart_and_a_wiped_env_file() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    let mut agent = alder.agent(etcd.flags())?;
    let first = agent.wait_ready(READY_WITHIN)?;
    let mac = alder.link("flannel.1")?.context("no device")?["address"].clone();
    let file = agent.subnet_file().to_owned();
    agent.stop()?;
    std::fs::remove_file(file)?;
    alder.run("ip link del flannel.1")?;
    let mut agent = alder.agent(etcd.flags())?;
    let second = agent.wait_ready(READY_WITHIN)?;
    ensure!(first == second, "{first:?} became {second:?}");
    let now = alder.link("flannel.1")?.context("no device")?["address"].clone();
    ensure!(now == mac, "MAC {mac} became {now}");
    ensure!(etcd.leases()?.len() == 1, "{:?}", etcd.leases()?);
    Ok(())
}

#[test]
fn an_etcd_that_starts_late_is_waited_for() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.stop()?;
    let mut agent = lab.node("alder")?.agent(etcd.flags())?;
    agent.wait_complaint(&["etcd"], Duration::from_secs(8))?;
    std::thread::sleep(Duration::from_secs(3));
    let lines = agent.complaints(&[]).len();
    ensure!(lines <= 2, "a line per try:\n{}", agent.log());
    etcd.start()?;
    // No configuration yet: said, and waited for too.
    agent.wait_complaint(&[CONFIG_KEY], Duration::from_secs(10))?;
    etcd.put_config(CONFIG)?;
    agent.wait_ready(Duration::from_secs(10))?;
    Ok(())
}

#[test]
fn another_prefix_is_another_cluster() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(r#"{"Network":"10.99.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    etcd.put("/elsewhere/config", CONFIG)?;
    let mut flags = etcd.flags();
    flags.push("--etcd-prefix=/elsewhere".into());
    let env = lab.node("alder")?.agent(flags)?.wait_ready(READY_WITHIN)?;
    ensure!(env.get("FLANNEL_NETWORK") == Some("10.77.0.0/16"), "{env:?}");
    ensure!(etcd.list("/elsewhere/subnets/")?.len() == 1, "no lease below the prefix");
    ensure!(etcd.leases()?.is_empty(), "a lease below the usual prefix");
    Ok(())
}

#[test]
fn tls_with_a_client_certificate_and_with_an_authority_only() -> Result<()> {
    for kind in [ClientCertificates::Required, ClientCertificates::NotAsked] {
        let lab = Lab::new()?;
        let etcd = Etcd::with(&lab, EtcdOptions { tls: Some(kind), ..EtcdOptions::default() })?;
        etcd.put_config(CONFIG)?;
        let mut flags = etcd.flags();
        let mut names = vec![("cafile", "ca.pem")];
        if kind == ClientCertificates::Required {
            names.extend([("certfile", "client.pem"), ("keyfile", "client.key")]);
        }
        for (flag, name) in names {
            let file = etcd.certificates()?.file(name);
            flags.push(format!("--etcd-{flag}={}", file.display()));
        }
        lab.node("alder")?
            .agent(flags)?
            .wait_ready(READY_WITHIN)
            .with_context(|| format!("{kind:?}"))?;
    }
    Ok(())
}

#[test]
fn a_password_is_used_and_never_logged() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    etcd.put_config(CONFIG)?;
    etcd.require_password("weft", "s3cret-of-the-lab")?;
    let mut flags = etcd.flags();
    flags.push("--etcd-username=weft".into());
    let mut wrong = flags.clone();
    wrong.push("--etcd-password=wrong-0f-the-lab".into());
    let alder = lab.node("alder")?;
    let mut agent = alder.agent(wrong)?;
    agent.wait_complaint(&["password"], Duration::from_secs(10))?;
    ensure!(!agent.log().contains("wrong-0f"), "the password is in the log");
    agent.kill()?;
    flags.push("--etcd-password=s3cret-of-the-lab".into());
    flags.push("-v=10".into());
    let mut agent = alder.agent(flags)?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(!agent.log().contains("s3cret"), "the password is in the log");
    Ok(())
}
