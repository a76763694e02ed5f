//! Keeping an eye on the rules of others while they and we change.

use std::{io, time::Duration};

use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::{
    ruleset,
    walk::{self, Findings, Surroundings},
};
use crate::{background::Background, firewall::nfnetlink::Monitor};

/// Pause in which the notifications of one change gather.
const SETTLE: Duration = Duration::from_millis(100);

/// Pause before looking again because of what changed about us.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a change of the legacy tables is looked for, which nobody tells of.
const LEGACY_LOOK: Duration = Duration::from_millis(1500);

/// The same on a host that has neither such tables nor pods: it may sleep.
const LAZY_LEGACY_LOOK: Duration = Duration::from_mins(1);

/// How often everything is read though nothing was heard.
const SAFETY_NET: Duration = Duration::from_mins(1);

/// So many looks may fail in a row before what was found last no longer counts: while somebody keeps
/// changing many rules, a reading may be torn.
const FAILURES: u32 = 3;

/// After a look there is a rest of so many times its length, within [`PATIENCE`].
const SHARE: u32 = 4;

/// What a look came to, and the legacy tables' outline from before it.
type Look = io::Result<(Findings, Vec<Vec<u8>>)>;

/// Watches the rules of the host for those that the eBPF data path would bypass.
pub struct RuleWatch {
    /// `None` where no notifications are to be had.
    monitor: Option<Monitor>,
    surroundings: Surroundings,
    findings: Findings,
    look: Option<(Background<Look>, Instant)>,
    /// When to look next.
    due: Instant,
    /// When to compare the legacy tables' outline next.
    legacy_due: Instant,
    outline: Vec<Vec<u8>>,
    /// Not before this another look.
    rest_until: Instant,
    /// Looks that failed since the last that did not.
    failures: u32,
}

impl RuleWatch {
    /// Begins to listen, in the network namespace of the calling thread. Until the first look is
    /// over, every rule is suspected.
    pub fn open() -> Self {
        let monitor = Monitor::open();
        if let Err(err) = &monitor {
            debug!("no notifications about nf_tables: {err}");
        }
        let unread = "the host's rules are not read yet".to_owned();
        let now = Instant::now();
        Self {
            monitor: monitor.ok(),
            surroundings: Surroundings::default(),
            findings: Findings { outer: Some(unread.clone()), inner: Some(unread) },
            look: None,
            due: now,
            legacy_due: now + LEGACY_LOOK,
            outline: Vec::new(),
            rest_until: now,
            failures: 0,
        }
    }

    /// Says what the packets are whose way is watched.
    pub fn tell(&mut self, surroundings: Surroundings) {
        if surroundings != self.surroundings {
            let first = self.surroundings == Surroundings::default();
            self.surroundings = surroundings;
            self.legacy_due = self.legacy_due.min(Instant::now() + self.legacy_pause());
            self.look_within(if first { Duration::ZERO } else { PATIENCE });
        }
    }

    /// What was found last.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Resolves when the findings are others. Cancel-safe.
    pub async fn changed(&mut self) {
        loop {
            if self.step().await {
                return;
            }
        }
    }

    fn legacy_pause(&self) -> Duration {
        let busy = self.surroundings.pods || !self.outline.is_empty();
        if busy { LEGACY_LOOK } else { LAZY_LEGACY_LOOK }
    }

    fn look_within(&mut self, time: Duration) {
        self.due = self.due.min(Instant::now() + time);
    }

    /// Waits for one thing to happen. Returns whether the findings are others now.
    async fn step(&mut self) -> bool {
        // Without anything to watch over there is nothing to look for.
        if self.surroundings == Surroundings::default() {
            return std::future::pending().await;
        }
        if let Some((look, _)) = &mut self.look {
            let outcome = look.finished().await;
            return self.take(outcome);
        }
        let due = self.due.max(self.rest_until);
        let heard = async {
            match &self.monitor {
                Some(monitor) => monitor.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = heard => self.look_within(SETTLE),
            () = sleep_until(due) => self.begin(),
            () = sleep_until(self.legacy_due) => {
                self.legacy_due = Instant::now() + self.legacy_pause();
                if ruleset::legacy_outline().ok().as_ref() != Some(&self.outline) {
                    self.look_within(Duration::ZERO);
                }
            }
        }
        false
    }

    /// Begins a look.
    fn begin(&mut self) {
        let now = Instant::now();
        self.due = now + SAFETY_NET;
        let surroundings = self.surroundings.clone();
        let look = Background::start("rules", move || {
            let outline = ruleset::legacy_outline()?;
            Ok((walk::find(&ruleset::read()?, &surroundings), outline))
        });
        match look {
            Ok(look) => self.look = Some((look, now)),
            Err(err) => debug!("no thread to read the host's rules: {err}"),
        }
    }

    fn take(&mut self, outcome: Option<Look>) -> bool {
        let now = Instant::now();
        if let Some((_, begun)) = self.look.take() {
            self.rest_until = now + ((now - begun) * SHARE).min(PATIENCE);
        }
        let findings = match outcome {
            Some(Ok((findings, outline))) => {
                self.outline = outline;
                self.failures = 0;
                findings
            }
            failed => {
                let why = match failed {
                    Some(Err(err)) => err.to_string(),
                    _ => "the thread that reads them failed".to_owned(),
                };
                debug!("reading the host's rules: {why}");
                self.look_within(PATIENCE);
                self.failures = self.failures.saturating_add(1);
                if self.failures < FAILURES {
                    return false;
                }
                let unread = format!("the host's rules cannot be read: {why}");
                Findings { outer: Some(unread.clone()), inner: Some(unread) }
            }
        };
        let differs = findings != self.findings;
        self.findings = findings;
        differs
    }
}
