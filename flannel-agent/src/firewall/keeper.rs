//! The task that makes the rules as wanted and keeps them so. It runs beside the agent's loop: a
//! slow tool or a held lock delays nothing but the rules.

use std::{collections::BTreeSet, io, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info, warn};

use super::{
    FirewallReport,
    child::ChildError,
    fingerprint::{self, Fingerprint, Key},
    iptables::PLACES,
    nfnetlink::{Monitor, NfTables, Notice},
    nftables,
    obstacles::{self, Obstacles},
    removal::{self, Realm},
    renderer::{Renderer, Write},
    rules::{Family, FirewallWanted, Lacks},
};
use crate::telemetry::metrics::Metrics;

/// Pause in which the notifications of one change gather.
const SETTLE: Duration = Duration::from_millis(20);

/// How often rules are looked at, at most, of which the kernel tells every change: as a safety net.
const SAFETY_NET: Duration = Duration::from_mins(1);

/// How often a change of the legacy tables is looked for, which nobody tells of.
const LEGACY_LOOK: Duration = Duration::from_secs(1);

/// Pauses between tries of what failed.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// How many repairs may come at once before somebody else counts as working against us, in
/// seconds' worth: from then on there is one a second.
const REPAIR_BUDGET: Duration = Duration::from_mins(1);
const REPAIR_COST: Duration = Duration::from_secs(1);

/// How often reading and writing may alternate within one pass.
const ROUNDS: usize = 50;

/// The rules as they were when they were last seen to be right.
struct Stood {
    wanted: FirewallWanted,
    fingerprint: Fingerprint,
}

/// What the task is told once.
pub(super) struct KeeperOptions {
    /// nftables rather than iptables.
    pub(super) nftables: bool,
    /// How often to look though nothing was heard.
    pub(super) resync: Duration,
    pub(super) metrics: Metrics,
}

/// Keeps the rules as wanted until the agent is no longer there.
pub(super) async fn keep(
    options: KeeperOptions,
    mut wanted: watch::Receiver<Option<FirewallWanted>>,
    report: watch::Sender<FirewallReport>,
) {
    loop {
        // Before anything is read, so that no change goes unheard.
        let err = match Monitor::open().and_then(|monitor| Ok((monitor, NfTables::open()?))) {
            Ok((monitor, nf)) => {
                return Keeper::new(options, wanted, report, monitor, nf).run().await;
            }
            Err(err) => err,
        };
        let problem = format!("cannot open a netfilter socket: {err}; is nf_tables in the kernel?");
        let now = wanted.borrow_and_update().clone();
        let in_place = now.as_ref().is_some_and(FirewallWanted::is_empty);
        report.send_replace(FirewallReport {
            in_place,
            wanted: now,
            problems: (!in_place).then_some(problem).into_iter().collect(),
            ..FirewallReport::default()
        });
        tokio::select! {
            change = wanted.changed() => if change.is_err() { return },
            () = sleep(LONGEST_RETRY) => {}
        }
    }
}

/// The task's state.
struct Keeper {
    options: KeeperOptions,
    wanted: watch::Receiver<Option<FirewallWanted>>,
    report: watch::Sender<FirewallReport>,
    nf: NfTables,
    monitor: Monitor,
    renderer: Option<Renderer>,
    lacks: Lacks,
    stood: Option<Stood>,
    obstacles: Obstacles,
    look_for_obstacles: bool,
    /// What a rule of others ahead of ours keeps from us.
    barriers: Vec<String>,
    /// Whether the other renderers' rules were dealt with, and what was wrong with that.
    others: Option<Vec<String>>,
    outline: Vec<Vec<u8>>,
    /// Whether the last write was refused.
    refused: bool,
    next_resync: Instant,
    /// When the budget for repairs will be whole again.
    repairs_spent_until: Instant,
    failures: u32,
    told: BTreeSet<String>,
}

