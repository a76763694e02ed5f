//! The `flannel-agent` binary: everything is in the library.

fn main() {}
