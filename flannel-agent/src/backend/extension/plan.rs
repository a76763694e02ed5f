//! What has been told to the commands, and what to tell them next: pure, so that it is tested
//! without a process.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::{
    lease::{LeaseAttributes, Subnets},
    peer_table::PeerTable,
};

/// Pause after a command's first failure; twice as long after each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(2);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// Something to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// We have this lease.
    Own(Subnets),
    /// A peer is there.
    Add(Subnets, LeaseAttributes),
    /// A peer is gone.
    Remove(Subnets, LeaseAttributes),
}

/// A command that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    reason: String,
    times: u32,
    again: Instant,
}

impl Failure {
    fn after(before: Option<&Self>, reason: String, now: Instant) -> Self {
        let times = before.map_or(1, |before| before.times.saturating_add(1));
        let pause = FIRST_PAUSE.saturating_mul(1 << (times - 1).min(10)).min(LONGEST_PAUSE);
        Self { reason, times, again: now + pause }
    }
}

/// A peer as it was told last.
#[derive(Clone, Debug)]
struct Told {
    attributes: LeaseAttributes,
    failure: Option<Failure>,
}

/// The wanted state and how much of it the commands have been told.
#[derive(Debug, Default)]
pub struct Plan {
    own: Option<Subnets>,
    wanted: BTreeMap<Subnets, LeaseAttributes>,
    complete: bool,
    told_own: Option<Subnets>,
    own_failure: Option<Failure>,
    told: BTreeMap<Subnets, Told>,
}

impl Plan {
    /// Takes in what is wanted now: our own lease and the peers that use `backend`.
    pub fn want(&mut self, own: Subnets, peers: &PeerTable, backend: &str) {
        if self.own.replace(own) != Some(own) {
            self.own_failure = None;
        }
        let ours = peers.peers().filter(|(_, attributes)| attributes.backend_type == backend);
        self.wanted = ours.map(|(subnets, attributes)| (*subnets, attributes.clone())).collect();
        self.complete = peers.synced();
    }

    /// What to tell next, if anything can be told now. A changed peer is removed as it was and
    /// added as it is; nothing is removed before all peers are known, or told before our own lease.
    pub fn next(&self, now: Instant) -> Option<Task> {
        let due = |failure: &Option<Failure>| failure.as_ref().is_none_or(|f| f.again <= now);
        let own = self.own?;
        if self.told_own != Some(own) {
            return due(&self.own_failure).then_some(Task::Own(own));
        }
        let stale = self.told.iter().find(|(subnets, told)| match self.wanted.get(subnets) {
            Some(wanted) => *wanted != told.attributes,
            None => self.complete,
        });
        if let Some((subnets, told)) = stale {
            return Some(Task::Remove(*subnets, told.attributes.clone()));
        }
        let missing = self.wanted.iter().find(|(subnets, _)| match self.told.get(subnets) {
            None => true,
            Some(told) => told.failure.is_some() && due(&told.failure),
        });
        missing.map(|(subnets, attributes)| Task::Add(*subnets, attributes.clone()))
    }

    /// When a failed command is due again.
    pub fn next_try(&self) -> Option<Instant> {
        let failures = self.told.values().filter_map(|told| told.failure.as_ref());
        failures.chain(&self.own_failure).map(|failure| failure.again).min()
    }

    /// Takes in how telling went. A failed removal is not repeated: what it was about is gone.
    pub fn done(&mut self, task: Task, result: Result<(), String>, now: Instant) {
        match task {
            Task::Own(own) => match result {
                Ok(()) => (self.told_own, self.own_failure) = (Some(own), None),
                Err(reason) => {
                    self.own_failure = Some(Failure::after(self.own_failure.as_ref(), reason, now));
                }
            },
            Task::Add(subnets, attributes) => {
                let before = self.told.get(&subnets).and_then(|told| told.failure.as_ref());
                let failure = result.err().map(|reason| Failure::after(before, reason, now));
                self.told.insert(subnets, Told { attributes, failure });
            }
            Task::Remove(subnets, _) => drop(self.told.remove(&subnets)),
        }
    }

    /// Why our own lease has not been told.
    pub fn own_problem(&self) -> Option<String> {
        if self.told_own.is_some() && self.told_own == self.own {
            return None;
        }
        let reason = self.own_failure.as_ref().map_or("has not ended yet", |f| &f.reason);
        Some(format!("PostStartupCommand {reason}"))
    }

    /// One sentence per peer whose command failed.
    pub fn problems(&self) -> Vec<String> {
        let failed = |(subnets, told): (&Subnets, &Told)| {
            let reason = &told.failure.as_ref()?.reason;
            Some(format!("SubnetAddCommand for peer {subnets} {reason}"))
        };
        self.told.iter().filter_map(failed).collect()
    }

    /// Peers that were told as they are.
    pub fn served(&self) -> usize {
        let right = |(subnets, told): &(&Subnets, &Told)| {
            told.failure.is_none() && self.wanted.get(subnets) == Some(&told.attributes)
        };
        self.told.iter().filter(right).count()
    }
}

#[cfg(test)]
mod tests;
