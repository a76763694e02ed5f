//! The optimised part of `cargo xtask bench`, which builds and starts it.

use std::process::ExitCode;

use clap::Parser;
use flannel_lab::bench::{self, arguments::Arguments};

#[derive(Parser)]
#[command(name = "cargo xtask bench")]
struct CommandLine {
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    match bench::run(&CommandLine::parse().arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
