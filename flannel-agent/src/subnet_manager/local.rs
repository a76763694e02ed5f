//! Leases as files in a directory: the store that needs no server.
//!
//! `DIR/config.json` (or `net-conf.json`) is the network configuration, `DIR/subnets/<key>.json`
//! one lease each, in the JSON form that etcd holds, with `Expires` (Unix seconds) behind it; a
//! file without `Expires` is a reservation. Whoever changes a lease holds the lock on
//! `DIR/.lock`; readers need none, because files are replaced in one step.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use tokio::{sync::mpsc, time::sleep};
use tracing::{error, info, warn};

use self::{
    directory::{Directory, Dirty, Lock, StoredLease, View, unix_seconds},
    watch::Watch,
};
use super::{
    Connection, GrantedLease, LeaseLost, LeaseRequest, StoreError, StoreEvent, StoredIdentity,
    SubnetManager,
    acquire::{self, Choice, KnownLease, Plan},
};
use crate::{
    config::NetworkConfig,
    lease::{Lease, LeaseAttributes, Subnets},
    peer_table::{LeaseChange, PeerUpdate},
    telemetry::metrics::Metrics,
};

mod directory;
mod watch;

/// How long to wait for another agent to release the lock. It is held for a few file
/// operations only.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Pause before the next try when the directory is away.
const RETRY: Duration = Duration::from_secs(1);

/// Pause after a renewal that failed.
const RENEWAL_RETRY: Duration = Duration::from_secs(10);

/// However long there is nothing to do, look at the wall clock this often: somebody may set it.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// The local directory as a store.
#[derive(Debug)]
pub struct LocalSubnetManager {
    dir: Directory,
    ttl: Duration,
    margin: Duration,
    metrics: Metrics,
    /// What we last wrote, by which we know our file again even after our address changed.
    held: RefCell<Option<LeaseAttributes>>,
}

impl LocalSubnetManager {
    /// Opens the store in `dir`, making the directory if need be. Leases last for `ttl` and are
    /// renewed when `margin` of it is left (at least one second after they were written).
    pub fn new(
        dir: impl Into<PathBuf>,
        ttl: Duration,
        margin: Duration,
        metrics: Metrics,
    ) -> Result<Self, StoreError> {
        let dir = dir.into();
        let fatal = |what: &str, e: io::Error| {
            StoreError::Fatal(format!(
                "cannot {what} the local store {}: {e}; --local-subnet-mgr must name a directory that can be written",
                dir.display()
            ))
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&dir)
            .map_err(|e| fatal("create", e))?;
        let directory = Directory::new(dir.clone());
        directory.ensure_subnets().map_err(|e| fatal("write to", e))?;
        directory.try_lock().map_err(|e| fatal("lock", e))?;
        let margin = margin.min(ttl.saturating_sub(Duration::from_secs(1)));
        Ok(Self { dir: directory, ttl, margin, metrics, held: RefCell::default() })
    }

    fn unavailable(&self, e: &io::Error) -> StoreError {
        StoreError::Unavailable(format!("local store {}: {e}", self.dir.root().display()))
    }

    /// Waits for the lock without blocking the runtime.
    async fn lock(&self) -> Result<Lock, StoreError> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(lock) = self.dir.try_lock().map_err(|e| self.unavailable(&e))? {
                return Ok(lock);
            }
            if start.elapsed() > LOCK_PATIENCE {
                return Err(StoreError::Unavailable(format!(
                    "local store {}: another process has held the lock .lock for {} s",
                    self.dir.root().display(),
                    LOCK_PATIENCE.as_secs()
                )));
            }
            // Uneven, so that agents that wait together do not ask in step.
            sleep(pause.mul_f32(0.5 + fastrand::f32())).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Reads every lease file.
    fn read_all(&self) -> Result<View, StoreError> {
        let mut view = View::default();
        // The run loop complains about files that make no sense, once.
        view.refresh(&self.dir, &Dirty::All, None).map_err(|e| self.unavailable(&e))?;
        Ok(view)
    }

