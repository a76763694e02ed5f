//! The real agent, as a user has it: the binary, its flags, its files, its port.

use std::{
    collections::BTreeMap,
    env, fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{ExitStatus, Output},
    rc::Rc,
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    http,
    netns::Netns,
    node::Node,
    process::{self, Process},
    wait::eventually,
};

/// How long stories wait for an agent to be ready, on a machine busy with other stories.
pub const READY_WITHIN: Duration = Duration::from_secs(20);

/// The health port of every agent of the lab.
pub const HEALTH_PORT: u16 = 8081;

/// Where the agent writes its env file unless a flag says otherwise.
pub const SUBNET_FILE: &str = "/run/flannel/subnet.env";

/// What the status says of the data path while the eBPF programs are being loaded.
pub const LOADING: &str = "loading the eBPF programs";

/// A running agent. Killed when dropped.
#[derive(Debug)]
pub struct Agent {
    process: Process,
    ns: Netns,
    subnet_file: PathBuf,
    /// Its mount namespace lives as long as it does, whatever became of the [`Node`].
    _mounts: Rc<Process>,
}

/// The agent's binary: `$FLANNEL_AGENT`, else the newest one that this workspace has built.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os("FLANNEL_AGENT") {
        return fs::canonicalize(&path)
            .with_context(|| format!("FLANNEL_AGENT names {}", Path::new(&path).display()));
    }
    let target = env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    ["release", "debug"]
        .iter()
        .map(|profile| target.join(profile).join("flannel-agent"))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max()
        .map(|(_, path)| fs::canonicalize(&path).unwrap_or(path))
        .with_context(|| {
            format!(
                "no flannel-agent below {}: build it or name one in FLANNEL_AGENT",
                target.display()
            )
        })
}

impl Agent {
    pub(crate) fn start<I>(node: &Node, flags: I, environment: &[(&str, &str)]) -> Result<Self>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let flags: Vec<_> = flags.into_iter().map(|f| f.as_ref().to_owned()).collect();
        let mut command = node.command(binary()?);
        let usual = [
            ("iface", "eth0".to_owned()),
            ("healthz-ip", "127.0.0.1".to_owned()),
            ("healthz-port", HEALTH_PORT.to_string()),
            ("state-dir", node.state_dir().display().to_string()),
        ];
        let given = |name: &str| {
            let exact = format!("--{name}");
            let assigned = format!("--{name}=");
            // `--iface-can-reach` and the like also choose the interface.
            flags.iter().any(|f| {
                *f == exact
                    || f.starts_with(&assigned)
                    || (name == "iface"
                        && (f.starts_with("--iface-") || f.starts_with("--public-ip")))
            })
        };
        for (name, value) in usual.iter().filter(|(name, _)| !given(name)) {
            command.arg(format!("--{name}={value}"));
        }
        command.args(&flags).env("NODE_NAME", node.name()).envs(environment.iter().copied());
        let subnet_file =
            flags.iter().find_map(|f| f.strip_prefix("--subnet-file=")).unwrap_or(SUBNET_FILE);
        let subnet_file = node.path(subnet_file);
        let log = node.dir().join("agent.log");
        // Only this run's words, or a story would find those of the run before it.
        let number = (1..1000_u16)
            .find(|n| !log.with_extension(format!("log.{n}")).exists())
            .context("too many agent logs")?;
        if log.exists() {
            fs::rename(&log, log.with_extension(format!("log.{number}")))?;
        }
        let process = Process::spawn(command, &log, node.lab().run().keeps())?;
        Ok(Self { process, ns: node.ns().clone(), subnet_file, _mounts: node.holder() })
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until `/readyz` says so and the env file is there, and returns that. The eBPF
    /// programs, which come after that, are waited for as well.
    pub fn wait_ready(&mut self, within: Duration) -> Result<SubnetEnv> {
        let env = self.wait_first_ready(within)?;
        eventually("the eBPF programs are loaded or refused", within, || {
            // Not every agent answers, nor has every one a data path of this kind.
            let Ok(status) = self.status() else { return Ok(Some(())) };
            let reason = status["backend"]["datapath"]["reason"].as_str().unwrap_or_default();
            Ok((reason != LOADING && !reason.ends_with("not read yet")).then_some(()))
        })
        .with_context(|| format!("its last words:\n{}", self.process.log_tail(30)))?;
        Ok(env)
    }

