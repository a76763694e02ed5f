//! The native renderer: tables of our own, written as one transaction, compared as a whole.
//!
//! Names and comments are those of specification §8.4, which users' scripts look for.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{
    child::{self, ChildError},
    rules::{Family, Match, Rule, RuleSet, Verdict},
};

/// The program.
const NFT: &str = "nft";

/// The table of a family.
pub const fn table(family: Family) -> &'static str {
    match family {
        Family::V4 => "flannel-ipv4",
        Family::V6 => "flannel-ipv6",
    }
}

/// The names of our chains.
pub const CHAIN_NAMES: [&str; 2] = [MASQUERADE.name, FORWARD.name];

/// A base chain of ours.
struct Chain {
    name: &'static str,
    kind: &'static str,
    hook: &'static str,
    priority: i64,
    comment: &'static str,
}

const MASQUERADE: Chain = Chain {
    name: "postrtg",
    kind: "nat",
    hook: "postrouting",
    priority: 100,
    comment: "chain to manage traffic masquerading by flannel",
};

const FORWARD: Chain = Chain {
    name: "forward",
    kind: "filter",
    hook: "forward",
    priority: 0,
    comment: "chain to accept flannel traffic",
};

/// The chains that are to be there, with their rules.
fn chains(set: &RuleSet) -> impl Iterator<Item = (&'static Chain, &[Rule])> {
    let all = [(&MASQUERADE, set.masquerade.as_slice()), (&FORWARD, set.forward.as_slice())];
    all.into_iter().filter(|(_, rules)| !rules.is_empty())
}

/// What `nft` lists of our table of one family: chains and rules without what changes by itself.
/// Empty if there is no such table.
pub type Listing = Vec<Value>;

/// Reads our table of a family, which is there.
pub async fn list(family: Family) -> Result<Listing, ChildError> {
    let arguments = ["-j", "list", "table", family.nft(), table(family)];
    let text = child::run(NFT, &arguments, "").await?;
    parse_listing(&text).ok_or_else(|| ChildError::Failed {
        program: format!("{NFT} {}", arguments.join(" ")),
        status: "unreadable answer".to_owned(),
        complaint: text.chars().take(200).collect(),
    })
}

fn parse_listing(text: &str) -> Option<Listing> {
    let document: Value = serde_json::from_str(text).ok()?;
    let strip = |object: &Value| -> Option<Value> {
        if object.get("metainfo").is_some() || object.get("table").is_some() {
            return None;
        }
        let mut object = object.clone();
        for inner in object.as_object_mut()?.values_mut().filter_map(Value::as_object_mut) {
            inner.remove("handle");
            inner.remove("comment");
        }
        Some(object)
    };
    Some(document.get("nftables")?.as_array()?.iter().filter_map(strip).collect())
}

/// What a listing says if the table is as wanted. `nft` lists all chains first, then the rules.
pub fn wanted_listing(set: &RuleSet) -> Listing {
    let (family, table) = (set.family.nft(), table(set.family));
    let chain = |(chain, _): (&Chain, &[Rule])| {
        let Chain { name, kind, hook, priority, .. } = chain;
        json!({"chain": {"family": family, "table": table, "name": name, "type": kind,
            "hook": hook, "prio": priority, "policy": "accept"}})
    };
    let mut listing: Listing = chains(set).map(chain).collect();
    for (chain, rules) in chains(set) {
        listing.extend(rules.iter().map(|rule| {
            json!({"rule": {"family": family, "table": table, "chain": chain.name,
                "expr": expressions(set.family, rule)}})
        }));
    }
    listing
}

/// Whether two listings say the same. Chains may be listed before or between the rules.
pub fn same(a: &Listing, b: &Listing) -> bool {
    let rules = |listing: &Listing, chain: &str| -> Vec<Value> {
        let of = |object: &&Value| object.get("rule").is_some_and(|rule| rule["chain"] == chain);
        listing.iter().filter(of).cloned().collect()
    };
    same_shape(a, b)
        && a.len() == b.len()
        && CHAIN_NAMES.iter().all(|chain| rules(a, chain) == rules(b, chain))
}

/// Whether all but the rules is the same, in whatever order.
fn same_shape(a: &Listing, b: &Listing) -> bool {
    let shape = |listing: &Listing| -> Vec<Value> {
        listing.iter().filter(|object| object.get("rule").is_none()).cloned().collect()
    };
    let (a, b) = (shape(a), shape(b));
    a.len() == b.len() && a.iter().all(|object| b.contains(object))
}

