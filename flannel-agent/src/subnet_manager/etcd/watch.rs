//! Follows all leases: one list, then one watch from there on, resumed where it broke.

use std::{collections::HashMap, pin::pin, time::Duration};

use etcd_client::{Client, Error, EventType, GetOptions, WatchOptions, WatchResponse, WatchStream};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info};

use super::{
    EtcdSubnetManager,
    client::{Bound, kv, watcher},
    failure::{Cause, Failure},
    registry::{Decoded, Listing},
};
use crate::{
    lease::{LeaseAttributes, Subnets},
    peer_table::{LeaseChange, PeerUpdate},
    subnet_manager::{Connection, LeaseLost, StoreEvent},
};

/// After this much silence the member that serves the watch is asked for a sign of life.
const PROBE_AFTER: Duration = Duration::from_secs(6);
/// How long it may take to give one.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// At most one attempt to connect begins in this time.
const RETRY: Duration = Duration::from_secs(1);
/// How old a list made while acquiring may be to serve as the first snapshot.
const RECENT: Duration = Duration::from_secs(10);
/// Watches that broke at once, in a row, after which the store counts as away.
const TOLERATED_BREAKS: u32 = 2;

/// How a watch ended.
enum End {
    /// Our lease is gone.
    Lost(LeaseLost),
    /// Nobody listens any more.
    Closed,
    /// It never began.
    NotOpened(Failure),
    /// It broke; resume.
    Broken(Failure),
    /// Its member gives no sign of life; resume with another.
    Silent(Failure),
    /// Its history is compacted away; list again.
    Compacted,
}

/// What we know of the leases while following them.
#[derive(Default)]
struct Following {
    /// The next revision to hear of; `None` before the first list and after a compaction.
    next_revision: Option<i64>,
    /// The last readable state of each lease: what counts while its value is junk.
    known: HashMap<Subnets, LeaseAttributes>,
    /// What was told about the connection last.
    connected: Option<bool>,
    /// The endpoint of the last watch.
    endpoint: Option<String>,
}

/// The answer to a request for a watch.
enum Opened {
    Watching(WatchStream),
    Cancelled(WatchResponse),
}

impl EtcdSubnetManager {
    /// Delivers the leases until ours is lost; `None` if nobody listens any more.
    pub(super) async fn follow(&self, events: &mpsc::Sender<StoreEvent>) -> Option<LeaseLost> {
        let mut following = Following::default();
        let mut breaks = 0;
        loop {
            let started = Instant::now();
            let (failure, tolerated) = match self.follow_once(&mut following, events).await {
                End::Lost(lost) => return Some(lost),
                End::Closed => return None,
                End::Compacted => {
                    info!(
                        "etcd has compacted the history we had not seen; listing all leases again"
                    );
                    following.next_revision = None;
                    continue;
                }
                End::NotOpened(failure) => (failure, false),
                End::Broken(failure) => {
                    breaks = if started.elapsed() < RETRY { breaks + 1 } else { 1 };
                    (failure, breaks <= TOLERATED_BREAKS)
                }
                // Where there is no other, it would be known seconds later only.
                End::Silent(failure) => (failure, self.registry.client.has_several_endpoints()),
            };
            debug!("the watch on etcd is broken: {failure}");
            if !tolerated {
                if following.connected != Some(false) {
                    following.connected = Some(false);
                    let down = StoreEvent::Connection(Connection::Down(failure.text));
                    events.send(down).await.ok()?;
                }
                sleep_until(started + RETRY).await;
            }
        }
    }

