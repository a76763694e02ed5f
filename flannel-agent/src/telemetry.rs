//! What the agent tells about itself: readiness, metrics, status, logs.

pub mod health;
pub mod log;
pub mod metrics;
mod prometheus_text;
pub mod server;
pub mod status;
pub mod systemd;

use std::time::Instant;

use prometheus_client::registry::Registry;

use self::{
    health::{Condition, Heartbeat, Readiness},
    metrics::Metrics,
    status::{Missing, Status},
};

/// Everything the agent's parts report to and the servers read from.
#[derive(Debug)]
pub struct Telemetry {
    /// What is missing before the agent is ready.
    pub readiness: Readiness,
    /// Counters and gauges.
    pub metrics: Metrics,
    /// Whether the agent's loop turns.
    pub heartbeat: Heartbeat,
    registry: Registry,
    started: Instant,
}

impl Telemetry {
    /// Starts the clock and registers [`Metrics`]. `more` may register further metrics.
    pub fn new(metrics: Metrics, more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        more(&mut registry);
        Self {
            readiness: Readiness::default(),
            metrics,
            heartbeat: Heartbeat::default(),
            registry,
            started: Instant::now(),
        }
    }

    /// A status with what is known here: version, uptime, readiness. The rest is empty.
    pub fn base_status(&self) -> Status {
        let missing: Vec<_> = self.readiness.missing().into_iter().map(Missing::from).collect();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ready: missing.is_empty(),
            missing,
            ..Status::default()
        }
    }

    /// All metrics in the `OpenMetrics` text format.
    pub fn metrics_text(&self) -> String {
        let missing = self.readiness.missing();
        for condition in Condition::ALL {
            let holds = !missing.iter().any(|(c, _)| *c == condition);
            self.metrics.set_condition(condition, holds);
        }
        let mut text = String::with_capacity(4096);
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            // Writing to a string fails only if a metric's own encoder does.
            Err(error) => format!("# metrics cannot be written: {error}\n# EOF\n"),
        }
    }
}
