//! What `cargo xtask bench` measures, and how. The method is told in `docs/benchmarks.md`.
//!
//! [`datapath`] compares ways for packets from a pod on one node to a pod on another, all set up
//! side by side and measured in turn. [`micro`] times the eBPF programs alone. [`control_plane`]
//! times the agent.

pub mod arguments;
pub mod bpf_programs;
pub mod candidate;
pub mod control_plane;
pub mod cpu_time;
pub mod datapath;
pub mod frames;
pub mod generators;
pub mod micro;
pub mod priority;
pub mod report;
pub mod site;
pub mod statistics;
pub mod window;
pub mod workload;

use anyhow::Result;

use self::arguments::{Arguments, Part};

/// Does what the arguments ask for.
pub fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.part {
        Some(Part::Micro(micro)) => micro::run(micro),
        Some(Part::ControlPlane(control_plane)) => control_plane::run(control_plane),
        None => datapath::run(&arguments.datapath),
    }
}
