//! Network namespaces.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    thread,
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::{
    process,
    run::{NETNS_DIR, Run},
};

/// A network namespace of a run, known to `ip netns` by its full name.
#[derive(Clone, Debug)]
pub struct Netns {
    run: Arc<Run>,
    name: String,
}

impl Netns {
    /// Makes the namespace `<prefix>-<name>` with loopback up, no reverse path filter, no
    /// duplicate address detection.
    pub fn new(run: &Arc<Run>, name: &str) -> Result<Self> {
        let full = format!("{}-{name}", run.prefix());
        process::output(Command::new("ip").args(["netns", "add", &full]))?;
        let ns = Self { run: Arc::clone(run), name: full };
        ns.sysctls(&[
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
            ("net/ipv4/ping_group_range", "0 2147483647"),
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/all/accept_ra", "0"),
            ("net/ipv6/conf/default/accept_ra", "0"),
        ])?;
        ns.ip(&["link set lo up"])?;
        Ok(ns)
    }

    /// Its full name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The run it belongs to.
    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// The file that `setns` and `nsenter` take.
    pub fn path(&self) -> PathBuf {
        Path::new(NETNS_DIR).join(&self.name)
    }

    /// Runs a closure on a thread of its own inside the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let file = self.open()?;
        thread::scope(|scope| {
            let job = scope.spawn(move || {
                enter(&file)?;
                drop(file);
                work()
            });
            match job.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Starts a thread inside the namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<thread::JoinHandle<Result<T>>> {
        let file = self.open()?;
        Ok(thread::spawn(move || {
            enter(&file)?;
            drop(file);
            work()
        }))
    }

    fn open(&self) -> Result<File> {
        File::open(self.path()).with_context(|| format!("namespace {} is gone", self.name))
    }

    /// A command that runs inside the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Runs lines of `ip` commands, all in one process; the first failure ends it.
    pub fn ip(&self, lines: &[&str]) -> Result<()> {
        batch("ip", &self.name, lines)
    }

    /// Runs lines of `bridge` commands.
    pub fn bridge(&self, lines: &[&str]) -> Result<()> {
        batch("bridge", &self.name, lines)
    }

    /// What `ip -j -d <words>` prints: an array of objects.
    pub fn ip_json(&self, words: &str) -> Result<Vec<Value>> {
        json("ip", &self.name, words)
    }

    /// What `bridge -j <words>` prints: an array of objects.
    pub fn bridge_json(&self, words: &str) -> Result<Vec<Value>> {
        json("bridge", &self.name, words)
    }

    /// Sets several values below `/proc/sys`.
    pub fn sysctls(&self, values: &[(&str, &str)]) -> Result<()> {
        self.within(|| {
            for (key, value) in values {
                fs::write(Path::new("/proc/sys").join(key), value)
                    .with_context(|| format!("cannot set {key} to {value}"))?;
            }
            Ok(())
        })
    }

    /// Reads a value below `/proc/sys`.
    pub fn sysctl(&self, key: &str) -> Result<String> {
        self.within(|| {
            let text = fs::read_to_string(Path::new("/proc/sys").join(key))
                .with_context(|| format!("cannot read {key}"))?;
            Ok(text.trim().to_owned())
        })
    }
}

/// Moves the calling thread into a namespace.
fn enter(file: &File) -> Result<()> {
    setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")
}

fn batch(program: &str, namespace: &str, lines: &[&str]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut child = Command::new(program)
        .args(["-n", namespace, "-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let text = lines.join("\n") + "\n";
    if let Some(mut stdin) = child.stdin.take() {
        // A program that fails at the first line does not read the rest; its status tells.
        let _ = stdin.write_all(text.as_bytes());
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{program} in {namespace}: {}: {}",
            lines.join("; "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

fn json(program: &str, namespace: &str, words: &str) -> Result<Vec<Value>> {
    let mut command = Command::new(program);
    command.args(["-n", namespace, "-j", "-d"]).args(words.split_whitespace());
    let text = process::output(&mut command)?;
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let objects: Vec<Value> =
        serde_json::from_str(&text).with_context(|| format!("{command:?} printed {text}"))?;
    // iproute2 prints an empty object for each entry that a filter hides.
    Ok(objects.into_iter().filter(|o| o.as_object().is_none_or(|o| !o.is_empty())).collect())
}
