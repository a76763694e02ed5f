//! A host of the lab: a network namespace and a private mount namespace.

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    rc::Rc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    agent::Agent,
    http,
    lab::{Lab, Segment},
    netns::Netns,
    pod::Pod,
    process::{self, Process},
    wait::eventually,
};

/// Makes the mount namespace, then waits for ever. `$1` is a directory for the view of
/// `/run/netns`.
const MOUNTS: &str = r#"
set -e
mkdir -p "$1"
mount --bind /run/netns "$1"
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/netns /run/lock
mount --bind "$1" /run/netns
mkdir -p /sys/fs/bpf
mount -t bpf bpf /sys/fs/bpf
echo ready
exec sleep infinity
"#;

/// The switch's end of a host's interface.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The switch.
    pub switch: Netns,
    /// Name of the interface there.
    pub port: String,
}

/// A host with `eth0` on the underlay, and `/run`, `/sys` and `/sys/fs/bpf` of its own.
#[derive(Debug)]
pub struct Node {
    lab: Lab,
    name: String,
    ns: Netns,
    segment: Segment,
    number: u8,
    attachment: RefCell<Attachment>,
    dir: PathBuf,
    holder: Rc<Process>,
    pods: RefCell<Vec<Pod>>,
}

impl Node {
    pub(crate) fn new(lab: &Lab, name: &str, segment: Segment, number: u8) -> Result<Self> {
        let ns = Netns::new(lab.run(), name)?;
        ns.sysctls(&[("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")])?;
        let dir = lab.run().dir().join(name);
        fs::create_dir_all(dir.join("state"))?;
        let holder = hold(lab, &ns, &dir)?;
        let attachment = lab.plug(&ns, segment, "eth0", 1500)?;
        let node = Self {
            lab: lab.clone(),
            name: name.to_owned(),
            ns,
            segment,
            number,
            attachment: RefCell::new(attachment),
            dir,
            holder: Rc::new(holder),
            pods: RefCell::default(),
        };
        node.address_eth0()?;
        Ok(node)
    }

    /// Gives `eth0` its addresses and default routes.
    fn address_eth0(&self) -> Result<()> {
        let (v4, v6) = (self.v4(), self.v6());
        let (gate4, gate6) = (self.segment.v4(1), self.segment.v6(1));
        self.ns.ip(&[
            &format!("addr add {v4}/24 brd + dev eth0"),
            &format!("addr add {v6}/64 dev eth0 nodad"),
            &format!("route add default via {gate4} dev eth0"),
            &format!("route add default via {gate6} dev eth0"),
        ])
    }

    /// Its short name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The lab it stands in.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Its network namespace.
    pub fn ns(&self) -> &Netns {
        &self.ns
    }

    /// IPv4 address on the underlay.
    pub fn v4(&self) -> String {
        self.segment.v4(self.number)
    }

    /// IPv6 address on the underlay.
    pub fn v6(&self) -> String {
        self.segment.v6(self.number)
    }

    /// A directory for its files, the same inside and outside of its mount namespace.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The agent's state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// A path of its mount namespace as seen from outside.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.holder.pid()))
            .join(inside.trim_start_matches('/'))
    }

    /// The process that holds the mount namespace, for `nsenter --target`.
    pub fn holder_pid(&self) -> u32 {
        self.holder.pid()
    }

    /// The same, to be kept alive.
    pub(crate) fn holder(&self) -> Rc<Process> {
        Rc::clone(&self.holder)
    }

    /// A command that runs as on this host: in its network and mount namespaces.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.holder.pid()))
            .args(["--net", "--mount", "--"])
            .arg(program);
        command
    }

    /// Runs a command line, words split at blanks, and returns what it printed.
    pub fn run(&self, line: &str) -> Result<String> {
        let mut words = line.split_whitespace();
        let program = words.next().context("an empty command line")?;
        process::output(self.command(program).args(words))
    }

    /// Runs a shell script and returns whatever came of it.
    pub fn shell(&self, script: &str) -> Result<Output> {
        process::status_and_output(self.command("sh").args(["-c", script]))
    }

    /// Starts the agent with the lab's usual flags and these on top. A flag given here replaces
    /// the usual one of the same name.
    pub fn agent<I>(&self, flags: I) -> Result<Agent>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        Agent::start(self, flags, &[])
    }

    /// The same with environment variables set.
    pub fn agent_with<I>(&self, flags: I, environment: &[(&str, &str)]) -> Result<Agent>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        Agent::start(self, flags, environment)
    }

    /// Asks a server on this host by `GET`, from inside.
    pub fn http_get(&self, port: u16, path: &str) -> Result<http::Response> {
        self.ns.within(|| http::get(&format!("127.0.0.1:{port}"), path))
    }

    /// `ip -j -d link show dev <name>`, `None` if there is no such device.
    pub fn link(&self, name: &str) -> Result<Option<Value>> {
        let all = self.ns.ip_json("link show")?;
        Ok(all.into_iter().find(|link| link["ifname"] == name))
    }

    /// Takes the cable's both ends away: `eth0` disappears.
    pub fn remove_eth0(&self) -> Result<()> {
        self.ns.ip(&["link del eth0"])
    }

    /// Makes `eth0` anew, with another interface index, the same addresses and routes.
    pub fn recreate_eth0(&self, mtu: u32) -> Result<()> {
        *self.attachment.borrow_mut() = self.lab.plug(&self.ns, self.segment, "eth0", mtu)?;
        self.address_eth0()
    }

    /// The switch's end of `eth0`.
    pub fn attachment(&self) -> Attachment {
        self.attachment.borrow().clone()
    }

    /// The bridge `cni0` and `count` pods in the subnets that the agent wrote to its env file.
    pub fn add_pods(&self, env: &crate::agent::SubnetEnv, count: u8) -> Result<Vec<Pod>> {
        let mut pods = self.pods.borrow_mut();
        let existing = u8::try_from(pods.len()).context("too many pods")?;
        if existing == 0 {
            crate::pod::make_bridge(self, env)?;
        }
        for index in existing..existing + count {
            pods.push(Pod::new(self, env, index)?);
        }
        Ok(pods[usize::from(existing)..].to_vec())
    }

    /// Its first pod, made if there is none yet.
    pub fn pod(&self, env: &crate::agent::SubnetEnv) -> Result<Pod> {
        if let Some(pod) = self.pods.borrow().first() {
            return Ok(pod.clone());
        }
        self.add_pods(env, 1)?.pop().context("no pod was made")
    }
}

fn hold(lab: &Lab, ns: &Netns, dir: &Path) -> Result<Process> {
    let log = dir.join("mounts.log");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", ns.name(), "sh", "-c", MOUNTS, "mounts"]).arg(dir.join("netns"));
    let mut holder = Process::spawn(command, &log, lab.run().keeps())?;
    eventually("a mount namespace", Duration::from_secs(10), || {
        ensure!(holder.exited()?.is_none(), "{}", holder.log());
        Ok(holder.log().contains("ready").then_some(()))
    })?;
    Ok(holder)
}
