//! The project's tasks: `cargo xtask <task>`.

mod bench;
mod build;
mod build_ebpf;
mod demo;
mod fuzz;
mod image;
mod lint;
mod run;
mod setup;
mod test;
mod tool;
mod toolchain;

use std::process::ExitCode;

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
    /// Find or install the BPF toolchain and what the lab needs
    Setup(setup::Arguments),
    /// Build the eBPF programs into target/bpf/flannel-ebpf
    BuildEbpf,
    /// Build the eBPF programs and the agent with them inside
    Build {
        /// Optimised, as released
        #[arg(long)]
        release: bool,
    },
    /// Build a container image as an OCI archive; no container engine is needed
    Image(image::Arguments),
    /// Build everything and start the agent: cargo xtask run -- <flags>
    Run(run::Arguments),
    /// Show a whole cluster at work, in namespaces of this machine
    Demo(demo::Arguments),
    /// Compare data paths, side by side in namespaces of this machine
    Bench(flannel_lab::bench::arguments::Arguments),
    /// Run the tests
    Test(test::Arguments),
    /// Throw generated input at everything that reads what others wrote
    Fuzz(fuzz::Arguments),
    /// Let clippy judge everything, the eBPF programs too
    Lint,
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Setup(arguments) => setup::run(&arguments),
        Task::BuildEbpf => build_ebpf::run().map(drop),
        Task::Build { release } => build::run(release),
        Task::Image(arguments) => image::run(&arguments),
        Task::Run(arguments) => run::run(&arguments),
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Bench(_) => bench::run(),
        Task::Test(arguments) => test::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Lint => lint::run(),
    }
}
