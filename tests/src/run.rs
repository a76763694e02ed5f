//! One run of the lab: its name, its directory, and taking everything away again.
//!
//! A run owns a directory `<base>/<prefix>` with a locked file `owner`. The lock goes with the
//! process, so a directory whose lock can be had belongs to nobody any more and is removed by
//! the next run, with every namespace that carries its prefix and every process in them.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Write},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process, ptr,
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicI32, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    fcntl::{Flock, FlockArg, OFlag},
    mount::{MntFlags, umount2},
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction},
    unistd::{Pid, pipe2},
};

/// Where `ip netns` keeps namespaces.
pub const NETNS_DIR: &str = "/run/netns";

/// Number of runs of this process so far.
static RUNS: AtomicU32 = AtomicU32::new(0);
/// Runs to be removed when a signal ends the process.
static LIVE: Mutex<Vec<(String, PathBuf)>> = Mutex::new(Vec::new());
/// Where the signal handler writes; -1 before it is installed.
static SIGNAL_PIPE: AtomicI32 = AtomicI32::new(-1);

/// A run. Dropping it removes everything made under it.
#[derive(Debug)]
pub struct Run {
    prefix: String,
    dir: PathBuf,
    keep: bool,
    _owner: Flock<File>,
}

impl Run {
    /// Starts a run. Removes what dead runs left, and arranges for SIGINT, SIGTERM and SIGHUP
    /// to remove this one.
    pub fn new() -> Result<Self> {
        let _global = lock_base()?;
        sweep_locked(false)?;
        handle_signals()?;
        let number = RUNS.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("fl{}{}", base36(process::id()), base36(number));
        let dir = base_dir().join(&prefix);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let owner = File::create(dir.join("owner")).context("cannot make the run's owner file")?;
        let owner = Flock::lock(owner, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, e)| e)
            .context("cannot lock the run's owner file")?;
        lock(&LIVE).push((prefix.clone(), dir.clone()));
        Ok(Self { prefix, dir, keep: false, _owner: owner })
    }

    /// Makes what is started from now on outlive this process once [`Run::mark_kept`] is called.
    pub fn plan_to_keep(&mut self) {
        self.keep = true;
    }

    /// Whether processes are to outlive this one.
    pub fn keeps(&self) -> bool {
        self.keep
    }

    /// Leaves everything running; [`remove_kept`] removes it later. The caller has to forget
    /// (`std::mem::forget`) every handle of the lab: a dropped one still ends what it stands for.
    pub fn mark_kept(&self) -> Result<()> {
        fs::write(self.dir.join("kept"), "").context("cannot mark the run as kept")?;
        lock(&LIVE).retain(|(prefix, _)| *prefix != self.prefix);
        Ok(())
    }

    /// What every namespace's name starts with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A directory in memory for the run's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        lock(&LIVE).retain(|(prefix, _)| *prefix != self.prefix);
        if let Err(error) = remove(&self.prefix, &self.dir) {
            complain(&format!("cannot remove run {}: {error:#}", self.prefix));
        }
    }
}

/// Removes runs that were left running on purpose, and those whose process is gone. Returns the
/// prefixes of the runs that are no more.
pub fn remove_kept() -> Result<Vec<String>> {
    let _global = lock_base()?;
    sweep_locked(true)
}

/// Removes what runs left whose process is gone.
pub fn sweep() -> Result<()> {
    let _global = lock_base()?;
    sweep_locked(false).map(drop)
}

fn base_dir() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.join("flannel-lab") } else { PathBuf::from("/tmp/flannel-lab") }
}

/// Starting and sweeping runs happens one at a time.
fn lock_base() -> Result<Flock<File>> {
    let base = base_dir();
    fs::create_dir_all(&base).with_context(|| format!("cannot make {}", base.display()))?;
    let file = File::create(base.join(".lock")).context("cannot make the lab's lock file")?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).context("cannot lock the lab")
}