impl Keeper {
    fn new(
        options: KeeperOptions,
        wanted: watch::Receiver<Option<FirewallWanted>>,
        report: watch::Sender<FirewallReport>,
        monitor: Monitor,
        nf: NfTables,
    ) -> Self {
        let next_resync = Instant::now() + options.resync;
        Self {
            options,
            wanted,
            report,
            nf,
            monitor,
            renderer: None,
            lacks: Lacks::default(),
            stood: None,
            obstacles: Obstacles::default(),
            look_for_obstacles: true,
            barriers: Vec::new(),
            others: None,
            outline: Vec::new(),
            refused: false,
            next_resync,
            repairs_spent_until: Instant::now(),
            failures: 0,
            told: BTreeSet::new(),
        }
    }

    /// Works until the agent is no longer there.
    async fn run(mut self) {
        loop {
            let wanted = self.wanted.borrow_and_update().clone();
            let retry = match wanted {
                Some(wanted) => self.pass(wanted).await,
                None => None,
            };
            if !self.wait(retry).await {
                return;
            }
        }
    }

    /// Makes the rules as wanted and tells what came of it. Returns when to try again, if
    /// something failed.
    async fn pass(&mut self, wanted: FirewallWanted) -> Option<Duration> {
        let (changes, mut problem) = match self.establish(&wanted).await {
            Ok(changes) => (changes, None),
            Err(problem) => (0, Some(problem)),
        };
        if problem.is_none() && self.others.is_none() {
            self.remove_others().await;
        }
        if self.look_for_obstacles {
            self.look_for_obstacles = false;
            let families: Vec<Family> =
                wanted.families.iter().map(|f| Family::of(&f.network)).collect();
            let found = obstacles::find(&mut self.nf, &families).and_then(|mut found| {
                found.found.extend(obstacles::find_legacy(&families)?);
                Ok(found)
            });
            match found {
                Ok(found) => self.obstacles = found,
                Err(err) => problem = problem.or(Some(format!("cannot read nf_tables: {err}"))),
            }
        }
        self.options.metrics.kernel_changes.inc_by(u64::try_from(changes).unwrap_or(u64::MAX));
        let failed = problem.is_some();
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        self.tell(wanted, changes, problem);
        failed.then(|| (RETRY * (1 << (self.failures - 1).min(5))).min(LONGEST_RETRY))
    }

    fn tell(&mut self, wanted: FirewallWanted, changes: usize, problem: Option<String>) {
        let mut warnings = self.obstacles.found.clone();
        warnings.extend(self.barriers.iter().cloned());
        warnings.extend(self.others.iter().flatten().cloned());
        if self.lacks.fully_random {
            warnings.push("this host cannot masquerade to fully random ports".to_owned());
        }
        if self.lacks.local_source {
            warnings.push(
                "this host cannot match its own addresses: outer packets are not exempt from \
                 masquerading"
                    .to_owned(),
            );
        }
        let now: BTreeSet<String> = problem.iter().chain(&warnings).cloned().collect();
        for news in now.difference(&self.told) {
            warn!("firewall: {news}");
        }
        for past in self.told.difference(&now) {
            info!("firewall: no longer: {past}");
        }
        self.told = now;
        let renderer = match &self.renderer {
            Some(renderer) => removal::name(renderer.realm()),
            None if self.options.nftables => removal::name(Realm::Nftables),
            None => "iptables",
        };
        self.report.send_if_modified(|report| {
            let new = FirewallReport {
                renderer: renderer.to_owned(),
                in_place: problem.is_none(),
                wanted: Some(wanted),
                changes: report.changes + changes,
                problems: problem.into_iter().collect(),
                warnings,
            };
            let differs = *report != new;
            *report = new;
            differs
        });
    }

    /// Waits for a reason to look again. Returns whether the agent is still there.
    async fn wait(&mut self, retry: Option<Duration>) -> bool {
        let retry = retry.map(|pause| Instant::now() + pause);
        loop {
            let legacy = self.renderer.as_ref().is_some_and(Renderer::is_legacy);
            let mut due = retry.map_or(self.next_resync, |retry| retry.min(self.next_resync));
            if legacy {
                due = due.min(Instant::now() + LEGACY_LOOK);
            }
            tokio::select! {
                change = self.wanted.changed() => return change.is_ok(),
                notices = self.monitor.next() => {
                    let Some(notices) = notices else {
                        self.look_for_obstacles = true;
                        return true;
                    };
                    if notices.iter().any(|notice| self.concerns_us(notice)) {
                        sleep(SETTLE).await;
                        return true;
                    }
                }
                () = sleep_until(due) => {
                    let now = Instant::now();
                    if now >= self.next_resync {
                        let period = self.options.resync;
                        self.next_resync =
                            now + if legacy { period } else { period.max(SAFETY_NET) };
                        return true;
                    }
                    if retry.is_some_and(|retry| now >= retry) {
                        return true;
                    }
                    if legacy && fingerprint::outline_of_legacy().ok().as_ref() != Some(&self.outline) {
                        self.look_for_obstacles = true;
                        return true;
                    }
                }
            }
        }
    }

