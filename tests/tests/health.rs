//! The health port: alive, ready and why not, status, metrics.

use flannel_lab::prelude::*;

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

#[test]
fn alive_at_once_ready_when_everything_is_in_place() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let mut agent = lab.node("alder")?.agent(store.flags())?;
    let alive =
        eventually("the health port answers", READY_WITHIN, || agent.get("/healthz").map(Some))?;
    ensure!(alive.status == 200, "{alive:?}");
    // No configuration yet.
    let (ready, why) = agent.readiness()?;
    ensure!(!ready && why.contains("config"), "{why}");
    store.put_config(CONFIG)?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(agent.get("/healthz")?.status == 200, "not alive");
    ensure!(agent.get("/nowhere")?.status == 404, "a page that is none");
    Ok(())
}

#[test]
fn a_device_that_cannot_be_had_makes_it_not_ready_and_is_named() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    // Somebody else's device has our VNI and port: the kernel allows one only.
    node.ns().ip(&["link add theirs type vxlan id 1 dev eth0 local 192.0.2.11 dstport 8472"])?;
    let mut agent = node.agent(store.flags())?;
    eventually("it says why it is not ready", Duration::from_secs(5), || {
        let (ready, why) = agent.readiness()?;
        ensure!(!ready, "ready");
        Ok(why.contains("theirs").then_some(()))
    })
    .with_context(|| agent.log())?;
    std::thread::sleep(Duration::from_secs(3));
    let lines = agent.complaints(&[]);
    ensure!(lines.len() == 1, "a line per try: {lines:#?}");
    ensure!(!agent.subnet_file().exists(), "an env file for a network that is not there");
    ensure!(node.link("theirs")?.is_some(), "a foreign device was removed");
    node.run("ip link del theirs")?;
    agent.wait_ready(Duration::from_secs(10))?;
    Ok(())
}

#[test]
fn status_and_metrics_say_what_is() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &Plan { agents: 2, ..Plan::default() })?;
    cluster.wait_peers(1, READY_WITHIN)?;
    let member = &cluster.members[0];
    let agent = member.agent().context("an agent")?;
    let status = agent.status()?;
    ensure!(status["ready"] == true && status["missing"] == json!([]), "{status:#}");
    ensure!(status["backend_type"] == "vxlan", "{status:#}");
    ensure!(status["lease"]["subnet"] == member.env().subnet_v4()?.as_str(), "{status:#}");
    ensure!(
        status["store"]["kind"] == "local" && status["store"]["connected"] == true,
        "{status:#}"
    );
    ensure!(status["external_interface"]["name"] == "eth0", "{status:#}");
    ensure!(status["peers_wanted"] == 1 && status["peers_applied"] == 1, "{status:#}");
    #[expect(clippy::float_cmp, reason = "small whole numbers")]
    for (metric, value) in [
        ("flannel_peers_wanted", 1.0),
        ("flannel_peers_applied", 1.0),
        ("flannel_store_connected", 1.0),
        ("flannel_condition{condition=\"lease\"}", 1.0),
        ("flannel_condition{condition=\"device\"}", 1.0),
    ] {
        let got = agent.metric(metric)?;
        ensure!(got == value, "{metric} is {got}, not {value}");
    }
    // What any reader knows, unless it says that it knows more: types of 2014, and each sample
    // under its family's name.
    let page = agent.get("/metrics")?.body;
    let mut family = "";
    for line in page.lines() {
        if let Some(comment) = line.strip_prefix("# TYPE ") {
            let (name, kind) = comment.split_once(' ').context("a type without a name")?;
            ensure!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            family = name;
        } else if !line.starts_with("# HELP ") {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            ensure!(name == family, "{line} after the type of {family}");
        }
    }
    ensure!(page.contains("# TYPE flannel_repairs_total counter"), "{page}");
    Ok(())
}

#[test]
fn a_repair_is_counted() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let plan = Plan { agents: 1, kernel_peer: true, pods: 0, ..Plan::default() };
    let cluster = Cluster::start(&lab, &store, &plan)?;
    let member = &cluster.members[0];
    let agent = member.agent().context("an agent")?;
    cluster.wait_peers(1, READY_WITHIN)?;
    let before = agent.metric("flannel_repairs_total")?;
    member.node().run("ip route del 10.77.200.0/24 dev flannel.1")?;
    eventually("the repair is counted", Duration::from_secs(5), || {
        Ok((agent.metric("flannel_repairs_total")? > before).then_some(()))
    })?;
    cluster.assert_entries(&store)
}

#[test]
fn no_port_no_server_and_a_taken_port_is_said() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let mut flags = store.flags();
    flags.push("--healthz-port=0".into());
    let agent = node.agent(&flags)?;
    eventually("the env file", READY_WITHIN, || agent.subnet_env().map(Some))?;
    ensure!(agent.get("/healthz").is_err(), "a server nobody asked for");
    agent.stop()?;

    let _other = node.ns().within(|| Ok(std::net::TcpListener::bind("127.0.0.1:8081")?))?;
    let (status, log) = node.agent(store.flags())?.wait_exit(Duration::from_secs(10))?;
    ensure!(status.code().is_some_and(|code| code != 0), "{status}");
    ensure!(log.contains("8081"), "{log}");
    Ok(())
}