fn sweep_locked(kept_too: bool) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(base_dir())?.flatten() {
        let (dir, prefix) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if !dir.is_dir() || (!kept_too && dir.join("kept").exists()) {
            continue;
        }
        if let Ok(owner) = File::open(dir.join("owner"))
            && Flock::lock(owner, FlockArg::LockExclusiveNonblock).is_err()
        {
            continue;
        }
        remove(&prefix, &dir)?;
        removed.push(prefix);
    }
    Ok(removed)
}

/// Ends every process in the run's namespaces, removes these and the run's directory.
fn remove(prefix: &str, dir: &Path) -> Result<()> {
    let start = format!("{prefix}-");
    let mut inodes = HashSet::new();
    let mut paths = Vec::new();
    if let Ok(entries) = fs::read_dir(NETNS_DIR) {
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(&start) {
                if let Ok(meta) = fs::metadata(entry.path()) {
                    inodes.insert((meta.dev(), meta.ino()));
                }
                paths.push(entry.path());
            }
        }
    }
    end_processes(&inodes);
    for path in &paths {
        // Not mounted if its maker died half way; the file goes in any case.
        let _ = umount2(path, MntFlags::MNT_DETACH);
        fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Kills what runs in these namespaces and waits for it to be gone.
fn end_processes(namespaces: &HashSet<(u64, u64)>) {
    if namespaces.is_empty() {
        return;
    }
    let patience = Instant::now() + Duration::from_secs(5);
    loop {
        let pids = pids_in(namespaces);
        if pids.is_empty() || Instant::now() > patience {
            return;
        }
        for pid in pids {
            let _ = kill(pid, Signal::SIGKILL);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Live processes, this one left out, whose network namespace is one of these.
fn pids_in(namespaces: &HashSet<(u64, u64)>) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| u32::try_from(*pid).is_ok_and(|pid| pid != process::id()))
        .filter(|pid| {
            fs::metadata(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|meta| namespaces.contains(&(meta.dev(), meta.ino())))
        })
        .map(Pid::from_raw)
        .collect()
}

extern "C" fn on_signal(signal: libc::c_int) {
    let fd = SIGNAL_PIPE.load(Ordering::Relaxed);
    let byte = u8::try_from(signal).unwrap_or(0);
    // SAFETY: write(2) may be called from a signal handler; the byte lives on this stack.
    unsafe { libc::write(fd, ptr::from_ref(&byte).cast(), 1) };
}

/// Once per process: a thread that removes all live runs and exits when a signal says so.
fn handle_signals() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| result = install_handler());
    result
}

fn install_handler() -> Result<()> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC).context("cannot make a pipe")?;
    SIGNAL_PIPE.store(write.as_raw_fd(), Ordering::Relaxed);
    // Open for the life of the process.
    std::mem::forget(write);
    thread::spawn(move || {
        let mut byte = [0_u8];
        while !matches!(nix::unistd::read(&read, &mut byte), Ok(1)) {}
        for (prefix, dir) in lock(&LIVE).drain(..) {
            if let Err(error) = remove(&prefix, &dir) {
                complain(&format!("cannot remove run {prefix}: {error:#}"));
            }
        }
        process::exit(128 + i32::from(byte[0]));
    });
    let action =
        SigAction::new(SigHandler::Handler(on_signal), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only calls write(2).
        unsafe { sigaction(signal, &action) }.context("cannot install a signal handler")?;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says something where nobody can be told by a result.
fn complain(text: &str) {
    // If standard error is gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "{text}");
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.extend(char::from_digit(number % 36, 36));
        number /= 36;
        if number == 0 {
            return digits.into_iter().rev().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::base36;

    #[test]
    fn numbers_in_base_36() {
        assert_eq!(base36(0), "0");
        assert_eq!(base36(35), "z");
        assert_eq!(base36(36), "10");
        assert_eq!(base36(4_194_304), "2hwcg");
    }
}
