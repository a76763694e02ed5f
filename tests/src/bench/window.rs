//! The time in which something is measured, and counting within it on pinned threads.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

use super::{
    cpu_time::CpuUsage,
    priority::{Importance, raise_thread},
};

/// How long before a window opens everything is at work already: connections have left slow
/// start, caches are warm, and a data path that treats long flows better has seen enough.
pub const WARM_UP: Duration = Duration::from_millis(300);

/// When a measurement begins and ends.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    from: Instant,
    until: Instant,
}

impl Window {
    /// Opens after the warm-up, stays open for `time`.
    pub fn after_warm_up(time: Duration) -> Self {
        let from = Instant::now() + WARM_UP;
        Self { from, until: from + time }
    }

    /// When it closes.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// How much CPU time the kernel's own threads take while it is open.
    pub fn kernel_threads(&self, usage: &CpuUsage) -> Result<Duration> {
        thread::sleep(self.from.saturating_duration_since(Instant::now()));
        let before = usage.kernel_threads()?;
        thread::sleep(self.until.saturating_duration_since(Instant::now()));
        Ok(usage.kernel_threads()?.saturating_sub(before))
    }
}

/// What one thread counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// How much.
    pub count: u64,
    /// Over which time.
    pub wall: Duration,
    /// With how much CPU time of the thread.
    pub cpu: Duration,
}

impl Counted {
    /// Per second.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn rate(&self) -> f64 {
        self.count as f64 / self.wall.as_secs_f64()
    }

    /// Together with another thread's that worked at the same time.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            wall: self.wall.max(other.wall),
            cpu: self.cpu + other.cpu,
        }
    }
}

/// Counts on the calling thread while the window is open.
#[derive(Debug)]
pub struct Counter {
    window: Window,
    begun: Option<(Instant, Duration)>,
    counted: Counted,
}

impl Counter {
    /// Pins the calling thread to a CPU and makes it more important than others.
    pub fn on_cpu(cpu: usize, importance: Importance, window: Window) -> Result<Self> {
        keep_on_cpu(cpu)?;
        raise_thread(importance)?;
        Ok(Self { window, begun: None, counted: Counted::default() })
    }

    /// Adds what was just done. `false` once the window has closed; nothing is added then.
    pub fn add(&mut self, count: u64) -> Result<bool> {
        let now = Instant::now();
        if now < self.window.from {
            return Ok(true);
        }
        let Some((begun, cpu)) = self.begun else {
            self.begun = Some((now, thread_time()?));
            return Ok(true);
        };
        self.counted.count += count;
        self.counted.wall = now - begun;
        if now < self.window.until {
            return Ok(true);
        }
        self.counted.cpu = thread_time()?.saturating_sub(cpu);
        Ok(false)
    }

    /// Whether the window has opened.
    pub fn is_open(&self) -> bool {
        self.begun.is_some()
    }

    /// What was counted. Of a thread that ended before the window closed, up to now.
    pub fn finish(mut self) -> Result<Counted> {
        if let (Some((_, cpu)), true) = (self.begun, self.counted.cpu.is_zero()) {
            self.counted.cpu = thread_time()?.saturating_sub(cpu);
        }
        Ok(self.counted)
    }
}

/// Keeps the calling thread on a CPU.
pub fn keep_on_cpu(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    sched_setaffinity(Pid::from_raw(0), &set)
        .with_context(|| format!("cannot keep a thread on CPU {cpu}"))
}

/// CPU time of the calling thread, in the scheduler's nanoseconds.
fn thread_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).context("no thread clock")?.into())
}
