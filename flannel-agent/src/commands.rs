//! The commands beside running the agent.

pub mod peers;
pub mod status;
mod table;
