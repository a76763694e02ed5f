//! Data paths beside the kernel's own.

pub mod ebpf;
pub mod pods;
