//! Liveness and readiness.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};

/// What has to hold before the agent is ready. Each can turn false again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The agent's loop turns: after the process was stopped, nothing it believes is worth
    /// anything until it has looked again.
    Loop,
    /// The network configuration was read and is usable.
    Config,
    /// A subnet is leased and the lease is ours.
    Lease,
    /// The backend's devices are right.
    Device,
    /// The first full set of peers was applied.
    Peers,
    /// Firewall rules are in place.
    Firewall,
    /// `subnet.env` is written and right.
    SubnetFile,
}

impl Condition {
    /// All conditions, in the order in which they come true at start.
    pub const ALL: [Self; 7] = [
        Self::Loop,
        Self::Config,
        Self::Lease,
        Self::Device,
        Self::Peers,
        Self::Firewall,
        Self::SubnetFile,
    ];

    /// The word in `/readyz`, `/status` and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Config => "config",
            Self::Lease => "lease",
            Self::Device => "device",
            Self::Peers => "peers",
            Self::Firewall => "firewall",
            Self::SubnetFile => "subnet-file",
        }
    }
}

/// The conditions that do not hold now, each with the reason.
#[derive(Debug)]
pub struct Readiness {
    missing: Mutex<BTreeMap<Condition, String>>,
    /// When the loop turned last, as time since the machine's start.
    beat: Mutex<Option<Duration>>,
}

/// How long the agent's loop sleeps at most. Who is stopped by SIGSTOP hears of it by SIGCONT;
/// this is for machines that sleep and control groups that are frozen.
pub const HEARTBEAT: Duration = Duration::from_secs(30);

/// A beat of the agent's loop this late means that the process was stopped or starved.
pub const SUSPENDED_AFTER: Duration = Duration::from_secs(35);

/// Time since the machine's start. Unlike [`Instant`], it goes on while the machine sleeps.
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

impl Default for Readiness {
    fn default() -> Self {
        let missing = Condition::ALL.map(|c| (c, "not there yet".to_owned())).into();
        Self { missing: Mutex::new(missing), beat: Mutex::new(None) }
    }
}

impl Readiness {
    /// Records that a condition holds.
    pub fn met(&self, condition: Condition) {
        self.lock().remove(&condition);
    }

    /// Records that a condition does not hold, and why.
    pub fn unmet(&self, condition: Condition, reason: impl Into<String>) {
        self.lock().insert(condition, reason.into());
    }

    /// What is missing, in start order. Empty means ready.
    pub fn missing(&self) -> Vec<(Condition, String)> {
        let mut missing = self.lock().clone();
        if let Some(late) = self.suspended() {
            let reason = format!("the agent did not run for {} s", late.as_secs());
            missing.insert(Condition::Loop, reason);
        }
        missing.into_iter().collect()
    }

    /// Whether a condition holds.
    pub fn holds(&self, condition: Condition) -> bool {
        !self.lock().contains_key(&condition)
    }

    /// Records that the agent's loop turns. Returns how long it did not if that was long enough
    /// to doubt everything ([`SUSPENDED_AFTER`]).
    pub fn beat(&self) -> Option<Duration> {
        let late = self.suspended();
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = Some(since_boot());
        self.met(Condition::Loop);
        late
    }

    fn suspended(&self) -> Option<Duration> {
        let beat = (*self.beat.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some(since_boot().saturating_sub(beat)).filter(|late| *late > SUSPENDED_AFTER)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Condition, String>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long one pass of the agent's loop may take before the agent counts as stuck.
pub const STUCK_AFTER: Duration = Duration::from_mins(1);

/// Whether the agent's loop turns. While it waits for events there is nothing to measure, so
/// only the passes are: each holds a [`Pass`] from begin to end.
#[derive(Debug, Default)]
pub struct Heartbeat {
    running: Mutex<Option<(&'static str, Instant)>>,
}

impl Heartbeat {
    /// Begins a pass; it ends when the result is dropped.
    pub fn pass(&self, what: &'static str) -> Pass<'_> {
        *self.lock() = Some((what, Instant::now()));
        Pass(self)
    }

    /// What the loop has been at for longer than [`STUCK_AFTER`], and for how long.
    pub fn stuck(&self) -> Option<(&'static str, Duration)> {
        self.stuck_at(Instant::now())
    }

    fn stuck_at(&self, now: Instant) -> Option<(&'static str, Duration)> {
        let (what, since) = (*self.lock())?;
        let took = now.saturating_duration_since(since);
        (took > STUCK_AFTER).then_some((what, took))
    }

    fn lock(&self) -> MutexGuard<'_, Option<(&'static str, Instant)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pass of the agent's loop under way.
#[derive(Debug)]
#[must_use = "the pass ends when this is dropped"]
pub struct Pass<'a>(&'a Heartbeat);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_come_and_go_in_start_order() {
        let readiness = Readiness::default();
        assert_eq!(readiness.missing().len(), Condition::ALL.len());
        for condition in Condition::ALL {
            readiness.met(condition);
        }
        assert!(readiness.missing().is_empty());
        readiness.unmet(Condition::Firewall, "nft is missing");
        readiness.unmet(Condition::Lease, "lost");
        let missing = readiness.missing();
        assert_eq!(missing[0], (Condition::Lease, "lost".to_owned()));
        assert_eq!(missing[1], (Condition::Firewall, "nft is missing".to_owned()));
    }

    #[test]
    fn only_a_long_pass_counts_as_stuck() {
        let heartbeat = Heartbeat::default();
        let late = Instant::now() + STUCK_AFTER + Duration::from_secs(5);
        assert_eq!(heartbeat.stuck_at(late), None, "waiting for events");
        let pass = heartbeat.pass("applying peers");
        assert_eq!(heartbeat.stuck(), None);
        assert_eq!(heartbeat.stuck_at(late).map(|(what, _)| what), Some("applying peers"));
        drop(pass);
        assert_eq!(heartbeat.stuck_at(late), None);
    }
}
