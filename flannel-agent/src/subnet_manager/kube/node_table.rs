//! Which node leases which subnet, folded from what the API server says about the nodes.
//!
//! Kubernetes gives a subnet to one node, yet for a moment two nodes may have it: the new one is
//! seen before the old one is gone. Each family is decided by itself: the subnet belongs to the
//! node made last, and when that goes, to the one that is left.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
};

use ipnet::{Ipv4Net, Ipv6Net};
use tracing::{info, warn};

use super::{annotations::AnnotationNames, node::Node};
use crate::{
    config::NetworkConfig,
    lease::{Lease, Subnets},
    peer_table::LeaseChange,
};

/// Nodes gone of which the version is remembered, against events that come late.
const REMEMBERED: usize = 1024;

/// What a node asks for, if flannel has it in its care.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Claim {
    name: Box<str>,
    /// `metadata.resourceVersion` if it is a number, as it is everywhere so far.
    version: Option<u64>,
    created: Box<str>,
    lease: Option<Lease>,
    problems: Vec<String>,
}

/// Which of a node's subnets may be leases: those enabled and not our own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    v4: bool,
    v6: bool,
    own: Subnets,
}

impl Scope {
    pub(super) fn new(config: &NetworkConfig, own: Subnets) -> Self {
        Self { v4: config.ipv4.is_some(), v6: config.ipv6.is_some(), own }
    }
}

impl Claim {
    /// Reads a node.
    pub(super) fn read(names: &AnnotationNames, scope: Scope, node: &Node<'_>) -> Self {
        let mut problems = Vec::new();
        let lease = names.managed(node).then(|| {
            let (attributes, unreadable) = names.read(node);
            problems = unreadable;
            let mut subnets = node.spec.subnets().unwrap_or_else(|problem| {
                problems.push(problem);
                Subnets::default()
            });
            let mut keep = |enabled: bool, reachable: bool, taken: bool, net: String| {
                if enabled && reachable && taken {
                    problems.push(format!("its podCIDR {net} overlaps our own"));
                }
                enabled && reachable && !taken
            };
            let own = scope.own;
            subnets.v4 = subnets.v4.filter(|net| {
                let taken = own.overlaps(&Subnets { v4: Some(*net), v6: None });
                keep(scope.v4, attributes.public_ip.is_some(), taken, net.to_string())
            });
            subnets.v6 = subnets.v6.filter(|net| {
                let taken = own.overlaps(&Subnets { v4: None, v6: Some(*net) });
                keep(scope.v6, attributes.public_ipv6.is_some(), taken, net.to_string())
            });
            Lease { subnets, attributes }
        });
        let metadata = &node.metadata;
        Self {
            name: (&*metadata.name).into(),
            version: metadata.resource_version.parse().ok(),
            created: (&*metadata.creation_timestamp).into(),
            lease: lease.filter(|lease| lease.subnets != Subnets::default()),
            problems,
        }
    }

    fn subnets(&self) -> Subnets {
        self.lease.as_ref().map(|lease| lease.subnets).unwrap_or_default()
    }
}

#[derive(Debug)]
struct Record {
    claim: Claim,
    /// When the node began to ask for these subnets, as a running number.
    since: u64,
    /// What was told as its lease: the subnets that no other node has taken from it.
    told: Subnets,
}

impl Record {
    /// The subnet goes to the node that is made last, and among nodes of one moment to the one
    /// that asked last.
    fn rank(&self) -> (&str, u64) {
        (&self.claim.created, self.since)
    }
}

/// All nodes but our own.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    nodes: HashMap<Box<str>, Record>,
    v4: HashMap<Ipv4Net, Vec<Box<str>>>,
    v6: HashMap<Ipv6Net, Vec<Box<str>>>,
    clock: u64,
    /// Versions at which nodes went.
    gone: HashMap<Box<str>, u64>,
    /// Conflicts that have been told.
    disputes: BTreeSet<String>,
}