    async fn follow_once(
        &self,
        following: &mut Following,
        events: &mpsc::Sender<StoreEvent>,
    ) -> End {
        let next = match following.next_revision {
            Some(next) => next,
            None => match self.take_listing(following, events).await {
                Ok(next) => next,
                Err(end) => return end,
            },
        };
        let (mut stream, mut bound) = match self.open(next).await {
            Ok(opened) => opened,
            Err(end) => return end,
        };
        let endpoint = Some(bound.endpoint.to_string());
        if following.endpoint != endpoint {
            info!("following the leases in etcd at {}", bound.endpoint);
            following.endpoint = endpoint;
        }
        if following.connected != Some(true) {
            // A member that was cut off believes in its old leader for a moment. "Up" is a cluster
            // with a quorum, which only a linearizable read proves.
            if following.connected == Some(false)
                && let Err(failure) = self.registry.config().await
            {
                return End::NotOpened(failure);
            }
            following.connected = Some(true);
            if events.send(StoreEvent::Connection(Connection::Up)).await.is_err() {
                return End::Closed;
            }
        }
        loop {
            let message = match self.next_message(&mut stream, &mut bound).await {
                Ok(message) => message,
                Err(end) => {
                    self.registry.client.leave(&bound.endpoint);
                    return end;
                }
            };
            if message.compact_revision() != 0 {
                return End::Compacted;
            }
            if message.canceled() {
                self.registry.client.leave(&bound.endpoint);
                return End::Broken(self.why_cancelled(&message, &bound));
            }
            if let Err(end) = self.deliver(&message, following, events).await {
                return end;
            }
        }
    }

    /// Lists all leases and hands them out. Returns the revision to follow from.
    async fn take_listing(
        &self,
        following: &mut Following,
        events: &mpsc::Sender<StoreEvent>,
    ) -> Result<i64, End> {
        let recent = self.recent.borrow_mut().take().filter(|l| l.taken.elapsed() < RECENT);
        let listing = match recent {
            Some(listing) => listing,
            None => self.registry.list().await.map_err(End::NotOpened)?,
        };
        if let Some(lost) = self.check_listing(&listing) {
            return Err(End::Lost(lost));
        }
        let next = listing.revision + 1;
        let mut leases: Vec<_> = listing.known.into_iter().map(|known| known.lease).collect();
        // A value that was readable once counts on while it is junk.
        for subnets in listing.unreadable {
            if let Some(attributes) = following.known.remove(&subnets) {
                leases.push(crate::lease::Lease { subnets, attributes });
            }
        }
        following.known =
            leases.iter().map(|lease| (lease.subnets, lease.attributes.clone())).collect();
        following.next_revision = Some(next);
        events
            .send(StoreEvent::Peers(PeerUpdate::Snapshot(leases)))
            .await
            .map_err(|_| End::Closed)?;
        Ok(next)
    }

    /// Looks our own lease up in a list, if that is newer than what we know.
    fn check_listing(&self, listing: &Listing) -> Option<LeaseLost> {
        let (subnets, seen) = {
            let held = self.held.borrow();
            let held = held.as_ref()?;
            (held.lease.subnets, held.version.mod_revision)
        };
        if listing.revision < seen {
            return None;
        }
        match listing.entry(&subnets) {
            Some(entry) => self.observe_own(&Decoded::Lease(entry)),
            None if listing.unreadable.contains(&subnets) => None,
            None => Some(LeaseLost { subnets, holder: None }),
        }
    }

    /// Opens the watch and waits until etcd has confirmed it.
    async fn open(&self, revision: i64) -> Result<(WatchStream, Bound), End> {
        let registry = &self.registry;
        let has_user = registry.client.has_user();
        let (opened, bound) = registry
            .client
            .call_bound(async |client| {
                // etcd reports a stale token on a watch as "permission denied", on a read as what
                // it is: read first, so that the token is renewed.
                if has_user {
                    probe(client, &registry.keys.config).await?;
                }
                let options = WatchOptions::new().with_prefix().with_start_revision(revision);
                let mut stream =
                    watcher(client).watch(registry.keys.subnets.as_str(), Some(options)).await?;
                match stream.message().await? {
                    Some(first) if first.canceled() || first.compact_revision() != 0 => {
                        Ok(Opened::Cancelled(first))
                    }
                    Some(_) => Ok(Opened::Watching(stream)),
                    None => Err(ended()),
                }
            })
            .await
            .map_err(End::NotOpened)?;
        match opened {
            Opened::Watching(stream) => Ok((stream, bound)),
            Opened::Cancelled(message) if message.compact_revision() != 0 => Err(End::Compacted),
            Opened::Cancelled(message) => Err(End::NotOpened(self.why_cancelled(&message, &bound))),
        }
    }

