//! What `cargo xtask bench` measures, and how. The method is told in `docs/benchmarks.md`.
//!
//! [`datapath`] compares ways for packets from a pod on one node to a pod on another, all set up
//! side by side and measured in turn. [`micro`] times the eBPF programs alone. [`control_plane`]
//! times the agent.

pub mod arguments;
pub mod candidate;
pub mod cpu_time;
pub mod datapath;
pub mod generators;
pub mod priority;
pub mod report;
pub mod site;
pub mod statistics;
pub mod window;
pub mod workload;

use anyhow::Result;

use self::arguments::Arguments;

/// Does what the arguments ask for.
pub fn run(arguments: &Arguments) -> Result<()> {
    datapath::run(&arguments.datapath)
}
