//! Prometheus metrics. Each name is spelled once, here.

use std::{
    sync::atomic::Ordering,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::Registry,
};
use serde_json::Value;

use super::health::Condition;

/// One label.
type Label = [(&'static str, &'static str); 1];

/// What carries packets, and why not something better.
type CarrierLabels = [(&'static str, String); 2];

/// One label whose values somebody else names.
type NamedLabel = [(&'static str, String); 1];

/// The agent's metrics; cheap to clone, all clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Entries of the store that could not be understood and were skipped.
    pub store_bad_entries: Counter,
    /// 1 while the store answers.
    pub store_connected: Gauge,
    /// Peers the store asks for.
    pub peers_wanted: Gauge,
    /// Peers fully in place in the kernel.
    pub peers_applied: Gauge,
    /// Kernel objects made, changed or removed.
    pub kernel_changes: Counter,
    /// Objects that somebody else had removed or changed and that were put back.
    pub repairs: Counter,
    /// Times a lease was lost.
    pub leases_lost: Counter,
    /// 1 while eBPF programs stand beside the kernel's path; 0 if that is alone.
    pub datapath_ebpf: Gauge,
    /// What carries packets; one series, whose value is 1.
    fast_path: Family<CarrierLabels, Gauge>,
    /// 1 while packets are taken out of the tunnel in XDP.
    datapath_xdp: Gauge,
    /// What became of tunnel packets in XDP.
    xdp_packets: Family<Label, Counter>,
    /// Seconds since the epoch at which our lease ends; 0 without a lease or an end.
    lease_expiry: Gauge,
    /// Seconds since the epoch of the last pass that left the kernel as wanted.
    last_sync: Gauge,
    conditions: Family<Label, Gauge>,
    datapath_packets: Family<NamedLabel, Counter>,
    datapath_bytes: Family<NamedLabel, Counter>,
}

impl Metrics {
    /// Registers everything under the prefix `flannel`.
    pub fn register(&self, registry: &mut Registry) {
        let r = registry.sub_registry_with_prefix("flannel");
        r.register(
            "build",
            "Version of the agent",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        r.register("condition", "Whether a condition of readiness holds", self.conditions.clone());
        r.register(
            "store_bad_entries",
            "Store entries skipped as unusable",
            self.store_bad_entries.clone(),
        );
        r.register(
            "store_connected",
            "Whether the lease store answers",
            self.store_connected.clone(),
        );
        r.register("peers_wanted", "Peers the store asks for", self.peers_wanted.clone());
        r.register("peers_applied", "Peers fully in place", self.peers_applied.clone());
        r.register("kernel_changes", "Kernel objects changed", self.kernel_changes.clone());
        r.register("repairs", "Foreign changes undone", self.repairs.clone());
        r.register("leases_lost", "Times our lease was lost", self.leases_lost.clone());
        r.register("datapath_ebpf", "Whether eBPF is in use", self.datapath_ebpf.clone());
        r.register("datapath_xdp", "Whether XDP is in use", self.datapath_xdp.clone());
        r.register("xdp_packets", "Tunnel packets by what XDP did", self.xdp_packets.clone());
        r.register(
            "fast_path_info",
            "What carries packets (flows, stack, off, kernel) and what stands in the way of more",
            self.fast_path.clone(),
        );
        r.register(
            "lease_expiry_timestamp_seconds",
            "When our lease ends unless renewed, 0 if it does not",
            self.lease_expiry.clone(),
        );
        r.register(
            "last_sync_timestamp_seconds",
            "When the kernel last was all as wanted",
            self.last_sync.clone(),
        );
        r.register(
            "datapath_packets",
            "Packets by what the eBPF programs did with them, drops by their reason",
            self.datapath_packets.clone(),
        );
        r.register(
            "datapath_bytes",
            "Bytes of the packets by what the eBPF programs did with them",
            self.datapath_bytes.clone(),
        );
    }

    /// Records whether XDP is in use, and what it has counted since the maps were made.
    pub fn set_xdp(&self, attached: bool, packets: impl IntoIterator<Item = (&'static str, u64)>) {
        self.datapath_xdp.set(i64::from(attached));
        for (outcome, packets) in packets {
            let counter = self.xdp_packets.get_or_create(&[("outcome", outcome)]);
            counter.inner().store(packets, Ordering::Relaxed);
        }
    }

    /// Records when our lease ends; `None` without a lease or an end.
    pub fn set_lease_expiry(&self, expires: Option<SystemTime>) {
        self.lease_expiry.set(expires.map_or(0, epoch_seconds));
    }

    /// Records what carries packets and why not something better.
    pub fn set_fast_path(&self, mode: &str, reason: &str) {
        self.fast_path.clear();
        let labels = [("mode", mode.to_owned()), ("reason", reason.to_owned())];
        self.fast_path.get_or_create(&labels).set(1);
    }

    /// Records that the kernel is all as wanted now.
    pub fn synced_now(&self) {
        self.last_sync.set(epoch_seconds(SystemTime::now()));
    }

    /// Takes over what the eBPF programs have counted: an object of outcomes with their `packets`
    /// and `bytes`, as the status shows it. Without one there is nothing to show.
    pub fn set_datapath_outcomes(&self, outcomes: &Value) {
        let Some(outcomes) = outcomes.as_object() else {
            self.datapath_packets.clear();
            self.datapath_bytes.clear();
            return;
        };
        for (outcome, counted) in outcomes {
            for (family, unit) in
                [(&self.datapath_packets, "packets"), (&self.datapath_bytes, "bytes")]
            {
                if let Some(count) = counted.get(unit).and_then(Value::as_u64) {
                    let counter = family.get_or_create(&[("outcome", outcome.clone())]);
                    counter.inner().store(count, Ordering::Relaxed);
                }
            }
        }
    }

    /// Records whether a condition of readiness holds.
    pub(super) fn set_condition(&self, condition: Condition, holds: bool) {
        self.conditions.get_or_create(&[("condition", condition.name())]).set(i64::from(holds));
    }
}

/// Whole seconds since the epoch, 0 for times before it.
pub(super) fn epoch_seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}
