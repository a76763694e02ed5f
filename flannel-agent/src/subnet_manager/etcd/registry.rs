//! The lease registry in etcd: keys, values, and the guarded reads and writes on them.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    time::Duration,
};

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
};
use tokio::time::Instant;
use tracing::warn;

use super::{
    client::{EtcdClient, kv},
    failure::{Cause, Failure},
};
use crate::{
    lease::{Lease, LeaseAttributes, Subnets},
    subnet_manager::acquire::KnownLease,
    telemetry::metrics::Metrics,
};

/// Leases a page of a list: keeps a page below etcd's own message limits.
const PAGE: i64 = 5000;
/// How much of a foreign key or value a log line shows.
const SHOWN: usize = 120;

/// The keys of one network, built as a path is joined: doubled slashes collapse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    /// `<prefix>/config`.
    pub config: String,
    /// `<prefix>/subnets/`, with the trailing slash.
    pub subnets: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        let mut parts: Vec<&str> = Vec::new();
        for part in prefix.split('/') {
            match part {
                "" | "." => {}
                ".." => {
                    parts.pop();
                }
                part => parts.push(part),
            }
        }
        let mut root = parts.join("/");
        if prefix.starts_with('/') && !root.is_empty() {
            root.insert(0, '/');
        }
        if !root.is_empty() || prefix.starts_with('/') {
            root.push('/');
        }
        Self { config: format!("{root}config"), subnets: format!("{root}subnets/") }
    }

    pub(super) fn lease(&self, subnets: &Subnets) -> String {
        format!("{}{}", self.subnets, subnets.key())
    }

    /// The subnets a key stands for. Only the form in which leases are written counts: two keys
    /// must never mean the same subnet.
    pub(super) fn subnets_of(&self, key: &[u8]) -> Option<Subnets> {
        let name = std::str::from_utf8(key).ok()?.strip_prefix(&self.subnets)?;
        Subnets::parse_key(name).filter(|subnets| subnets.key() == name)
    }
}

/// Which state of a key we have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    /// The revision at which the key was last written.
    pub mod_revision: i64,
    /// The etcd lease it hangs on; 0 for none (a reservation).
    pub etcd_lease: i64,
}

/// One lease as it stands in etcd.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub lease: Lease,
    pub version: Version,
}

/// What stands at a key under `<prefix>/subnets/`.
pub(super) enum Decoded {
    Lease(Entry),
    /// A lease key whose value cannot be read.
    BadValue(Subnets, Version),
    /// Not a lease key.
    BadKey,
}

/// All leases at one revision.
#[derive(Debug)]
pub(super) struct Listing {
    /// In key order.
    pub known: Vec<KnownLease>,
    /// For each of `known`, its version.
    pub versions: Vec<Version>,
    /// Keys that are leases but whose values cannot be read.
    pub unreadable: Vec<Subnets>,
    /// The store's revision when the list was made.
    pub revision: i64,
    /// When it was made.
    pub taken: Instant,
}

impl Listing {
    pub(super) fn version(&self, subnets: &Subnets) -> Option<Version> {
        let index = self.known.iter().position(|known| known.lease.subnets == *subnets)?;
        self.versions.get(index).copied()
    }

    pub(super) fn entry(&self, subnets: &Subnets) -> Option<Entry> {
        let index = self.known.iter().position(|known| known.lease.subnets == *subnets)?;
        let version = *self.versions.get(index)?;
        Some(Entry { lease: self.known.get(index)?.lease.clone(), version })
    }

    pub(super) fn remove(&mut self, subnets: &Subnets) {
        if let Some(index) = self.known.iter().position(|known| known.lease.subnets == *subnets) {
            self.known.remove(index);
            self.versions.remove(index);
        }
    }

    pub(super) fn push(&mut self, entry: Entry) {
        let Entry { lease, version } = entry;
        self.remove(&lease.subnets);
        self.known.push(KnownLease { lease, permanent: version.etcd_lease == 0 });
        self.versions.push(version);
    }
}

/// What became of a guarded write.
pub(super) enum Put {
    /// Done, at this revision.
    Written(i64),
    /// Somebody was faster. What stands there now, if it can be read.
    Conflict(Option<Decoded>),
}

/// Reads and writes leases; knows nothing of who we are.
pub(super) struct Registry {
    pub client: EtcdClient,
    pub keys: Keys,
    metrics: Metrics,
    /// Entries already complained about, with the revision of the complaint.
    bad: RefCell<HashMap<Box<[u8]>, i64>>,
}

impl Registry {
    pub(super) fn new(client: EtcdClient, keys: Keys, metrics: Metrics) -> Self {
        Self { client, keys, metrics, bad: RefCell::default() }
    }

    /// The value of the configuration key.
    pub(super) async fn config(&self) -> Result<Option<Vec<u8>>, Failure> {
        let key = self.keys.config.as_str();
        let mut answer = self.client.call(async |c| kv(c).get(key, None).await).await?;
        Ok(answer.take_kvs().into_iter().next().map(|kv| kv.into_key_value().1))
    }

