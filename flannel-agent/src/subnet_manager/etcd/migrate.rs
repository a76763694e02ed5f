//! Carrying over what an old flannel kept with etcd's v2 API to the keys of v3.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnOpResponse};
use serde::Serialize;

use super::{
    EtcdOptions,
    client::EtcdClient,
    connect,
    registry::{Keys, Registry},
    v2::{self, Node},
};
use crate::{
    config::NetworkConfig,
    go_json,
    lease::{LeaseAttributes, Subnets},
    subnet_manager::StoreError,
    telemetry::metrics::Metrics,
};

/// What becomes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// It is written; in a dry run it would be.
    Write,
    /// v3 has the same already.
    Same,
    /// v3 has something else, which stays.
    Differs,
    /// It is nothing that can be carried over.
    Skip,
}

/// One key of the v2 tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The key in v3; in v2 if there is none.
    pub key: String,
    /// What becomes of it.
    pub action: Fate,
    /// Seconds the lease has left; `None` for the configuration and for reservations.
    pub ttl: Option<u64>,
    /// What is written, or was read.
    pub value: String,
    /// Why it is not written, if it is not.
    pub note: String,
}

/// Reads the v2 tree and writes what v3 lacks, unless `dry_run`. One entry per key found; none if
/// there is nothing under the prefix.
///
/// # Errors
/// [`StoreError`] if etcd cannot be asked or refuses.
pub async fn migrate(options: &EtcdOptions, dry_run: bool) -> Result<Vec<Entry>, StoreError> {
    let keys = Keys::new(&options.prefix);
    let root = keys.config.trim_end_matches("config").trim_end_matches('/').to_owned();
    let connect::Access { endpoints, tls, user } = connect::access(options)?;
    let path = if root.starts_with('/') || root.is_empty() { root } else { format!("/{root}") };
    let tree = v2::read(&endpoints, &tls, user.as_ref(), &path).await;
    let Some(tree) = tree.map_err(StoreError::Unavailable)? else { return Ok(Vec::new()) };
    let metrics = Metrics::default();
    let client = EtcdClient::new(endpoints, tls, user, metrics.clone());
    let registry = Registry::new(client, keys, metrics);
    let mut entries = Vec::new();
    for found in plan(&registry.keys, &path, tree) {
        entries.push(carry(&registry, found, dry_run).await?);
    }
    Ok(entries)
}

/// The keys of the tree, each with what is to become of it as far as it tells by itself.
fn plan(keys: &Keys, path: &str, tree: Node) -> Vec<Entry> {
    let mut entries = Vec::new();
    for node in tree.nodes {
        let name = node.key.strip_prefix(path).unwrap_or(&node.key).trim_start_matches('/');
        match (name, node.dir) {
            ("config", false) => entries.push(config(keys, node)),
            ("subnets", true) => {
                let mut leases: Vec<_> =
                    node.nodes.into_iter().map(|node| lease(keys, node)).collect();
                leases.sort_by(|a, b| a.key.cmp(&b.key));
                entries.extend(leases);
            }
            _ => entries.push(skip(node, "belongs to no network at this prefix".to_owned())),
        }
    }
    entries.sort_by_key(|entry| entry.key != keys.config);
    entries
}

fn skip(node: Node, note: String) -> Entry {
    Entry { key: node.key, action: Fate::Skip, ttl: None, value: node.value, note }
}

fn config(keys: &Keys, node: Node) -> Entry {
    match NetworkConfig::parse(&node.value) {
        Ok(_) => Entry {
            key: keys.config.clone(),
            action: Fate::Write,
            ttl: None,
            value: node.value,
            note: String::new(),
        },
        Err(error) => skip(node, format!("no network configuration: {error}")),
    }
}

fn lease(keys: &Keys, node: Node) -> Entry {
    let name = node.key.rsplit('/').next().unwrap_or_default();
    let subnets = Subnets::parse_key(name).filter(|subnets| subnets.key() == name && !node.dir);
    let Some(subnets) = subnets else { return skip(node, "names no subnet".to_owned()) };
    match LeaseAttributes::from_json(&node.value) {
        Ok(attributes) => Entry {
            key: keys.lease(&subnets),
            action: Fate::Write,
            ttl: node.ttl.map(|ttl| u64::try_from(ttl).unwrap_or(0).max(1)),
            value: attributes.to_json(),
            note: String::new(),
        },
        Err(error) => skip(node, error.to_string()),
    }
}

