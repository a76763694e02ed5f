//! The status document: `/status`, and what `flannel-agent status` prints.

use std::time::SystemTime;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{health::Condition, metrics::epoch_seconds};
use crate::{
    external_interface::ExternalInterface,
    firewall::FirewallReport,
    lease::Lease,
    subnet_manager::{Connection, GrantedLease},
};

/// Where the servers get the state from that only the agent's loop has.
#[async_trait(?Send)]
pub trait StateSource {
    /// Has what changes without the loop's doing (counters) looked at, before it is shown.
    async fn freshen(&self) {}
    /// The state now.
    fn status(&self) -> Status;
    /// All peers, as a JSON array of objects.
    fn peers(&self) -> Value;
}

/// How the agent is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Seconds since the agent started.
    pub uptime_seconds: u64,
    /// Whether all conditions hold.
    pub ready: bool,
    /// The conditions that do not.
    pub missing: Vec<Missing>,
    /// The lease store.
    pub store: Option<StoreStatus>,
    /// Our lease.
    pub lease: Option<LeaseStatus>,
    /// Which interface carries the tunnel.
    pub external_interface: Option<InterfaceStatus>,
    /// Name of the backend.
    pub backend_type: String,
    /// What the backend tells of itself.
    pub backend: Value,
    /// The rung of the data path in use.
    pub datapath: Option<DatapathStatus>,
    /// The firewall's rules.
    pub firewall: Option<FirewallStatus>,
    /// Peers the store asks for.
    pub peers_wanted: usize,
    /// Peers fully in place.
    pub peers_applied: usize,
    /// How the network configuration differs by now from the one in use.
    pub config_change: Option<String>,
    /// What could not be brought to the wanted state, one sentence each.
    pub problems: Vec<String>,
}

/// A condition that does not hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The condition's name.
    pub condition: String,
    /// Why it does not hold.
    pub reason: String,
}

impl From<(Condition, String)> for Missing {
    fn from((condition, reason): (Condition, String)) -> Self {
        Self { condition: condition.name().to_owned(), reason }
    }
}

/// The lease store and whether it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStatus {
    /// `etcd`, `kube` or `local`.
    pub kind: String,
    /// Whether it answers.
    pub connected: bool,
    /// What was tried and what came back, if it does not.
    pub detail: String,
}

impl StoreStatus {
    /// The status of a store of this kind.
    pub fn new(kind: &str, connection: &Connection) -> Self {
        let (connected, detail) = match connection {
            Connection::Up => (true, String::new()),
            Connection::Down(detail) => (false, detail.clone()),
        };
        Self { kind: kind.to_owned(), connected, detail }
    }
}

/// Our lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// IPv4 subnet.
    pub subnet: Option<String>,
    /// IPv6 subnet.
    pub subnet_v6: Option<String>,
    /// When it ends unless renewed, in seconds since the epoch; absent if it does not end.
    pub expires_epoch_seconds: Option<i64>,
}

impl From<&GrantedLease> for LeaseStatus {
    fn from(granted: &GrantedLease) -> Self {
        let Lease { subnets, .. } = &granted.lease;
        Self {
            subnet: subnets.v4.map(|net| net.to_string()),
            subnet_v6: subnets.v6.map(|net| net.to_string()),
            expires_epoch_seconds: granted.expires.map(epoch_seconds),
        }
    }
}

impl LeaseStatus {
    /// Seconds until the lease ends, negative when it has.
    pub fn remaining_seconds(&self, now: SystemTime) -> Option<i64> {
        self.expires_epoch_seconds.map(|expires| expires.saturating_sub(epoch_seconds(now)))
    }
}

/// The external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Addresses on it.
    pub addresses: Vec<String>,
    /// Addresses that peers send to.
    pub public_addresses: Vec<String>,
}

impl From<&ExternalInterface> for InterfaceStatus {
    fn from(interface: &ExternalInterface) -> Self {
        let text = |v4: Option<std::net::Ipv4Addr>, v6: Option<std::net::Ipv6Addr>| {
            v4.map(|a| a.to_string()).into_iter().chain(v6.map(|a| a.to_string())).collect()
        };
        Self {
            name: interface.name.clone(),
            mtu: interface.mtu,
            addresses: text(interface.addr, interface.addr_v6),
            public_addresses: text(interface.public_ip, interface.public_ipv6),
        }
    }
}

/// The firewall's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirewallStatus {
    /// Which tool's rules they are.
    pub renderer: String,
    /// Whether they are as wanted.
    pub in_place: bool,
    /// Transactions written since the start.
    pub changes: usize,
    /// Why they are not in place.
    pub problems: Vec<String>,
    /// Rules of others that keep ours from having their effect, and the like.
    pub warnings: Vec<String>,
}

impl From<&FirewallReport> for FirewallStatus {
    fn from(report: &FirewallReport) -> Self {
        let FirewallReport { renderer, in_place, changes, problems, warnings, .. } = report.clone();
        Self { renderer, in_place, changes, problems, warnings }
    }
}

/// The rung of the data path in use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatapathStatus {
    /// Its name.
    pub mode: String,
    /// Why not the one above.
    pub reason: String,
}
