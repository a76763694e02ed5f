//! The `flannel-agent` binary: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    flannel_agent::main()
}
