//! Promoting the flows of one family, and looking after those that are promoted.

use std::{
    collections::{BTreeSet, HashMap as StdHashMap, HashSet, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
};

use aya::{
    Pod,
    maps::{HashMap, MapData, MapError},
};
use flannel_common::flow::{Flow, Flow4Key, Flow6Key, FlowRules};

use super::flows::now;
use crate::netlink::conntrack::{Connection, Conntrack};

/// `BPF_EXIST`: an entry that has gone meanwhile stays gone.
const EXISTING: u64 = 2;

/// How many flows are looked after at a time: a few milliseconds.
const AT_A_TIME: usize = 512;

/// How many flows are remembered that conntrack did not know.
const UNTRACKED: usize = 4096;

/// A key as the connection that conntrack knows.
pub(super) trait FlowKey: Pod + Eq + std::hash::Hash {
    fn connection(&self) -> Connection;
}

impl FlowKey for Flow4Key {
    fn connection(&self) -> Connection {
        let ports = (self.local_port, self.remote_port);
        connection((self.local.into(), self.remote.into()), ports, self.protocol)
    }
}

impl FlowKey for Flow6Key {
    fn connection(&self) -> Connection {
        let ports = (self.local_port, self.remote_port);
        connection((self.local.into(), self.remote.into()), ports, self.protocol)
    }
}

fn connection(
    (local, remote): (IpAddr, IpAddr),
    (local_port, remote_port): ([u8; 2], [u8; 2]),
    protocol: u8,
) -> Connection {
    Connection {
        from: SocketAddr::new(local, u16::from_be_bytes(local_port)),
        to: SocketAddr::new(remote, u16::from_be_bytes(remote_port)),
        tcp: i32::from(protocol) == libc::IPPROTO_TCP,
    }
}

/// The flows of one family.
pub(super) struct Promoter<K> {
    map: HashMap<MapData, K, Flow>,
    /// Those that we promoted, the one looked at longest ago first.
    promoted: VecDeque<K>,
    /// How many were promoted since the start.
    promotions: u64,
    /// The same, to have each once.
    known: HashSet<K>,
    /// Those that conntrack did not know when they were offered, by when they began.
    untracked: StdHashMap<K, u64>,
}

impl<K: FlowKey> Promoter<K> {
    pub(super) fn new(map: HashMap<MapData, K, Flow>) -> Self {
        Self {
            map,
            promoted: VecDeque::new(),
            promotions: 0,
            known: HashSet::new(),
            untracked: StdHashMap::new(),
        }
    }

    /// Promotes a flow if it is proved and conntrack agrees. The error says why not.
    pub(super) fn promote(
        &mut self,
        key: &K,
        rules: &FlowRules,
        pods: &BTreeSet<u32>,
        conntrack: &mut Conntrack,
    ) -> Result<(), String> {
        let gone = |_| "it is gone".to_owned();
        let first = self.map.get(key, 0).map_err(gone)?;
        if !first.is_proved(now(), rules) {
            return Err("its proof is old".to_owned());
        }
        if !pods.contains(&first.pod_ifindex) {
            return Err(format!("interface {} is no pod's", first.pod_ifindex));
        }
        self.settle(key, first.born, conntrack)?;
        let flow = self.map.get(key, 0).map_err(gone)?;
        if flow.born != first.born || !flow.is_proved(now(), rules) {
            return Err("it has changed meanwhile".to_owned());
        }
        self.map.insert(key, flow.promoted(), EXISTING).map_err(gone)?;
        if self.known.insert(*key) {
            self.promotions += 1;
            self.promoted.push_back(*key);
        }
        Ok(())
    }

    /// Has conntrack say that the connection goes on as it is, and judge it liberally.
    fn settle(&mut self, key: &K, born: u64, conntrack: &mut Conntrack) -> Result<(), String> {
        let connection = key.connection();
        let failed = |error: io::Error| format!("conntrack: {error}");
        match conntrack.find(&connection).map_err(failed)? {
            Some(tracked) if !tracked.is_settled() => {
                Err(format!("conntrack has reservations: {tracked:?}"))
            }
            Some(tracked) => {
                self.untracked.remove(key);
                if tracked.liberal {
                    return Ok(());
                }
                conntrack.be_liberal(&connection).map_err(failed)
            }
            // Between two offers packets went through the stack. If something tracks, it had the
            // opportunity.
            None if self.untracked.get(key) == Some(&born) => Ok(()),
            None => {
                if self.untracked.len() >= UNTRACKED {
                    self.untracked.clear();
                }
                self.untracked.insert(*key, born);
                Err("conntrack does not know it; if it still does not, it is not in use".to_owned())
            }
        }
    }

    /// How many flows were promoted since the start.
    pub fn promotions(&self) -> u64 {
        self.promotions
    }

    /// Looks at some of the promoted flows. Their conntrack entry may have been flushed and made
    /// anew by a packet in the middle of the connection, or be the first one ever: it has to judge
    /// liberally, too. A connection that is ending, or rewritten, takes the stack.
    pub(super) fn look_after(&mut self, rules: &FlowRules, conntrack: &mut Conntrack) {
        for _ in 0..self.promoted.len().min(AT_A_TIME) {
            let Some(key) = self.promoted.pop_front() else { return };
            if !self.map.get(&key, 0).is_ok_and(|flow| flow.is_promoted(rules)) {
                self.known.remove(&key);
                continue;
            }
            let connection = key.connection();
            let good = match conntrack.find(&connection) {
                Ok(Some(tracked)) if tracked.altered || !tracked.open => false,
                Ok(Some(tracked)) => tracked.liberal || conntrack.be_liberal(&connection).is_ok(),
                Ok(None) => true,
                Err(_) => false,
            };
            if good {
                self.promoted.push_back(key);
                continue;
            }
            self.known.remove(&key);
            if let Err(error) = self.remove(&key) {
                tracing::warn!("flows: {error}");
            }
        }
    }

    /// Removes the flows of pods that are no longer there.
    pub(super) fn forget_strangers(&mut self, pods: &BTreeSet<u32>) -> Result<(), MapError> {
        let gone: Vec<K> = self
            .map
            .iter()
            .filter_map(Result::ok)
            // 0: nothing has been delivered yet.
            .filter(|(_, flow)| flow.pod_ifindex != 0 && !pods.contains(&flow.pod_ifindex))
            .map(|(key, _)| key)
            .collect();
        gone.iter().try_for_each(|key| self.remove(key))
    }

    fn remove(&mut self, key: &K) -> Result<(), MapError> {
        match self.map.remove(key) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
