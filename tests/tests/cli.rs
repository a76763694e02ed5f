//! The command line, as an operator types it.

use std::process::Command;

use flannel_lab::{
    agent::{binary, subcommand},
    prelude::*,
    process::status_and_output,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// Runs the binary outside of any node.
fn run(words: &[&str], variables: &[(&str, &str)]) -> Result<(i32, String, String)> {
    let mut command = Command::new(binary()?);
    let output = status_and_output(command.args(words).envs(variables.iter().copied()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().context("ended by a signal")?;
    Ok((code, text(&output.stdout), text(&output.stderr)))
}

#[test]
fn help_and_version_end_well() -> Result<()> {
    for words in [["--help"], ["-help"], ["-h"]] {
        let (code, out, _) = run(&words, &[])?;
        ensure!(code == 0 && out.contains("--etcd-endpoints"), "{words:?}: {code}: {out}");
    }
    for words in [["--version"], ["-version"]] {
        let (code, out, err) = run(&words, &[])?;
        ensure!(code == 0 && (out + &err).contains("flannel-agent"), "{words:?}: {code}: {err}");
    }
    for command in ["status", "peers"] {
        let (code, out, _) = run(&[command, "--help"], &[])?;
        ensure!(code == 0 && out.contains("--output"), "{command}: {code}: {out}");
    }
    let (code, _, err) = run(&["dance"], &[])?;
    ensure!(code == 2 && err.contains("dance") && err.contains("peers"), "{code}: {err}");
    Ok(())
}

#[test]
fn one_dash_and_two_and_variables_mean_the_same() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let dir = store.dir().display().to_string();
    let state = node.state_dir().display().to_string();
    let two = ["--iface", "eth0", "--local-subnet-mgr", &dir, "--healthz-port=8081"];
    let one = ["-iface", "eth0", "-local-subnet-mgr", &dir, "-healthz-port=8081"];
    let none: [&str; 0] = [];
    for (flags, by_variables) in [(&two[..], false), (&one[..], false), (&none[..], true)] {
        let mut command = node.command("env");
        if by_variables {
            command.arg("FLANNELD_IFACE=eth0");
            command.arg(format!("FLANNELD_LOCAL_SUBNET_MGR={dir}"));
            command.args(["FLANNELD_HEALTHZ_PORT=8081"]);
        }
        command.arg(binary()?).args(flags).arg(format!("--state-dir={state}"));
        let log = node.dir().join("by-hand.log");
        let mut process = flannel_lab::process::Process::spawn(command, &log, false)?;
        eventually("it is ready", READY_WITHIN, || {
            ensure!(node.http_get(8081, "/readyz")?.status == 200, "not ready");
            Ok(Some(()))
        })
        .with_context(|| format!("{flags:?}:\n{}", process.log()))?;
        let status = process.stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(10))?;
        ensure!(status.code() == Some(0), "{flags:?}: {status}");
    }
    ensure!(store.leases()?.len() == 1, "{:?}", store.leases()?);
    Ok(())
}

#[test]
fn status_and_peers_of_a_running_agent() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let plan = Plan { agents: 1, kernel_peer: true, pods: 0, ..Plan::default() };
    let cluster = Cluster::start(&lab, &store, &plan)?;
    cluster.wait_peers(1, READY_WITHIN)?;
    let member = &cluster.members[0];
    let ask = |words: &[&str]| -> Result<String> {
        let output = subcommand(member.node(), words)?;
        ensure!(output.status.success(), "{words:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let peers = ask(&["peers"])?;
    ensure!(peers.contains("10.77.200.0/24") && peers.contains("192.0.2.11"), "{peers}");
    let peers: Value = serde_json::from_str(&ask(&["peers", "--output", "json"])?)?;
    ensure!(peers.as_array().is_some_and(|peers| peers.len() == 1), "{peers:#}");
    ensure!(peers[0]["subnet"] == "10.77.200.0/24", "{peers:#}");
    let status = ask(&["status"])?;
    ensure!(status.contains(&member.env().subnet_v4()?) && status.contains("eth0"), "{status}");
    let status: Value = serde_json::from_str(&ask(&["status", "--output=json"])?)?;
    ensure!(status["ready"] == true && status["peers_applied"] == 1, "{status:#}");
    Ok(())
}

#[test]
fn without_an_agent_the_commands_say_so() -> Result<()> {
    let lab = Lab::new()?;
    let node = lab.node("alder")?;
    for command in ["status", "peers"] {
        let output = subcommand(&node, &[command])?;
        let said = [output.stdout.as_slice(), &output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        ensure!(output.status.code() == Some(1), "{command}: {said}");
        ensure!(said.contains("/run/flannel/agent.sock"), "{command}: {said}");
        ensure!(!said.contains("panicked"), "{command}: {said}");
    }
    Ok(())
}

#[test]
fn docker_gets_its_options_from_the_env_file() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    let words = ["mk-docker-opts", "-f", "/run/flannel/subnet.env", "-d", "/run/docker.env"];
    let output = subcommand(&node, &words)?;
    ensure!(output.status.success(), "{output:?}");
    let options = std::fs::read_to_string(node.path("/run/docker.env"))?;
    let subnet = env.get("FLANNEL_SUBNET").context("no subnet")?;
    ensure!(options.contains(&format!("--bip={subnet}")), "{options}");
    ensure!(options.contains("--mtu=1450") && options.contains("--ip-masq=true"), "{options}");
    Ok(())
}

#[test]
fn json_log_lines_are_json() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let mut flags = store.flags();
    flags.push("--log-format=json".into());
    let mut agent = lab.node("alder")?.agent(&flags)?;
    agent.wait_ready(READY_WITHIN)?;
    let log = agent.log();
    ensure!(log.lines().count() > 2, "{log}");
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        ensure!(line["level"].is_string(), "{line}");
    }
    Ok(())
}

#[test]
fn signals_end_it_well_even_while_it_waits() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_complaint(&["config.json"], Duration::from_secs(5))?;
    let status = agent.stop()?;
    ensure!(status.code() == Some(0), "{status}");
    store.put_config(CONFIG)?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let file = agent.subnet_file().to_owned();
    let status = agent.process().stop(nix::sys::signal::Signal::SIGINT, Duration::from_secs(10))?;
    ensure!(status.code() == Some(0), "{status}");
    ensure!(file.exists() && node.link("flannel.1")?.is_some(), "it took something along");
    Ok(())
}
