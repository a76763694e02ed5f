//! The running agent: start-up order, the event loop, and what happens when a lease is lost.
//!
//! Everything runs on one thread. The loop knows four causes for work: the store said something,
//! the kernel's state changed under us, the store's task ended, we were suspended. Each ends in
//! [`Agent::apply`], which makes the kernel equal to the wanted state: all of it, or, when only
//! some peers' leases changed, these peers' part.

mod config_change;

use std::{collections::BTreeSet, future::Future, pin::Pin, rc::Rc, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep},
};
use tracing::{error, info, warn};

use crate::{
    backend::{Backend, BackendError},
    cli::Exit,
    config::NetworkConfig,
    firewall::{Firewall, FirewallPolicy},
    lease::{Lease, LeaseAttributes, Subnets},
    peer_table::{Changed, PeerTable},
    state::SharedState,
    subnet_env::{SubnetEnv, SubnetFile},
    subnet_manager::{
        Connection, GrantedLease, LeaseLost, LeaseRequest, NodePublicAddresses, StoreError,
        StoreEvent, SubnetManager,
    },
    telemetry::health::{Condition, HEARTBEAT},
};

/// Pause between tries of anything the start waits for.
const RETRY: Duration = Duration::from_secs(1);

/// How long a lease check after a suspension may take before the store counts as away.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

/// Everything the event loop works on.
pub struct Agent {
    store: Rc<dyn SubnetManager>,
    backend: Box<dyn Backend>,
    config: NetworkConfig,
    subnet_file: SubnetFile,
    firewall: Firewall,
    policy: FirewallPolicy,
    state: Rc<SharedState>,
    peers: Rc<PeerTable>,
    granted: GrantedLease,
    /// The backend's problems of the last pass, so that each is logged once.
    problems: BTreeSet<String>,
    /// After a suspension: the store does not show our lease as we know it.
    doubtful: bool,
    /// What the store does not know of us yet, because it could not be told.
    unpublished: Option<Unpublished>,
    /// What `subnet.env` holds now, if we wrote it.
    written: Option<SubnetEnv>,
}

/// What the store's task came to.
enum StoreTask {
    /// `run` returned; what it had to say came through the channel.
    Ended,
    /// A new lease after one was lost.
    Acquired(GrantedLease),
}

/// A try to publish that failed.
struct Unpublished {
    /// When to try again.
    retry: Instant,
    /// What was said about it, so that it is said once.
    reason: String,
}

type StoreFuture = Pin<Box<dyn Future<Output = Result<StoreTask, Exit>>>>;

/// Reads the network configuration, waiting until there is a usable one.
pub async fn network_config(
    store: &dyn SubnetManager,
    state: &SharedState,
) -> Result<NetworkConfig, Exit> {
    let config =
        until_ok(state, Condition::Config, "network configuration", || store.network_config())
            .await?;
    state.telemetry.readiness.met(Condition::Config);
    if !config.unknown_keys.is_empty() {
        warn!("network configuration: ignoring unknown keys: {}", config.unknown_keys.join(", "));
    }
    if config.backend_type_missing {
        warn!(
            "network configuration: Backend.Type is missing, so the udp backend is used as flannel \
             does; set \"Backend\": {{\"Type\": \"vxlan\"}} for the fast one"
        );
    }
    Ok(config)
}

/// Asks the store which public addresses this node is to use, waiting until it answers.
pub async fn node_public_addresses(
    store: &dyn SubnetManager,
    state: &SharedState,
) -> Result<NodePublicAddresses, Exit> {
    until_ok(state, Condition::Lease, "looking up our own node", || store.node_public_addresses())
        .await
}

/// Repeats `step` every second until it works, telling why it waits once per reason.
async fn until_ok<T, F>(
    state: &SharedState,
    condition: Condition,
    what: &str,
    mut step: impl FnMut() -> F,
) -> Result<T, Exit>
where
    F: Future<Output = Result<T, StoreError>>,
{
    // One cause may show in two ways that alternate: a refused handshake is now an alert, now a
    // closed connection.
    let mut told = BTreeSet::new();
    loop {
        match step().await {
            Ok(value) => {
                if !told.is_empty() {
                    info!("{what}: no longer waiting");
                }
                return Ok(value);
            }
            Err(StoreError::Fatal(reason)) => {
                return Err(Exit::failure(format!("{what}: {reason}")));
            }
            Err(reason) => {
                let reason = reason.to_string();
                state.telemetry.readiness.unmet(condition, reason.clone());
                if !told.contains(&reason) {
                    warn!("{what}: {reason}; trying again every second");
                    told.insert(reason);
                }
            }
        }
        sleep(RETRY).await;
    }
}

