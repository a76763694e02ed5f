//! The commands beside running the agent.

pub mod cleanup;
pub mod peers;
pub mod status;
mod table;
