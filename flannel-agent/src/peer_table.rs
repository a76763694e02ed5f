//! The wanted set of peers, folded from what a store delivers.

use std::collections::BTreeMap;

use crate::lease::{Lease, LeaseAttributes, Subnets};

/// What a subnet manager learnt about the leases in its store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerUpdate {
    /// The complete set of leases, our own among them. Whatever is not in it is gone.
    Snapshot(Vec<Lease>),
    /// Single changes in the order in which the store made them.
    Changes(Vec<LeaseChange>),
}

/// One change of one lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseChange {
    /// The lease is new or its attributes changed.
    Put(Lease),
    /// The lease was deleted or has expired.
    Removed(Subnets),
}

/// All leases of the cluster, keyed by subnet.
///
/// [`peers`](Self::peers) leaves our own out. Until the first snapshot has come the table is
/// not [`synced`](Self::synced), and nothing may be removed from the kernel on its account.
#[derive(Clone, Debug, Default)]
pub struct PeerTable {
    leases: BTreeMap<Subnets, LeaseAttributes>,
    own: Option<Subnets>,
    synced: bool,
}

impl PeerTable {
    /// An empty table that has seen no snapshot.
    pub fn new() -> Self {
        Self::default()
    }

    /// Says which lease is ours, so that it never counts as a peer.
    pub fn set_own(&mut self, own: Option<Subnets>) {
        self.own = own;
    }

    /// Folds an update in. Returns whether the set of peers differs afterwards.
    pub fn apply(&mut self, update: PeerUpdate) -> bool {
        match update {
            PeerUpdate::Snapshot(leases) => {
                let new: BTreeMap<_, _> =
                    leases.into_iter().map(|lease| (lease.subnets, lease.attributes)).collect();
                let changed = !self.synced || new != self.leases;
                self.leases = new;
                self.synced = true;
                changed
            }
            PeerUpdate::Changes(changes) => {
                let mut changed = false;
                for change in changes {
                    changed |= match change {
                        LeaseChange::Put(Lease { subnets, attributes }) => {
                            self.leases.get(&subnets) != Some(&attributes) && {
                                self.leases.insert(subnets, attributes);
                                self.own != Some(subnets)
                            }
                        }
                        LeaseChange::Removed(subnets) => {
                            self.leases.remove(&subnets).is_some() && self.own != Some(subnets)
                        }
                    };
                }
                changed
            }
        }
    }

    /// Whether a complete snapshot has been folded in.
    pub fn synced(&self) -> bool {
        self.synced
    }

    /// All leases but our own, in the order of their subnets.
    pub fn peers(&self) -> impl Iterator<Item = (&Subnets, &LeaseAttributes)> {
        self.leases.iter().filter(|(subnets, _)| self.own != Some(**subnets))
    }
}
