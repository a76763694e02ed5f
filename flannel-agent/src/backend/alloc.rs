//! The alloc backend: specification §7.7. Leases a subnet and moves no packets: something else
//! connects the nodes, a cloud's router for example.

use async_trait::async_trait;
use serde_json::{Value, json};
use tracing::debug;

use super::{ApplyReport, Backend, BackendError};
use crate::{
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes},
    netlink::mirror::{Mirror, Scope},
    peer_table::PeerTable,
};

/// The backend.
pub struct AllocBackend {
    external: ExternalInterface,
    mirror: Mirror,
    mtu: u32,
}

impl AllocBackend {
    /// Opens the netlink sockets: the interface's MTU is followed.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if netlink is refused.
    pub fn new(external: ExternalInterface) -> Result<Self, BackendError> {
        let mirror = Mirror::open(Scope::default())
            .map_err(|err| BackendError::Kernel(format!("cannot open netlink sockets: {err}")))?;
        Ok(Self { mtu: external.mtu, external, mirror })
    }

    fn interface_mtu(&self) -> Option<u32> {
        self.mirror.tables().link(&self.external.name).map(|link| link.mtu)
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
        LeaseAttributes { public_ip: self.external.public_ip, ..LeaseAttributes::default() }
    }

    async fn apply(&mut self, _own: &Lease, _peers: &PeerTable) -> ApplyReport {
        let mut report = ApplyReport::default();
        if let Err(err) = self.mirror.refresh() {
            report.problems.push(format!("cannot read the kernel's links: {err}"));
        }
        // Without the interface the subnet stays ours, and pods keep the MTU they have.
        self.mtu = self.interface_mtu().unwrap_or(self.mtu);
        report
    }

    async fn changed(&mut self) {
        loop {
            self.mirror.readable().await;
            match self.mirror.refresh() {
                Ok(_) if self.interface_mtu().is_some_and(|mtu| mtu != self.mtu) => return,
                Ok(_) => {}
                Err(err) => {
                    debug!("reading the kernel's links: {err}");
                    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                }
            }
        }
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn status(&self) -> Value {
        json!({ "interface": { "name": self.external.name, "mtu": self.interface_mtu() } })
    }
}
