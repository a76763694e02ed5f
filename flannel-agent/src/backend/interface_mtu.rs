//! The external interface's MTU, followed: all that backends without a device of their own need
//! of the kernel.

use std::time::Duration;

use tracing::debug;

use super::BackendError;
use crate::{
    external_interface::ExternalInterface,
    netlink::mirror::{Mirror, Scope},
};

/// Pause before another try when the kernel did not answer.
const RETRY: Duration = Duration::from_secs(1);

/// The MTU and the socket that tells of its changes.
pub struct InterfaceMtu {
    name: String,
    mirror: Mirror,
    mtu: u32,
}

impl InterfaceMtu {
    /// The MTU as found at start.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if netlink is refused.
    pub fn new(external: &ExternalInterface) -> Result<Self, BackendError> {
        let mirror = Mirror::open(Scope::default())
            .map_err(|err| BackendError::Kernel(format!("cannot open netlink sockets: {err}")))?;
        Ok(Self { name: external.name.clone(), mirror, mtu: external.mtu })
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The MTU in bytes as of the last [`refresh`](Self::refresh). Without the interface it stays.
    pub fn get(&self) -> u32 {
        self.mtu
    }

    /// Takes in what was heard.
    ///
    /// # Errors
    /// A sentence if the kernel does not tell.
    pub fn refresh(&mut self) -> Result<(), String> {
        let heard = self.mirror.refresh();
        heard.map_err(|err| format!("cannot read the kernel's links: {err}"))?;
        self.mtu = self.now().unwrap_or(self.mtu);
        Ok(())
    }

    fn now(&self) -> Option<u32> {
        self.mirror.tables().link(&self.name).map(|link| link.mtu)
    }

    /// Resolves when the MTU is another one. Cancel-safe.
    pub async fn changed(&mut self) {
        loop {
            self.mirror.readable().await;
            match self.mirror.refresh() {
                Ok(_) if self.now().is_some_and(|mtu| mtu != self.mtu) => return,
                Ok(_) => {}
                Err(err) => {
                    debug!("reading the kernel's links: {err}");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}
