//! The vxlan backend and the kernel: what it makes, adopts, heals and leaves alone.
//!
//! Every test makes a network namespace of its own and needs root: `cargo xtask test` runs them.

#[path = "kernel_datapath/adoption.rs"]
mod adoption;
#[path = "kernel_datapath/device.rs"]
mod device;
#[path = "kernel_datapath/direct_routing.rs"]
mod direct_routing;
#[path = "kernel_datapath/families.rs"]
mod families;
#[path = "kernel_datapath/healing.rs"]
mod healing;
#[path = "kernel_datapath/host.rs"]
mod host;
#[path = "kernel_datapath/peers.rs"]
mod peers;
#[path = "kernel_datapath/scale.rs"]
mod scale;
