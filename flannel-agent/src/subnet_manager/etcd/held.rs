//! The lease we hold, and what an observation of its key means for us. No I/O.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::registry::{Entry, Version};
use crate::lease::{Lease, LeaseAttributes};

/// Two hosts that publish the same address would overwrite each other without end. This is how
/// long we leave a foreign value alone before we write ours once more.
const RESTORE_PAUSE: Duration = Duration::from_mins(1);

/// How long our lease lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Term {
    /// For ever: the key hangs on no etcd lease.
    Reservation,
    /// Until an instant that has to be asked for: somebody moved our key to another etcd lease.
    Unknown,
    /// Until `since + length`.
    Until {
        /// When we learnt it.
        since: Instant,
        /// The same on the wall clock, which goes on while the machine is suspended.
        wall: SystemTime,
        /// What was left then.
        length: Duration,
    },
}

impl Term {
    pub(super) fn starting_now(length: Duration) -> Self {
        Self::Until { since: Instant::now(), wall: SystemTime::now(), length }
    }

    pub(super) fn expires(&self) -> Option<SystemTime> {
        match self {
            Self::Until { wall, length, .. } => wall.checked_add(*length),
            _ => None,
        }
    }
}

/// What has to be done next for our lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing, until something is observed.
    Idle,
    /// Ask how long it lasts.
    LearnTerm,
    /// Renew it, at this time on either clock.
    Renew(Instant, SystemTime),
}

/// What an observation of our key means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing new.
    Known,
    /// It is still ours, but was rewritten from outside.
    Rewritten,
    /// As [`Rewritten`](Self::Rewritten) with the very data that we publish, but on an etcd lease
    /// of somebody else: only who takes it for his own does that.
    Claimed,
    /// Still ours by its address, but published with other data. The first sight of these data.
    Contested,
    /// Somebody else holds it.
    Lost(LeaseAttributes),
}

/// The lease we hold.
#[derive(Clone, Debug)]
pub(super) struct Held {
    /// What we hold and want to see published.
    pub lease: Lease,
    /// The last state of its key that we know of.
    pub version: Version,
    pub term: Term,
    /// The etcd leases that we made for this key last.
    granted: [i64; 2],
    /// When to write our own value again, if the one in etcd differs.
    pub restore: Option<Instant>,
    last_restore: Option<Instant>,
    contested_by: Option<LeaseAttributes>,
}

impl Held {
    /// A lease as we have just written it.
    pub(super) fn new(lease: Lease, version: Version, term: Term) -> Self {
        Self {
            lease,
            version,
            term,
            granted: [version.etcd_lease, 0],
            restore: None,
            last_restore: None,
            contested_by: None,
        }
    }

    /// Remembers an etcd lease as made by us, before anything hangs on it.
    pub(super) fn granted(&mut self, etcd_lease: i64) {
        if etcd_lease != 0 {
            self.granted = [etcd_lease, self.granted[0]];
        }
    }

    /// Whether the key hangs on an etcd lease that we made and may keep alive.
    pub(super) fn on_own_etcd_lease(&self) -> bool {
        self.version.etcd_lease != 0 && self.granted.contains(&self.version.etcd_lease)
    }

    /// Records that we wrote the key.
    pub(super) fn written(&mut self, version: Version, term: Term) {
        self.version = version;
        self.term = term;
        if self.restore.take().is_some() {
            self.last_restore = Some(Instant::now());
        }
    }

    /// Takes in a state of our key as read from etcd. Older states than the one known count for
    /// nothing: answers and events overtake each other.
    pub(super) fn observe(&mut self, entry: &Entry) -> Seen {
        if entry.version.mod_revision <= self.version.mod_revision {
            return Seen::Known;
        }
        let theirs = &entry.lease.attributes;
        if theirs.public_ip != self.lease.attributes.public_ip {
            return Seen::Lost(theirs.clone());
        }
        let before = self.version;
        self.adopt(entry.version);
        if *theirs == self.lease.attributes {
            self.restore = None;
            let moved = before.etcd_lease != self.version.etcd_lease;
            let foreign = self.version.etcd_lease != 0 && !self.on_own_etcd_lease();
            return if moved && foreign { Seen::Claimed } else { Seen::Rewritten };
        }
        self.plan_restore();
        if self.contested_by.as_ref() == Some(theirs) {
            return Seen::Rewritten;
        }
        self.contested_by = Some(theirs.clone());
        Seen::Contested
    }

    /// Takes in that our key holds something unreadable: nobody's claim, so ours comes back.
    pub(super) fn observe_unreadable(&mut self, version: Version) {
        if version.mod_revision > self.version.mod_revision {
            self.adopt(version);
            self.plan_restore();
        }
    }

    fn adopt(&mut self, version: Version) {
        if version.etcd_lease != self.version.etcd_lease {
            self.term = if version.etcd_lease == 0 {
                Term::Reservation
            } else if self.granted.contains(&version.etcd_lease) {
                // Our own write, seen before its answer: that will bring the term.
                self.term
            } else {
                Term::Unknown
            };
        }
        self.version = version;
    }

    fn plan_restore(&mut self) {
        let now = Instant::now();
        self.restore = Some(self.last_restore.map_or(now, |last| now.max(last + RESTORE_PAUSE)));
    }

