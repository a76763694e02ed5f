//! Keeps our lease alive and our key ours.
//!
//! While the key hangs on an etcd lease that we made, renewal is a keep-alive of that, preceded by
//! a look at the key: no write, so no event for the other nodes. If somebody moved the key to
//! another etcd lease, it is written again on a new one, guarded by its revision.

use std::time::{Duration, SystemTime};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use super::{
    EtcdSubnetManager,
    failure::{Cause, Failure},
    held::{Next, Seen, Term},
    registry::{Decoded, Entry, Put, Version},
};
use crate::{
    lease::LeaseAttributes,
    subnet_manager::{LeaseLost, StoreError, StoreEvent, acquire::holder},
};

/// Pause after a renewal that failed.
const RETRY: Duration = Duration::from_secs(5);
/// The longest sleep in one piece: timers stand still while the machine is suspended, so the wall
/// clock has to be looked at now and then.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);
/// How often a guarded write is tried when the key keeps changing but stays ours.
const WRITE_TRIES: usize = 5;

enum Outcome {
    Renewed(Option<SystemTime>),
    Unchanged,
    Lost(LeaseLost),
}

impl EtcdSubnetManager {
    /// Renews until the lease is lost; `None` if nobody listens any more.
    pub(super) async fn keep(&self, events: &mpsc::Sender<StoreEvent>) -> Option<LeaseLost> {
        let mut failing = false;
        let mut not_before = Instant::now();
        loop {
            let next =
                self.held.borrow().as_ref().map_or(Next::Idle, |h| h.next(self.renew_margin));
            let (at, wall) = match next {
                Next::Idle => {
                    self.held_changed.notified().await;
                    continue;
                }
                Next::LearnTerm => (not_before, SystemTime::now()),
                Next::Renew(at, wall) => (at.max(not_before), wall),
            };
            let now = Instant::now();
            if now < at && (now < not_before || SystemTime::now() < wall) {
                tokio::select! {
                    () = sleep_until(at.min(now + LONGEST_SLEEP)) => {}
                    () = self.held_changed.notified() => {}
                }
                continue;
            }
            let result = match next {
                Next::LearnTerm => self.learn_term().await,
                _ => self.renew().await,
            };
            match result {
                Ok(outcome) => {
                    if failing {
                        info!("our lease can be renewed again");
                        failing = false;
                    }
                    match outcome {
                        Outcome::Lost(lost) => return Some(lost),
                        Outcome::Renewed(expires) => {
                            events.send(StoreEvent::Renewed { expires }).await.ok()?;
                        }
                        Outcome::Unchanged => {}
                    }
                }
                Err(failure) => {
                    not_before = Instant::now() + RETRY;
                    if !failing {
                        warn!("our lease cannot be renewed now, trying on: {failure}");
                        failing = true;
                    }
                }
            }
        }
    }

    /// Takes in a state of our key. `Some` if it is no longer ours.
    pub(super) fn observe_own(&self, found: &Decoded) -> Option<LeaseLost> {
        let mut slot = self.held.borrow_mut();
        let held = slot.as_mut()?;
        let subnets = held.lease.subnets;
        match found {
            Decoded::Lease(entry) if entry.lease.subnets == subnets => match held.observe(entry) {
                Seen::Known => return None,
                Seen::Rewritten => {}
                Seen::Claimed => warn_of_claim(entry, &held.lease.attributes),
                Seen::Contested => warn_of_twin(entry, &held.lease.attributes),
                Seen::Lost(holder) => return Some(LeaseLost { subnets, holder: Some(holder) }),
            },
            Decoded::BadValue(found, version) if *found == subnets => {
                held.observe_unreadable(*version);
            }
            _ => return None,
        }
        self.held_changed.notify_one();
        None
    }

    /// Looks at our key in etcd. `Some` if it is no longer ours.
    pub(super) async fn check_own(&self) -> Result<Option<LeaseLost>, Failure> {
        let Some(subnets) = self.held.borrow().as_ref().map(|held| held.lease.subnets) else {
            return Ok(None);
        };
        Ok(match self.registry.get(&subnets).await? {
            None => Some(LeaseLost { subnets, holder: None }),
            Some(found) => self.observe_own(&found),
        })
    }

