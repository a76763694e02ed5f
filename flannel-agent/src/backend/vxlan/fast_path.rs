//! The eBPF programs beside the kernel's device: which rung of the ladder is in use, and why not
//! the one above.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    path::PathBuf,
};

use serde_json::{Value, json};
use tracing::{error, info, warn};

use crate::{
    datapath::ebpf::{AttachMode, EbpfDatapath, EbpfOptions, FastPathWanted, PeerEntry},
    lease::{LeaseAttributes, Subnets},
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

    /// Makes the maps equal to what is wanted for these outer addresses; `None` removes one. All
    /// else has to be as [`apply`](Self::apply) left it.
    ///
    /// # Errors
    /// As `apply`.
    pub fn apply_peers(&mut self, changed: &[(IpAddr, Option<Subnets>)]) -> Result<usize, String> {
        match self {
            Self::On(datapath) => datapath.apply_peers(changed).map_err(|err| err.to_string()),
            Self::Pending | Self::Off(_) => Ok(0),
        }
    }

    /// Whether there were more peers than the programs can know: one that goes makes room for
    /// another.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::On(datapath) if datapath.left_out() > 0)
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

/// The peers as the programs know them: by the address they send from. Of leases that share one
/// (nodes behind a NAT, a node with two subnets) the first counts.
#[derive(Debug, Default)]
pub struct Senders {
    of: HashMap<Subnets, [Option<IpAddr>; 2]>,
    at: BTreeMap<IpAddr, BTreeSet<Subnets>>,
}

impl Senders {
    /// Takes in all peers; returns the whole list.
    pub fn list(&mut self, peers: &PeerTable) -> Vec<PeerEntry> {
        *self = Self::default();
        let mut touched = BTreeSet::new();
        for (subnets, attributes) in peers.peers() {
            self.enter(*subnets, attributes, &mut touched);
        }
        self.at
            .iter()
            .filter_map(|(outer, all)| Some(PeerEntry { outer: *outer, subnets: *all.first()? }))
            .collect()
    }

    /// Takes in the peers that changed; returns what became of the addresses that this concerns.
    pub fn update(
        &mut self,
        peers: &PeerTable,
        changed: &BTreeSet<Subnets>,
    ) -> Vec<(IpAddr, Option<Subnets>)> {
        let mut touched = BTreeSet::new();
        for subnets in changed {
            for outer in self.of.remove(subnets).into_iter().flatten().flatten() {
                touched.insert(outer);
                if let Some(all) = self.at.get_mut(&outer) {
                    all.remove(subnets);
                    if all.is_empty() {
                        self.at.remove(&outer);
                    }
                }
            }
            if let Some(attributes) = peers.peer(subnets) {
                self.enter(*subnets, attributes, &mut touched);
            }
        }
        let first = |outer: &IpAddr| self.at.get(outer)?.first().copied();
        touched.into_iter().map(|outer| (outer, first(&outer))).collect()
    }

    fn enter(
        &mut self,
        subnets: Subnets,
        attributes: &LeaseAttributes,
        touched: &mut BTreeSet<IpAddr>,
    ) {
        let addresses =
            [attributes.public_ip.map(Into::into), attributes.public_ipv6.map(Into::into)];
        for outer in addresses.into_iter().flatten() {
            self.at.entry(outer).or_default().insert(subnets);
            touched.insert(outer);
        }
        self.of.insert(subnets, addresses);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        lease::Lease,
        peer_table::{Changed, LeaseChange, PeerUpdate},
    };

    fn lease(n: u8, ip: u8) -> Lease {
        let v4 = format!("10.77.{n}.0/24").parse().ok();
        let public_ip = (ip > 0).then_some([192, 0, 2, ip].into());
        let attributes = LeaseAttributes { public_ip, ..Default::default() };
        Lease { subnets: Subnets { v4, v6: None }, attributes }
    }

    proptest! {
        /// Change by change the programs are told what they would be told all at once.
        #[test]
        fn updates_add_up_to_the_list(changes in prop::collection::vec((0_u8..6, 0_u8..4), 0..40)) {
            let mut table = PeerTable::new();
            table.apply(PeerUpdate::Snapshot(Vec::new()));
            let mut senders = Senders::default();
            let mut told: BTreeMap<IpAddr, Subnets> = BTreeMap::new();
            for (n, ip) in changes {
                let lease = lease(n, ip);
                let change = if ip == 3 {
                    LeaseChange::Removed(lease.subnets)
                } else {
                    LeaseChange::Put(lease)
                };
                let Changed::Peers(changed) = table.apply(PeerUpdate::Changes(vec![change]))
                else { continue };
                for (outer, subnets) in senders.update(&table, &changed) {
                    match subnets {
                        Some(subnets) => drop(told.insert(outer, subnets)),
                        None => drop(told.remove(&outer)),
                    }
                }
            }
            let all = Senders::default().list(&table);
            let all: BTreeMap<_, _> = all.into_iter().map(|e| (e.outer, e.subnets)).collect();
            prop_assert_eq!(told, all);
        }
    }
}
