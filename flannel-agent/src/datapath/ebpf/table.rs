//! Maps that follow a wanted content, changed only where they differ.

use std::{collections::BTreeMap, hash::Hash};

use aya::{
    Pod,
    maps::{HashMap, LpmTrie, MapData, MapError, lpm_trie::Key},
};
use flannel_common::map::{Lease, Vtep, VtepKey};

/// A map with keys and values.
pub(super) trait Store {
    type Key: Copy + Ord;
    type Value: Copy;
    fn entries(&self) -> Result<BTreeMap<Self::Key, Self::Value>, MapError>;
    fn insert(&mut self, key: &Self::Key, value: &Self::Value) -> Result<(), MapError>;
    fn remove(&mut self, key: &Self::Key) -> Result<(), MapError>;
    /// Whether an entry is as wanted, whatever the programs have noted in it.
    fn same(found: &Self::Value, wanted: &Self::Value) -> bool;
}

/// A store and what is in it.
pub(super) struct Table<S: Store> {
    store: S,
    known: BTreeMap<S::Key, S::Value>,
}

impl<S: Store> Table<S> {
    /// Takes over what is there.
    pub(super) fn adopt(store: S) -> Result<Self, MapError> {
        let known = store.entries()?;
        Ok(Self { store, known })
    }

    /// Makes the content equal to this; returns the number of changes. Nobody misses an entry
    /// meanwhile that is wanted before and after.
    pub(super) fn apply(&mut self, wanted: &BTreeMap<S::Key, S::Value>) -> Result<usize, MapError> {
        let mut changes = 0;
        let gone: Vec<_> =
            self.known.keys().filter(|key| !wanted.contains_key(key)).copied().collect();
        for key in gone {
            match self.store.remove(&key) {
                // Somebody else removed it.
                Ok(()) | Err(MapError::KeyNotFound) => (),
                Err(error) => return Err(error),
            }
            self.known.remove(&key);
            changes += 1;
        }
        for (key, value) in wanted {
            if self.known.get(key).is_some_and(|found| S::same(found, value)) {
                continue;
            }
            self.store.insert(key, value)?;
            self.known.insert(*key, *value);
            changes += 1;
        }
        Ok(changes)
    }

    /// How many entries there are.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

impl Store for HashMap<MapData, VtepKey, Vtep> {
    type Key = VtepKey;
    type Value = Vtep;

    fn entries(&self) -> Result<BTreeMap<VtepKey, Vtep>, MapError> {
        self.iter().collect()
    }

    fn insert(&mut self, key: &VtepKey, value: &Vtep) -> Result<(), MapError> {
        self.insert(key, value, 0)
    }

    fn remove(&mut self, key: &VtepKey) -> Result<(), MapError> {
        self.remove(key)
    }

    fn same(found: &Vtep, wanted: &Vtep) -> bool {
        found.remote == wanted.remote
    }
}

/// A prefix as it sorts: address, length.
pub(super) type Prefix<A> = (A, u32);

impl<A: Pod + Ord + Hash> Store for LpmTrie<MapData, A, Lease> {
    type Key = Prefix<A>;
    type Value = Lease;

    fn entries(&self) -> Result<BTreeMap<Prefix<A>, Lease>, MapError> {
        let sortable = |entry: Result<(Key<A>, Lease), MapError>| {
            entry.map(|(key, lease)| ((key.data(), key.prefix_len()), lease))
        };
        self.iter().map(sortable).collect()
    }

    fn insert(&mut self, (address, len): &Prefix<A>, value: &Lease) -> Result<(), MapError> {
        self.insert(&Key::new(*len, *address), value, 0)
    }

    fn remove(&mut self, (address, len): &Prefix<A>) -> Result<(), MapError> {
        self.remove(&Key::new(*len, *address))
    }

    fn same(found: &Lease, wanted: &Lease) -> bool {
        found == wanted
    }
}