    /// Lists all leases, as of one revision.
    pub(super) async fn list(&self) -> Result<Listing, Failure> {
        let mut listing = Listing {
            known: Vec::new(),
            versions: Vec::new(),
            unreadable: Vec::new(),
            revision: 0,
            taken: Instant::now(),
        };
        let end = prefix_end(self.keys.subnets.as_bytes());
        let mut from = self.keys.subnets.clone().into_bytes();
        let mut bad_keys = HashSet::new();
        loop {
            let options = GetOptions::new()
                .with_range(end.clone())
                .with_limit(PAGE)
                .with_revision(listing.revision);
            let page = self
                .client
                .call(async |c| kv(c).get(from.clone(), Some(options.clone())).await)
                .await?;
            if listing.revision == 0 {
                listing.revision = page.header().map_or(0, etcd_client::ResponseHeader::revision);
                listing.known.reserve_exact(usize::try_from(page.count()).unwrap_or(0));
            }
            for kv in page.kvs() {
                match self.decode(kv) {
                    Decoded::Lease(Entry { lease, version }) => {
                        let permanent = version.etcd_lease == 0;
                        listing.known.push(KnownLease { lease, permanent });
                        listing.versions.push(version);
                    }
                    Decoded::BadValue(subnets, _) => {
                        listing.unreadable.push(subnets);
                        bad_keys.insert(kv.key().to_vec());
                    }
                    Decoded::BadKey => {
                        bad_keys.insert(kv.key().to_vec());
                    }
                }
            }
            match page.kvs().last() {
                Some(last) if page.more() => {
                    from = last.key().to_vec();
                    from.push(0);
                }
                _ => break,
            }
        }
        self.bad.borrow_mut().retain(|key, _| bad_keys.contains(&**key));
        Ok(listing)
    }

    /// Reads one lease.
    pub(super) async fn get(&self, subnets: &Subnets) -> Result<Option<Decoded>, Failure> {
        let key = self.keys.lease(subnets);
        let answer = self.client.call(async |c| kv(c).get(key.as_str(), None).await).await?;
        Ok(answer.kvs().first().map(|kv| self.decode(kv)))
    }

    /// Reads what stands at a key. Complains about an unusable entry once for each of its states.
    pub(super) fn decode(&self, kv: &KeyValue) -> Decoded {
        let Some(subnets) = self.keys.subnets_of(kv.key()) else {
            self.complain(kv, "its key does not name a subnet");
            return Decoded::BadKey;
        };
        let version = Version { mod_revision: kv.mod_revision(), etcd_lease: kv.lease() };
        match LeaseAttributes::from_json(kv.value()) {
            Ok(attributes) => {
                Decoded::Lease(Entry { lease: Lease { subnets, attributes }, version })
            }
            Err(error) => {
                self.complain(kv, &error.to_string());
                Decoded::BadValue(subnets, version)
            }
        }
    }

    /// Forgets the complaint about a key that was deleted.
    pub(super) fn forget_complaint(&self, key: &[u8]) {
        self.bad.borrow_mut().remove(key);
    }

    fn complain(&self, kv: &KeyValue, why: &str) {
        if self.bad.borrow_mut().insert(kv.key().into(), kv.mod_revision())
            != Some(kv.mod_revision())
        {
            self.metrics.store_bad_entries.inc();
            warn!(
                "etcd key {} is ignored: {}; correct or delete it",
                shown(kv.key()),
                shown(why.as_bytes()).trim_matches('"')
            );
        }
    }