    /// Waits until `/readyz` says so and the env file is there, whatever becomes of eBPF.
    pub fn wait_first_ready(&mut self, within: Duration) -> Result<SubnetEnv> {
        eventually("the agent is ready", within, || {
            if let Some(status) = self.process.exited()? {
                bail!("it has ended: {status}");
            }
            let ready = self.get("/readyz")?;
            ensure!(ready.status == 200, "/readyz: {} {}", ready.status, ready.body.trim());
            Ok(Some(self.subnet_env()?))
        })
        .with_context(|| format!("its last words:\n{}", self.process.log_tail(30)))
    }

    /// Asks its health port.
    pub fn get(&self, path: &str) -> Result<http::Response> {
        self.ns.within(|| http::get(&format!("127.0.0.1:{HEALTH_PORT}"), path))
    }

    /// `/readyz` as (is it ready, why not).
    pub fn readiness(&self) -> Result<(bool, String)> {
        let answer = self.get("/readyz")?;
        Ok((answer.status == 200, answer.body))
    }

    /// `/status`.
    pub fn status(&self) -> Result<Value> {
        let answer = self.get("/status")?;
        serde_json::from_str(&answer.body).with_context(|| format!("/status: {}", answer.body))
    }

    /// The value of a metric without labels, or with exactly `{label="value"}` behind its name.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let body = self.get("/metrics")?.body;
        body.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
            .with_context(|| format!("no metric {name} in\n{body}"))
    }

    /// The env file now.
    pub fn subnet_env(&self) -> Result<SubnetEnv> {
        fs::read_to_string(&self.subnet_file)
            .with_context(|| format!("cannot read {}", self.subnet_file.display()))?
            .parse()
    }

    /// Where the env file is, seen from outside.
    pub fn subnet_file(&self) -> &Path {
        &self.subnet_file
    }

    /// All it logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Its log lines that contain a text.
    pub fn log_lines(&self, text: &str) -> Vec<String> {
        self.log().lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Its log lines at `WARN` or `ERROR` that contain every one of these texts, in any case.
    pub fn complaints(&self, texts: &[&str]) -> Vec<String> {
        self.log()
            .lines()
            .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
            .filter(|line| {
                let line = line.to_lowercase();
                texts.iter().all(|text| line.contains(&text.to_lowercase()))
            })
            .map(str::to_owned)
            .collect()
    }

    /// Waits for such a log line.
    pub fn wait_complaint(&mut self, texts: &[&str], within: Duration) -> Result<String> {
        eventually(&format!("a warning with {texts:?}"), within, || {
            Ok(self.complaints(texts).into_iter().next())
        })
        .with_context(|| format!("its last words:\n{}", self.process.log_tail(30)))
    }

    /// Waits for such a log line, or for the agent to end with these texts on its lips.
    pub fn wait_complaint_or_exit(&mut self, texts: &[&str], within: Duration) -> Result<()> {
        eventually(&format!("{texts:?} is said"), within, || {
            let log = self.process.log();
            let ended = self.process.exited()?.is_some();
            let said = texts.iter().all(|text| log.contains(text));
            Ok((!self.complaints(texts).is_empty() || ended && said).then_some(()))
        })
        .with_context(|| format!("its last words:\n{}", self.process.log_tail(30)))
    }

    /// Stops it as a supervisor does and returns how it ended.
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.process.stop(Signal::SIGTERM, Duration::from_secs(10))
    }

    /// Stops it with no warning.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill()
    }

    /// Waits for it to end by itself; returns status and log.
    pub fn wait_exit(mut self, within: Duration) -> Result<(ExitStatus, String)> {
        let status = self.process.wait(within)?;
        Ok((status, self.process.log()))
    }
}

