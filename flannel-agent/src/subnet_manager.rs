//! Subnet managers: where leases live. One trait, one module per store.

pub mod acquire;
pub mod etcd;
pub mod kube;
pub mod local;

use std::time::SystemTime;

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::{
    config::NetworkConfig,
    lease::{Lease, LeaseAttributes, Subnets},
    peer_table::PeerUpdate,
};

/// Why a store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store does not answer, or answers with an error that may pass. Worth retrying.
    #[error("{0}")]
    Unavailable(String),
    /// There is no network configuration yet. Worth waiting for.
    #[error("{0}")]
    NoConfig(String),
    /// The network configuration cannot be used until somebody edits it. Worth waiting for.
    #[error("{0}")]
    BadConfig(String),
    /// No subnet can be leased now (all taken, or our claim was refused). Worth retrying.
    #[error("{0}")]
    NoLease(String),
    /// Wrong in a way that only a restart with other flags or files can mend.
    #[error("{0}")]
    Fatal(String),
}

/// What we ask of the store when we lease a subnet.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// What to publish with the lease. `public_ip` is also how an existing lease of ours is found.
    pub attributes: LeaseAttributes,
    /// The subnets of the previous run (from `subnet.env`) or of the lease just lost.
    pub previous: Subnets,
}

/// What a store has on record about this node, read before any device exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredIdentity {
    /// The attributes of our existing lease, if the store knows one.
    pub attributes: Option<LeaseAttributes>,
}

/// Addresses that the store tells this node to use in place of `--public-ip` and
/// `--public-ipv6`, as text (specification §2.5).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePublicAddresses {
    /// IPv4.
    pub v4: Option<String>,
    /// IPv6.
    pub v6: Option<String>,
}

/// A granted lease.
#[derive(Clone, Debug)]
pub struct GrantedLease {
    /// Our subnets and what was published.
    pub lease: Lease,
    /// When it ends unless renewed; `None` for a reservation or a store without expiry.
    pub expires: Option<SystemTime>,
}

/// What a running subnet manager tells the agent.
#[derive(Debug)]
pub enum StoreEvent {
    /// Leases of the cluster changed.
    Peers(PeerUpdate),
    /// Our lease was renewed until this time.
    Renewed {
        /// When it ends unless renewed again.
        expires: Option<SystemTime>,
    },
    /// Our lease is no longer ours: deleted, expired, or held by somebody else. The manager has
    /// stopped renewing it; the agent has to acquire again.
    Lost(LeaseLost),
    /// The store became reachable or unreachable; sent on every change, not on every try.
    Connection(Connection),
    /// The network configuration as it stands now, or why that one cannot be used. Sent by stores
    /// that watch it, whenever that is another answer than before.
    Config(Result<NetworkConfig, String>),
}

/// Why and to whom a lease was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseLost {
    /// The subnets we held.
    pub subnets: Subnets,
    /// What the store says about them now: `None` if nobody holds them.
    pub holder: Option<LeaseAttributes>,
}

/// Whether the store answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connection {
    /// It answers.
    Up,
    /// It does not; the text says what was tried and what came back.
    Down(String),
}

/// A place where leases live: etcd, the Kubernetes API, or a local directory.
///
/// All methods may be called again after an error. Retrying and its pauses are the caller's
/// business, except inside [`run`](Self::run), which never gives up.
#[async_trait(?Send)]
pub trait SubnetManager {
    /// Short name for logs and status: `etcd`, `kube`, `local`.
    fn kind(&self) -> &'static str;

    /// Reads and checks the network configuration.
    async fn network_config(&self) -> Result<NetworkConfig, StoreError>;

    /// Asks which public addresses this node is to use; only Kubernetes has an opinion.
    async fn node_public_addresses(&self) -> Result<NodePublicAddresses, StoreError> {
        Ok(NodePublicAddresses::default())
    }

    /// Finds what the store knows about the node with these public addresses.
    async fn stored_identity(&self, own: &LeaseAttributes) -> Result<StoredIdentity, StoreError>;

    /// Leases a subnet: takes over what is ours, else the previous one if free, else a new one.
    async fn acquire(
        &self,
        config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError>;

    /// Publishes changed attributes (a new MAC or address) with the lease we hold. Fails with
    /// [`StoreError::NoLease`] if the lease is no longer ours.
    async fn publish(&self, lease: &GrantedLease) -> Result<(), StoreError>;

    /// Is told, once, that all conditions of readiness have been met.
    fn network_is_up(&self) {}

    /// Watches all leases and keeps ours alive, telling everything through `events`.
    ///
    /// Runs until the receiver is dropped or until it has sent [`StoreEvent::Lost`]. Never
    /// returns because the store is away: it sends [`StoreEvent::Connection`] and tries on.
    async fn run(&self, lease: GrantedLease, events: mpsc::Sender<StoreEvent>);
}