impl NodeTable {
    /// Takes a complete list in and returns all leases. Which of two claims is older is
    /// remembered from before.
    pub(super) fn replace(&mut self, claims: Vec<Claim>) -> Vec<Lease> {
        let before = std::mem::take(self);
        self.clock = before.clock;
        self.disputes = before.disputes;
        let mut ordered: Vec<_> = claims
            .into_iter()
            .map(|claim| {
                let known = before.nodes.get(&claim.name);
                let same = known.filter(|record| record.claim.subnets() == claim.subnets());
                (same.map_or(u64::MAX, |record| record.since), known.is_some(), claim)
            })
            .collect();
        ordered.sort_by_key(|(since, _, _)| *since);
        for (_, _, claim) in ordered {
            let told_before = before.nodes.get(&claim.name).map(|record| &record.claim.problems);
            tell_problems(&claim, told_before);
            self.insert(claim);
        }
        let names: Vec<_> = self.nodes.keys().cloned().collect();
        let mut leases = Vec::with_capacity(names.len());
        for name in names {
            let owned = self.owned(&name);
            if let Some(record) = self.nodes.get_mut(&name) {
                record.told = owned;
                leases.extend(lease(record));
            }
        }
        leases
    }

    /// Takes a new or changed node in.
    pub(super) fn put(&mut self, claim: Claim) -> Vec<LeaseChange> {
        let name = claim.name.clone();
        if let Some(gone) = self.gone.get(&name) {
            if claim.version.is_some_and(|version| version <= *gone) {
                return Vec::new();
            }
            self.gone.remove(&name);
        }
        let Some(record) = self.nodes.get_mut(&name) else {
            tell_problems(&claim, None);
            let changed = claim.lease.is_some();
            let affected = self.insert(claim);
            return if changed { self.tell(affected, Some(&name)) } else { Vec::new() };
        };
        if claim.version.zip(record.claim.version).is_some_and(|(new, old)| new < old) {
            return Vec::new();
        }
        tell_problems(&claim, Some(&record.claim.problems));
        if record.claim.lease == claim.lease && record.claim.created == claim.created {
            // A heartbeat, mostly.
            record.claim = claim;
            return Vec::new();
        }
        if record.claim.subnets() == claim.subnets() {
            record.claim = claim;
            let affected = self.rivals(&name);
            return self.tell(affected, Some(&name));
        }
        let told = record.told;
        let mut affected = self.take_out(&name);
        affected.extend(self.insert(claim));
        if let Some(record) = self.nodes.get_mut(&name) {
            record.told = told;
        }
        self.tell(affected, Some(&name))
    }

    /// Takes a node out.
    pub(super) fn remove(&mut self, node: &Node<'_>) -> Vec<LeaseChange> {
        let name: &str = &node.metadata.name;
        let version = node.metadata.resource_version.parse().ok();
        let Some(record) = self.nodes.get(name) else { return Vec::new() };
        if version.zip(record.claim.version).is_some_and(|(gone, seen)| gone < seen) {
            return Vec::new();
        }
        let told = record.told;
        let affected = self.take_out(name);
        if let Some(version) = version {
            if self.gone.len() >= REMEMBERED {
                self.gone.clear();
            }
            self.gone.insert(name.into(), version);
        }
        let mut changes = self.tell(affected, None);
        if told != Subnets::default() {
            removal(told, &mut changes);
        }
        changes
    }

    /// Adds a claim and returns the nodes whose leases that may change.
    fn insert(&mut self, claim: Claim) -> BTreeSet<Box<str>> {
        let name = claim.name.clone();
        let Subnets { v4, v6 } = claim.subnets();
        if let Some(net) = v4 {
            self.v4.entry(net).or_default().push(name.clone());
        }
        if let Some(net) = v6 {
            self.v6.entry(net).or_default().push(name.clone());
        }
        self.clock += 1;
        let record = Record { claim, since: self.clock, told: Subnets::default() };
        self.nodes.insert(name.clone(), record);
        self.rivals(&name)
    }

    /// Removes a claim and returns the nodes whose leases that may change.
    fn take_out(&mut self, name: &str) -> BTreeSet<Box<str>> {
        let mut affected = self.rivals(name);
        affected.remove(name);
        if let Some(record) = self.nodes.remove(name) {
            let Subnets { v4, v6 } = record.claim.subnets();
            forget(&mut self.v4, v4, name);
            forget(&mut self.v6, v6, name);
        }
        affected
    }