    /// The end of a lease written now, in the whole seconds that the file holds.
    fn new_end(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(unix_seconds(SystemTime::now() + self.ttl))
    }

    /// One try at a lease, under the lock.
    fn acquire_locked(
        &self,
        lock: &Lock,
        config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError> {
        let io = |e: io::Error| self.unavailable(&e);
        self.dir.remove_stale_temp_files(lock).map_err(io)?;
        let view = self.read_all()?;
        let known = self.known_leases(lock, &view, config, &request.attributes)?;
        let Plan { discard, choice, previous_held_by } =
            acquire::plan(config, &request.attributes, request.previous, &known)
                .map_err(|e| StoreError::NoLease(e.to_string()))?;
        if let Some(other) = previous_held_by {
            error!(
                "the previous subnet {} of {} is held by {} now; leasing another one",
                request.previous,
                acquire::holder(&request.attributes),
                acquire::holder(&other.attributes)
            );
        }
        for subnets in discard {
            info!("deleting our lease of {subnets}, which does not fit the network configuration");
            self.dir.delete(lock, subnets).map_err(io)?;
        }
        let (subnets, permanent) = match choice {
            Choice::TakeOver { subnets, permanent } => {
                warn_of_twin(subnets, &known, &request.attributes);
                (subnets, permanent)
            }
            Choice::Create(subnets) => (subnets, false),
        };
        let attributes = request.attributes.clone();
        let expires = (!permanent).then(|| self.new_end());
        self.dir
            .put(lock, subnets, &StoredLease { attributes: attributes.clone(), expires })
            .map_err(io)?;
        *self.held.borrow_mut() = Some(attributes.clone());
        Ok(GrantedLease { lease: Lease { subnets, attributes }, expires })
    }

    /// The leases that count. Those that have run out are deleted, except our own: it is taken
    /// over if nothing else has come into its place.
    fn known_leases(
        &self,
        lock: &Lock,
        view: &View,
        config: &NetworkConfig,
        own: &LeaseAttributes,
    ) -> Result<Vec<KnownLease>, StoreError> {
        let now = SystemTime::now();
        let mut known = Vec::new();
        let mut ours_ended = Vec::new();
        for file in view.leases() {
            let lease = |attributes| Lease { subnets: file.subnets, attributes };
            match file.lease {
                // Nobody can tell whose it is, so it is not free.
                None => known
                    .push(KnownLease { lease: lease(LeaseAttributes::default()), permanent: true }),
                Some(stored) if file.live_at(now) => known.push(KnownLease {
                    lease: lease(stored.attributes.clone()),
                    permanent: stored.expires.is_none(),
                }),
                Some(stored) if acquire::is_ours(config, own, &stored.attributes) => {
                    ours_ended.push(lease(stored.attributes.clone()));
                }
                Some(_) => {
                    self.dir.delete(lock, file.subnets).map_err(|e| self.unavailable(&e))?;
                }
            }
        }
        for lease in ours_ended {
            if known.iter().any(|k| k.lease.subnets.overlaps(&lease.subnets)) {
                self.dir.delete(lock, lease.subnets).map_err(|e| self.unavailable(&e))?;
            } else {
                known.push(KnownLease { lease, permanent: false });
            }
        }
        known.sort_unstable_by_key(|k| k.lease.subnets);
        Ok(known)
    }

    /// Whether a stored lease is the one we wrote.
    fn is_held(&self, stored: &LeaseAttributes, lease: &LeaseAttributes) -> bool {
        let same = |a: &LeaseAttributes| match (a.public_ip, a.public_ipv6) {
            (Some(ip), _) => stored.public_ip == Some(ip),
            (None, Some(ip)) => stored.public_ip.is_none() && stored.public_ipv6 == Some(ip),
            (None, None) => stored.public_ip.is_none() && stored.public_ipv6.is_none(),
        };
        self.held.borrow().as_ref().is_some_and(same) || same(lease)
    }

    /// Reads our own file again: `Ok` holds it unless it makes no sense, `Err` says who has it.
    fn own_file(
        &self,
        view: &View,
        lease: &Lease,
    ) -> Result<Option<StoredLease>, Option<LeaseAttributes>> {
        match view.get(lease.subnets) {
            None => Err(None),
            Some(file) if file.bad => Ok(None),
            Some(file) => match file.lease {
                Some(stored) if !self.is_held(&stored.attributes, &lease.attributes) => {
                    Err(Some(stored.attributes.clone()))
                }
                stored => Ok(stored.cloned()),
            },
        }
    }

    /// Writes our lease anew, provided that it is still ours. The outer error is the store's,
    /// the inner one says that the lease is lost.
    async fn rewrite(
        &self,
        lease: &Lease,
        expires: impl FnOnce(Option<SystemTime>) -> Option<SystemTime>,
        current_end: Option<SystemTime>,
    ) -> Result<Result<Option<SystemTime>, Option<LeaseAttributes>>, StoreError> {
        let lock = self.lock().await?;
        let view = self.read_all()?;
        let end = match self.own_file(&view, lease) {
            Err(holder) => return Ok(Err(holder)),
            Ok(Some(stored)) => stored.expires,
            Ok(None) => current_end,
        };
        let expires = expires(end);
        let stored = StoredLease { attributes: lease.attributes.clone(), expires };
        self.dir.put(&lock, lease.subnets, &stored).map_err(|e| self.unavailable(&e))?;
        *self.held.borrow_mut() = Some(stored.attributes);
        Ok(Ok(expires))
    }
}

/// Two nodes with one public address share a lease unawares, as they always did. Say so.
fn warn_of_twin(subnets: Subnets, known: &[KnownLease], own: &LeaseAttributes) {
    let before = known.iter().find(|k| k.lease.subnets == subnets).map(|k| &k.lease.attributes);
    if let Some(before) = before
        && before.backend_data.is_some()
        && before.backend_data != own.backend_data
    {
        let shown = |a: &LeaseAttributes| {
            a.backend_data.as_ref().map_or_else(|| "none".to_owned(), |d| d.as_str().to_owned())
        };
        warn!(
            "took over the lease of {subnets} of our public address {}, whose backend data was {} and is {} now; \
             if another node uses this address too, give each its own with --public-ip",
            acquire::holder(own),
            shown(before),
            shown(own)
        );
    }
}

#[async_trait(?Send)]
impl SubnetManager for LocalSubnetManager {
    fn kind(&self) -> &'static str {
        "local"
    }

