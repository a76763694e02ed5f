//! The eBPF programs beside the kernel's device: which rung of the ladder is in use, and why not
//! the one above.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use serde_json::{Value, json};
use tracing::{error, info, warn};

use crate::{
    datapath::ebpf::{AttachMode, EbpfDatapath, EbpfOptions, FastPathWanted, PeerEntry},
    lease::Subnets,
    peer_table::PeerTable,
    telemetry::metrics::Metrics,
};

/// What the command line asks of the data path.
#[derive(Clone, Debug)]
pub struct FastPathConfig {
    /// Use eBPF if it can be had.
    pub enabled: bool,
    /// Somebody insisted on it: failing is an error in the log, though forwarding goes on.
    pub demanded: bool,
    /// Where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// Whether the programs log unknown senders.
    pub log: bool,
}

/// The programs, or why there are none.
pub enum FastPath {
    /// Not looked at yet: the kernel's path comes first.
    Pending,
    /// Loaded.
    On(Box<EbpfDatapath>),
    /// The kernel's device carries everything; the text says why.
    Off(String),
}

impl FastPath {
    /// Loads the programs. Never fails: what cannot be had is said once, and the kernel's path
    /// goes on.
    pub fn open(config: &FastPathConfig, device: &str, metrics: &Metrics) -> Self {
        metrics.datapath_ebpf.set(0);
        if !config.enabled {
            return Self::Off("--datapath kernel".to_owned());
        }
        let options = EbpfOptions {
            pin_dir: config.pin_dir.clone(),
            device: device.to_owned(),
            attach: AttachMode::Auto,
            log: config.log,
        };
        match EbpfDatapath::load(options) {
            Ok(datapath) => {
                metrics.datapath_ebpf.set(1);
                info!("eBPF programs loaded: they count what comes from each peer");
                Self::On(Box::new(datapath))
            }
            Err(reason) => {
                let text = format!(
                    "eBPF is not used: {reason}; the kernel's VXLAN device carries everything"
                );
                if config.demanded {
                    error!("--datapath ebpf: {text}");
                } else {
                    warn!("{text}");
                }
                Self::Off(reason.to_string())
            }
        }
    }

    /// Makes maps and attachments equal to what is wanted.
    ///
    /// # Errors
    /// A sentence about what could not be had. Nothing is lost by it but counters.
    pub fn apply(&mut self, wanted: &FastPathWanted) -> Result<usize, String> {
        match self {
            Self::On(datapath) => datapath.apply(wanted).map_err(|err| err.to_string()),
            Self::Pending | Self::Off(_) => Ok(0),
        }
    }

    /// For `status`: the mode in use and why not a better one.
    pub fn status(&self) -> Value {
        match self {
            Self::On(datapath) => {
                json!({"mode": "ebpf", "reason": "", "programs": datapath.status()})
            }
            Self::Pending => json!({"mode": "kernel", "reason": "still starting"}),
            Self::Off(reason) => json!({"mode": "kernel", "reason": reason}),
        }
    }
}

/// The peers as the programs know them: by the address they send from. Nodes that share one
/// (behind a NAT) are one sender.
pub fn entries(peers: &PeerTable) -> Vec<PeerEntry> {
    let mut by_address: BTreeMap<IpAddr, Subnets> = BTreeMap::new();
    for (subnets, attributes) in peers.peers() {
        let v4 = attributes.public_ip.map(IpAddr::from);
        let v6 = attributes.public_ipv6.map(IpAddr::from);
        for outer in v4.into_iter().chain(v6) {
            by_address.entry(outer).or_insert(*subnets);
        }
    }
    by_address.into_iter().map(|(outer, subnets)| PeerEntry { outer, subnets }).collect()
}