/// The transaction that makes one family's table as wanted, given what is there. Where the chains
/// are right, only rules change, within the chains they are in: at no moment does a packet find
/// neither the old nor the new ones.
pub fn transaction(set: &RuleSet, there: Option<&Listing>) -> String {
    let (family, table) = (set.family.nft(), table(set.family));
    let mut script = String::new();
    // Writing to a string does not fail.
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(script, "{text}");
    };
    let no_chain = chains(set).next().is_none();
    if no_chain && there.is_none() {
        return script;
    }
    line(format_args!("add table {family} {table} {{ comment \"rules for {table}\"; }}"));
    let fits = there.is_none_or(|there| same_shape(there, &wanted_listing(set)));
    if no_chain || !fits {
        line(format_args!("delete table {family} {table}"));
        if no_chain {
            return script;
        }
        line(format_args!("add table {family} {table} {{ comment \"rules for {table}\"; }}"));
    }
    for (chain, rules) in chains(set) {
        let Chain { name, kind, hook, priority, comment } = chain;
        line(format_args!(
            "add chain {family} {table} {name} {{ type {kind} hook {hook} priority {priority}; \
             policy accept; comment \"{comment}\"; }}"
        ));
        line(format_args!("flush chain {family} {table} {name}"));
        for rule in rules {
            line(format_args!("add rule {family} {table} {name}{}", text(set.family, rule)));
        }
    }
    script
}

/// Runs a transaction.
pub async fn commit(script: &str) -> Result<(), ChildError> {
    child::run(NFT, &["-f", "-"], script).await.map(drop)
}

/// A rule in nft's language, a blank in front of each word.
fn text(family: Family, rule: &Rule) -> String {
    let ip = family.nft();
    let mut text = String::new();
    for matched in &rule.matches {
        let _ = match matched {
            Match::MarkBit(bit) => write!(text, " meta mark & {bit:#x} == {bit:#x}"),
            Match::Source(net) => write!(text, " {ip} saddr {net}"),
            Match::SourceNot(net) => write!(text, " {ip} saddr != {net}"),
            Match::Destination(net) => write!(text, " {ip} daddr {net}"),
            Match::DestinationNot(net) => write!(text, " {ip} daddr != {net}"),
            Match::UdpPort(port) => write!(text, " udp dport {port}"),
            Match::LocalSource => write!(text, " fib saddr type local"),
        };
    }
    text + match rule.verdict {
        Verdict::Return => " return",
        Verdict::Accept => " accept",
        Verdict::Masquerade { fully_random: false } => " masquerade",
        Verdict::Masquerade { fully_random: true } => " masquerade fully-random",
    }
}

/// A rule as `nft -j` lists it.
fn expressions(family: Family, rule: &Rule) -> Value {
    let test = |op: &str, left: Value, right: Value| json!({"match": {"op": op, "left": left, "right": right}});
    let address = |field: &str, op: &str, net: &ipnet::IpNet| {
        let left = json!({"payload": {"protocol": family.nft(), "field": field}});
        let right = if net.prefix_len() == net.max_prefix_len() {
            json!(net.addr())
        } else {
            json!({"prefix": {"addr": net.addr(), "len": net.prefix_len()}})
        };
        test(op, left, right)
    };
    let matches = rule.matches.iter().map(|matched| match matched {
        Match::MarkBit(bit) => {
            test("==", json!({"&": [{"meta": {"key": "mark"}}, bit]}), json!(bit))
        }
        Match::Source(net) => address("saddr", "==", net),
        Match::SourceNot(net) => address("saddr", "!=", net),
        Match::Destination(net) => address("daddr", "==", net),
        Match::DestinationNot(net) => address("daddr", "!=", net),
        Match::UdpPort(port) => {
            test("==", json!({"payload": {"protocol": "udp", "field": "dport"}}), json!(port))
        }
        Match::LocalSource => {
            test("==", json!({"fib": {"result": "type", "flags": ["saddr"]}}), json!("local"))
        }
    });
    let verdict = match rule.verdict {
        Verdict::Return => json!({"return": null}),
        Verdict::Accept => json!({"accept": null}),
        Verdict::Masquerade { fully_random: false } => json!({"masquerade": null}),
        Verdict::Masquerade { fully_random: true } => {
            json!({"masquerade": {"flags": "fully-random"}})
        }
    };
    matches.chain([verdict]).collect()
}

#[cfg(test)]
mod tests;
