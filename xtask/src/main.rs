//! Build, run, demonstrate and test: `cargo xtask <task>`.

use clap::{Parser, Subcommand};

mod demo;
mod run;
mod test;
mod tool;

/// Tasks of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Show a whole cluster at work, in namespaces of this machine
    Demo(demo::Arguments),
    /// Build everything and start the agent: cargo xtask run -- <flags>
    Run(run::Arguments),
    /// Run the tests
    Test(test::Arguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().task {
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Run(arguments) => run::run(&arguments),
        Task::Test(arguments) => test::run(&arguments),
    }
}
