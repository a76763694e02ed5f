//! What the kernel holds for a VXLAN device: the view that stories compare with their wishes.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{kernel_peer::RemoteVtep, netns::Netns};

/// The entries on one VXLAN device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VxlanView {
    /// (destination, gateway) of routes with a gateway over the device.
    pub routes: BTreeSet<(String, String)>,
    /// (address, MAC) of permanent neighbours.
    pub neighbours: BTreeSet<(String, String)>,
    /// (MAC, VTEP address) of permanent FDB entries.
    pub fdb: BTreeSet<(String, String)>,
    /// Addresses with length, link-local ones left out.
    pub addresses: BTreeSet<String>,
}

impl VxlanView {
    /// What stands in the kernel now.
    pub fn read(ns: &Netns, device: &str) -> Result<Self> {
        let mut view = Self::default();
        for family in ["-4", "-6"] {
            for route in ns.ip_json(&format!("{family} route show dev {device}"))? {
                if let (Some(to), Some(via)) = (text(&route, "dst"), text(&route, "gateway")) {
                    view.routes.insert((to, via));
                }
            }
        }
        for neighbour in ns.ip_json(&format!("neigh show dev {device} nud permanent"))? {
            if let (Some(to), Some(mac)) = (text(&neighbour, "dst"), text(&neighbour, "lladdr")) {
                view.neighbours.insert((to, mac));
            }
        }
        for entry in ns.bridge_json(&format!("fdb show dev {device}"))? {
            if let (Some(mac), Some(to)) = (text(&entry, "mac"), text(&entry, "dst")) {
                view.fdb.insert((mac, to));
            }
        }
        for link in ns.ip_json(&format!("addr show dev {device}"))? {
            for address in link["addr_info"].as_array().into_iter().flatten() {
                if address["scope"] != "link"
                    && let (Some(ip), Some(len)) =
                        (text(address, "local"), address["prefixlen"].as_u64())
                {
                    view.addresses.insert(format!("{ip}/{len}"));
                }
            }
        }
        Ok(view)
    }

    /// What has to stand there for these peers and this own address.
    pub fn wanted(own: &str, peers: &[RemoteVtep]) -> Result<Self> {
        let mut view = Self { addresses: BTreeSet::from([own.to_owned()]), ..Self::default() };
        for RemoteVtep { subnet, public_ip, mac } in peers {
            let base = subnet.split_once('/').context("a subnet without length")?.0;
            view.routes.insert((subnet.clone(), base.to_owned()));
            view.neighbours.insert((base.to_owned(), mac.clone()));
            view.fdb.insert((mac.clone(), public_ip.clone()));
        }
        Ok(view)
    }
}

fn text(value: &Value, key: &str) -> Option<String> {
    value[key].as_str().map(str::to_owned)
}