/// Brings the devices up and leases a subnet, waiting as long as that takes.
async fn lease(
    store: &dyn SubnetManager,
    backend: &mut dyn Backend,
    config: &NetworkConfig,
    previous: Subnets,
    state: &SharedState,
) -> Result<GrantedLease, Exit> {
    let own = backend.attributes();
    let stored = until_ok(state, Condition::Lease, "looking up our own lease", || {
        store.stored_identity(&own)
    })
    .await?;
    let mut last = String::new();
    loop {
        match backend.prepare(stored.attributes.as_ref()).await {
            Ok(()) => break,
            Err(BackendError::Config(reason)) => {
                return Err(Exit::failure(format!("{} backend: {reason}", backend.name())));
            }
            Err(BackendError::Kernel(reason)) => {
                if reason != last {
                    error!("{} backend: {reason}; trying again every second", backend.name());
                    state.telemetry.readiness.unmet(Condition::Device, reason.clone());
                    last = reason;
                }
            }
        }
        sleep(RETRY).await;
    }
    acquire(store, config, backend.attributes(), previous, state).await
}

async fn acquire(
    store: &dyn SubnetManager,
    config: &NetworkConfig,
    attributes: LeaseAttributes,
    previous: Subnets,
    state: &SharedState,
) -> Result<GrantedLease, Exit> {
    let request = LeaseRequest { attributes, previous };
    let granted =
        until_ok(state, Condition::Lease, "leasing a subnet", || store.acquire(config, &request))
            .await?;
    info!("leased {} from {}", granted.lease.subnets, store.kind());
    Ok(granted)
}

impl Agent {
    /// Leases a subnet and brings the backend up. Waits for whatever is missing.
    pub async fn start(
        store: Rc<dyn SubnetManager>,
        mut backend: Box<dyn Backend>,
        config: NetworkConfig,
        subnet_file: SubnetFile,
        (firewall, policy): (Firewall, FirewallPolicy),
        previous: Subnets,
        state: Rc<SharedState>,
    ) -> Result<Self, Exit> {
        let granted = lease(&*store, &mut *backend, &config, previous, &state).await?;
        Ok(Self {
            store,
            backend,
            config,
            subnet_file,
            firewall,
            policy,
            state,
            peers: Rc::default(),
            granted,
            problems: BTreeSet::new(),
            doubtful: false,
            unpublished: None,
            written: None,
        })
    }

    /// The event loop. Returns only when nothing can go on.
    ///
    /// Calls `first_ready` once, when everything holds for the first time.
    pub async fn run(mut self, first_ready: impl FnOnce()) -> Result<(), Exit> {
        let mut first_ready = Some(first_ready);
        let state = Rc::clone(&self.state);
        let (events_in, mut events) = mpsc::channel(64);
        let mut store_task = self.keep_lease(&events_in);
        self.apply(&Changed::Everything).await;

        // Whoever stops us with SIGSTOP says with this that we go on.
        let mut resumed = signal(SignalKind::from_raw(libc::SIGCONT))
            .map_err(|err| Exit::failure(format!("cannot handle signals: {err}")))?;
        let mut suspended = false;
        let mut checked = Instant::now();
        loop {
            suspended |= self.state.telemetry.readiness.beat().is_some();
            if suspended || self.doubtful && checked.elapsed() >= RETRY {
                suspended = false;
                self.check_lease().await;
                checked = Instant::now();
            }
            if self.unpublished.as_ref().is_some_and(|it| it.retry <= Instant::now()) {
                self.publish().await;
            }
            if self.state.telemetry.readiness.missing().is_empty()
                && let Some(first_ready) = first_ready.take()
            {
                info!("ready");
                self.store.network_is_up();
                first_ready();
            }
            let pause = self.pause();
            tokio::select! {
                biased;
                _ = resumed.recv() => suspended = true,
                Some(event) = events.recv() => {
                    let mut changed = Changed::Nothing;
                    let mut next = Some(event);
                    while let Some(event) = next {
                        match event {
                            StoreEvent::Lost(lost) => {
                                store_task = self.lost(&lost);
                                // What is left in the channel is the old task's.
                                while events.try_recv().is_ok() {}
                            }
                            other => changed.and(self.fold(other)),
                        }
                        next = events.try_recv().ok();
                    }
                    self.apply(&changed).await;
                }
                end = &mut store_task => match end? {
                    StoreTask::Ended => {
                        // Without a word about why: ask again for what we hold.
                        store_task = self.acquire_again(self.granted.lease.subnets);
                    }
                    StoreTask::Acquired(granted) => {
                        self.granted = granted;
                        store_task = self.keep_lease(&events_in);
                        self.apply(&Changed::Everything).await;
                    }
                },
                () = self.backend.changed() => self.apply(&Changed::Everything).await,
                () = self.firewall.changed() => {
                    self.take_firewall_report();
                    self.write_subnet_file(&self.granted.lease.clone());
                }
                () = state.asked() => state.set_backend(self.backend.status()),
                () = sleep(pause) => {}
            }
        }
    }

