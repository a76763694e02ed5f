//! The project's tasks: `cargo xtask <task>`.

mod build;
mod build_ebpf;
mod toolchain;

use clap::{Parser, Subcommand};

/// Tasks of the flannel-agent workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the eBPF programs into target/bpf/flannel-ebpf.
    BuildEbpf,
    /// Build the eBPF programs and the agent with them inside.
    Build {
        /// Optimised.
        #[arg(long)]
        release: bool,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().task {
        Task::BuildEbpf => build_ebpf::run().map(drop),
        Task::Build { release } => build::run(release),
    }
}
