//! Getting in front of other work on the machine while something is measured.

use std::{
    fs,
    sync::atomic::{AtomicI32, Ordering},
};

use anyhow::{Context, Result, ensure};

/// How important a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Importance {
    /// For threads that never rest: a low nice level. At a real-time priority they would starve
    /// `ksoftirqd`, and with it (before Linux 6.4) the packets.
    Nice,
    /// For threads that wait most of the time: the lowest real-time priority, so that whoever
    /// else computes on the CPU makes room at once.
    RealTime,
}

/// Nice level of what is measured.
const NICE: i32 = -15;

/// The group of processes that the scheduler treats as one: those of a terminal (sched(7)).
const GROUP: &str = "/proc/self/autogroup";

/// What the group's nice level was.
static GROUP_BEFORE: AtomicI32 = AtomicI32::new(0);

/// Makes the process's autogroup more important until the process ends. Nothing where the
/// kernel has no autogroups.
pub fn raise_group() -> Result<()> {
    let Ok(text) = fs::read_to_string(GROUP) else { return Ok(()) };
    let before = text.split_whitespace().last().and_then(|word| word.parse().ok());
    let before = before.with_context(|| format!("{GROUP}: {text}"))?;
    GROUP_BEFORE.store(before, Ordering::Relaxed);
    // SAFETY: the function is of the right kind, and may run at any time.
    let result = unsafe { libc::atexit(restore_group) };
    ensure!(result == 0, "cannot have a function called at the end");
    fs::write(GROUP, NICE.to_string()).with_context(|| format!("cannot write {GROUP}"))
}

extern "C" fn restore_group() {
    // The process ends: there is nobody left to tell.
    let _ = fs::write(GROUP, GROUP_BEFORE.load(Ordering::Relaxed).to_string());
}

/// Makes the calling thread more important than others.
pub fn raise_thread(importance: Importance) -> Result<()> {
    let result = match importance {
        // SAFETY: plain system call; on Linux 0 means the calling thread alone.
        Importance::Nice => unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) },
        Importance::RealTime => {
            let parameters = libc::sched_param { sched_priority: 1 };
            // SAFETY: plain system call with a valid pointer; 0 means the calling thread.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) }
        }
    };
    ensure!(result == 0, "cannot raise a priority: {}", std::io::Error::last_os_error());
    Ok(())
}
