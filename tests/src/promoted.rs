//! Flows that bypass a node's stack, as its agent's `flows` tells of them.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{agent::subcommand, node::Node};

/// The promoted flows of a node.
pub fn flows(node: &Node) -> Result<Vec<Value>> {
    let output = subcommand(node, &["flows", "--output=json"])?;
    let flows: Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
    Ok(flows.as_array().context("no array")?.clone())
}

/// The flow with this port at one of its ends.
pub fn flow(node: &Node, port: u16) -> Result<Option<Value>> {
    let end = format!(":{port}");
    let has = |row: &Value, field: &str| row[field].as_str().is_some_and(|s| s.ends_with(&end));
    Ok(flows(node)?.into_iter().find(|row| has(row, "pod") || has(row, "remote")))
}

/// How many packets of a flow have bypassed the stack, out and in. Merged ones count once.
pub fn bypassed(node: &Node, port: u16) -> Result<(u64, u64)> {
    let Some(row) = flow(node, port)? else { return Ok((0, 0)) };
    Ok((row["packets_out"].as_u64().unwrap_or(0), row["packets_in"].as_u64().unwrap_or(0)))
}
