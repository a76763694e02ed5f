//! Lease stores as the lab writes and reads them, from outside of any agent.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{lab::Lab, node::Node};

/// Where etcd holds leases unless an agent is told otherwise.
pub const SUBNETS_PREFIX: &str = "/coreos.com/network/subnets/";

/// Where etcd holds the network configuration.
pub const CONFIG_KEY: &str = "/coreos.com/network/config";

/// A store of leases.
pub trait LeaseStore {
    /// The flags by which an agent finds it.
    fn flags(&self) -> Vec<String>;
    /// Writes the network configuration, whatever it is.
    fn put_config(&self, text: &str) -> Result<()>;
    /// Makes a node known on which an agent is to start; only Kubernetes needs that.
    fn register(&self, _node: &Node) -> Result<()> {
        Ok(())
    }
    /// Writes a lease that does not end.
    fn put_lease(&self, key: &str, lease: &Value) -> Result<()>;
    /// Deletes a lease.
    fn delete_lease(&self, key: &str) -> Result<()>;
    /// All leases by their keys.
    fn leases(&self) -> Result<BTreeMap<String, Value>>;
}

/// Leases as files in a directory.
#[derive(Debug)]
pub struct LocalStore {
    dir: PathBuf,
}

impl LocalStore {
    /// An empty store of this lab.
    pub fn new(lab: &Lab) -> Result<Self> {
        let dir = lab.run().dir().join("leases");
        fs::create_dir_all(dir.join("subnets"))?;
        Ok(Self { dir })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn lease_path(&self, key: &str) -> PathBuf {
        self.dir.join("subnets").join(format!("{key}.json"))
    }
}

impl LeaseStore for LocalStore {
    fn flags(&self) -> Vec<String> {
        vec![format!("--local-subnet-mgr={}", self.dir.display())]
    }

    fn put_config(&self, text: &str) -> Result<()> {
        replace(&self.dir.join("config.json"), text)
    }

    fn put_lease(&self, key: &str, lease: &Value) -> Result<()> {
        replace(&self.lease_path(key), &lease.to_string())
    }

    fn delete_lease(&self, key: &str) -> Result<()> {
        let path = self.lease_path(key);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    fn leases(&self) -> Result<BTreeMap<String, Value>> {
        let mut leases = BTreeMap::new();
        for entry in fs::read_dir(self.dir.join("subnets"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if let Some(key) = name.strip_suffix(".json")
                && !key.starts_with('.')
            {
                let text = fs::read_to_string(&path)?;
                let lease = serde_json::from_str(&text)
                    .with_context(|| format!("{}: {text}", path.display()))?;
                leases.insert(key.to_owned(), lease);
            }
        }
        Ok(leases)
    }
}

/// Writes a file in one step.
fn replace(path: &Path, text: &str) -> Result<()> {
    let name = path.file_name().context("a path without a name")?.to_string_lossy();
    let new = path.with_file_name(format!(".lab-{name}"));
    fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
}
