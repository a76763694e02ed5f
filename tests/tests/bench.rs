//! The benchmark as a user starts it: rows complete, nothing left behind, whatever ends it.

use std::{
    fs,
    process::{Command, Stdio},
};

use flannel_lab::{
    prelude::*,
    process::{Process, status_and_output},
    run::NETNS_DIR,
};
use nix::sys::signal::Signal;

/// The measuring program.
const PROGRAM: &str = env!("CARGO_BIN_EXE_flannel-bench");

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
        Command::new(PROGRAM)
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
    let mut command = Command::new(PROGRAM);
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
        Command::new(PROGRAM)
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

/// Runs it with `--json` and returns the rows.
fn rows_of(lab: &Lab, words: &[&str]) -> Result<Vec<Value>> {
    let json = lab.run().dir().join("rows.json");
    let mut command = Command::new(PROGRAM);
    command.args(words).arg(format!("--json={}", json.display()));
    let output = status_and_output(&mut command)?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_str(&fs::read_to_string(&json)?)?)
}

#[test]
fn each_attached_program_is_timed_and_its_verification_counted() -> Result<()> {
    let lab = Lab::new()?;
    let rows = rows_of(&lab, &["micro", "--rounds=2", "--repeat=1000"])?;
    for (workload, unit) in [("udp64/", "ns/packet"), ("verified", "instructions")] {
        let found = rows.iter().find(|row| {
            let shown = row["workload"].as_str().is_some_and(|word| word.starts_with(workload));
            row["candidate"] == "underlay_ingress" && shown && row["unit"] == unit
        });
        let found = found.with_context(|| format!("no {workload} in {rows:#?}"))?;
        ensure!(found["median"].as_f64().is_some_and(|median| median > 0.0), "{found}");
        ensure!(found["profile"] == "micro", "{found}");
    }
    Ok(())
}

#[test]
fn the_agents_start_changes_and_idling_are_measured() -> Result<()> {
    let lab = Lab::new()?;
    let words = ["control-plane", "--peers=20", "--rounds=2", "--changes=3", "--idle=1"];
    let rows = rows_of(&lab, &words)?;
    for (workload, rounds) in [
        ("first_echo", 2),
        ("cold_start", 2),
        ("cold_start_cpu", 2),
        ("anonymous_memory", 2),
        ("add_p50", 1),
        ("move_p99", 1),
        ("remove_etcd_reply_p50", 1),
        ("idle_wake_ups", 1),
    ] {
        let found = rows.iter().find(|row| row["workload"] == workload);
        let found = found.with_context(|| format!("no {workload} in {rows:#?}"))?;
        ensure!(found["candidate"] == "ours" && found["profile"] == "control-plane", "{found}");
        ensure!(found["rounds"] == rounds && found["ratio"].is_null(), "{found}");
        ensure!(found["median"].as_f64().is_some_and(|median| median >= 0.0), "{found}");
    }
    Ok(())
}
