//! Processes that end with the lab.

use std::{
    fs::{self, File},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::{
        prctl,
        signal::{SigSet, Signal, kill},
    },
    unistd::{Pid, setsid},
};

/// A process in the background whose output goes to a file. Killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with standard output and error appended to `log`. With `keep` it
    /// outlives this process, unless it is dropped.
    pub fn spawn(mut command: Command, log: &Path, keep: bool) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        detach(&mut command, keep);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// Its process id: of the program itself, for nothing here forks.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All it wrote so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The file with its output.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The end of its output, for error messages.
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.log(), lines)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid()).context("pid out of range")?);
        kill(pid, signal).with_context(|| format!("cannot send {signal} to {pid}"))
    }

    /// The exit status if it has ended.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot wait for a process")
    }

    /// Waits for its end.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.exited()? {
                return Ok(status);
            }
            if start.elapsed() > within {
                bail!(
                    "process {} did not end within {within:?}; its last words:\n{}",
                    self.pid(),
                    self.log_tail(20)
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal and waits for the end.
    pub fn stop(&mut self, signal: Signal, within: Duration) -> Result<ExitStatus> {
        self.signal(signal)?;
        self.wait(within)
    }

    /// Ends it at once.
    pub fn kill(&mut self) -> Result<()> {
        // Fails if it has ended by itself, which is as good.
        let _ = self.child.kill();
        let status = self.child.wait().context("cannot wait for a killed process")?;
        debug_assert!(status.signal().is_some() || status.code().is_some());
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nobody to tell; the run's end looks for survivors.
        let _ = self.kill();
    }
}

/// A child in a session of its own with no signal blocked; it dies with the thread that
/// starts it, unless it is to be kept.
fn detach(command: &mut Command, keep: bool) {
    let set_up = move || {
        setsid()?;
        SigSet::empty().thread_set_mask()?;
        if !keep {
            prctl::set_pdeathsig(Some(Signal::SIGKILL))?;
        }
        Ok(())
    };
    // SAFETY: only async-signal-safe system calls between fork and exec, no allocation.
    unsafe { command.pre_exec(set_up) };
}

/// Runs a command to its end and returns what it printed on standard output. A failure carries
/// what it printed on standard error.
pub fn output(command: &mut Command) -> Result<String> {
    let output = status_and_output(command)?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim(),
            String::from_utf8_lossy(&output.stdout).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command to its end, whatever that is.
pub fn status_and_output(command: &mut Command) -> Result<Output> {
    detach(command, false);
    command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
