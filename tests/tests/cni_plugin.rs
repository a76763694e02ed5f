//! Containers get their network as a runtime gives it to them: our plugin `flannel`, Debian's real
//! `bridge` and `host-local`.

use flannel_lab::{
    cni::{Container, Refused, Runtime},
    prelude::*,
};

const DUAL: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;
const PLAIN: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

fn refusal(result: Result<Result<Value, Refused>>) -> Result<Refused> {
    match result? {
        Ok(value) => bail!("it was done: {value}"),
        Err(refused) => Ok(refused),
    }
}

/// A node with a running agent in a store of its own configuration.
fn node_with_agent(lab: &Lab, store: &LocalStore, name: &str) -> Result<(Node, Agent)> {
    let node = lab.node(name)?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    Ok((node, agent))
}

#[test]
fn containers_of_two_nodes_reach_each_other_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(DUAL)?;
    let (alder, agent) = node_with_agent(&lab, &store, "alder")?;
    let (birch, _other) = node_with_agent(&lab, &store, "birch")?;
    let runtimes = [Runtime::new(&alder, "1.0.0"), Runtime::new(&birch, "0.3.1")];
    let mut containers = Vec::new();
    for runtime in &runtimes {
        for _ in 0..2 {
            let container = runtime.container()?;
            let (addresses, result) = runtime.add(&container)?;
            ensure!(addresses.len() == 2, "{result:#}");
            containers.push((container, addresses));
        }
    }
    let env = agent.subnet_env()?;
    let prefix = env.subnet_v4()?;
    let prefix = prefix.strip_suffix("0/24").context("no /24")?;
    ensure!(containers[0].1[0].to_string() == format!("{prefix}2"), "{:?}", containers[0]);
    for (from, _) in &containers {
        for (to, addresses) in containers.iter().filter(|(to, _)| to.id != from.id) {
            for address in addresses {
                traffic::wait_reaches(&from.ns, *address, Duration::from_secs(5))
                    .with_context(|| format!("{} to {} at {address}", from.id, to.id))?;
            }
        }
    }
    let link = &containers[0].0.ns.ip_json("link show dev eth0")?[0];
    ensure!(link["mtu"] == env.mtu()?, "{link:#}");

    let (gone, _) = &containers[0];
    let given = runtimes[0].addresses_given()?;
    ensure!(given.len() == 4, "{given:?}");
    runtimes[0].del(gone)?;
    runtimes[0].del(gone).context("a second DEL")?;
    ensure!(runtimes[0].addresses_given()?.len() == 2, "{:?}", runtimes[0].addresses_given()?);
    ensure!(!runtimes[0].scratch_dir().join(&gone.id).exists(), "the scratch file stayed");
    ensure!(gone.ns.ip_json("link show")?.iter().all(|link| link["ifname"] != "eth0"));
    let (stays, _) = &containers[1];
    let far = containers[2].1[0];
    traffic::wait_reaches(&stays.ns, far, Duration::from_secs(5)).context("the other one")?;
    Ok(())
}

#[test]
fn a_runtime_that_is_early_is_told_to_try_again() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(PLAIN)?;
    let node = lab.node("alder")?;
    let early = Runtime::new(&node, "1.0.0");
    let container = early.container()?;
    let known = "open /run/flannel/subnet.env: no such file or directory";
    let refused = refusal(early.call("ADD", &container))?;
    ensure!(refused.code == 11 && refused.text.starts_with(known), "{refused:?}");
    let newest = Runtime::new(&node, "1.1.0");
    let refused = refusal(newest.call_with("STATUS", None, &newest.config()))?;
    ensure!(refused.code == 50 && refused.text.starts_with(known), "{refused:?}");

    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    early.add(&container)?;
    // Once the agent is ready the delegate is asked, and Debian's knows no version 1.1.0.
    let refused = refusal(newest.call_with("STATUS", None, &newest.config()))?;
    ensure!(refused.code == 50 && refused.text.contains("does not speak CNI 1.1.0"), "{refused:?}");
    early.del(&container)
}

/// CHECK with the result of ADD.
fn check(runtime: &Runtime<'_>, of: &Container, result: &Value) -> Result<Result<Value, Refused>> {
    let mut config = runtime.config();
    config["prevResult"] = result.clone();
    runtime.call_with("CHECK", Some(of), &config)
}

#[test]
fn check_finds_what_was_tampered_with() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(PLAIN)?;
    let (node, _agent) = node_with_agent(&lab, &store, "alder")?;
    let runtime = Runtime::new(&node, "1.0.0");
    for tampering in ["addr flush dev eth0", "link set eth0 name eth7", "route flush dev eth0"] {
        let container = runtime.container()?;
        let (_, result) = runtime.add(&container)?;
        check(&runtime, &container, &result)?
            .map_err(|refused| anyhow::anyhow!("untouched: {refused:?}"))?;
        if tampering.contains("name") {
            container.ns.ip(&["link set eth0 down"])?;
        }
        container.ns.ip(&[tampering])?;
        let refused = refusal(check(&runtime, &container, &result)).context(tampering)?;
        ensure!(refused.text.contains("delegate bridge"), "{tampering}: {refused:?}");
        runtime.del(&container)?;
        let refused = refusal(check(&runtime, &container, &result))?;
        ensure!(refused.code == 3, "after DEL: {refused:?}");
    }
    Ok(())
}

#[test]
fn garbage_collection_gives_addresses_back() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(PLAIN)?;
    let (node, _agent) = node_with_agent(&lab, &store, "alder")?;
    let runtime = Runtime::new(&node, "1.0.0");
    let (stays, lost) = (runtime.container()?, runtime.container()?);
    let (kept, _) = runtime.add(&stays)?;
    runtime.add(&lost)?;
    // The node lost power: the container and its namespace are gone, no DEL was ever sent.
    let lost_id = lost.id.clone();
    std::process::Command::new("ip").args(["netns", "del", lost.ns.name()]).status()?;
    ensure!(runtime.addresses_given()?.len() == 2, "{:?}", runtime.addresses_given()?);

    let newest = Runtime::new(&node, "1.1.0");
    let mut config = newest.config();
    config["cni.dev/valid-attachments"] = json!([{"containerID": stays.id, "ifname": "eth0"}]);
    let done = newest.call_with("GC", None, &config)?;
    ensure!(done == Ok(Value::Null), "{done:?}");
    let kept: Vec<_> = kept.iter().map(ToString::to_string).collect();
    ensure!(runtime.addresses_given()? == kept, "{:?}", runtime.addresses_given()?);
    ensure!(!runtime.scratch_dir().join(lost_id).exists(), "the scratch file stayed");
    ensure!(runtime.scratch_dir().join(&stays.id).exists(), "the living one's went");
    Ok(())
}
