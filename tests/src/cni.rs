//! A container runtime's side of CNI: calls the plugin `flannel` on a node, which calls Debian's
//! real `bridge` and `host-local`.

use std::{
    cell::Cell,
    fs,
    io::Write,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{agent, netns::Netns, node::Node};

/// Where Debian has the plugins.
pub const PLUGINS: &str = "/usr/lib/cni";

/// Our plugin: beside the agent.
pub fn plugin() -> Result<PathBuf> {
    let path = agent::binary()?.with_file_name("flannel");
    fs::metadata(&path).with_context(|| format!("no plugin at {}", path.display()))?;
    Ok(path)
}

/// The runtime of one node.
#[derive(Debug)]
pub struct Runtime<'a> {
    node: &'a Node,
    version: &'static str,
    containers: Cell<u32>,
}

/// A container that the runtime made.
#[derive(Debug)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its network namespace.
    pub ns: Netns,
}

/// The plugin's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Refused {
    /// CNI's error code.
    pub code: u64,
    /// Message and details.
    pub text: String,
}

impl<'a> Runtime<'a> {
    /// A runtime that speaks this version of CNI.
    pub fn new(node: &'a Node, version: &'static str) -> Self {
        Self { node, version, containers: Cell::new(0) }
    }

    /// A container with nothing but loopback.
    pub fn container(&self) -> Result<Container> {
        let number = self.containers.get() + 1;
        self.containers.set(number);
        let id = format!("{}-c{number}", self.node.name());
        let ns = Netns::new(self.node.ns().run(), &id)?;
        Ok(Container { id, ns })
    }

    /// The configuration: flannel's conflist entry, with files of the node's own.
    pub fn config(&self) -> Value {
        json!({
            "cniVersion": self.version,
            "name": "cbr0",
            "type": "flannel",
            "dataDir": self.scratch_dir(),
            "ipam": {"dataDir": self.address_dir()},
            "delegate": {"hairpinMode": true, "isDefaultGateway": true},
        })
    }

    /// The plugin's scratch directory.
    pub fn scratch_dir(&self) -> PathBuf {
        self.node.dir().join("cni-scratch")
    }

    /// Where `host-local` keeps the addresses it gave.
    pub fn address_dir(&self) -> PathBuf {
        self.node.dir().join("cni-networks")
    }

    /// The addresses that `host-local` has given and not got back.
    pub fn addresses_given(&self) -> Result<Vec<String>> {
        let dir = self.address_dir().join("cbr0");
        if !dir.exists() {
            return Ok(Vec::new());
        }
        let mut names: Vec<String> = fs::read_dir(dir)?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.parse::<IpAddr>().is_ok())
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Calls the plugin with a configuration. Success gives what it printed, JSON or nothing.
    pub fn call_with(
        &self,
        command: &str,
        container: Option<&Container>,
        config: &Value,
    ) -> Result<Result<Value, Refused>> {
        self.call_plugin(&plugin()?, command, container, config)
    }

    /// Calls any plugin, as the next of a chain.
    pub fn call_plugin(
        &self,
        plugin: &Path,
        command: &str,
        container: Option<&Container>,
        config: &Value,
    ) -> Result<Result<Value, Refused>> {
        let mut process: Command = self.node.command(plugin);
        process.env("CNI_COMMAND", command).env("CNI_PATH", PLUGINS);
        if let Some(container) = container {
            process.env("CNI_CONTAINERID", &container.id).env("CNI_IFNAME", "eth0");
            process.env("CNI_NETNS", container.ns.path());
        }
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = process.spawn().context("cannot start the plugin")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(config.to_string().as_bytes())?;
        }
        let output = child.wait_with_output()?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let printed = if stdout.trim().is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&stdout).with_context(|| format!("{command} printed {stdout}"))?
        };
        if output.status.success() {
            return Ok(Ok(printed));
        }
        let Some(code) = printed["code"].as_u64() else {
            bail!("{command}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        };
        let text = [&printed["msg"], &printed["details"]].map(|v| v.as_str().unwrap_or_default());
        Ok(Err(Refused { code, text: text.join("; ") }))
    }

    /// Calls the plugin for a container.
    pub fn call(&self, command: &str, container: &Container) -> Result<Result<Value, Refused>> {
        self.call_with(command, Some(container), &self.config())
    }

    /// Connects a container; its addresses and the whole result.
    pub fn add(&self, container: &Container) -> Result<(Vec<IpAddr>, Value)> {
        let result = match self.call("ADD", container)? {
            Ok(result) => result,
            Err(refused) => bail!("ADD of {}: {refused:?}", container.id),
        };
        let addresses = result["ips"].as_array().context("no ips")?.iter().map(|ip| {
            let address = ip["address"].as_str().and_then(|text| text.split('/').next());
            address.context("no address")?.parse().context("no address")
        });
        Ok((addresses.collect::<Result<_>>()?, result))
    }

    /// Disconnects a container.
    pub fn del(&self, container: &Container) -> Result<()> {
        match self.call("DEL", container)? {
            Ok(_) => Ok(()),
            Err(refused) => bail!("DEL of {}: {refused:?}", container.id),
        }
    }
}