    /// Whether a notification is about rules of ours, or about what may drop what we forward.
    fn concerns_us(&mut self, notice: &Notice) -> bool {
        let Notice { family, table, chain, base_chain } = notice;
        let watched = |(f, t, c): &(u8, String, String)| {
            f == family && t == table && (chain.is_empty() || c == chain)
        };
        let obstacle = *base_chain || self.obstacles.watched.iter().any(watched);
        self.look_for_obstacles |= obstacle;
        let own = Family::ALL.iter().any(|family| nftables::table(*family) == table);
        let place = PLACES.iter().any(|place| {
            place.table == table
                && (chain.is_empty() || chain == place.chain || chain == place.from)
        });
        obstacle || own || place
    }

    async fn renderer(&mut self) -> Result<Renderer, String> {
        if let Some(renderer) = &self.renderer {
            return Ok(renderer.clone());
        }
        let renderer = Renderer::choose(self.options.nftables, &mut self.nf).await?;
        info!("firewall rules go to {}", removal::name(renderer.realm()));
        self.renderer = Some(renderer.clone());
        Ok(renderer)
    }

    /// Reads and writes until what is there is what is wanted. Returns the number of writes.
    async fn establish(&mut self, wanted: &FirewallWanted) -> Result<usize, String> {
        if wanted.is_empty() && self.renderer.is_none() && self.holds_nothing()? {
            return Ok(0);
        }
        let renderer = self.renderer().await?;
        let mut print = self.fingerprint(&renderer).await?;
        let repairing = self.stood.as_ref().is_some_and(|stood| stood.wanted == *wanted);
        if repairing {
            if self.stood.as_ref().is_some_and(|stood| stood.fingerprint == print) {
                return Ok(0);
            }
            self.ration_repairs().await;
            if self.repair(&renderer, wanted).await {
                self.options.metrics.repairs.inc();
                info!("put our firewall rules back, which somebody else had changed");
                return Ok(1);
            }
            print = self.fingerprint(&renderer).await?;
        }
        let mut written: Vec<Fingerprint> = Vec::new();
        for _ in 0..ROUNDS {
            let sets = wanted.rule_sets(self.lacks);
            let look = renderer
                .look(&sets, wanted.forward, &print)
                .await
                .map_err(|err| err.to_string())?;
            let again = self.fingerprint(&renderer).await?;
            if again != print {
                // Somebody is at it; let them finish.
                sleep(SETTLE).await;
                print = self.fingerprint(&renderer).await?;
                continue;
            }
            // Twice written, twice the same in the kernel: a tool that shows our rules in words
            // we do not know, not somebody who changes them.
            let settled = matches!(written.as_slice(), [.., a, b] if a == b && *b == print);
            if look.writes.is_empty() || settled {
                if !look.writes.is_empty() {
                    warn!("firewall: the tool shows our rules in words we do not know");
                }
                self.barriers = look.barriers;
                self.stood = Some(Stood { wanted: wanted.clone(), fingerprint: print });
                if repairing && !written.is_empty() {
                    self.options.metrics.repairs.inc();
                    info!("put our firewall rules back, which somebody else had changed");
                }
                return Ok(written.len());
            }
            if self.write(&renderer, &look.writes, wanted).await? {
                print = self.fingerprint(&renderer).await?;
                written.push(print.clone());
            }
        }
        Err("something else changes our rules faster than we can write them".to_owned())
    }

