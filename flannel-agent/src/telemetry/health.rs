//! Liveness and readiness.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

/// What has to hold before the agent is ready. Each can turn false again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The network configuration was read and is usable.
    Config,
    /// A subnet is leased and the lease is ours.
    Lease,
    /// The backend's devices are right.
    Device,
    /// The first full set of peers was applied.
    Peers,
    /// Firewall rules are in place.
    Firewall,
    /// `subnet.env` is written and right.
    SubnetFile,
}

impl Condition {
    /// All conditions, in the order in which they come true at start.
    pub const ALL: [Self; 6] =
        [Self::Config, Self::Lease, Self::Device, Self::Peers, Self::Firewall, Self::SubnetFile];

    /// The word in `/readyz`, `/status` and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Lease => "lease",
            Self::Device => "device",
            Self::Peers => "peers",
            Self::Firewall => "firewall",
            Self::SubnetFile => "subnet-file",
        }
    }
}

/// The conditions that do not hold now, each with the reason.
#[derive(Debug)]
pub struct Readiness {
    missing: Mutex<BTreeMap<Condition, String>>,
}

impl Default for Readiness {
    fn default() -> Self {
        let missing = Condition::ALL.map(|c| (c, "not there yet".to_owned())).into();
        Self { missing: Mutex::new(missing) }
    }
}

impl Readiness {
    /// Records that a condition holds.
    pub fn met(&self, condition: Condition) {
        self.lock().remove(&condition);
    }

    /// Records that a condition does not hold, and why.
    pub fn unmet(&self, condition: Condition, reason: impl Into<String>) {
        self.lock().insert(condition, reason.into());
    }

    /// What is missing, in start order. Empty means ready.
    pub fn missing(&self) -> Vec<(Condition, String)> {
        self.lock().iter().map(|(c, reason)| (*c, reason.clone())).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Condition, String>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