    /// The next message of the watch, or how it ended: its member may fall silent.
    async fn next_message(
        &self,
        stream: &mut WatchStream,
        bound: &mut Bound,
    ) -> Result<WatchResponse, End> {
        let has_user = self.registry.client.has_user();
        let explain = |error: &Error| Failure::explain(&bound.endpoint, has_user, error);
        let answer = |result: Result<Option<WatchResponse>, Error>| match result {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(End::Broken(explain(&ended()))),
            Err(error) => Err(End::Broken(explain(&error))),
        };
        let mut renewed = pin!(self.registry.client.renewed());
        loop {
            tokio::select! {
                biased;
                result = timeout(PROBE_AFTER, stream.message()) => {
                    if let Ok(result) = result {
                        return answer(result);
                    }
                }
                () = &mut renewed => {
                    let text = "the watch was begun from an address we no longer have";
                    return Err(End::Broken(Failure::new(Cause::Endpoint, text)));
                }
            }
            let mut client = bound.client.clone();
            let probe = timeout(PROBE_TIMEOUT, probe(&mut client, &self.registry.keys.config));
            tokio::select! {
                biased;
                result = stream.message() => return answer(result),
                result = probe => match result {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        let failure = explain(&error);
                        // Any answer is a sign of life.
                        if failure.cause == Cause::Endpoint {
                            return Err(End::Broken(failure));
                        }
                    }
                    Err(_) => {
                        let seconds = (PROBE_AFTER + PROBE_TIMEOUT).as_secs();
                        return Err(End::Silent(Failure::silent(&bound.endpoint, seconds)));
                    }
                }
            }
        }
    }

    /// Hands the changes of one message out, in the order in which they were made.
    async fn deliver(
        &self,
        message: &WatchResponse,
        following: &mut Following,
        events: &mpsc::Sender<StoreEvent>,
    ) -> Result<(), End> {
        let mut changes = Vec::new();
        let mut lost = None;
        let mut own_removed = false;
        for event in message.events() {
            let Some(kv) = event.kv() else { continue };
            following.next_revision = Some(kv.mod_revision() + 1);
            if event.event_type() == EventType::Delete {
                self.registry.forget_complaint(kv.key());
                let Some(subnets) = self.registry.keys.subnets_of(kv.key()) else { continue };
                following.known.remove(&subnets);
                changes.push(LeaseChange::Removed(subnets));
                own_removed |= self.held.borrow().as_ref().is_some_and(|held| {
                    held.lease.subnets == subnets && held.version.mod_revision < kv.mod_revision()
                });
                continue;
            }
            let decoded = self.registry.decode(kv);
            lost = self.observe_own(&decoded).or(lost);
            if let Decoded::Lease(entry) = decoded {
                let lease = entry.lease;
                following.known.insert(lease.subnets, lease.attributes.clone());
                changes.push(LeaseChange::Put(lease));
            }
        }
        if !changes.is_empty() {
            let update = StoreEvent::Peers(PeerUpdate::Changes(changes));
            events.send(update).await.map_err(|_| End::Closed)?;
        }
        if lost.is_none() && own_removed {
            // Perhaps somebody holds it by now; perhaps it is back and ours.
            lost = self.check_own().await.unwrap_or_else(|_| {
                self.held
                    .borrow()
                    .as_ref()
                    .map(|held| LeaseLost { subnets: held.lease.subnets, holder: None })
            });
        }
        lost.map_or(Ok(()), |lost| Err(End::Lost(lost)))
    }

    fn why_cancelled(&self, message: &WatchResponse, bound: &Bound) -> Failure {
        let has_user = self.registry.client.has_user();
        Failure::watch_cancelled(&bound.endpoint, has_user, message.cancel_reason())
    }
}

/// Asks a member for a sign of life. Costs it no round to the others; without a leader it refuses.
async fn probe(client: &mut Client, key: &str) -> Result<(), Error> {
    let options = GetOptions::new().with_serializable().with_count_only();
    kv(client).get(key, Some(options)).await.map(|_| ())
}

fn ended() -> Error {
    Error::WatchError("the watch was closed".to_owned())
}

#[cfg(test)]
mod tests;
