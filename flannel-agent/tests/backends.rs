//! host-gw and udp and the kernel: what they make, adopt, heal and leave alone.
//!
//! Every test makes a network namespace of its own and needs root: `cargo xtask test` runs them.

#[path = "backends/host.rs"]
mod host;
#[path = "backends/host_gw.rs"]
mod host_gw;
#[path = "backends/udp.rs"]
mod udp;