    /// What has to be done next, if renewal is wanted `margin` before the end.
    pub(super) fn next(&self, margin: Duration) -> Next {
        let wall_of =
            |at: Instant| SystemTime::now() + at.saturating_duration_since(Instant::now());
        let renewal = match self.term {
            Term::Reservation => Next::Idle,
            Term::Unknown => return Next::LearnTerm,
            Term::Until { since, wall, length } => {
                // However long the margin, some time passes between two renewals.
                let least = (length / 10).clamp(Duration::from_secs(1), Duration::from_secs(10));
                let wait = length.saturating_sub(margin).max(least);
                Next::Renew(since + wait, wall.checked_add(wait).unwrap_or(wall))
            }
        };
        match (renewal, self.restore) {
            (Next::Renew(at, wall), Some(restore)) if at <= restore => Next::Renew(at, wall),
            (_, Some(restore)) => Next::Renew(restore, wall_of(restore)),
            (renewal, None) => renewal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{RawJson, Subnets};

    fn attributes(ip: &str, mac: &str) -> LeaseAttributes {
        LeaseAttributes {
            public_ip: ip.parse().ok(),
            backend_type: "vxlan".into(),
            backend_data: Some(RawJson::from_compact(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#))),
            ..LeaseAttributes::default()
        }
    }

    fn entry(ip: &str, mac: &str, mod_revision: i64, etcd_lease: i64) -> Entry {
        let subnets = Subnets { v4: "10.77.1.0/24".parse().ok(), v6: None };
        Entry {
            lease: Lease { subnets, attributes: attributes(ip, mac) },
            version: Version { mod_revision, etcd_lease },
        }
    }

    fn held() -> Held {
        let Entry { lease, version } = entry("192.0.2.11", "a", 10, 7);
        Held::new(lease, version, Term::starting_now(Duration::from_hours(24)))
    }

    fn wait(next: Next) -> Duration {
        match next {
            Next::Renew(at, _) => at.saturating_duration_since(Instant::now()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn old_states_count_for_nothing() {
        let mut held = held();
        assert_eq!(held.observe(&entry("192.0.2.12", "b", 10, 9)), Seen::Known);
        assert_eq!(held.version, Version { mod_revision: 10, etcd_lease: 7 });
    }

    #[test]
    fn another_address_means_lost() {
        let mut held = held();
        assert_eq!(
            held.observe(&entry("192.0.2.12", "b", 11, 9)),
            Seen::Lost(attributes("192.0.2.12", "b"))
        );
    }

    #[test]
    fn a_foreign_etcd_lease_makes_the_term_unknown_and_ours_does_not() {
        let mut held = held();
        held.granted(8);
        let term = held.term;
        assert_eq!(held.observe(&entry("192.0.2.11", "a", 11, 8)), Seen::Rewritten);
        assert_eq!(held.term, term);
        assert!(held.on_own_etcd_lease());
        assert_eq!(held.observe(&entry("192.0.2.11", "a", 12, 99)), Seen::Claimed);
        assert_eq!(held.next(Duration::from_mins(1)), Next::LearnTerm);
        assert!(!held.on_own_etcd_lease());
        assert_eq!(held.observe(&entry("192.0.2.11", "a", 13, 99)), Seen::Rewritten, "told once");
    }

    #[test]
    fn losing_the_etcd_lease_makes_a_reservation() {
        let mut held = held();
        assert_eq!(held.observe(&entry("192.0.2.11", "a", 11, 0)), Seen::Rewritten);
        assert_eq!(held.next(Duration::from_mins(1)), Next::Idle);
        assert_eq!(held.term.expires(), None);
    }

    #[test]
    fn foreign_data_under_our_address_are_replaced_but_not_in_a_race() {
        let mut held = held();
        assert_eq!(held.observe(&entry("192.0.2.11", "b", 11, 7)), Seen::Contested);
        assert!(wait(held.next(Duration::from_mins(1))).is_zero());
        held.written(Version { mod_revision: 12, etcd_lease: 8 }, held.term);
        assert_eq!(held.observe(&entry("192.0.2.11", "b", 13, 9)), Seen::Rewritten, "told once");
        held.term = Term::starting_now(Duration::from_hours(24));
        assert!(wait(held.next(Duration::from_mins(1))) > Duration::from_secs(50));
    }

    #[test]
    fn junk_on_our_key_is_replaced() {
        let mut held = held();
        held.observe_unreadable(Version { mod_revision: 11, etcd_lease: 7 });
        assert!(wait(held.next(Duration::from_mins(1))).is_zero());
        assert_eq!(held.version.mod_revision, 11);
    }

    #[test]
    fn renewal_falls_due_a_margin_before_the_end_and_never_spins() {
        for (length, margin, from, to) in [
            (86_400, 3_600, 82_795, 82_800),
            (86_400, 1_439 * 60, 55, 60),
            (69, 60, 8, 9),
            (66, 60, 6, 7),
            (30, 60, 2, 3),
            (5, 60, 0, 1),
        ] {
            let mut held = held();
            held.term = Term::starting_now(Duration::from_secs(length));
            let wait = wait(held.next(Duration::from_secs(margin)));
            assert!(
                (Duration::from_secs(from)..=Duration::from_secs(to)).contains(&wait)
                    && !wait.is_zero(),
                "{length} {margin}: {wait:?}"
            );
        }
    }
}
