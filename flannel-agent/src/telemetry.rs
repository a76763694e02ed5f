//! What the agent tells about itself: readiness, metrics, status, logs.

pub mod health;
pub mod metrics;
