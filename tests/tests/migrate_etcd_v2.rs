//! `migrate-etcd-v2`: what an old flannel kept with etcd's v2 API is carried over to v3's keys.

use flannel_lab::{agent::subcommand, etcd::ClientCertificates, prelude::*};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

fn vxlan(ip: &str) -> String {
    format!(
        r#"{{"PublicIP":"{ip}","BackendType":"vxlan","BackendData":{{"VtepMAC":"02:fa:00:00:00:11"}}}}"#
    )
}

/// An old cluster: a node, a reservation, a node that v3 knows otherwise, and junk.
fn fill(etcd: &Etcd) -> Result<()> {
    etcd.put_v2("/coreos.com/network/config", CONFIG, None)?;
    let subnets = "/coreos.com/network/subnets";
    etcd.put_v2(&format!("{subnets}/10.77.40.0-24"), &vxlan("192.0.2.11"), Some(5000))?;
    etcd.put_v2(&format!("{subnets}/10.77.41.0-24"), &vxlan("192.0.2.41"), None)?;
    etcd.put_v2(&format!("{subnets}/10.77.42.0-24"), &vxlan("192.0.2.42"), Some(6000))?;
    etcd.put_v2(&format!("{subnets}/junk"), "nothing", None)?;
    etcd.put_lease("10.77.42.0-24", &json!({"PublicIP": "192.0.2.99"}))
}

/// Runs it on a node. Exit status and what it printed.
fn migrate(node: &Node, etcd: &Etcd, flags: &[&str]) -> Result<(Option<i32>, String)> {
    let endpoint = format!("--etcd-endpoints={}", etcd.endpoint());
    let words: Vec<&str> =
        ["migrate-etcd-v2", &endpoint].into_iter().chain(flags.iter().copied()).collect();
    let output = subcommand(node, &words)?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((output.status.code(), text.into_owned()))
}

#[test]
fn everything_is_carried_over_once_and_nothing_is_overwritten() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::with(&lab, EtcdOptions { v2: true, ..EtcdOptions::default() })?;
    fill(&etcd)?;
    let alder = lab.node("alder")?;
    let before = etcd.list("/")?;
    let (code, text) = migrate(&alder, &etcd, &["--dry-run"])?;
    println!("{text}");
    ensure!(code == Some(1), "{code:?}: {text}");
    ensure!(text.contains("3 of 5 keys would be written, 2 left out"), "{text}");
    ensure!(etcd.list("/")? == before, "a dry run wrote");

    let (code, text) = migrate(&alder, &etcd, &["--output=json"])?;
    ensure!(code == Some(1), "{code:?}: {text}");
    let said: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let actions: Vec<_> = said["entries"]
        .as_array()
        .context("no entries")?
        .iter()
        .map(|entry| {
            (entry["key"].as_str().unwrap_or("?"), entry["action"].as_str().unwrap_or("?"))
        })
        .collect();
    ensure!(
        actions
            == [
                ("/coreos.com/network/config", "write"),
                ("/coreos.com/network/subnets/10.77.40.0-24", "write"),
                ("/coreos.com/network/subnets/10.77.41.0-24", "write"),
                ("/coreos.com/network/subnets/10.77.42.0-24", "differs"),
                ("/coreos.com/network/subnets/junk", "skip"),
            ],
        "{actions:?}"
    );
    let key = |name: &str| etcd.get(&format!("{SUBNETS_PREFIX}{name}"))?.context("not written");
    let (node, reserved, other) =
        (key("10.77.40.0-24")?, key("10.77.41.0-24")?, key("10.77.42.0-24")?);
    let left = etcd.time_to_live(node.lease)?;
    ensure!((4900..=5000).contains(&left), "{left} s are left");
    ensure!(reserved.lease == 0, "the reservation runs out");
    ensure!(other.value.contains("192.0.2.99"), "overwritten: {}", other.value);

    // Again: there is nothing left to do, and nothing is done.
    let after = etcd.list("/")?;
    let (_, text) = migrate(&alder, &etcd, &[])?;
    ensure!(text.contains("0 of 5 keys written"), "{text}");
    ensure!(etcd.list("/")? == after, "a second run wrote");
    // The node gets the subnet it has always had.
    let mut agent = alder.agent(etcd.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()? == "10.77.40.0/24", "{env:?}");
    Ok(())
}

#[test]
fn certificates_and_passwords_are_the_agents() -> Result<()> {
    let lab = Lab::new()?;
    let options =
        EtcdOptions { v2: true, tls: Some(ClientCertificates::Required), ..EtcdOptions::default() };
    let etcd = Etcd::with(&lab, options)?;
    fill(&etcd)?;
    etcd.require_password_v2("flannel", "secret")?;
    let alder = lab.node("alder")?;
    let certificates = etcd.certificates()?;
    let file =
        |flag: &str, name: &str| format!("--etcd-{flag}={}", certificates.file(name).display());
    let tls =
        [file("cafile", "ca.pem"), file("certfile", "client.pem"), file("keyfile", "client.key")];
    let mut flags: Vec<&str> = tls.iter().map(String::as_str).collect();
    let (code, text) = migrate(&alder, &etcd, &flags[..1])?;
    ensure!(code == Some(1) && text.contains("etcd endpoint"), "without certificate: {text}");
    let (code, text) = migrate(&alder, &etcd, &flags)?;
    ensure!(code == Some(1) && text.contains("--etcd-username"), "without a name: {text}");
    flags.extend(["--etcd-username=flannel", "--etcd-password=wrong"]);
    let (code, text) = migrate(&alder, &etcd, &flags)?;
    ensure!(code == Some(1) && text.contains("does not let us read"), "wrong password: {text}");
    ensure!(!text.contains("wrong"), "the password is shown: {text}");
    flags.push("--etcd-password=secret");
    let (_, text) = migrate(&alder, &etcd, &flags)?;
    ensure!(text.contains("3 of 5 keys written, 2 left out"), "{text}");
    ensure!(etcd.get(&format!("{SUBNETS_PREFIX}10.77.40.0-24"))?.is_some(), "not written");
    Ok(())
}

#[test]
fn what_is_not_there_is_told() -> Result<()> {
    let lab = Lab::new()?;
    let node = lab.node("alder")?;
    let new = Etcd::with(&lab, EtcdOptions { number: Some(6), ..EtcdOptions::default() })?;
    let (code, text) = migrate(&node, &new, &[])?;
    ensure!(code == Some(1) && text.contains("--enable-v2"), "{code:?}: {text}");
    let empty = Etcd::with(&lab, EtcdOptions { v2: true, ..EtcdOptions::default() })?;
    let (code, text) = migrate(&node, &empty, &["--etcd-prefix=/elsewhere"])?;
    ensure!(code == Some(0) && text.contains("nothing is kept under /elsewhere"), "{text}");
    Ok(())
}
