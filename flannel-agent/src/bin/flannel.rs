//! The CNI plugin `flannel`: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    flannel_agent::cni::main()
}
