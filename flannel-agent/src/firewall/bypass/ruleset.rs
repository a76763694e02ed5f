//! All rules of the host that stand in the way of packets, read from the kernel.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use super::{condition::Step, nft, xtables};
use crate::firewall::{
    legacy,
    nfnetlink::{NfTables, POLICY_DROP, protocol},
    rules::Family,
};

/// Where a chain is hooked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
    Ingress,
    Egress,
}

/// Which packets a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// IP packets of these families.
    Ip { v4: bool, v6: bool },
    /// Frames that cross a bridge, or its ports.
    Bridge,
    /// Frames of one device.
    Device,
}

/// A base chain.
#[derive(Clone, Debug)]
pub struct Hook {
    pub at: At,
    pub chain: String,
    /// Whether what no rule decides is dropped.
    pub drops: bool,
    /// The devices it is about; empty for all.
    pub devices: Vec<String>,
}

/// A table, of which the NAT chains are left out: they see the first packet of a connection.
#[derive(Clone, Debug)]
pub struct Table {
    /// As people call it: `table ip filter`.
    pub name: String,
    pub layer: Layer,
    pub hooks: Vec<Hook>,
    pub chains: HashMap<String, Vec<Step>>,
}

/// Reads everything, in the network namespace of the calling thread.
pub fn read() -> io::Result<Vec<Table>> {
    let mut tables = match NfTables::open() {
        Ok(mut nf) => nf_tables(&mut nf)?,
        // A kernel without netfilter's netlink has no such rules.
        Err(err) if err.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Vec::new(),
        Err(err) => return Err(err),
    };
    for family in Family::ALL {
        for name in legacy::tables(family) {
            if name != "nat" {
                tables.push(legacy_table(family, &name, &legacy::read(family, &name)?));
            }
        }
    }
    Ok(tables)
}

fn nf_tables(nf: &mut NfTables) -> io::Result<Vec<Table>> {
    let mut hooks: BTreeMap<(u8, String), Vec<Hook>> = BTreeMap::new();
    for chain in nf.chains()? {
        let Some(base) = chain.base.filter(|base| base.kind != "nat") else { continue };
        let Some(at) = hook(chain.family, base.hook) else { continue };
        hooks.entry((chain.family, chain.table)).or_default().push(Hook {
            at,
            chain: chain.name,
            drops: base.policy == POLICY_DROP,
            devices: base.devices,
        });
    }
    let mut tables = Vec::new();
    for ((family, name), hooks) in hooks {
        let (word, layer) = match family {
            protocol::INET => ("inet", Layer::Ip { v4: true, v6: true }),
            protocol::IPV4 => ("ip", Layer::Ip { v4: true, v6: false }),
            protocol::IPV6 => ("ip6", Layer::Ip { v4: false, v6: true }),
            protocol::BRIDGE => ("bridge", Layer::Bridge),
            _ => ("netdev", Layer::Device),
        };
        let mut chains: HashMap<String, Vec<Step>> = HashMap::new();
        for rule in nf.rules(family, &name, None)? {
            chains.entry(rule.chain.clone()).or_default().push(nft::read_rule(family, &rule));
        }
        tables.push(Table { name: format!("table {word} {name}"), layer, hooks, chains });
    }
    Ok(tables)
}

/// `NF_INET_*`, which a bridge's hooks follow, and `NF_NETDEV_*`.
fn hook(family: u8, number: u32) -> Option<At> {
    let ip_or_bridge =
        matches!(family, protocol::INET | protocol::IPV4 | protocol::IPV6 | protocol::BRIDGE);
    Some(match (family, number) {
        (_, 0) if ip_or_bridge => At::Prerouting,
        (_, 1) if ip_or_bridge => At::Input,
        (_, 2) if ip_or_bridge => At::Forward,
        (_, 3) if ip_or_bridge => At::Output,
        (_, 4) if ip_or_bridge => At::Postrouting,
        (protocol::INET, 5) | (protocol::NETDEV, 0) => At::Ingress,
        (protocol::NETDEV, 1) => At::Egress,
        _ => return None,
    })
}

fn legacy_table(family: Family, name: &str, read: &legacy::Chains) -> Table {
    let layer = Layer::Ip { v4: family == Family::V4, v6: family == Family::V6 };
    let mut chains = HashMap::new();
    let mut hooks = Vec::new();
    for (chain, rules) in read {
        let at = match chain.as_str() {
            "PREROUTING" => Some(At::Prerouting),
            "INPUT" => Some(At::Input),
            "FORWARD" => Some(At::Forward),
            "OUTPUT" => Some(At::Output),
            "POSTROUTING" => Some(At::Postrouting),
            _ => None,
        };
        // The last rule of a built-in chain is its policy; that of another returns.
        let (policy, rules) = match (at, rules.split_last()) {
            (Some(_), Some((policy, rules))) => (policy.verdict, rules),
            _ => (None, rules.as_slice()),
        };
        if let Some(at) = at {
            let drops = policy == Some(legacy::DROP);
            hooks.push(Hook { at, chain: chain.clone(), drops, devices: Vec::new() });
        }
        let steps = rules.iter().map(|rule| xtables::read_rule(family, rule)).collect();
        chains.insert(chain.clone(), steps);
    }
    Table { name: format!("the legacy {family} table {name}"), layer, hooks, chains }
}

/// What changes whenever a legacy table does, or nearly: nobody tells of their changes.
pub fn legacy_outline() -> io::Result<Vec<Vec<u8>>> {
    let mut outlines = Vec::new();
    for family in Family::ALL {
        for name in legacy::tables(family) {
            if name != "nat" {
                outlines.push(legacy::outline(family, &name)?);
            }
        }
    }
    Ok(outlines)
}