    async fn network_config(&self) -> Result<NetworkConfig, StoreError> {
        let root = self.dir.root().display();
        match self.dir.config() {
            Ok(Some((text, path))) => NetworkConfig::parse(&text).map_err(|e| {
                StoreError::BadConfig(format!("network configuration {}: {e}", path.display()))
            }),
            Ok(None) => Err(StoreError::NoConfig(format!(
                "no network configuration: write {root}/config.json (or {root}/net-conf.json)"
            ))),
            Err(e) => Err(StoreError::Unavailable(format!("network configuration {e}"))),
        }
    }

    async fn stored_identity(&self, own: &LeaseAttributes) -> Result<StoredIdentity, StoreError> {
        let view = self.read_all()?;
        let ours = |a: &&LeaseAttributes| match own.public_ip {
            Some(ip) => a.public_ip == Some(ip),
            None => own.public_ipv6.is_some() && a.public_ipv6 == own.public_ipv6,
        };
        let mut leases: Vec<_> =
            view.leases().filter_map(|file| Some((file.subnets, file.lease?))).collect();
        leases.sort_unstable_by_key(|(subnets, _)| *subnets);
        let attributes = leases.into_iter().map(|(_, lease)| &lease.attributes).find(ours).cloned();
        Ok(StoredIdentity { attributes })
    }

