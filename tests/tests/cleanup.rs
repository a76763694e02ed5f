//! `flannel-agent cleanup`: afterwards the host is as it was before the agent, and nothing of
//! others' is gone.

use std::collections::BTreeMap;

use flannel_lab::{agent::subcommand, prelude::*};

/// Everything an agent may change on a host, by the command that shows it. The directories are
/// the lab's own view of the node.
fn snapshot(node: &Node) -> Result<BTreeMap<String, String>> {
    let state = node.state_dir().display().to_string();
    let commands = [
        "ip -d -o link show",
        "ip -o addr show",
        "ip route show table all",
        "ip -6 route show table all",
        "ip neigh show nud permanent",
        "bridge fdb show",
        "ip rule",
        "nft list ruleset",
        "tc qdisc show dev eth0",
        "bpftool net show dev eth0",
        "find /sys/fs/bpf -mindepth 1",
        "find /run -mindepth 1 -not -path */netns*",
        "sysctl -a -r ^net\\.ipv[46]\\.(ip_forward|conf\\.(all|default|eth0)\\.)",
        &format!("find {state}"),
    ];
    let mut seen = BTreeMap::new();
    for command in commands {
        let text = node.run(command)?;
        let mut lines: Vec<_> = text.lines().filter(|line| !of_no_account(line)).collect();
        lines.sort_unstable();
        seen.insert(command.to_owned(), lines.join("\n"));
    }
    Ok(seen)
}

/// What changes by itself.
fn of_no_account(line: &str) -> bool {
    line.contains("expires") || line.contains("multicast") || line.starts_with("ff00::/8")
}

fn same(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Result<()> {
    for (command, was) in before {
        let is = &after[command];
        ensure!(is == was, "`{command}` shows\n{is}\nand showed before\n{was}");
    }
    Ok(())
}

fn clean(node: &Node, more: &[&str]) -> Result<(bool, Value)> {
    let state = format!("--state-dir={}", node.state_dir().display());
    let mut words = vec!["cleanup", "--output=json", &state];
    words.extend(more);
    let output = subcommand(node, &words)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = serde_json::from_str(&text)
        .with_context(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))?;
    Ok((output.status.success(), report))
}

fn names(report: &Value, kind: &str) -> Vec<String> {
    let removed = report["removed"].as_array().into_iter().flatten();
    removed
        .filter(|thing| thing["kind"] == kind)
        .filter_map(|thing| thing["name"].as_str().map(str::to_owned))
        .collect()
}

#[test]
fn the_host_is_as_before_and_a_second_run_finds_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(
        r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48",
            "Backend":{"Type":"vxlan","DirectRouting":true}}"#,
    )?;
    // One peer behind the tunnel, one on our link.
    for (n, ip) in [(200, "198.51.100.9"), (201, "192.0.2.201")] {
        store.put_lease(
            &format!("10.77.{n}.0-24&fd77:0:0:{n}::-64"),
            &json!({"PublicIP": ip, "PublicIPv6": format!("2001:db8:b::{n}"),
                "BackendType": "vxlan",
                "BackendData": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:04:{n:02x}")},
                "BackendV6Data": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:06:{n:02x}")}}),
        )?;
    }
    let node = lab.node("alder")?;
    // Of others: what an agent may neither adopt nor remove.
    node.ns().ip(&[
        "link add flannel.9 type vxlan id 9 dev eth0 dstport 9999",
        "route add 10.99.0.0/24 via 192.0.2.1 proto 102",
        "route add 172.31.0.0/16 via 192.0.2.1",
    ])?;
    let before = snapshot(&node)?;
    let mut agent = node.agent(store.flags().into_iter().chain(["--ip-masq".to_owned()]))?;
    agent.wait_ready(READY_WITHIN)?;
    eventually("both peers' routes", Duration::from_secs(5), || {
        let routes = node.run("ip route show proto 102")?;
        let there =
            ["10.77.200.0/24 via 10.77.200.0 dev flannel.1", "10.77.201.0/24 via 192.0.2.201"];
        Ok(there.iter().all(|route| routes.contains(route)).then_some(()))
    })?;
    agent.stop()?;
    ensure!(same(&before, &snapshot(&node)?).is_err(), "the agent has changed nothing?");

    let (ok, report) = clean(&node, &[])?;
    ensure!(ok, "{report:#}");
    same(&before, &snapshot(&node)?).with_context(|| format!("{report:#}"))?;
    ensure!(names(&report, "device") == ["flannel.1", "flannel-v6.1"], "{report:#}");
    ensure!(names(&report, "route").len() == 4, "{report:#}");
    ensure!(report["left"].to_string().contains("flannel.9"), "{report:#}");
    ensure!(report["left"].to_string().contains("10.99.0.0/24"), "{report:#}");

    let (ok, report) = clean(&node, &[])?;
    ensure!(ok && report["removed"] == json!([]), "{report:#}");
    same(&before, &snapshot(&node)?)
}

#[test]
fn while_an_agent_runs_nothing_is_removed() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let before = snapshot(&node)?;
    let state = format!("--state-dir={}", node.state_dir().display());
    // However little of what the agent uses is named.
    for hidden in [
        vec![],
        vec!["--control-socket=/run/none.sock"],
        vec!["--control-socket=/run/none.sock", "--subnet-file=/run/none/subnet.env"],
        vec![
            "--control-socket=/run/none.sock",
            "--subnet-file=/run/none/subnet.env",
            "--bpf-pin-dir=/sys/fs/bpf/none",
        ],
    ] {
        let mut words = vec!["cleanup", &state];
        words.extend(&hidden);
        let output = subcommand(&node, &words)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "{hidden:?}: it did");
        ensure!(said.contains("agent") && said.contains("running"), "{hidden:?}: {said}");
        node.run("rm -rf /run/none")?;
        same(&before, &snapshot(&node)?)?;
    }
    Ok(())
}