    /// How long the loop may sleep if nothing happens.
    fn pause(&self) -> Duration {
        let checking = if self.doubtful { RETRY } else { HEARTBEAT };
        let publishing = self.unpublished.as_ref().map(|it| it.retry - Instant::now());
        publishing.map_or(checking, |wait| wait.min(checking))
    }

    /// The task that watches the store and keeps our lease alive.
    fn keep_lease(&mut self, events: &mpsc::Sender<StoreEvent>) -> StoreFuture {
        let own = self.granted.lease.subnets;
        self.change_peers(|peers| peers.set_own(Some(own)));
        self.state.set_lease(&self.granted);
        self.doubtful = false;
        self.unpublished = None;
        self.state.telemetry.readiness.met(Condition::Lease);
        let (store, granted, events) =
            (Rc::clone(&self.store), self.granted.clone(), events.clone());
        Box::pin(async move {
            store.run(granted, events).await;
            Ok(StoreTask::Ended)
        })
    }

    /// Changes the table of peers, without a copy: the view that `peers` shows is put aside.
    fn change_peers<T>(&mut self, change: impl FnOnce(&mut PeerTable) -> T) -> T {
        self.state.set_peers(Rc::default());
        let result = change(Rc::make_mut(&mut self.peers));
        self.state.set_peers(Rc::clone(&self.peers));
        result
    }

    fn acquire_again(&self, previous: Subnets) -> StoreFuture {
        let (store, config, state) =
            (Rc::clone(&self.store), self.config.clone(), Rc::clone(&self.state));
        let attributes = self.backend.attributes();
        Box::pin(async move {
            acquire(&*store, &config, attributes, previous, &state).await.map(StoreTask::Acquired)
        })
    }

    /// Stops announcing a lease that is no longer ours and asks for one again: the same subnet if
    /// nobody has it. Forwarding goes on meanwhile.
    fn lost(&mut self, lost: &LeaseLost) -> StoreFuture {
        self.state.telemetry.metrics.leases_lost.inc();
        // Who has it now is told by the store when it is asked for the same subnet again.
        if lost.holder.is_some() {
            info!("the lease of {} went to another node", lost.subnets);
        } else {
            warn!("the lease of {} was deleted or ran out", lost.subnets);
        }
        self.state
            .telemetry
            .readiness
            .unmet(Condition::Lease, format!("the lease of {} was lost", lost.subnets));
        if lost.holder.is_some() {
            self.withdraw_subnet_file("the lease was lost");
        }
        self.acquire_again(lost.subnets)
    }

    fn withdraw_subnet_file(&mut self, reason: &str) {
        self.written = None;
        self.state.telemetry.readiness.unmet(Condition::SubnetFile, reason);
        if let Err(err) = self.subnet_file.remove() {
            error!("{err}");
        }
    }

    /// Takes in what the store said. Tells which peers differ now.
    fn fold(&mut self, event: StoreEvent) -> Changed {
        match event {
            StoreEvent::Peers(update) => self.change_peers(|peers| peers.apply(update)),
            StoreEvent::Renewed { expires } => {
                self.granted.expires = expires;
                self.state.set_lease(&self.granted);
                Changed::Nothing
            }
            StoreEvent::Connection(connection) => {
                match &connection {
                    Connection::Up => info!("{} store answers again", self.store.kind()),
                    Connection::Down(reason) => warn!(
                        "{} store does not answer: {reason}; forwarding goes on with what is known",
                        self.store.kind()
                    ),
                }
                self.state.set_connection(&connection);
                Changed::Nothing
            }
            StoreEvent::Config(read) => self.take_config(read),
            StoreEvent::Lost(_) => Changed::Nothing,
        }
    }

    /// After a suspension: is the lease still ours? The store's task finds out by itself as well;
    /// this keeps us from calling ourselves ready until it is known.
    async fn check_lease(&mut self) {
        let readiness = &self.state.telemetry.readiness;
        readiness.unmet(
            Condition::Lease,
            "the agent was suspended; the store has not yet shown the lease as ours again",
        );
        let own = &self.granted.lease.attributes;
        let look = tokio::time::timeout(CHECK_TIMEOUT, self.store.stored_identity(own));
        self.doubtful = match look.await {
            Ok(Ok(stored)) => stored.attributes.as_ref() != Some(own),
            // A store that does not answer takes no lease away.
            Ok(Err(_)) | Err(_) => false,
        };
        if !self.doubtful && self.unpublished.is_none() {
            readiness.met(Condition::Lease);
        }
    }