    /// The short way back to rules that have stood before: writes the places that differ, and knows
    /// by the kernel's account that they are as they were. Returns whether they are; whatever else
    /// is wrong is for the long way.
    async fn repair(&mut self, renderer: &Renderer, wanted: &FirewallWanted) -> bool {
        let Some(stood) = self.stood.as_ref().map(|stood| stood.fingerprint.clone()) else {
            return false;
        };
        let Ok(print) = self.fingerprint(renderer).await else { return false };
        let differs = |key: &Key| print.get(key) != stood.get(key);
        let sets = wanted.rule_sets(self.lacks);
        if let Err(err) = renderer.rewrite(&sets, wanted.forward, differs).await {
            debug!("firewall: repairing: {err}");
            return false;
        }
        self.fingerprint(renderer).await.is_ok_and(|now| now == stood)
    }

    async fn fingerprint(&mut self, renderer: &Renderer) -> Result<Fingerprint, String> {
        let unreadable = |err: io::Error| unreadable(&err);
        if renderer.is_legacy() {
            self.outline = fingerprint::outline_of_legacy().map_err(unreadable)?;
        }
        renderer.fingerprint(&mut self.nf).await.map_err(unreadable)
    }

    /// Whether there is no rule of ours anywhere.
    fn holds_nothing(&mut self) -> Result<bool, String> {
        let all = [
            fingerprint::of_nftables(&mut self.nf),
            fingerprint::of_iptables_nft(&mut self.nf),
            fingerprint::of_legacy(),
        ];
        let mut empty = true;
        for print in all {
            empty &= print.map_err(|err| unreadable(&err))?.is_empty();
        }
        Ok(empty)
    }

    /// Writes. Returns whether that worked; if not, there is a simpler way to try.
    async fn write(
        &mut self,
        renderer: &Renderer,
        writes: &[Write],
        wanted: &FirewallWanted,
    ) -> Result<bool, String> {
        let Err(err) = renderer.write(writes).await else {
            self.refused = false;
            return Ok(true);
        };
        let refused =
            matches!(&err, ChildError::Failed { .. }) && !err.to_string().contains("xtables lock");
        // Once may be somebody else's change at the same moment.
        let again = std::mem::replace(&mut self.refused, true);
        if refused && (!again || self.do_without(wanted)) {
            debug!("firewall: {err}");
            return Ok(false);
        }
        Err(err.to_string())
    }

    /// Gives up the next thing that the tool or the kernel may lack. With everything given up and
    /// still refused, that was not it.
    fn do_without(&mut self, wanted: &FirewallWanted) -> bool {
        let steps = [(true, false), (false, true), (true, true)];
        let now = (self.lacks.fully_random, self.lacks.local_source);
        let tried = steps.iter().position(|step| *step == now).map_or(0, |at| at + 1);
        let helps = |(random, local): &&(bool, bool)| {
            (wanted.fully_random || !random) && (wanted.tunnel_port.is_some() || !local)
        };
        let next = steps[tried..].iter().find(helps).filter(|_| wanted.masquerade).copied();
        let (fully_random, local_source) = next.unwrap_or_default();
        self.lacks = Lacks { fully_random, local_source };
        next.is_some()
    }

    /// Two programs that both insist would keep each other busy: after many repairs at once, one
    /// a second.
    async fn ration_repairs(&mut self) {
        let now = Instant::now();
        // Each repair takes a second out of the budget, time puts it back.
        let full = now + REPAIR_BUDGET;
        let spent_until = self.repairs_spent_until.max(now) + REPAIR_COST;
        if spent_until > full {
            warn!("firewall: something else keeps changing our rules; repairing them more slowly");
            sleep_until(spent_until - REPAIR_BUDGET).await;
        }
        self.repairs_spent_until = spent_until;
    }

    /// Once ours stand, what another renderer (of ours or of a flanneld) left behind goes.
    async fn remove_others(&mut self) {
        let used = self.renderer.as_ref().map(Renderer::realm);
        let mut problems = Vec::new();
        for realm in Realm::ALL.into_iter().filter(|realm| Some(*realm) != used) {
            match removal::remove(&mut self.nf, realm).await {
                Ok(removed) if removed.is_empty() => {}
                Ok(removed) => {
                    info!("removed {} from {}", removed.join(", "), removal::name(realm));
                }
                Err(problem) => problems.push(problem),
            }
        }
        self.others = Some(problems);
    }
}

fn unreadable(err: &io::Error) -> String {
    format!("cannot read the kernel's rules: {err}")
}