    /// Publishes what `held` wants published, on the etcd lease it is on.
    pub(super) async fn write_attributes(&self) -> Result<(), StoreError> {
        for _ in 0..WRITE_TRIES {
            let Some((lease, version)) =
                self.held.borrow().as_ref().map(|held| (held.lease.clone(), held.version))
            else {
                break;
            };
            let subnets = lease.subnets;
            match self.registry.put_if(&lease, version.mod_revision, version.etcd_lease).await {
                Ok(Put::Written(mod_revision)) => {
                    if let Some(held) = self.held.borrow_mut().as_mut() {
                        let term = held.term;
                        held.written(Version { mod_revision, ..version }, term);
                    }
                    return Ok(());
                }
                Ok(Put::Conflict(Some(found))) => {
                    if self.observe_own(&found).is_some() {
                        break;
                    }
                }
                Ok(Put::Conflict(None)) => break,
                Err(failure) if failure.cause == Cause::LeaseGone => {
                    return Err(StoreError::NoLease(format!("our lease of {subnets} has expired")));
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Err(StoreError::NoLease("our lease is no longer ours".to_owned()))
    }

    async fn learn_term(&self) -> Result<Outcome, Failure> {
        let Some(etcd_lease) = self.held.borrow().as_ref().map(|held| held.version.etcd_lease)
        else {
            return Ok(Outcome::Unchanged);
        };
        // An etcd lease that is gone takes the key with it: then renewal is due at once.
        let left = self.registry.time_left(etcd_lease).await?.unwrap_or_default();
        if let Some(held) = self.held.borrow_mut().as_mut()
            && held.version.etcd_lease == etcd_lease
        {
            held.term = Term::starting_now(left);
        }
        Ok(Outcome::Unchanged)
    }

    async fn renew(&self) -> Result<Outcome, Failure> {
        if let Some(lost) = self.check_own().await? {
            return Ok(Outcome::Lost(lost));
        }
        let keepable = self
            .held
            .borrow()
            .as_ref()
            .filter(|held| held.on_own_etcd_lease() && held.restore.is_none())
            .map(|held| held.version.etcd_lease);
        if let Some(etcd_lease) = keepable {
            let left = self.registry.keep_alive(etcd_lease).await?;
            if let (Some(left), Some(held)) = (left, self.held.borrow_mut().as_mut()) {
                held.term = Term::starting_now(left);
                return Ok(Outcome::Renewed(held.term.expires()));
            }
        }
        self.rewrite().await
    }

    /// Writes our key again on a new etcd lease, or on none if it is a reservation.
    async fn rewrite(&self) -> Result<Outcome, Failure> {
        let reservation =
            self.held.borrow().as_ref().is_none_or(|held| held.version.etcd_lease == 0);
        let (etcd_lease, term) = if reservation {
            (0, Term::Reservation)
        } else {
            let (etcd_lease, length) = self.registry.grant(self.lease_ttl).await?;
            (etcd_lease, Term::starting_now(length))
        };
        let mut lost = None;
        for _ in 0..WRITE_TRIES {
            let Some((lease, seen)) = self.held.borrow_mut().as_mut().map(|held| {
                held.granted(etcd_lease);
                (held.lease.clone(), held.version.mod_revision)
            }) else {
                break;
            };
            // On an error the new etcd lease is left to run out: the write may have been done.
            match self.registry.put_if(&lease, seen, etcd_lease).await? {
                Put::Written(mod_revision) => {
                    if let Some(held) = self.held.borrow_mut().as_mut() {
                        held.written(Version { mod_revision, etcd_lease }, term);
                    }
                    return Ok(Outcome::Renewed(term.expires()));
                }
                Put::Conflict(Some(found)) => lost = self.observe_own(&found),
                Put::Conflict(None) => {
                    lost = Some(LeaseLost { subnets: lease.subnets, holder: None });
                }
            }
            if lost.is_some() {
                break;
            }
        }
        if !reservation {
            self.registry.revoke(etcd_lease).await;
        }
        lost.map(Outcome::Lost).ok_or_else(|| {
            Failure::new(Cause::Refused, "our key in etcd is being rewritten all the time")
        })
    }
}

/// Says that a second host seems to publish our address.
fn warn_of_twin(entry: &Entry, ours: &LeaseAttributes) {
    warn!(
        "the lease of {} was rewritten with our public IP {} but other data; ours are put back. \
         Do two hosts use this address?",
        entry.lease.subnets,
        holder(ours),
    );
}

/// Says that a second host seems to have taken our lease for its own: it found it by our address.
fn warn_of_claim(entry: &Entry, ours: &LeaseAttributes) {
    warn!(
        "the lease of {} was renewed by somebody else as that of {}: if two hosts use this \
         address, both give out the same pod addresses; choose another interface on one of them \
         (--iface, --public-ip)",
        entry.lease.subnets,
        holder(ours),
    );
}