/// Writes an entry, if nothing stands at its key.
async fn carry(registry: &Registry, mut entry: Entry, dry_run: bool) -> Result<Entry, StoreError> {
    if entry.action != Fate::Write {
        return Ok(entry);
    }
    let key = entry.key.clone();
    let answer = registry.client.call(async |c| c.get(key.as_str(), None).await).await?;
    if let Some(there) = answer.kvs().first() {
        return Ok(judge(entry, there.value()));
    }
    if dry_run {
        return Ok(entry);
    }
    let etcd_lease = match entry.ttl {
        Some(seconds) => registry.grant(Duration::from_secs(seconds)).await?.0,
        None => 0,
    };
    let options = PutOptions::new().with_lease(etcd_lease);
    let missing = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
    let put = TxnOp::put(key.as_str(), entry.value.as_str(), Some(options));
    let transaction =
        Txn::new().when([missing]).and_then([put]).or_else([TxnOp::get(key.as_str(), None)]);
    let answer = registry.client.call(async |c| c.txn(transaction.clone()).await).await;
    let refused = match &answer {
        Ok(answer) => !answer.succeeded(),
        Err(_) => true,
    };
    if refused && etcd_lease != 0 {
        registry.revoke(etcd_lease).await;
    }
    let answer = answer?;
    if answer.succeeded() {
        return Ok(entry);
    }
    // Written by somebody in between, or by ourselves if the first answer got lost.
    let there = answer.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(get) => get.kvs().first().map(|kv| kv.value().to_vec()),
        _ => None,
    });
    entry = judge(entry, &there.unwrap_or_default());
    Ok(entry)
}

/// Compares with what stands in v3.
fn judge(mut entry: Entry, there: &[u8]) -> Entry {
    if same(&entry.value, there) {
        entry.action = Fate::Same;
    } else {
        entry.action = Fate::Differs;
        entry.note = format!("v3 has {}", String::from_utf8_lossy(there));
    }
    entry
}

/// Whether two texts are the same JSON but for white space, or the same lease.
fn same(ours: &str, theirs: &[u8]) -> bool {
    let text = String::from_utf8_lossy(theirs);
    let compact = |text: &str| go_json::compact(text).ok();
    if compact(ours).is_some_and(|ours| Some(ours) == compact(&text)) {
        return true;
    }
    let lease =
        |text: &str| LeaseAttributes::from_json(text).ok().filter(|l| l.public_ip.is_some());
    lease(ours).is_some_and(|ours| Some(ours) == lease(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(key: &str, value: &str, ttl: Option<i64>) -> Node {
        Node { key: key.to_owned(), value: value.to_owned(), ttl, ..Node::default() }
    }

    #[test]
    fn every_key_is_accounted_for_the_configuration_first() {
        let subnets = Node {
            key: "/coreos.com/network/subnets".to_owned(),
            dir: true,
            nodes: vec![
                node(
                    "/coreos.com/network/subnets/10.5.2.0-24",
                    r#"{"PublicIP":"192.0.2.2"}"#,
                    None,
                ),
                node(
                    "/coreos.com/network/subnets/10.5.1.0-24",
                    r#"{ "PublicIP" : "192.0.2.1" }"#,
                    Some(77),
                ),
                node("/coreos.com/network/subnets/junk", "x", None),
                node("/coreos.com/network/subnets/10.5.3.0-24", "no json", Some(5)),
            ],
            ..Node::default()
        };
        let other =
            Node { key: "/coreos.com/network/other".to_owned(), dir: true, ..Node::default() };
        let config = node("/coreos.com/network/config", r#"{"Network":"10.5.0.0/16"}"#, None);
        let tree = Node { nodes: vec![subnets, other, config], dir: true, ..Node::default() };
        let keys = Keys::new("/coreos.com/network");
        let entries = plan(&keys, "/coreos.com/network", tree);
        let seen: Vec<_> = entries
            .iter()
            .map(|e| (e.key.trim_start_matches("/coreos.com/network/"), e.action, e.ttl))
            .collect();
        assert_eq!(
            seen,
            [
                ("config", Fate::Write, None),
                ("subnets/10.5.1.0-24", Fate::Write, Some(77)),
                ("subnets/10.5.2.0-24", Fate::Write, None),
                ("subnets/10.5.3.0-24", Fate::Skip, None),
                ("subnets/junk", Fate::Skip, None),
                ("other", Fate::Skip, None),
            ]
        );
        assert_eq!(entries[1].value, r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#);
    }

    #[test]
    fn what_means_the_same_is_the_same() {
        assert!(same(r#"{"Network":"10.5.0.0/16"}"#, br#"{ "Network": "10.5.0.0/16" }"#));
        assert!(!same(r#"{"Network":"10.5.0.0/16"}"#, br#"{"Network":"10.6.0.0/16"}"#));
        let lease = r#"{"PublicIP":"192.0.2.1","PublicIPv6":null}"#;
        assert!(same(lease, br#"{"PublicIP":"192.0.2.1"}"#));
        assert!(!same(lease, br#"{"PublicIP":"192.0.2.2"}"#));
        assert!(!same(lease, b""));
    }
}
