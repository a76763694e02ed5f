//! What the agent's loop knows, in the form in which servers and commands ask for it.

use std::{
    cell::RefCell, collections::HashMap, net::IpAddr, path::PathBuf, rc::Rc, time::Duration,
};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::{sync::Notify, time::timeout};

use crate::{
    backend::ApplyReport,
    config::NetworkConfig,
    datapath::ebpf::read_pinned_peers,
    external_interface::ExternalInterface,
    firewall::FirewallReport,
    lease::RawJson,
    peer_table::PeerTable,
    subnet_manager::{Connection, GrantedLease},
    telemetry::{
        Telemetry,
        status::{DatapathStatus, StateSource, Status, StoreStatus},
    },
};

/// How long the loop may take to look before what it said last is shown.
const ANSWER: Duration = Duration::from_millis(200);

/// The agent's state as others see it. The loop writes, the servers read, all on one thread.
pub struct SharedState {
    /// Readiness, metrics, heartbeat.
    pub telemetry: Rc<Telemetry>,
    store_kind: &'static str,
    pin_dir: PathBuf,
    inner: RefCell<Inner>,
    asked: Notify,
    answered: Notify,
}

#[derive(Default)]
struct Inner {
    status: Status,
    peers: Rc<PeerTable>,
}

impl SharedState {
    /// The state of an agent that has only just been told which store to use.
    pub fn new(telemetry: Rc<Telemetry>, store_kind: &'static str, pin_dir: PathBuf) -> Self {
        let state = Self {
            telemetry,
            store_kind,
            pin_dir,
            inner: RefCell::default(),
            asked: Notify::new(),
            answered: Notify::new(),
        };
        state.set_connection(&Connection::Down("not asked yet".to_owned()));
        state
    }

    /// Records whether the store answers.
    pub fn set_connection(&self, connection: &Connection) {
        let up = *connection == Connection::Up;
        self.telemetry.metrics.store_connected.set(i64::from(up));
        self.inner.borrow_mut().status.store = Some(StoreStatus::new(self.store_kind, connection));
    }

    /// Records the network configuration in use.
    pub fn set_config(&self, config: &NetworkConfig) {
        self.inner.borrow_mut().status.backend_type.clone_from(&config.backend_type);
    }

    /// Records how the configuration in the store differs from the one in use. Returns whether
    /// that is news.
    pub fn set_config_change(&self, change: Option<String>) -> bool {
        let mut inner = self.inner.borrow_mut();
        let news = inner.status.config_change != change;
        inner.status.config_change = change;
        news
    }

    /// Records which interface carries the tunnel.
    pub fn set_external_interface(&self, interface: &ExternalInterface) {
        self.inner.borrow_mut().status.external_interface = Some(interface.into());
    }

    /// Records the lease we hold.
    pub fn set_lease(&self, granted: &GrantedLease) {
        self.telemetry.metrics.set_lease_expiry(granted.expires);
        self.inner.borrow_mut().status.lease = Some(granted.into());
    }

    /// Records how the firewall is.
    pub fn set_firewall(&self, report: &FirewallReport) {
        self.inner.borrow_mut().status.firewall = Some(report.into());
    }

    /// Replaces the table of peers that is shown.
    pub fn set_peers(&self, peers: Rc<PeerTable>) {
        let wanted = peers.len();
        self.telemetry.metrics.peers_wanted.set(i64::try_from(wanted).unwrap_or(i64::MAX));
        let mut inner = self.inner.borrow_mut();
        inner.status.peers_wanted = wanted;
        inner.peers = peers;
    }

    /// Records what a pass of the backend came to.
    pub fn set_applied(&self, report: &ApplyReport, backend: Value) {
        let metrics = &self.telemetry.metrics;
        metrics.kernel_changes.inc_by(u64::try_from(report.changes).unwrap_or(u64::MAX));
        metrics.peers_applied.set(i64::try_from(report.peers_applied).unwrap_or(i64::MAX));
        if report.problems.is_empty() && report.device_problem.is_none() {
            metrics.synced_now();
        }
        let mut inner = self.inner.borrow_mut();
        inner.status.peers_applied = report.peers_applied;
        inner.status.problems =
            report.device_problem.iter().chain(&report.problems).cloned().collect();
        drop(inner);
        self.set_backend(backend);
    }

    /// Records what the backend shows of itself.
    pub fn set_backend(&self, backend: Value) {
        let mut inner = self.inner.borrow_mut();
        let text =
            |field: &str| backend["datapath"].get(field).and_then(Value::as_str).map(str::to_owned);
        inner.status.datapath = text("mode")
            .map(|mode| DatapathStatus { mode, reason: text("reason").unwrap_or_default() });
        let outcomes = &backend["datapath"]["programs"]["outcomes"];
        self.telemetry.metrics.set_datapath_outcomes(outcomes);
        inner.status.backend = backend;
        drop(inner);
        self.answered.notify_waiters();
    }

    /// Resolves when somebody wants to see what the backend shows now: the loop answers by
    /// [`set_backend`](Self::set_backend). Cancel-safe.
    pub async fn asked(&self) {
        self.asked.notified().await;
    }
}

impl SharedState {
    /// What the BPF maps have counted, by outer address. Empty without eBPF.
    fn counters(&self) -> HashMap<String, Value> {
        let Ok(Value::Array(rows)) = read_pinned_peers(&self.pin_dir) else {
            return HashMap::new();
        };
        let outer = |row: &Value| row.get("outer").and_then(Value::as_str).map(str::to_owned);
        rows.into_iter().filter_map(|row| Some((outer(&row)?, row))).collect()
    }
}

#[async_trait(?Send)]
impl StateSource for SharedState {
    async fn freshen(&self) {
        let answered = self.answered.notified();
        self.asked.notify_one();
        // A loop that is busy, or not turning yet, has to be told of as well.
        let _ = timeout(ANSWER, answered).await;
    }

    fn status(&self) -> Status {
        let Status { version, uptime_seconds, ready, missing, .. } = self.telemetry.base_status();
        Status { version, uptime_seconds, ready, missing, ..self.inner.borrow().status.clone() }
    }

    fn peers(&self) -> Value {
        let inner = self.inner.borrow();
        let counted = self.counters();
        let peers = inner.peers.peers().map(|(subnets, attributes)| {
            let addresses: Vec<IpAddr> = attributes
                .public_ip
                .map(IpAddr::from)
                .into_iter()
                .chain(attributes.public_ipv6.map(IpAddr::from))
                .collect();
            let count = |what: &str| -> Option<u64> {
                let of = |ip: &IpAddr| counted.get(&ip.to_string())?.get(what)?.as_u64();
                addresses.iter().filter_map(of).reduce(u64::saturating_add)
            };
            json!({
                "subnet": subnets.v4.map(|net| net.to_string()),
                "subnet_v6": subnets.v6.map(|net| net.to_string()),
                "addresses": addresses,
                "backend_type": attributes.backend_type,
                "backend_data": attributes.backend_data.as_ref().map(RawJson::as_str),
                "packets_received": count("packets"),
                "bytes_received": count("bytes"),
            })
        });
        peers.collect()
    }
}
