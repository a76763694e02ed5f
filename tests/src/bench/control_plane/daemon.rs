//! The process that is measured.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::{
    agent::{Agent, SubnetEnv},
    etcd::Etcd,
    lease_store::LeaseStore,
    node::Node,
    process::{Process, tail},
    wait::eventually,
};

/// Whose it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Our agent.
    Ours,
    /// The flanneld at this path.
    Flanneld(PathBuf),
}

impl Kind {
    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Flanneld(_) => "flanneld",
        }
    }
}

/// A running process. Killed when dropped.
#[derive(Debug)]
pub enum Daemon {
    /// Our agent.
    Ours(Box<Agent>),
    /// A flanneld, and where it writes its env file.
    Flanneld(Process, PathBuf),
}

impl Daemon {
    /// Starts it on a node.
    pub fn start(kind: &Kind, node: &Node, etcd: &Etcd) -> Result<Self> {
        match kind {
            Kind::Ours => {
                let mut flags = etcd.flags();
                flags.push("--ip-masq".to_owned());
                Ok(Self::Ours(Box::new(node.agent(&flags)?)))
            }
            Kind::Flanneld(binary) => Self::start_flanneld(binary, node, etcd),
        }
    }

    fn start_flanneld(binary: &Path, node: &Node, etcd: &Etcd) -> Result<Self> {
        let mut command = node.command(binary);
        command
            .arg(format!("-etcd-endpoints={}", etcd.endpoint()))
            .args(["-iface=eth0", "-ip-masq", "-subnet-file=/run/flannel/subnet.env"])
            .args(["-healthz-ip=127.0.0.1", "-healthz-port=8081"]);
        let process = Process::spawn(command, &node.dir().join("flanneld.log"), false)?;
        Ok(Self::Flanneld(process, node.path("/run/flannel/subnet.env")))
    }

    /// Waits for its env file.
    pub fn wait_ready(&mut self, within: Duration) -> Result<SubnetEnv> {
        match self {
            Self::Ours(agent) => agent.wait_ready(within),
            Self::Flanneld(process, file) => eventually("flanneld's env file", within, || {
                let ended = process.exited()?;
                ensure!(ended.is_none(), "flanneld has ended:\n{}", process.log_tail(20));
                Ok(fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()))
            }),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Ours(agent) => agent.pid(),
            Self::Flanneld(process, _) => process.pid(),
        }
    }

    /// The memory that is its own and not a file's, in MiB (`RssAnon`, proc(5)).
    pub fn anonymous_memory(&self) -> Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u32>().ok());
        Ok(f64::from(kib.context("no RssAnon")?) / 1024.0)
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        match self {
            Self::Ours(agent) => tail(&agent.log(), 20),
            Self::Flanneld(process, _) => process.log_tail(20),
        }
    }

    /// Stops it as a supervisor does.
    pub fn stop(&mut self) -> Result<()> {
        const WITHIN: Duration = Duration::from_secs(10);
        match self {
            Self::Ours(agent) => agent.process().stop(Signal::SIGTERM, WITHIN),
            Self::Flanneld(process, _) => process.stop(Signal::SIGTERM, WITHIN),
        }
        .map(drop)
    }
}