/// Runs a subcommand of the binary on a node, `peers` for example.
pub fn subcommand(node: &Node, words: &[&str]) -> Result<Output> {
    process::status_and_output(node.command(binary()?).args(words))
}

/// What the env file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetEnv {
    values: BTreeMap<String, String>,
}

impl FromStr for SubnetEnv {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        ensure!(text.ends_with('\n'), "the env file ends in mid-line: {text:?}");
        let mut values = BTreeMap::new();
        for line in text.lines() {
            let (key, value) =
                line.split_once('=').with_context(|| format!("a line without `=`: {line}"))?;
            values.insert(key.to_owned(), value.to_owned());
        }
        Ok(Self { values })
    }
}

impl SubnetEnv {
    /// An env file of a node that has no agent.
    pub fn by_hand(subnet: Option<&str>, subnet_v6: Option<&str>, mtu: u32) -> Result<Self> {
        let mut text = String::new();
        for (key, subnet) in [("FLANNEL_SUBNET", subnet), ("FLANNEL_IPV6_SUBNET", subnet_v6)] {
            if let Some(subnet) = subnet {
                let (base, len) = subnet.split_once('/').context("a subnet without length")?;
                let gateway = if let Ok(base) = base.parse::<Ipv4Addr>() {
                    Ipv4Addr::from_bits(base.to_bits() + 1).to_string()
                } else {
                    let base: Ipv6Addr = base.parse().context("not an address")?;
                    Ipv6Addr::from_bits(base.to_bits() + 1).to_string()
                };
                text.extend([key, "=", &gateway, "/", len, "\n"]);
            }
        }
        (text + &format!("FLANNEL_MTU={mtu}\n")).parse()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The pods' MTU in bytes.
    pub fn mtu(&self) -> Result<u32> {
        self.get("FLANNEL_MTU")
            .context("no FLANNEL_MTU")?
            .parse()
            .context("FLANNEL_MTU is no number")
    }

    /// IPv4 gateway address for pods and the subnet's prefix length.
    pub fn gateway_v4(&self) -> Result<Option<(Ipv4Addr, u8)>> {
        self.gateway("FLANNEL_SUBNET")
    }

    /// IPv6 gateway address for pods and the subnet's prefix length.
    pub fn gateway_v6(&self) -> Result<Option<(Ipv6Addr, u8)>> {
        self.gateway("FLANNEL_IPV6_SUBNET")
    }

    fn gateway<A: FromStr>(&self, key: &str) -> Result<Option<(A, u8)>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let (address, len) =
            text.split_once('/').with_context(|| format!("{key}={text} has no length"))?;
        match (address.parse(), len.parse()) {
            (Ok(address), Ok(len)) => Ok(Some((address, len))),
            _ => bail!("{key}={text} is no subnet"),
        }
    }

    /// The IPv4 subnet, `10.77.1.0/24`.
    pub fn subnet_v4(&self) -> Result<String> {
        let (gateway, len) = self.gateway_v4()?.context("no FLANNEL_SUBNET")?;
        Ok(format!("{}/{len}", Ipv4Addr::from_bits(gateway.to_bits() - 1)))
    }

    /// The IPv6 subnet.
    pub fn subnet_v6(&self) -> Result<String> {
        let (gateway, len) = self.gateway_v6()?.context("no FLANNEL_IPV6_SUBNET")?;
        Ok(format!("{}/{len}", Ipv6Addr::from_bits(gateway.to_bits() - 1)))
    }

    /// The lease's key in a store, `10.77.1.0-24` or with the IPv6 subnet behind `&`.
    pub fn key(&self) -> Result<String> {
        let v4 = self.subnet_v4()?.replace('/', "-");
        Ok(if self.gateway_v6()?.is_some() {
            format!("{v4}&{}", self.subnet_v6()?.replace('/', "-"))
        } else {
            v4
        })
    }
}
