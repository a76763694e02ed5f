//! The benchmark as a user starts it: rows complete, nothing left behind, whatever ends it.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use flannel_lab::{
    prelude::*,
    process::{Process, status_and_output},
    run::NETNS_DIR,
};
use nix::sys::signal::Signal;

/// The measuring program, which cargo builds along with the stories.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let target = own.parent().and_then(|dir| dir.parent()).context("a test in no directory")?;
    let program = target.join("examples/bench");
    ensure!(program.exists(), "{} has not been built", program.display());
    Ok(program)
}

/// The prefixes of the namespaces that it said it made.
fn prefixes(said: &str) -> Vec<String> {
    let after = said.lines().filter_map(|line| line.split_once(", namespaces "));
    after.map(|(_, pattern)| pattern.trim_end_matches('*').to_owned()).collect()
}

fn namespaces_of(prefixes: &[String]) -> Result<Vec<String>> {
    let entries = fs::read_dir(NETNS_DIR)?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).collect())
}

#[test]
fn every_candidate_gets_a_row_for_every_workload_and_all_is_removed() -> Result<()> {
    let lab = Lab::new()?;
    let json = lab.run().dir().join("rows.json");
    let (candidates, workloads) = (
        ["host", "host-gw", "kernel-vxlan", "ours-kernel"],
        ["udp64", "rr_p50", "rr_p99", "cpu_gb"],
    );
    let output = status_and_output(
        Command::new(program()?)
            .args(["--rounds=1", "--turn=100", "--profile=wire"])
            .arg(format!("--candidates={},flanneld", candidates.join(",")))
            .arg(format!("--workloads={}", workloads.join(",")))
            .arg(format!("--json={}", json.display())),
    )?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(said.contains("skipped flanneld: no --flanneld PATH was given"), "{said}");
    let rows: Vec<Value> = serde_json::from_str(&fs::read_to_string(&json)?)?;
    ensure!(rows.len() == candidates.len() * workloads.len(), "{rows:#?}");
    for candidate in candidates {
        for workload in workloads {
            let found = rows
                .iter()
                .find(|row| row["candidate"] == candidate && row["workload"] == workload)
                .with_context(|| format!("no row for {candidate}, {workload}"))?;
            let ratio = found["ratio"].as_f64().context("no ratio")?;
            ensure!(found["median"].as_f64().is_some_and(|median| median > 0.0), "{found}");
            ensure!(
                ratio > 0.0 && (candidate != "kernel-vxlan" || found["ratio"] == 1.0),
                "{found}"
            );
            ensure!(found["profile"] == "wire" && found["rounds"] == 1, "{found}");
        }
    }
    let made = prefixes(&said);
    ensure!(made.len() == candidates.len(), "{said}");
    let left = namespaces_of(&made)?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

#[test]
fn an_interrupted_benchmark_removes_all_it_made() -> Result<()> {
    let lab = Lab::new()?;
    let mut command = Command::new(program()?);
    command.args(["--rounds=1000", "--candidates=host,kernel-vxlan", "--workloads=rr_p50"]);
    command.stdin(Stdio::null());
    let mut process = Process::spawn(command, &lab.run().dir().join("bench.log"), false)?;
    let made = eventually("it measures", Duration::from_secs(30), || {
        let said = process.log();
        Ok(said.contains("round 1 of").then(|| prefixes(&said)))
    })
    .with_context(|| process.log())?;
    ensure!(made.len() == 2 && namespaces_of(&made)?.len() >= 6, "{}", process.log());
    let status = process.stop(Signal::SIGINT, Duration::from_secs(10))?;
    ensure!(status.code() == Some(130), "{status}");
    let left = namespaces_of(&made)?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

#[test]
fn a_candidate_that_is_not_really_in_use_is_skipped_with_the_reason() -> Result<()> {
    let lab = Lab::new()?;
    let json = lab.run().dir().join("rows.json");
    // A bpf file system cannot be mounted over by the agent: it goes by the kernel's path.
    let blunt = lab.run().dir().join("agent");
    let agent = flannel_lab::agent::binary()?;
    fs::write(
        &blunt,
        format!("#!/bin/sh\nexec {} \"$@\" --bpf-pin-dir=/run/nowhere\n", agent.display()),
    )?;
    status_and_output(Command::new("chmod").arg("755").arg(&blunt))?;
    let output = status_and_output(
        Command::new(program()?)
            .args(["--rounds=1", "--turn=50", "--candidates=host,ours-flows", "--workloads=rr_p50"])
            .arg(format!("--json={}", json.display()))
            .env("FLANNEL_AGENT", &blunt),
    )?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(
        said.contains("skipped ours-flows: the agent's data path is kernel: /run/nowhere"),
        "{said}"
    );
    let rows: Vec<Value> = serde_json::from_str(&fs::read_to_string(&json)?)?;
    ensure!(rows.iter().all(|row| row["candidate"] == "host"), "{rows:?}");
    Ok(())
}
