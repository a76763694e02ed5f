//! What we write to etcd, and what we make of what others write there.

use flannel_lab::prelude::*;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

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
fn etcd_back_after_an_absence_is_noticed_within_seconds() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, Etcd::new(&lab)?)?;
    duo.store.stop()?;
    // For a longer absence, by hand: what it takes to come back does not depend on it.
    let seconds =
        std::env::var("FLANNEL_LAB_ABSENCE_SECONDS").map_or(Ok(8), |text| text.parse())?;
    std::thread::sleep(Duration::from_secs(seconds));
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
