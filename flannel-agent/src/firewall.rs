//! The host's firewall: masquerading what leaves the network, accepting what is forwarded for it.
//!
//! One model of the rules ([`rules`]), two renderers ([`nftables`], [`iptables`]). The rules
//! outlive the process; a start adopts what is right, and what somebody else changes is noticed
//! by netlink notifications and put back.

pub mod bypass;
mod child;
mod fingerprint;
mod iptables;
mod keeper;
mod legacy;
mod nfnetlink;
mod nftables;
mod obstacles;
pub mod removal;
mod renderer;
pub mod rules;
mod variant;

use std::time::Duration;

use tokio::{sync::watch, task::JoinHandle};

use self::keeper::KeeperOptions;
pub use self::rules::{FamilyWanted, FirewallPolicy, FirewallWanted, ForwardPosition};
use crate::telemetry::metrics::Metrics;

/// How the firewall is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirewallReport {
    /// Which tool's rules they are.
    pub renderer: String,
    /// Whether the rules are as wanted.
    pub in_place: bool,
    /// What was wanted when this was found; `None` before the first attempt.
    pub wanted: Option<FirewallWanted>,
    /// Transactions written since the start.
    pub changes: usize,
    /// Why the rules are not in place.
    pub problems: Vec<String>,
    /// What keeps them from having their effect, or could.
    pub warnings: Vec<String>,
}

/// A handle to the task that keeps the rules. Dropped, the task ends and the rules stay.
pub struct Firewall {
    wanted: watch::Sender<Option<FirewallWanted>>,
    report: watch::Receiver<FirewallReport>,
    task: JoinHandle<()>,
}

impl Firewall {
    /// Starts the task, which waits to be told what is wanted. `nftables` chooses the renderer;
    /// every `resync` legacy rules are looked at even if nothing was heard; of others the kernel
    /// tells.
    ///
    /// Needs a [`tokio::task::LocalSet`] to run on.
    pub fn open(nftables: bool, resync: Duration, metrics: Metrics) -> Self {
        let (wanted, wanted_in) = watch::channel(None);
        let (report_out, report) = watch::channel(FirewallReport::default());
        let options = KeeperOptions { nftables, resync, metrics };
        let task = tokio::task::spawn_local(keeper::keep(options, wanted_in, report_out));
        Self { wanted, report, task }
    }

    /// Says what is wanted. Returns at once; [`changed`](Self::changed) tells when there is news.
    pub fn want(&self, wanted: FirewallWanted) {
        self.wanted.send_if_modified(|now| {
            let differs = now.as_ref() != Some(&wanted);
            *now = Some(wanted);
            differs
        });
    }

    /// Resolves when the report is another. Cancel-safe.
    pub async fn changed(&mut self) {
        if self.report.changed().await.is_err() {
            // The task is gone only if the runtime is going down.
            std::future::pending::<()>().await;
        }
    }

    /// What came of the last look.
    pub fn report(&self) -> FirewallReport {
        self.report.borrow().clone()
    }

    /// Whether what is wanted now was tried, however that ended.
    pub fn attempted(&self) -> bool {
        *self.wanted.borrow() == self.report.borrow().wanted
    }

    /// Why the agent is not ready for the rules' sake, if it is not.
    pub fn missing(&self) -> Option<String> {
        let report = self.report.borrow();
        if *self.wanted.borrow() != report.wanted || report.wanted.is_none() {
            return Some("firewall rules are being put in place".to_owned());
        }
        // Without masquerading nothing goes out under a wrong source, and a host without a
        // firewall's tools has hardly a rule that drops what ours would accept.
        let needed = report.wanted.as_ref().is_some_and(|wanted| wanted.masquerade);
        (needed && !report.in_place).then(|| report.problems.join("; "))
    }
}

impl Drop for Firewall {
    fn drop(&mut self) {
        self.task.abort();
    }
}
