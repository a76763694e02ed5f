//! Leases in etcd v3 (specification §4).

mod claim;
mod client;
mod connect;
mod endpoint;
mod failure;
mod held;
mod lease_keeper;
pub mod migrate;
mod registry;
mod v2;
mod watch;

use std::{cell::RefCell, path::PathBuf, time::Duration};

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc};

pub use self::endpoint::Password;
use self::{
    client::EtcdClient,
    connect::Access,
    held::{Held, Term},
    registry::{Keys, Listing, Registry, Version},
};
use super::{GrantedLease, LeaseRequest, StoreError, StoreEvent, StoredIdentity, SubnetManager};
use crate::{
    config::NetworkConfig,
    lease::{Lease, LeaseAttributes, Subnets},
    telemetry::metrics::Metrics,
};

/// How etcd is reached and how long leases last.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// Endpoint URLs; an entry may itself be a comma list. `https://` is TLS, `http://` is not,
    /// and without a scheme it is TLS if any TLS file is given.
    pub endpoints: Vec<String>,
    /// Key prefix, such as `/coreos.com/network`.
    pub prefix: String,
    /// Key of our client certificate, PEM.
    pub keyfile: Option<PathBuf>,
    /// Our client certificate, PEM.
    pub certfile: Option<PathBuf>,
    /// The CAs that may have signed etcd's certificate, PEM; the system's if `None`.
    pub cafile: Option<PathBuf>,
    /// User for etcd's authentication.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<Password>,
    /// How long a lease lasts without renewal; real flannel uses 24 h. Whole seconds.
    pub lease_ttl: Duration,
    /// How long before its end a lease is renewed.
    pub renew_margin: Duration,
}

/// The subnet manager that keeps leases in etcd.
///
/// Does not log connection state: [`StoreEvent::Connection`] and [`StoreError`] carry the text,
/// and who calls knows whether it is news.
pub struct EtcdSubnetManager {
    registry: Registry,
    lease_ttl: Duration,
    renew_margin: Duration,
    held: RefCell<Option<Held>>,
    held_changed: Notify,
    /// The list of leases that was made last, so that start-up needs one and not three.
    recent: RefCell<Option<Listing>>,
    /// The loss of a subnet to somebody else that was reported last: told once, not per try.
    reported: RefCell<Option<(Subnets, Lease)>>,
}

impl EtcdSubnetManager {
    /// Checks the options; contacts nobody.
    ///
    /// # Errors
    /// [`StoreError::Fatal`] for unusable endpoint URLs, unreadable TLS files, and a password
    /// without a user.
    pub fn new(options: EtcdOptions, metrics: Metrics) -> Result<Self, StoreError> {
        let Access { endpoints, tls, user } = connect::access(&options)?;
        let EtcdOptions { prefix, lease_ttl, renew_margin, .. } = options;
        let client = EtcdClient::new(endpoints, tls, user, metrics.clone());
        Ok(Self {
            registry: Registry::new(client, Keys::new(&prefix), metrics),
            lease_ttl,
            renew_margin,
            held: RefCell::default(),
            held_changed: Notify::new(),
            recent: RefCell::default(),
            reported: RefCell::default(),
        })
    }
}

#[async_trait(?Send)]
impl SubnetManager for EtcdSubnetManager {
    fn kind(&self) -> &'static str {
        "etcd"
    }

    async fn network_config(&self) -> Result<NetworkConfig, StoreError> {
        let key = &self.registry.keys.config;
        let Some(value) = self.registry.config().await? else {
            return Err(StoreError::NoConfig(format!(
                "there is no network configuration at etcd key {key} ({}): write it with the v3 \
                 API (`etcdctl put {key} …`; what was written with the v2 API is not visible to \
                 v3), or correct -etcd-prefix",
                self.registry.client.endpoints()
            )));
        };
        let bad = |why: String| StoreError::BadConfig(format!("etcd key {key}: {why}"));
        let text = String::from_utf8(value)
            .map_err(|_| bad("the network configuration is not UTF-8 text".to_owned()))?;
        let config = NetworkConfig::parse(&text).map_err(|error| bad(error.to_string()))?;
        if config.ipv4.is_none() {
            return Err(bad(
                "EnableIPv4 is false, but leases in etcd need IPv4: set it to true (dual stack), \
                 or use Kubernetes as store"
                    .to_owned(),
            ));
        }
        Ok(config)
    }

    async fn stored_identity(&self, own: &LeaseAttributes) -> Result<StoredIdentity, StoreError> {
        let listing = self.registry.list().await?;
        let attributes = own.public_ip.and_then(|ip| {
            let mine = listing.known.iter().find(|k| k.lease.attributes.public_ip == Some(ip))?;
            Some(mine.lease.attributes.clone())
        });
        *self.recent.borrow_mut() = Some(listing);
        Ok(StoredIdentity { attributes })
    }

    async fn acquire(
        &self,
        config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError> {
        self.claim(config, request).await
    }

    async fn publish(&self, lease: &GrantedLease) -> Result<(), StoreError> {
        let subnets = lease.lease.subnets;
        match self.held.borrow_mut().as_mut() {
            Some(held) if held.lease.subnets == subnets => {
                let addresses = |of: &LeaseAttributes| (of.public_ip, of.public_ipv6);
                if addresses(&held.lease.attributes) != addresses(&lease.lease.attributes) {
                    self.registry.client.renew();
                }
                held.lease.attributes = lease.lease.attributes.clone();
            }
            _ => return Err(StoreError::NoLease(format!("we do not hold the lease of {subnets}"))),
        }
        self.write_attributes().await
    }

    async fn run(&self, lease: GrantedLease, events: mpsc::Sender<StoreEvent>) {
        let lease = lease.lease;
        let held = self.held.borrow().as_ref().map(|held| held.lease.subnets);
        if held != Some(lease.subnets) {
            // Not what we acquired last: the first list will tell what there is.
            let nothing_seen = Version { mod_revision: 0, etcd_lease: 0 };
            *self.held.borrow_mut() = Some(Held::new(lease, nothing_seen, Term::Reservation));
            *self.recent.borrow_mut() = None;
        }
        let lost = tokio::select! {
            lost = self.follow(&events) => lost,
            lost = self.keep(&events) => lost,
            () = events.closed() => None,
        };
        *self.held.borrow_mut() = None;
        if let Some(lost) = lost {
            // A receiver that is gone does not want to know.
            let _ = events.send(StoreEvent::Lost(lost)).await;
        }
    }
}
