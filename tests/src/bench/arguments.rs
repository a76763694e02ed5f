//! What `cargo xtask bench` can be told.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{candidate::Candidate, site::Profile, workload::Workload};

/// Arguments of `bench`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    /// Something else than the data path
    #[command(subcommand)]
    pub part: Option<Part>,
    /// The data path
    #[command(flatten)]
    pub datapath: Datapath,
}

/// What else can be measured.
#[derive(Clone, Debug, Subcommand)]
pub enum Part {
    /// Nanoseconds per packet of each eBPF program, and what the verifier went through
    Micro(Micro),
    /// Start, changes of peers, and idling of the agent
    ControlPlane(ControlPlane),
}

/// Candidates side by side, measured in turn, with ratios to kernel-vxlan
#[derive(Args, Clone, Debug)]
pub struct Datapath {
    /// What the underlay carries
    #[arg(long, value_enum, default_value_t = Profile::Virtual)]
    pub profile: Profile,
    /// How many times each candidate has its turn with each workload
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Write the results here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Which candidates; all unless given
    #[arg(long, value_enum, value_delimiter = ',')]
    pub candidates: Vec<Candidate>,
    /// Which workloads; all unless given
    #[arg(long, value_enum, value_delimiter = ',')]
    pub workloads: Vec<Workload>,
    /// A flanneld to compare with
    #[arg(long, value_name = "PATH")]
    pub flanneld: Option<PathBuf>,
    /// Length of one turn in milliseconds, the warm-up not counted
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(20..=60_000))]
    pub turn: u64,
}

/// Arguments of `bench micro`.
#[derive(Args, Clone, Debug)]
pub struct Micro {
    /// How many runs are timed together
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub repeat: u32,
    /// How many such measurements are made of each program and packet
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Write the results here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Arguments of `bench control-plane`.
#[derive(Args, Clone, Debug)]
pub struct ControlPlane {
    /// How many peers there are
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=8000))]
    pub peers: u16,
    /// How many times each start is measured
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// How many changes of each kind are measured
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=2000))]
    pub changes: u16,
    /// For how many seconds an idle agent is watched
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub idle: u64,
    /// A flanneld to compare with
    #[arg(long, value_name = "PATH")]
    pub flanneld: Option<PathBuf>,
    /// Write the results here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