    /// Creates an etcd lease. Returns its id and the TTL that etcd chose.
    pub(super) async fn grant(&self, ttl: Duration) -> Result<(i64, Duration), Failure> {
        let seconds = i64::try_from(ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let answer =
            self.client.call(async |c| c.lease_client().grant(seconds, None).await).await?;
        Ok((answer.id(), whole_seconds(answer.ttl()).unwrap_or(ttl)))
    }

    /// Gives an etcd lease back that no key of ours hangs on. If that fails it runs out by itself.
    pub(super) async fn revoke(&self, etcd_lease: i64) {
        let answer = self.client.call(async |c| c.lease_client().revoke(etcd_lease).await).await;
        if let Err(failure) = answer {
            tracing::debug!("unused etcd lease {etcd_lease:x} is left to run out: {failure}");
        }
    }

    /// What is left of an etcd lease; `None` if it is gone.
    pub(super) async fn time_left(&self, etcd_lease: i64) -> Result<Option<Duration>, Failure> {
        let answer = self
            .client
            .call(async |c| c.lease_client().time_to_live(etcd_lease, None).await)
            .await?;
        Ok(whole_seconds(answer.ttl()))
    }

    /// Starts the term of an etcd lease anew; `None` if it is gone.
    pub(super) async fn keep_alive(&self, etcd_lease: i64) -> Result<Option<Duration>, Failure> {
        let answer = self
            .client
            .call(async |c| {
                // The library turns "no such lease" into an error without a code.
                match c.lease_client().keep_alive(etcd_lease).await {
                    Ok(_) => Ok(true),
                    Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
                    Err(error) => Err(error),
                }
            })
            .await;
        match answer {
            Ok(true) => self.time_left(etcd_lease).await,
            Ok(false) => Ok(None),
            Err(failure) if failure.cause == Cause::LeaseGone => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Writes a lease if its key is still as we saw it: `seen` is the revision of its last write,
    /// 0 if there was no key.
    ///
    /// The write may have been sent twice (see [`EtcdClient::call`]), so a conflict with our own
    /// value on our own etcd lease counts as written.
    pub(super) async fn put_if(
        &self,
        lease: &Lease,
        seen: i64,
        etcd_lease: i64,
    ) -> Result<Put, Failure> {
        let key = self.keys.lease(&lease.subnets);
        let value = lease.attributes.to_json();
        let put = PutOptions::new().with_lease(etcd_lease);
        let txn = Txn::new()
            .when([unchanged(&key, seen)])
            .and_then([TxnOp::put(key.as_str(), value.as_str(), Some(put))])
            .or_else([TxnOp::get(key.as_str(), None)]);
        let answer = self.client.call(async |c| kv(c).txn(txn.clone()).await).await?;
        if answer.succeeded() {
            let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
            return Ok(Put::Written(revision));
        }
        let Some(TxnOpResponse::Get(found)) = answer.op_responses().into_iter().next() else {
            return Ok(Put::Conflict(None));
        };
        Ok(match found.kvs().first() {
            Some(kv) if kv.lease() == etcd_lease && kv.value() == value.as_bytes() => {
                Put::Written(kv.mod_revision())
            }
            Some(kv) => Put::Conflict(Some(self.decode(kv))),
            None => Put::Conflict(None),
        })
    }

    /// Deletes a lease if its key is still as we saw it.
    pub(super) async fn delete_if(&self, subnets: &Subnets, seen: i64) -> Result<(), Failure> {
        let key = self.keys.lease(subnets);
        let txn =
            Txn::new().when([unchanged(&key, seen)]).and_then([TxnOp::delete(key.as_str(), None)]);
        self.client.call(async |c| kv(c).txn(txn.clone()).await).await.map(|_| ())
    }
}

fn unchanged(key: &str, seen: i64) -> Compare {
    if seen == 0 {
        Compare::version(key, CompareOp::Equal, 0)
    } else {
        Compare::mod_revision(key, CompareOp::Equal, seen)
    }
}

/// etcd answers a TTL of -1 (or 0) for a lease that is gone.
fn whole_seconds(ttl: i64) -> Option<Duration> {
    u64::try_from(ttl).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs)
}

/// The first key after all keys that begin with `prefix`.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

/// Foreign bytes for a log line: quoted, without control characters, cut short.
fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    if text.chars().count() > SHOWN {
        format!("{:?}…", text.chars().take(SHOWN).collect::<String>())
    } else {
        format!("{text:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_joined_as_paths_are() {
        for (prefix, config) in [
            ("/coreos.com/network", "/coreos.com/network/config"),
            ("/coreos.com//network/", "/coreos.com/network/config"),
            ("coreos.com/network", "coreos.com/network/config"),
            ("/a/./b/../c", "/a/c/config"),
            ("/", "/config"),
            ("", "config"),
        ] {
            let keys = Keys::new(prefix);
            assert_eq!(keys.config, config, "{prefix}");
            assert_eq!(keys.subnets, config.replace("config", "subnets/"));
        }
    }

    #[test]
    fn only_the_written_form_of_a_key_is_a_lease() {
        let keys = Keys::new("/n");
        let dual = b"/n/subnets/10.5.1.0-24&fd00:5:1::-64";
        let subnets = keys.subnets_of(dual).unwrap();
        assert_eq!(keys.lease(&subnets).as_bytes(), dual);
        assert_ne!(keys.subnets_of(b"/n/subnets/10.5.1.0-24").unwrap(), subnets);
        for key in ["foo", "10.5.1.7-24", "x10.5.1.0-24", "sub/10.5.1.0-24", "10.5.1.0-32", ""] {
            assert_eq!(keys.subnets_of(format!("/n/subnets/{key}").as_bytes()), None, "{key}");
        }
        assert_eq!(keys.subnets_of(b"/m/subnets/10.5.1.0-24"), None);
        assert_eq!(keys.subnets_of(b"/n/subnets/\xff"), None);
    }

    #[test]
    fn foreign_text_is_shown_on_one_line_and_cut() {
        assert_eq!(shown(b"a\nb"), r#""a\nb""#);
        assert!(shown(&[b'x'; 5000]).len() < 200);
    }

    #[test]
    fn the_end_of_a_prefix_is_the_next_key() {
        assert_eq!(prefix_end(b"/n/subnets/"), b"/n/subnets0");
        assert_eq!(prefix_end(b"a\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
    }
}