    /// The node and those that ask for one of its subnets too.
    fn rivals(&self, name: &str) -> BTreeSet<Box<str>> {
        let subnets = self.nodes.get(name).map(|r| r.claim.subnets()).unwrap_or_default();
        let v4 = subnets.v4.and_then(|net| self.v4.get(&net));
        let v6 = subnets.v6.and_then(|net| self.v6.get(&net));
        let rivals = v4.into_iter().chain(v6).flatten().cloned();
        rivals.chain([name.into()]).collect()
    }

    /// The subnets of a node that no other node has a better claim to.
    fn owned(&mut self, name: &str) -> Subnets {
        let Some(record) = self.nodes.get(name) else { return Subnets::default() };
        let Subnets { v4, v6 } = record.claim.subnets();
        let best = |names: Option<&Vec<Box<str>>>| {
            let names = names.filter(|names| names.len() > 1)?;
            let best =
                names.iter().filter_map(|name| self.nodes.get(name)).max_by_key(|r| r.rank())?;
            (*best.claim.name != *name).then(|| best.claim.name.clone())
        };
        let better_v4 = v4.and_then(|net| best(self.v4.get(&net)));
        let better_v6 = v6.and_then(|net| best(self.v6.get(&net)));
        let mut told = Vec::new();
        let mut keep = |net: Option<String>, better: Option<&Box<str>>| match (net, better) {
            (Some(net), Some(better)) => {
                told.push(format!("nodes {name} and {better} both have podCIDR {net}"));
                false
            }
            _ => true,
        };
        let owned = Subnets {
            v4: v4.filter(|net| keep(Some(net.to_string()), better_v4.as_ref())),
            v6: v6.filter(|net| keep(Some(net.to_string()), better_v6.as_ref())),
        };
        for text in told {
            if self.disputes.len() < REMEMBERED && self.disputes.insert(text.clone()) {
                warn!("{text}; traffic goes to the node that was made last");
            }
        }
        owned
    }

    /// Works out what the peers have to be told about these nodes.
    fn tell(&mut self, names: BTreeSet<Box<str>>, changed: Option<&str>) -> Vec<LeaseChange> {
        let (mut changes, mut puts) = (Vec::new(), BTreeMap::new());
        for name in names {
            let owned = self.owned(&name);
            let Some(record) = self.nodes.get_mut(&name) else { continue };
            if record.told == owned && changed != Some(&*name) {
                continue;
            }
            if record.told != owned && record.told != Subnets::default() {
                changes.push(LeaseChange::Removed(record.told));
            }
            record.told = owned;
            if let Some(lease) = lease(record) {
                puts.insert(lease.subnets, lease);
            }
        }
        changes.retain(|change| !matches!(change, LeaseChange::Removed(s) if puts.contains_key(s)));
        changes.extend(puts.into_values().map(LeaseChange::Put));
        changes
    }
}

/// Adds a removal unless another node has the very lease by now.
fn removal(subnets: Subnets, changes: &mut Vec<LeaseChange>) {
    let taken = changes
        .iter()
        .any(|change| matches!(change, LeaseChange::Put(lease) if lease.subnets == subnets));
    if !taken {
        changes.insert(0, LeaseChange::Removed(subnets));
    }
}

fn forget<N: Eq + Hash>(claims: &mut HashMap<N, Vec<Box<str>>>, net: Option<N>, name: &str) {
    let Some(net) = net else { return };
    if let Some(names) = claims.get_mut(&net) {
        names.retain(|other| **other != *name);
        if names.is_empty() {
            claims.remove(&net);
        }
    }
}

/// The lease to tell of a node.
fn lease(record: &Record) -> Option<Lease> {
    let attributes = &record.claim.lease.as_ref()?.attributes;
    (record.told != Subnets::default())
        .then(|| Lease { subnets: record.told, attributes: attributes.clone() })
}

/// Says what cannot be used of a node, once.
fn tell_problems(claim: &Claim, before: Option<&Vec<String>>) {
    if before == Some(&claim.problems) {
        return;
    }
    for problem in &claim.problems {
        warn!("node {}: {problem}; that part of it is left out", claim.name);
    }
    if claim.problems.is_empty() && before.is_some_and(|before| !before.is_empty()) {
        info!("node {}: can be read again", claim.name);
    }
}

#[cfg(test)]
mod tests;