    /// Makes the kernel and `subnet.env` equal to the wanted state, and says what is wrong.
    async fn apply(&mut self, changed: &Changed) {
        let state = Rc::clone(&self.state);
        let _pass = state.telemetry.heartbeat.pass("applying the wanted state");
        let lease = self.granted.lease.clone();
        let report = match changed {
            Changed::Nothing => return,
            Changed::Peers(changed) => {
                self.backend.apply_changed(&lease, &self.peers, changed).await
            }
            Changed::Everything => {
                let port = self.backend.tunnel_port();
                self.firewall.want(self.policy.wanted(&self.config, lease.subnets, port));
                self.take_firewall_report();
                self.backend.apply(&lease, &self.peers).await
            }
        };
        self.state.set_applied(&report, self.backend.status());

        let problems: BTreeSet<_> = report.problems.iter().cloned().collect();
        for problem in problems.difference(&self.problems) {
            warn!("{problem}");
        }
        for problem in self.problems.difference(&problems) {
            info!("no longer: {problem}");
        }
        self.problems = problems;

        match report.device_problem {
            None => self.state.telemetry.readiness.met(Condition::Device),
            Some(problem) => self.state.telemetry.readiness.unmet(Condition::Device, problem),
        }
        if self.peers.synced() {
            self.state.telemetry.readiness.met(Condition::Peers);
        } else {
            self.state
                .telemetry
                .readiness
                .unmet(Condition::Peers, "the store has not listed the peers yet");
        }
        self.publish().await;
        self.write_subnet_file(&lease);
    }

    /// Makes known how the firewall is.
    fn take_firewall_report(&self) {
        let readiness = &self.state.telemetry.readiness;
        match self.firewall.missing() {
            None => readiness.met(Condition::Firewall),
            Some(reason) => readiness.unmet(Condition::Firewall, reason),
        }
        self.state.set_firewall(&self.firewall.report());
    }

    /// Publishes what changed about us: a device made anew with another MAC, another address.
    /// Until the store has it, peers send to where we are not: that is not ready, and it is tried
    /// again without another cause.
    async fn publish(&mut self) {
        let attributes = self.backend.attributes();
        if attributes == self.granted.lease.attributes && self.unpublished.is_none() {
            return;
        }
        let mut granted = self.granted.clone();
        granted.lease.attributes = attributes;
        let readiness = &self.state.telemetry.readiness;
        let started = Instant::now();
        match self.store.publish(&granted).await {
            Ok(()) => {
                info!("published changed attributes of {}", granted.lease.subnets);
                self.granted = granted;
                if self.unpublished.take().is_some() && !self.doubtful {
                    readiness.met(Condition::Lease);
                }
            }
            Err(err) => {
                let reason = err.to_string();
                if self.unpublished.as_ref().is_none_or(|it| it.reason != reason) {
                    warn!("could not publish our changed attributes, trying on: {reason}");
                }
                readiness.unmet(
                    Condition::Lease,
                    format!("peers do not know our changed attributes yet: {reason}"),
                );
                // The loop stands still meanwhile: most of the time it is to serve the rest.
                let pause = RETRY.max(3 * started.elapsed());
                self.unpublished = Some(Unpublished { retry: Instant::now() + pause, reason });
            }
        }
    }

    fn write_subnet_file(&mut self, lease: &Lease) {
        let readiness = &self.state.telemetry.readiness;
        // Pods that start before their packets are masqueraded are known by a wrong source for as
        // long as their connections last. A firewall that cannot be had is no reason to wait.
        if !readiness.holds(Condition::Device)
            || !readiness.holds(Condition::Lease)
            || !self.firewall.attempted()
        {
            return;
        }
        let wanted =
            SubnetEnv::new(&self.config, lease.subnets, self.backend.mtu(), self.policy.masquerade);
        if self.written.as_ref() == Some(&wanted) {
            return;
        }
        match self.subnet_file.write(&wanted) {
            Ok(()) => {
                info!("wrote {}", self.subnet_file.path().display());
                self.written = Some(wanted);
                self.state.telemetry.readiness.met(Condition::SubnetFile);
            }
            Err(err) => {
                error!("{err}");
                self.state.telemetry.readiness.unmet(Condition::SubnetFile, err.to_string());
            }
        }
    }
}