    async fn acquire(
        &self,
        config: &NetworkConfig,
        request: &LeaseRequest,
    ) -> Result<GrantedLease, StoreError> {
        self.dir.ensure_subnets().map_err(|e| self.unavailable(&e))?;
        let lock = self.lock().await?;
        self.acquire_locked(&lock, config, request)
    }

    async fn publish(&self, lease: &GrantedLease) -> Result<(), StoreError> {
        match self.rewrite(&lease.lease, |end| end, lease.expires).await? {
            Ok(_) => Ok(()),
            Err(holder) => Err(StoreError::NoLease(format!(
                "the lease of {} is not ours any more: {}",
                lease.lease.subnets,
                holder.map_or_else(
                    || "its file is gone".to_owned(),
                    |h| format!("{} holds it", acquire::holder(&h))
                )
            ))),
        }
    }

    async fn run(&self, lease: GrantedLease, events: mpsc::Sender<StoreEvent>) {
        Running {
            store: self,
            expires: lease.expires,
            lease: lease.lease,
            events,
            view: View::default(),
            watch: Watch::default(),
            dirty: None,
            told: None,
            up: None,
            renewal_failed: None,
        }
        .run()
        .await;
    }
}

/// The state of [`SubnetManager::run`].
struct Running<'a> {
    store: &'a LocalSubnetManager,
    lease: Lease,
    expires: Option<SystemTime>,
    events: mpsc::Sender<StoreEvent>,
    view: View,
    watch: Watch,
    /// What is to be read again, besides what a new watch asks for.
    dirty: Option<Dirty>,
    /// The leases the agent knows of; `None` before the first snapshot.
    told: Option<BTreeMap<Subnets, LeaseAttributes>>,
    up: Option<bool>,
    /// When the last renewal failed, if it did.
    renewal_failed: Option<Instant>,
}

/// The receiver is gone, or the lease is lost and that has been told: time to return.
struct Over;

