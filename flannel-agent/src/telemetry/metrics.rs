//! Prometheus metrics. Each name is spelled once, here.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

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
}

impl Metrics {
    /// Registers everything under the prefix `flannel`.
    pub fn register(&self, registry: &mut Registry) {
        let r = registry.sub_registry_with_prefix("flannel");
        r.register("store_bad_entries", "Store entries skipped as unusable", self.store_bad_entries.clone());
        r.register("store_connected", "Whether the lease store answers", self.store_connected.clone());
        r.register("peers_wanted", "Peers the store asks for", self.peers_wanted.clone());
        r.register("peers_applied", "Peers fully in place", self.peers_applied.clone());
        r.register("kernel_changes", "Kernel objects changed", self.kernel_changes.clone());
        r.register("repairs", "Foreign changes undone", self.repairs.clone());
        r.register("leases_lost", "Times our lease was lost", self.leases_lost.clone());
    }
}
