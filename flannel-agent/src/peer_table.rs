//! The wanted set of peers, folded from what a store delivers.

use std::collections::{BTreeMap, BTreeSet};

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

/// Which peers an update made differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Changed {
    /// None.
    #[default]
    Nothing,
    /// These: new, changed or gone.
    Peers(BTreeSet<Subnets>),
    /// Any of them, or what all of them stand on.
    Everything,
}

impl Changed {
    /// Adds what another update made differ.
    pub fn and(&mut self, other: Self) {
        match (&mut *self, other) {
            (_, Self::Nothing) | (Self::Everything, _) => {}
            (Self::Peers(these), Self::Peers(those)) => these.extend(those),
            (_, other) => *self = other,
        }
    }
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

    /// Folds an update in. Tells which peers differ afterwards.
    pub fn apply(&mut self, update: PeerUpdate) -> Changed {
        match update {
            PeerUpdate::Snapshot(leases) => {
                let new: BTreeMap<_, _> =
                    leases.into_iter().map(|lease| (lease.subnets, lease.attributes)).collect();
                let changed = !self.synced || new != self.leases;
                self.leases = new;
                self.synced = true;
                if changed { Changed::Everything } else { Changed::Nothing }
            }
            PeerUpdate::Changes(changes) => {
                let mut changed = BTreeSet::new();
                for change in changes {
                    let (subnets, differs) = match change {
                        LeaseChange::Put(Lease { subnets, attributes }) => {
                            let differs = self.leases.get(&subnets) != Some(&attributes);
                            if differs {
                                self.leases.insert(subnets, attributes);
                            }
                            (subnets, differs)
                        }
                        LeaseChange::Removed(subnets) => {
                            (subnets, self.leases.remove(&subnets).is_some())
                        }
                    };
                    if differs && self.own != Some(subnets) {
                        changed.insert(subnets);
                    }
                }
                if changed.is_empty() { Changed::Nothing } else { Changed::Peers(changed) }
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

    /// The lease of this peer; `None` for our own and for none.
    pub fn peer(&self, subnets: &Subnets) -> Option<&LeaseAttributes> {
        self.leases.get(subnets).filter(|_| self.own != Some(*subnets))
    }

    /// How many peers there are.
    pub fn len(&self) -> usize {
        let own = self.own.is_some_and(|own| self.leases.contains_key(&own));
        self.leases.len() - usize::from(own)
    }

    /// Whether there is no peer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(n: u8, ip: u8) -> Lease {
        let v4 = format!("10.77.{n}.0/24").parse().ok();
        let attributes =
            LeaseAttributes { public_ip: Some([192, 0, 2, ip].into()), ..Default::default() };
        Lease { subnets: Subnets { v4, v6: None }, attributes }
    }

    fn put(table: &mut PeerTable, n: u8, ip: u8) -> Changed {
        table.apply(PeerUpdate::Changes(vec![LeaseChange::Put(lease(n, ip))]))
    }

    #[test]
    fn an_update_tells_which_peers_differ() {
        let mut table = PeerTable::new();
        table.set_own(Some(lease(1, 1).subnets));
        let all = PeerUpdate::Snapshot(vec![lease(1, 1), lease(2, 2)]);
        assert_eq!(table.apply(all.clone()), Changed::Everything);
        assert_eq!(table.apply(all), Changed::Nothing);
        assert_eq!(put(&mut table, 2, 2), Changed::Nothing);
        assert_eq!(put(&mut table, 1, 9), Changed::Nothing, "our own is no peer");
        let three = lease(3, 3).subnets;
        assert_eq!(put(&mut table, 3, 3), Changed::Peers([three].into()));
        assert_eq!((table.len(), table.peers().count()), (2, 2));
        assert_eq!(table.peer(&lease(1, 1).subnets), None);
        let gone = PeerUpdate::Changes(vec![LeaseChange::Removed(three)]);
        assert_eq!(table.apply(gone.clone()), Changed::Peers([three].into()));
        assert_eq!(table.apply(gone), Changed::Nothing);
    }

    #[test]
    fn changes_add_up() {
        let (one, two) = (lease(1, 1).subnets, lease(2, 2).subnets);
        let mut changed = Changed::Nothing;
        changed.and(Changed::Nothing);
        assert_eq!(changed, Changed::Nothing);
        changed.and(Changed::Peers([one].into()));
        changed.and(Changed::Peers([two].into()));
        assert_eq!(changed, Changed::Peers([one, two].into()));
        changed.and(Changed::Everything);
        changed.and(Changed::Peers([one].into()));
        assert_eq!(changed, Changed::Everything);
    }
}
