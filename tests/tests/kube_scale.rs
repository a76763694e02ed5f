//! What many nodes cost the agent: `cargo test --release -p flannel-lab --test kube_scale --
//! --ignored --nocapture` prints figures; only that all is learnt is asserted.

use std::{fs, thread::sleep, time::Instant};

use flannel_lab::{
    kube_stub::{annotate, flannel_annotations, plain_node},
    prelude::*,
};

/// A node as large as those that real flannel was measured with: 55 images, some 12.5 KB.
fn large_node(number: usize) -> Value {
    let (high, low) = (number / 256, number % 256);
    let mut node =
        plain_node(&format!("worker-{number}"), &[&format!("10.{}.{low}.0/24", 80 + high)]);
    let mac = format!("02:fa:00:01:{high:02x}:{low:02x}");
    annotate(&mut node, &flannel_annotations(&format!("198.18.{high}.{low}"), &mac));
    let images: Vec<Value> = (0..55)
        .map(|image| {
            let digest = "0123456789abcdef".repeat(4);
            let names = [
                format!("registry.example.org/team-{image}/some-longer-service@sha256:{digest}"),
                format!(
                    "registry.example.org/team-{image}/some-longer-service:v1.{image}.{number}"
                ),
            ];
            json!({"names": names, "sizeBytes": 100_000_000 + image})
        })
        .collect();
    node["status"]["images"] = json!(images);
    node
}

/// CPU time of a process in milliseconds, from `schedstat` of its threads.
fn cpu(pid: u32) -> Result<f64> {
    let mut nanoseconds = 0_f64;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        let first = text.split_whitespace().next().context("an empty schedstat")?;
        nanoseconds += first.parse::<f64>()?;
    }
    Ok(nanoseconds / 1e6)
}

/// A memory figure of a process in MiB.
fn memory(pid: u32, field: &str) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with(field)).context("no such field")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
    Ok(kib / 1024.0)
}

fn scale(count: usize) -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.put_config(r#"{"Network":"10.64.0.0/10","Backend":{"Type":"vxlan"}}"#)?;
    stub.put_all((0..count).map(large_node))?;
    let size = large_node(1).to_string().len();
    let alder = lab.node("alder")?;
    stub.put(plain_node("alder", &["10.77.1.0/24"]))?;
    let start = Instant::now();
    let mut flags = stub.flags();
    flags.push("--datapath=kernel".to_owned());
    let agent = alder.agent(flags)?;
    let wall = eventually("all peers are applied", Duration::from_mins(1), || {
        Ok((agent.status()?["peers_applied"] == count).then(|| start.elapsed()))
    })?;
    let pid = agent.pid();
    println!(
        "{count} nodes of {size} bytes: cold {:.2} s wall, {:.2} s CPU; anonymous {:.1} MiB, peak RSS {:.1} MiB",
        wall.as_secs_f64(),
        cpu(pid)? / 1e3,
        memory(pid, "RssAnon:")?,
        memory(pid, "VmHWM:")?
    );
    // Idle, then heartbeats of others, as many as flannel was measured with.
    let rest = Duration::from_secs(10);
    let before = cpu(pid)?;
    sleep(rest);
    let idle = (cpu(pid)? - before) / rest.as_secs_f64();
    let beats = 200_u32;
    let (before, begun) = (cpu(pid)?, Instant::now());
    for beat in 0..beats {
        stub.edit(&format!("worker-{}", usize::try_from(beat)? % count), |node| {
            node["status"]["conditions"][0]["lastHeartbeatTime"] = json!(format!("{beat}"));
        })?;
        sleep(Duration::from_millis(50));
    }
    sleep(Duration::from_millis(300));
    let used = cpu(pid)? - before - idle * begun.elapsed().as_secs_f64();
    println!(
        "{beats} heartbeats at 20/s: {:.3} ms CPU each beyond idle ({idle:.2} ms/s); anonymous {:.1} MiB",
        used / f64::from(beats),
        memory(pid, "RssAnon:")?
    );
    ensure!(agent.status()?["peers_applied"] == count, "peers were lost");
    Ok(())
}

#[test]
#[ignore = "prints figures of an optimised build"]
fn what_a_thousand_nodes_cost() -> Result<()> {
    scale(1000)
}

#[test]
#[ignore = "prints figures of an optimised build"]
fn what_five_thousand_nodes_cost() -> Result<()> {
    scale(5000)
}
