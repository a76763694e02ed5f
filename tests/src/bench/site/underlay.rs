//! The cable between two nodes.

use std::process::Command;

use anyhow::{Context, Result};

use super::Profile;
use crate::{node::Node, process};

/// Takes both nodes off the lab's switch, whose bridge would cost every candidate the same and so
/// make them look alike, and joins them by a veth pair with the same addresses.
pub fn join(nodes: &[Node; 2], profile: Profile) -> Result<()> {
    for node in nodes {
        node.remove_eth0()?;
    }
    let [client, server] = nodes;
    client.ns().ip(&[&format!(
        "link add eth0 mtu 1500 type veth peer name eth0 mtu 1500 netns {}",
        server.ns().name()
    )])?;
    for node in nodes {
        node.ns().ip(&[
            "link set eth0 up",
            &format!("addr add {}/24 brd + dev eth0", node.v4()),
            &format!("addr add {}/64 dev eth0 nodad", node.v6()),
            "route add default via 192.0.2.1 dev eth0",
        ])?;
    }
    if profile == Profile::Wire {
        ethtool(client, &["tso", "off", "gso", "off"])?;
        ethtool(server, &["gro", "on"])?;
    }
    Ok(())
}

fn ethtool(node: &Node, features: &[&str]) -> Result<()> {
    let mut command: Command = node.ns().command("ethtool");
    command.args(["-K", "eth0"]).args(features);
    process::output(&mut command)
        .map(drop)
        .with_context(|| format!("cannot set features of eth0 on {}", node.name()))
}
