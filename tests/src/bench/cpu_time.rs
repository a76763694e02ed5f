//! CPU time that packets cost outside of the threads that send and receive them.
//!
//! Where the kernel counts interrupts into whatever they interrupt (`TICK_CPU_ACCOUNTING`, the
//! usual build), a thread's own clock holds the softirqs that its system calls end in: on veth
//! that is the whole path to the receiver's socket. What is missing then is `ksoftirqd`, which
//! takes over under load. Where the kernel keeps interrupts apart (`IRQ_TIME_ACCOUNTING`),
//! `/proc/stat` has the softirq time of each CPU, `ksoftirqd` included.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

/// `/proc/stat` counts in these (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// Where the missing part is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuUsage {
    /// `schedstat` of the `ksoftirqd` threads.
    Ksoftirqd(Vec<PathBuf>),
    /// The softirq column of `/proc/stat` for these CPUs.
    SoftirqColumn(Vec<usize>),
}

impl CpuUsage {
    /// The right way for this kernel and these CPUs.
    pub fn of_cpus(cpus: &[usize]) -> Result<Self> {
        if kernel_config().is_some_and(|text| keeps_interrupts_apart(&text)) {
            return Ok(Self::SoftirqColumn(cpus.to_vec()));
        }
        let wanted: Vec<_> = cpus.iter().map(|cpu| format!("ksoftirqd/{cpu}")).collect();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let path = entry.path();
            let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
            if wanted.iter().any(|wanted| wanted == name.trim()) {
                found.push(path.join("schedstat"));
            }
        }
        Ok(Self::Ksoftirqd(found))
    }

    /// All of it since the machine started.
    pub fn kernel_threads(&self) -> Result<Duration> {
        match self {
            Self::Ksoftirqd(files) => files.iter().map(|file| schedstat(file.as_path())).sum(),
            Self::SoftirqColumn(cpus) => {
                let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
                cpus.iter().map(|cpu| softirq_of(&text, *cpu)).sum()
            }
        }
    }
}

fn schedstat(file: &Path) -> Result<Duration> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let first = text.split_whitespace().next().and_then(|word| word.parse().ok());
    first.map(Duration::from_nanos).with_context(|| format!("{}: {text}", file.display()))
}

/// The seventh figure of a CPU's line (proc(5)).
fn softirq_of(stat: &str, cpu: usize) -> Result<Duration> {
    let name = format!("cpu{cpu}");
    stat.lines()
        .find_map(|line| {
            let mut words = line.split_whitespace();
            if words.next() != Some(&name) {
                return None;
            }
            words.nth(6)?.parse::<u32>().ok()
        })
        .map(|ticks| TICK * ticks)
        .with_context(|| format!("/proc/stat has no softirq time of CPU {cpu}"))
}

/// The text of the running kernel's configuration, if it is kept where it usually is.
fn kernel_config() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    if let Ok(text) = fs::read_to_string(format!("/boot/config-{}", release.trim())) {
        return Some(text);
    }
    let output = std::process::Command::new("zcat").arg("/proc/config.gz").output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn keeps_interrupts_apart(config: &str) -> bool {
    config.lines().any(|line| line == "CONFIG_IRQ_TIME_ACCOUNTING=y")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_softirq_column_is_the_seventh() {
        let stat = "cpu  10 0 10 100 0 1 12 0 0 0\n\
                    cpu0 1 2 3 4 5 6 700 8 9 10\ncpu10 1 2 3 4 5 6 9 8 9 10\nintr 1\n";
        assert_eq!(softirq_of(stat, 0).unwrap(), Duration::from_secs(7));
        assert_eq!(softirq_of(stat, 10).unwrap(), Duration::from_millis(90));
        assert!(softirq_of(stat, 1).is_err());
    }

    #[test]
    fn the_kernel_is_asked_how_it_counts() {
        assert!(keeps_interrupts_apart("A=y\nCONFIG_IRQ_TIME_ACCOUNTING=y\n"));
        assert!(!keeps_interrupts_apart("# CONFIG_IRQ_TIME_ACCOUNTING is not set\n"));
    }

    #[test]
    fn this_kernels_time_goes_forward() {
        let usage = CpuUsage::of_cpus(&[0]).unwrap();
        let before = usage.kernel_threads().unwrap();
        assert!(usage.kernel_threads().unwrap() >= before);
        assert_ne!(usage, CpuUsage::Ksoftirqd(Vec::new()), "CPU 0 has no ksoftirqd");
    }
}