/// Makes what an administrator might: the name of the second table is one that iptables uses.
fn administrators_tables(node: &Node) -> Result<()> {
    for line in [
        "nft add table ip mine",
        "nft add table ip filter",
        "nft add set ip filter allowed '{ type ipv4_addr; }'",
        "nft add chain ip filter admission '{ type filter hook forward priority 10; }'",
    ] {
        let done = node.shell(line)?;
        ensure!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    }
    Ok(())
}

/// A backend serves a peer, whose `route` tells that it did; after cleanup nothing does.
fn leaves_nothing(
    backend: &str,
    peers_type: &str,
    route: &str,
    prepare: impl Fn(&Node) -> Result<()>,
) -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(&format!(r#"{{"Network":"10.77.0.0/16",{backend}}}"#))?;
    let peer = json!({"PublicIP": "192.0.2.200", "BackendType": peers_type});
    store.put_lease("10.77.200.0-24", &peer)?;
    let node = lab.node("alder")?;
    prepare(&node)?;
    let before = snapshot(&node)?;
    let flags = ["--ip-masq", "--ip-blackhole-route"].map(str::to_owned);
    let mut agent = node.agent(store.flags().into_iter().chain(flags))?;
    agent.wait_ready(READY_WITHIN)?;
    let routes = node.run("ip route show table all")?;
    ensure!(routes.contains(route), "no {route:?} in\n{routes}");
    agent.stop()?;
    ensure!(same(&before, &snapshot(&node)?).is_err(), "the agent has changed nothing?");
    let (ok, report) = clean(&node, &[])?;
    ensure!(ok, "{report:#}");
    same(&before, &snapshot(&node)?).with_context(|| format!("{report:#}"))
}

#[test]
fn host_gw_leaves_no_route() -> Result<()> {
    let route = "10.77.200.0/24 via 192.0.2.200";
    leaves_nothing(r#""Backend":{"Type":"host-gw"}"#, "host-gw", route, |_| Ok(()))
}

#[test]
fn with_nftables_the_tables_of_others_stay() -> Result<()> {
    let config = r#""EnableNFTables":true,"Backend":{"Type":"host-gw"}"#;
    leaves_nothing(config, "host-gw", "via 192.0.2.200", administrators_tables)
}

#[test]
fn udp_leaves_no_device_and_no_route() -> Result<()> {
    leaves_nothing(r#""Backend":{"Type":"udp"}"#, "", "dev flannel0", |_| Ok(()))
}

#[test]
fn alloc_leaves_no_file_and_no_rule() -> Result<()> {
    leaves_nothing(r#""Backend":{"Type":"alloc"}"#, "", "", |_| Ok(()))
}

#[test]
fn a_table_that_iptables_shares_with_an_administrator_stays() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"host-gw"}}"#)?;
    let node = lab.node("alder")?;
    administrators_tables(&node)?;
    let mut agent = node.agent(store.flags().into_iter().chain(["--ip-masq".to_owned()]))?;
    agent.wait_ready(READY_WITHIN)?;
    let rules = node.run("nft list ruleset")?;
    ensure!(rules.contains("FLANNEL-FWD"), "no rules of ours:\n{rules}");
    agent.stop()?;
    let (ok, report) = clean(&node, &[])?;
    ensure!(ok, "{report:#}");
    let rules = node.run("nft list ruleset")?;
    ensure!(!rules.contains("FLANNEL"), "{rules}");
    for theirs in ["table ip mine", "set allowed", "chain admission"] {
        ensure!(rules.contains(theirs), "no {theirs} in\n{rules}");
    }
    Ok(())
}
