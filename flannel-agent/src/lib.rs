//! flannel-agent: a drop-in flannel whose VXLAN data path runs in eBPF.
//!
//! The library behind the two binaries. `docs/architecture.md` tells how the
//! modules fit together: a subnet manager delivers leases, [`peer_table`] folds
//! them into the wanted set, a [`backend`] makes the kernel equal to it.

pub mod backend;
pub mod cli;
pub mod commands;
pub mod config;
pub mod control;
pub mod external_interface;
pub mod go_json;
pub mod lease;
pub mod mac;
pub mod mk_docker_opts;
pub mod netlink;
pub mod peer_table;
pub mod subnet_env;
pub mod subnet_manager;
pub mod telemetry;
