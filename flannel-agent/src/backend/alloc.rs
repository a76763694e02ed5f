//! The alloc backend: specification §7.7. Leases a subnet and moves no packets: something else
//! connects the nodes, a cloud's router for example.

use std::net::Ipv4Addr;

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{ApplyReport, Backend, BackendError, interface_mtu::InterfaceMtu};
use crate::{
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes},
    peer_table::PeerTable,
};

/// The backend.
pub struct AllocBackend {
    public_ip: Option<Ipv4Addr>,
    mtu: InterfaceMtu,
}

impl AllocBackend {
    /// Opens the netlink sockets: the interface's MTU is followed.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if netlink is refused.
    pub fn new(external: &ExternalInterface) -> Result<Self, BackendError> {
        Ok(Self { public_ip: external.public_ip, mtu: InterfaceMtu::new(external)? })
    }
}

#[async_trait(?Send)]
impl Backend for AllocBackend {
    fn name(&self) -> &'static str {
        "alloc"
    }

    async fn prepare(&mut self, _stored: Option<&LeaseAttributes>) -> Result<(), BackendError> {
        Ok(())
    }

    fn attributes(&self) -> LeaseAttributes {
        LeaseAttributes { public_ip: self.public_ip, ..LeaseAttributes::default() }
    }

    async fn apply(&mut self, _own: &Lease, _peers: &PeerTable) -> ApplyReport {
        ApplyReport {
            problems: self.mtu.refresh().err().into_iter().collect(),
            ..ApplyReport::default()
        }
    }

    async fn changed(&mut self) {
        self.mtu.changed().await;
    }

    fn mtu(&self) -> u32 {
        self.mtu.get()
    }

    fn status(&self) -> Value {
        json!({ "interface": { "name": self.mtu.name(), "mtu": self.mtu.get() } })
    }
}
