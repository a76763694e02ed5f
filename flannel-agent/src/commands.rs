//! The commands beside running the agent.

pub mod cleanup;
pub mod flows;
pub mod migrate_etcd_v2;
pub mod peers;
pub mod status;
mod table;
