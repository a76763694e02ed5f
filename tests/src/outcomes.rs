//! What the eBPF programs have counted, read from their pinned map: fresh, and without the agent.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::node::Node;

/// Where the pins of `flannel.1` are: a bpf file system takes no dots in names.
pub const PINS: &str = "/sys/fs/bpf/flannel/flannel:1";

/// Numbers of the contract between programs and agent.
pub const ENCAPSULATED: u32 = 6;
/// Taken out of the tunnel.
pub const DECAPSULATED: u32 = 7;
/// Left to the kernel's device: merged from several.
pub const MERGED: u32 = 21;
/// Left to the kernel's device: close behind a burst of its flow.
pub const BEHIND_BURST: u32 = 23;
/// Refused: made by a local pod.
pub const DROP_LOCAL_POD: u32 = 39;

/// Taken out of the tunnel in XDP already.
pub const FROM_XDP: u32 = 41;
/// Refused: taken out in XDP, but tagged.
pub const DROP_TAGGED: u32 = 44;

/// Packets counted under an outcome's number.
pub fn count(node: &Node, number: u32) -> Result<u64> {
    count_in(node, "OUTCOMES", number)
}

/// The same of what became of packets in XDP.
pub fn count_xdp(node: &Node, number: u32) -> Result<u64> {
    count_in(node, "XDP_OUTCOMES", number)
}

fn count_in(node: &Node, map: &str, number: u32) -> Result<u64> {
    let text = node.shell(&format!("bpftool -j map dump pinned {PINS}/v*/{map}"))?.stdout;
    let entries: Value = serde_json::from_slice(&text)?;
    let entry = entries.as_array().context("no entries")?.iter().find_map(|entry| {
        let formatted = entry.get("formatted").unwrap_or(entry);
        (formatted["key"] == number).then_some(formatted)
    });
    let values = entry.context("no such outcome")?["values"].as_array().context("no values")?;
    Ok(values.iter().filter_map(|cpu| cpu["value"]["packets"].as_u64()).sum())
}
