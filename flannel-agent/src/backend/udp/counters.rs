//! What happened to packets, by reason.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// A number of packets. Some threads count, another reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn add(&self) {
        self.add_many(1);
    }

    /// So many more.
    pub fn add_many(&self, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// How many so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Packets since the agent started.
#[derive(Debug, Default)]
pub struct Counters {
    /// Sent to a peer.
    pub sent: Counter,
    /// Received from a peer and handed to the kernel.
    pub received: Counter,
    /// Came out of the device for a destination that no peer has.
    pub no_peer: Counter,
    /// Came out of the device without an IPv4 header.
    pub not_ipv4: Counter,
    /// Received without a complete IPv4 header.
    pub malformed: Counter,
    /// Received, longer than the device's MTU and not to be fragmented.
    pub too_long: Counter,
    /// Had no time to live left, in either direction.
    pub ttl_expired: Counter,
    /// The socket did not take it.
    pub send_failed: Counter,
    /// The device did not take it.
    pub write_failed: Counter,
}

impl Counters {
    /// What `/status` shows.
    pub fn to_json(&self) -> Value {
        json!({
            "sent": self.sent.get(),
            "received": self.received.get(),
            "dropped": {
                "no_peer": self.no_peer.get(),
                "not_ipv4": self.not_ipv4.get(),
                "malformed": self.malformed.get(),
                "too_long": self.too_long.get(),
                "ttl_expired": self.ttl_expired.get(),
                "send_failed": self.send_failed.get(),
                "write_failed": self.write_failed.get(),
            },
        })
    }
}
