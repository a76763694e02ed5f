//! Backends: how packets reach the peers. One trait, one module per backend.

pub mod alloc;
pub mod extension;
pub mod host_gw;
mod interface_mtu;
mod on_link;
mod peer_ranges;
pub mod registry;
pub mod udp;
pub mod vxlan;

use std::{collections::BTreeSet, future::Future, pin::Pin};

use async_trait::async_trait;

use crate::{
    lease::{Lease, LeaseAttributes, RawJson, Subnets},
    peer_table::PeerTable,
};

/// See [`Backend::farewell`].
pub type Farewell = Pin<Box<dyn Future<Output = ()>>>;

/// Why a backend cannot be brought up.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An option of the network configuration is unusable; names the field and the value.
    #[error("{0}")]
    Config(String),
    /// The kernel refused, or something of somebody else is in the way. May pass: worth retrying.
    #[error("{0}")]
    Kernel(String),
}

/// What one pass of [`Backend::apply`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApplyReport {
    /// Single objects made, changed or removed in this pass.
    pub changes: usize,
    /// What could not be brought to the wanted state, one sentence each. Empty means: all right.
    /// A problem with one peer never keeps another from being served.
    pub problems: Vec<String>,
    /// Why the backend's own devices or addresses are not right, if they are not. Keeps the agent
    /// from being ready.
    pub device_problem: Option<String>,
    /// Peers that are fully in place.
    pub peers_applied: usize,
}

/// What [`Backend::reconfigure`] came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reconfigured {
    /// The options of `Backend` that are now as asked; all others need a restart.
    pub options: &'static [&'static str],
    /// Whether one of them has another meaning than before: then a pass over everything is due.
    pub differs: bool,
}

/// A way to carry packets between nodes. Sees the wanted set only; never talks to a store.
///
/// The agent's loop calls [`prepare`](Self::prepare) once, then [`apply`](Self::apply) whenever
/// leases change or [`changed`](Self::changed) resolves. There is no other path: start, restart,
/// store event, tampering and recovery all end in `apply`.
#[async_trait(?Send)]
pub trait Backend {
    /// The name peers find in the lease's `BackendType` and operators in the configuration.
    fn name(&self) -> &'static str;

    /// Creates or adopts the devices, so that what they are can be published with the lease.
    /// Idempotent. `stored` is what the store has on record about us, if anything: a device that
    /// has to be made anew gets the MAC published there.
    async fn prepare(&mut self, stored: Option<&LeaseAttributes>) -> Result<(), BackendError>;

    /// What to publish with our lease. May differ after `apply` had to make a device anew.
    fn attributes(&self) -> LeaseAttributes;

    /// Makes the kernel equal to the wanted state: our own lease and all peers. While `peers` is
    /// not [`synced`](PeerTable::synced), nothing that may belong to a peer is removed.
    async fn apply(&mut self, own: &Lease, peers: &PeerTable) -> ApplyReport;

    /// As [`apply`](Self::apply), and may look at nothing but these peers: all else is as the last
    /// pass left it, as far as this backend knows. The report is about all peers nevertheless.
    async fn apply_changed(
        &mut self,
        own: &Lease,
        peers: &PeerTable,
        changed: &BTreeSet<Subnets>,
    ) -> ApplyReport {
        // To look at more than asked is always right.
        let _ = changed;
        self.apply(own, peers).await
    }

    /// Takes over those of changed options that can be changed while packets flow. Touches nothing
    /// yet: the next [`apply`](Self::apply) carries it out.
    ///
    /// # Errors
    /// [`BackendError::Config`] if the options make no sense; nothing is taken over then.
    fn reconfigure(&mut self, backend: &RawJson) -> Result<Reconfigured, BackendError> {
        let _ = backend;
        Ok(Reconfigured::default())
    }

    /// Resolves when something outside made the kernel's state differ (a device, route, neighbour
    /// or rule changed or went away) or a retry is due. Cancel-safe.
    async fn changed(&mut self);

    /// The MTU for pods, in bytes: goes to `subnet.env`.
    fn mtu(&self) -> u32;

    /// UDP port of the outer packets, if the backend wraps packets into such.
    fn tunnel_port(&self) -> Option<u16> {
        None
    }

    /// What `/status` and the `status` command show of this backend.
    fn status(&self) -> serde_json::Value;

    /// What is to be done when the agent is told to stop; run after the backend is gone. Bounded
    /// in time. Nothing unless a user asked for it: forwarding outlives the agent.
    fn farewell(&self) -> Option<Farewell> {
        None
    }
}