impl Running<'_> {
    async fn run(mut self) {
        while let Ok(()) = self.turn().await {}
    }

    async fn turn(&mut self) -> Result<(), Over> {
        if let Err(e) = self.read() {
            if self.up != Some(false) {
                self.up = Some(false);
                let text = self.store.unavailable(&e).to_string();
                self.send(StoreEvent::Connection(Connection::Down(text))).await?;
            }
            // Another directory may come into its place: start over.
            self.watch = Watch::default();
            return self.pause(RETRY).await;
        }
        if self.up != Some(true) {
            self.up = Some(true);
            self.send(StoreEvent::Connection(Connection::Up)).await?;
        }
        self.check_own().await?;
        self.tell_peers().await?;
        self.renew_if_due().await?;

        let pause = self.next_deadline();
        tokio::select! {
            dirty = self.watch.changed() => self.dirty = Some(dirty),
            () = self.events.closed() => return Err(Over),
            () = sleep(pause) => {}
        }
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let from_watch = self.watch.establish(&self.store.dir)?;
        if let Some(dirty) = from_watch.or(self.dirty.take()) {
            self.view.refresh(&self.store.dir, &dirty, Some(&self.store.metrics))?;
        }
        Ok(())
    }

    async fn send(&self, event: StoreEvent) -> Result<(), Over> {
        self.events.send(event).await.map_err(|_| Over)
    }

    async fn pause(&self, pause: Duration) -> Result<(), Over> {
        tokio::select! {
            () = self.events.closed() => Err(Over),
            () = sleep(pause) => Ok(()),
        }
    }

    async fn lost(&self, holder: Option<LeaseAttributes>) -> Result<(), Over> {
        let subnets = self.lease.subnets;
        self.send(StoreEvent::Lost(LeaseLost { subnets, holder })).await?;
        Err(Over)
    }

    /// Is our file still there and ours? Somebody may also have changed when it ends.
    async fn check_own(&mut self) -> Result<(), Over> {
        match self.store.own_file(&self.view, &self.lease) {
            Err(holder) => self.lost(holder).await,
            Ok(Some(stored)) if stored.expires != self.expires => {
                self.expires = stored.expires;
                self.send(StoreEvent::Renewed { expires: stored.expires }).await
            }
            Ok(_) => Ok(()),
        }
    }

    async fn tell_peers(&mut self) -> Result<(), Over> {
        let now = SystemTime::now();
        let own = self.lease.subnets;
        let live: BTreeMap<_, _> = self
            .view
            .leases()
            .filter(|file| file.live_at(now) || file.subnets == own)
            .filter_map(|file| Some((file.subnets, file.lease?.attributes.clone())))
            .collect();
        let lease = |(subnets, attributes): (&Subnets, &LeaseAttributes)| Lease {
            subnets: *subnets,
            attributes: attributes.clone(),
        };
        let update = match &self.told {
            None => PeerUpdate::Snapshot(live.iter().map(lease).collect()),
            Some(told) => {
                let gone = told.keys().filter(|subnets| !live.contains_key(subnets));
                let new = live.iter().filter(|(subnets, a)| told.get(subnets) != Some(a));
                let changes: Vec<_> = gone
                    .map(|subnets| LeaseChange::Removed(*subnets))
                    .chain(new.map(|entry| LeaseChange::Put(lease(entry))))
                    .collect();
                if changes.is_empty() {
                    return Ok(());
                }
                PeerUpdate::Changes(changes)
            }
        };
        self.told = Some(live);
        self.send(StoreEvent::Peers(update)).await
    }

    /// When to renew; `None` for a reservation.
    fn renewal(&self) -> Option<SystemTime> {
        self.expires.map(|expires| expires.checked_sub(self.store.margin).unwrap_or(UNIX_EPOCH))
    }

    async fn renew_if_due(&mut self) -> Result<(), Over> {
        if self.renewal().is_none_or(|due| due > SystemTime::now())
            || self.renewal_failed.is_some_and(|failed| failed.elapsed() < RENEWAL_RETRY)
        {
            return Ok(());
        }
        // Attributes published since count, not those we started with.
        if let Some(held) = self.store.held.borrow().clone() {
            self.lease.attributes = held;
        }
        let end = self.store.new_end();
        match self.store.rewrite(&self.lease, |old| old.map(|_| end), self.expires).await {
            Ok(Ok(expires)) => {
                self.renewal_failed = None;
                self.expires = expires;
                self.send(StoreEvent::Renewed { expires }).await
            }
            Ok(Err(holder)) => self.lost(holder).await,
            Err(e) => {
                if self.renewal_failed.replace(Instant::now()).is_none() {
                    warn!("cannot renew the lease of {}: {e}; trying on", self.lease.subnets);
                }
                Ok(())
            }
        }
    }

    /// Time until a lease ends or ours has to be renewed.
    fn next_deadline(&self) -> Duration {
        let now = SystemTime::now();
        let own = self.lease.subnets;
        let until = |time: SystemTime| time.duration_since(now).unwrap_or(Duration::ZERO);
        let ends = self
            .view
            .leases()
            .filter(|file| !file.bad && file.subnets != own)
            .filter_map(|file| file.lease?.expires.filter(|end| *end > now).map(until));
        let renewal = match self.renewal_failed {
            Some(failed) => Some(RENEWAL_RETRY.saturating_sub(failed.elapsed())),
            None => self.renewal().map(until),
        };
        let soonest = ends.chain(renewal).min().unwrap_or(LONGEST_SLEEP);
        // Timers of the runtime may be a millisecond early; look when the moment has passed.
        soonest.min(LONGEST_SLEEP) + Duration::from_millis(1)
    }
}

#[cfg(test)]
mod tests;
