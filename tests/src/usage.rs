//! What a process costs: CPU time and wake-ups.

use std::{fs, time::Duration};

use anyhow::{Context, Result};

/// What a process has used since it began, all its threads together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time on a CPU (proc(5), `schedstat`).
    pub cpu: Duration,
    /// Times it gave up the CPU to wait, and so was woken (`voluntary_ctxt_switches`).
    pub wake_ups: u64,
}

impl Usage {
    /// The usage up to now.
    pub fn of(pid: u32) -> Result<Self> {
        let mut usage = Self::default();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?.path();
            let read = |name: &str| {
                let path = task.join(name);
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
            };
            let schedstat = read("schedstat")?;
            let time = schedstat.split_whitespace().next().context("an empty schedstat")?;
            usage.cpu += Duration::from_nanos(time.parse()?);
            let status = read("status")?;
            let mut lines = status.lines();
            let switches = lines
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
                .context("no voluntary_ctxt_switches")?;
            usage.wake_ups += switches.trim().parse::<u64>()?;
        }
        Ok(usage)
    }

    /// What was used since an earlier look.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            wake_ups: self.wake_ups.saturating_sub(earlier.wake_ups),
        }
    }
}
