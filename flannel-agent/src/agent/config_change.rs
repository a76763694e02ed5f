//! A network configuration that changes while the agent runs: what can be changed while packets
//! flow is taken over, the rest is told.

use tracing::{info, warn};

use super::Agent;
use crate::{backend::BackendError, config::NetworkConfig, peer_table::Changed};

impl Agent {
    /// Takes in what the store's configuration is now, or why it cannot be used. Tells what there
    /// is to be applied.
    pub(super) fn take_config(&mut self, read: Result<NetworkConfig, String>) -> Changed {
        let (changed, rest) = match read.and_then(|new| self.adopt_config(&new)) {
            Ok((changed, rest)) if rest.is_empty() => (changed, None),
            Ok((changed, rest)) => {
                let rest = rest.join("; ");
                let note = format!(
                    "the network configuration has changed; a restart is needed for {rest}"
                );
                (changed, Some(note))
            }
            Err(reason) => (
                Changed::Nothing,
                Some(format!("{reason}; the network configuration in use stays")),
            ),
        };
        if self.state.set_config_change(rest.clone()) {
            if let Some(note) = rest {
                warn!("{note}");
            } else {
                info!("the network configuration is the one in use again");
            }
        }
        changed
    }

    /// Takes over what can be; returns what is left that a restart is needed for.
    fn adopt_config(&mut self, new: &NetworkConfig) -> Result<(Changed, Vec<String>), String> {
        let mut changed = Changed::Nothing;
        if new.backend_type == self.config.backend_type {
            let taken = self.backend.reconfigure(&new.backend).map_err(|error| match error {
                BackendError::Config(reason) | BackendError::Kernel(reason) => {
                    format!("network configuration: {reason}")
                }
            })?;
            let mixed = self.config.with_backend_options(new, taken.options);
            if taken.differs {
                let differences = self.config.differences(&mixed).join("; ");
                info!("the network configuration has changed; taken over: {differences}");
                changed = Changed::Everything;
            }
            self.config = mixed;
        }
        Ok((changed, self.config.differences(new)))
    }
}
