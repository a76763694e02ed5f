//! Leases in Kubernetes: a node's subnet is its `podCIDR`, its attributes are annotations
//! (specification §5).

mod annotations;
mod api;
mod config_file;
mod credentials;
mod failure;
mod lines;
mod node;
mod node_table;
mod own_node;
mod watch;

use std::{
    cell::{Cell, OnceCell, RefCell},
    path::PathBuf,
    rc::Rc,
};

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc};

pub use self::own_node::NodeIdentity;
use self::{
    annotations::AnnotationNames, api::Api, config_file::ConfigFile, credentials::Credentials,
    own_node::OwnNode,
};
use super::{
    GrantedLease, LeaseRequest, NodePublicAddresses, StoreError, StoreEvent, StoredIdentity,
    SubnetManager,
};
use crate::{config::NetworkConfig, lease::LeaseAttributes, telemetry::metrics::Metrics};

/// How the API server is reached and what is done with our node.
#[derive(Clone, Debug)]
pub struct KubeOptions {
    /// URL of the API server; empty for the one that the credentials name.
    pub api_url: String,
    /// kubeconfig file; empty for the pod's service account.
    pub kubeconfig: PathBuf,
    /// Prefix of the annotations, as given by the user.
    pub annotation_prefix: String,
    /// `net-conf.json`.
    pub net_config_path: PathBuf,
    /// Whether the node's condition `NetworkUnavailable` is set to false when all is up.
    pub set_network_unavailable: bool,
    /// Who we are.
    pub node: NodeIdentity,
}

/// The subnet manager that finds leases in the nodes of a Kubernetes cluster.
///
/// As that of etcd it does not log connection state: [`StoreEvent::Connection`] and
/// [`StoreError`] carry the text, and who calls knows whether it is news.
pub struct KubeSubnetManager {
    api: Api,
    names: AnnotationNames,
    identity: NodeIdentity,
    node_name: OnceCell<String>,
    config_file: ConfigFile,
    /// The configuration in use; what stands in the file by now may differ.
    config: RefCell<Option<Rc<NetworkConfig>>>,
    set_network_unavailable: bool,
    own: RefCell<OwnNode>,
    /// Our node, or what we want of it, has changed.
    own_changed: Notify,
    /// All conditions of readiness have been met once.
    network_up: Cell<bool>,
    metrics: Metrics,
}

impl KubeSubnetManager {
    /// Checks the options; contacts nobody.
    ///
    /// # Errors
    /// [`StoreError::Fatal`] for an annotation prefix that is none.
    pub fn new(options: KubeOptions, metrics: Metrics) -> Result<Self, StoreError> {
        let credentials = Credentials { api_url: options.api_url, kubeconfig: options.kubeconfig };
        Ok(Self {
            api: Api::new(credentials),
            names: AnnotationNames::new(&options.annotation_prefix)?,
            identity: options.node,
            node_name: OnceCell::new(),
            config_file: ConfigFile::new(options.net_config_path),
            config: RefCell::default(),
            set_network_unavailable: options.set_network_unavailable,
            own: RefCell::default(),
            own_changed: Notify::new(),
            network_up: Cell::new(false),
            metrics,
        })
    }

    fn config_in_use(&self) -> Result<Rc<NetworkConfig>, StoreError> {
        self.config.borrow().clone().ok_or_else(|| {
            StoreError::NoConfig("the network configuration has not been read yet".to_owned())
        })
    }
}

#[async_trait(?Send)]
impl SubnetManager for KubeSubnetManager {
    fn kind(&self) -> &'static str {
        "kube"
    }

    async fn network_config(&self) -> Result<NetworkConfig, StoreError> {
        let config = self.config_file.read()?;
        *self.config.borrow_mut() = Some(Rc::new(config.clone()));
        Ok(config)
    }

    async fn node_public_addresses(&self) -> Result<NodePublicAddresses, StoreError> {
        let text = self.own_node_again().await?;
        Ok(self.names.node_public_addresses(&self.parse_own(&text)?))
    }

    async fn stored_identity(&self, own: &LeaseAttributes) -> Result<StoredIdentity, StoreError> {
        let text = self.own_node_again().await?;
        let node = self.parse_own(&text)?;
        if self.names.missing(own, &node).is_empty() {
            // The same as ours, in spite of an address that peers are told instead of ours.
            return Ok(StoredIdentity { attributes: Some(own.clone()) });
        }
        let (attributes, _) = self.names.read(&node);
        let known = attributes.backend_data.is_some() || attributes.backend_v6_data.is_some();
        Ok(StoredIdentity { attributes: known.then_some(attributes) })
    }

    async fn acquire(
        &self,
        _config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError> {
        self.claim_pod_cidrs(&request.attributes).await
    }

    async fn publish(&self, lease: &GrantedLease) -> Result<(), StoreError> {
        self.publish_attributes(&lease.lease).await
    }

    fn network_is_up(&self) {
        self.network_up.set(true);
        self.own_changed.notify_one();
    }

    async fn run(&self, lease: GrantedLease, events: mpsc::Sender<StoreEvent>) {
        self.hold(lease.lease.clone());
        let lost = tokio::select! {
            lost = self.follow(&lease.lease, &events) => lost,
            () = self.tend_own_node() => None,
            () = self.watch_config(&events) => None,
            () = events.closed() => None,
        };
        self.let_go();
        if let Some(lost) = lost {
            // A receiver that is gone does not want to know.
            let _ = events.send(StoreEvent::Lost(lost)).await;
        }
    }
}
