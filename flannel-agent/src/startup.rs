//! From the command line to the running agent: specification §1.3, in that order.

use std::{cell::Cell, path::Path, rc::Rc, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use crate::{
    agent::{self, Agent},
    backend::{
        Backend, BackendError, Farewell,
        registry::{self, Parts},
    },
    cli::{
        Exit, Options,
        flags::{EtcdFlags, InterfaceFlags, KubeFlags, OptionalPath},
    },
    config::NetworkConfig,
    control::ControlSocket,
    external_interface::{self, ExternalInterface, Families, SelectError},
    firewall::Firewall,
    host_checks,
    state::SharedState,
    subnet_env::SubnetFile,
    subnet_manager::{
        NodePublicAddresses, StoreError, SubnetManager,
        etcd::{EtcdOptions, EtcdSubnetManager, Password},
        kube::{KubeOptions, KubeSubnetManager, NodeIdentity},
        local::LocalSubnetManager,
    },
    telemetry::{
        Telemetry,
        health::Condition,
        metrics::Metrics,
        server::{self, Pages},
        systemd,
    },
};

/// How long a lease is granted for: 24 hours (specification §4.3).
const LEASE_TTL: Duration = Duration::from_hours(24);

/// How long an agent that is just stopping may keep the subnet file's lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

/// How long an address that is still tentative, or a link that is still coming, is waited for.
const INTERFACE_PATIENCE: Duration = Duration::from_secs(3);

/// Pause between two looks for it.
const INTERFACE_PAUSE: Duration = Duration::from_millis(200);

/// Runs the agent until a signal comes or nothing can go on.
pub async fn run(options: Options) -> Result<(), Exit> {
    options.log();
    let mut stop = StopSignals::install()?;
    let farewell = Cell::default();
    let name = tokio::select! {
        result = run_until_failure(&options, &farewell) => return result,
        name = stop.received() => name,
    };
    info!("{name}: stopping; everything stays as it is in the kernel and in the store");
    if let Some(farewell) = farewell.take() {
        tokio::select! {
            () = farewell => {}
            name = stop.received() => info!("{name}: stopping at once"),
        }
    }
    Ok(())
}

async fn run_until_failure(
    options: &Options,
    farewell: &Cell<Option<Farewell>>,
) -> Result<(), Exit> {
    let subnet_file = SubnetFile::new(&options.files.subnet_file);
    let _lock =
        subnet_file.lock(LOCK_PATIENCE).await.map_err(|err| Exit::failure(err.to_string()))?;
    let previous = subnet_file.set_aside();

    let metrics = Metrics::default();
    let firewall_metrics = metrics.clone();
    let store = open_store(options, &metrics)?;
    let telemetry = Rc::new(Telemetry::new(metrics.clone(), |_| {}));
    let state = Rc::new(SharedState::new(
        Rc::clone(&telemetry),
        store.kind(),
        options.datapath.bpf_pin_dir.clone(),
    ));
    let servers = Servers::open(options, &telemetry, &state).await?;

    let agent = async {
        let config = agent::network_config(&*store, &state).await?;
        state.set_config(&config);
        let interface = interface_flags(options, &*store, &state).await?;
        let external = external_interface(&interface, &config, &state).await?;
        info!("external interface: {external}");
        state.set_external_interface(&external);
        for warning in host_checks::warnings(Path::new("/proc/sys"), &config) {
            warn!("{warning}");
        }
        let backend = open_backend(options, &config, external, metrics)?;
        let firewall =
            Firewall::open(config.enable_nftables, options.firewall.resync(), firewall_metrics);
        farewell.set(backend.farewell());
        let agent = Agent::start(
            Rc::clone(&store),
            backend,
            config,
            subnet_file,
            (firewall, options.firewall.policy()),
            previous.subnets(),
            Rc::clone(&state),
        )
        .await?;
        agent.run(announce_readiness).await
    };
    tokio::select! {
        // In this order: nobody is told that we are ready before the agent has seen that we were
        // suspended.
        biased;
        result = agent => result,
        () = servers.serve() => Ok(()),
    }
}

/// Tells systemd, once, that we are ready.
fn announce_readiness() {
    if let Err(err) = systemd::notify_ready() {
        warn!("could not tell systemd that we are ready: {err}");
    }
}

fn open_store(options: &Options, metrics: &Metrics) -> Result<Rc<dyn SubnetManager>, Exit> {
    let local = options.files.local_subnet_mgr.0.clone();
    let store = if options.kube.enabled {
        kube_store(&options.kube, metrics)
    } else if let Some(dir) = local {
        let margin = renew_margin(&options.etcd);
        LocalSubnetManager::new(dir, LEASE_TTL, margin, metrics.clone()).map(shared)
    } else {
        EtcdSubnetManager::new(etcd_options(&options.etcd), metrics.clone()).map(shared)
    };
    store.map_err(|err| Exit::failure(err.to_string()))
}

fn shared(store: impl SubnetManager + 'static) -> Rc<dyn SubnetManager> {
    Rc::new(store)
}

fn kube_store(flags: &KubeFlags, metrics: &Metrics) -> Result<Rc<dyn SubnetManager>, StoreError> {
    let options = KubeOptions {
        api_url: flags.api_url.clone(),
        kubeconfig: flags.kubeconfig_file.clone().into(),
        annotation_prefix: flags.annotation_prefix.clone(),
        net_config_path: flags.net_config_path.clone(),
        set_network_unavailable: flags.set_node_network_unavailable,
        node: NodeIdentity::from_environment(&|name| std::env::var_os(name))?,
    };
    KubeSubnetManager::new(options, metrics.clone()).map(shared)
}

/// How the flags say that etcd is reached.
pub(crate) fn etcd_options(flags: &EtcdFlags) -> EtcdOptions {
    let text = |value: &str| Some(value.to_owned()).filter(|value| !value.is_empty());
    let file = |value: &str| text(value).map(Into::into);
    EtcdOptions {
        endpoints: flags.endpoints().map(str::to_owned).collect(),
        prefix: flags.prefix.clone(),
        keyfile: file(&flags.key_file),
        certfile: file(&flags.cert_file),
        cafile: file(&flags.ca_file),
        username: text(&flags.username),
        password: text(flags.password.expose()).map(Password::from),
        lease_ttl: LEASE_TTL,
        renew_margin: renew_margin(flags),
    }
}

/// The flags that choose the interface, with what the store says of this node's addresses put
/// over them.
async fn interface_flags(
    options: &Options,
    store: &dyn SubnetManager,
    state: &SharedState,
) -> Result<InterfaceFlags, Exit> {
    let NodePublicAddresses { v4, v6 } = agent::node_public_addresses(store, state).await?;
    let mut flags = options.interface.clone();
    for (flag, told) in [(&mut flags.public_ip, v4), (&mut flags.public_ipv6, v6)] {
        if let Some(told) = told {
            info!("the node's annotations set the public address {told}");
            *flag = told;
        }
    }
    Ok(flags)
}

fn renew_margin(flags: &EtcdFlags) -> Duration {
    Duration::from_secs(60 * flags.renew_margin_minutes.unsigned_abs())
}

/// Chooses the external interface. What may still come on a host that is starting (an address, a
/// default route) is waited for; a name that no interface has gets a moment, as udev may still be
/// naming, and is then an error, as upstream has it.
async fn external_interface(
    flags: &InterfaceFlags,
    config: &NetworkConfig,
    state: &SharedState,
) -> Result<ExternalInterface, Exit> {
    let families = Families { v4: config.ipv4.is_some(), v6: config.ipv6.is_some() };
    let patience = tokio::time::Instant::now() + INTERFACE_PATIENCE;
    let mut told = String::new();
    loop {
        let impatient = tokio::time::Instant::now() >= patience;
        match external_interface::discover(flags, families).await {
            Ok(found) => {
                if !told.is_empty() {
                    info!("external interface: no longer waiting");
                }
                return Ok(found);
            }
            Err(SelectError::NotFound { .. }) if !impatient => {}
            Err(SelectError::NotFound { why, only_late: true }) => {
                if told != why {
                    warn!("{why}; waiting for an address or a route");
                    state.telemetry.readiness.unmet(Condition::Device, why.clone());
                    told = why;
                }
            }
            Err(err) => return Err(Exit::failure(format!("no external interface: {err}"))),
        }
        tokio::time::sleep(INTERFACE_PAUSE).await;
    }
}

fn open_backend(
    options: &Options,
    config: &NetworkConfig,
    external: ExternalInterface,
    metrics: Metrics,
) -> Result<Box<dyn Backend>, Exit> {
    let failure =
        |err: BackendError| Exit::failure(format!("{} backend: {err}", config.backend_type));
    registry::open(Parts { options, config, external, metrics }).map_err(failure)
}

/// The ports and sockets that others ask us on.
struct Servers {
    telemetry: Rc<Telemetry>,
    state: Rc<SharedState>,
    health: Option<(tokio::net::TcpListener, Pages)>,
    metrics: Option<tokio::net::TcpListener>,
    control: Option<ControlSocket>,
}

impl Servers {
    async fn open(
        options: &Options,
        telemetry: &Rc<Telemetry>,
        state: &Rc<SharedState>,
    ) -> Result<Self, Exit> {
        let bind = async |address, flag| {
            server::bind(address, flag).await.map_err(|err| Exit::failure(err.to_string()))
        };
        let metrics = match options.telemetry.metrics_address.0 {
            Some(address) => Some(bind(address, "--metrics-address").await?),
            None => None,
        };
        let health = match options.telemetry.health_address() {
            Some(address) => {
                let pages = if metrics.is_some() { Pages::Health } else { Pages::All };
                Some((bind(address, "--healthz-port").await?, pages))
            }
            None => None,
        };
        Ok(Self {
            telemetry: Rc::clone(telemetry),
            state: Rc::clone(state),
            health,
            metrics,
            control: open_control(&options.files.control_socket),
        })
    }

    /// Answers for as long as the agent runs.
    async fn serve(self) {
        let Self { telemetry, state, health, metrics, control } = self;
        let never = std::future::pending::<()>;
        let source = || Rc::clone(&state) as Rc<dyn crate::telemetry::status::StateSource>;
        let health = async {
            if let Some((listener, pages)) = health {
                server::serve(listener, pages, Rc::clone(&telemetry), source(), never()).await;
            }
        };
        let metrics = async {
            if let Some(listener) = metrics {
                let telemetry = Rc::clone(&telemetry);
                server::serve(listener, Pages::Metrics, telemetry, source(), never()).await;
            }
        };
        let control = async {
            if let Some(socket) = control {
                let telemetry = Rc::clone(&telemetry);
                server::serve(socket, Pages::Control, telemetry, source(), never()).await;
            }
        };
        tokio::join!(health, metrics, control, never());
    }
}

/// The control socket is a convenience: several agents on one host may share its default path.
fn open_control(path: &OptionalPath) -> Option<ControlSocket> {
    let path = path.0.as_deref()?;
    match ControlSocket::bind(path) {
        Ok(socket) => Some(socket),
        Err(err) => {
            error!("{err}; `flannel-agent status` cannot ask this agent");
            None
        }
    }
}

/// SIGTERM and SIGINT.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn install() -> Result<Self, Exit> {
        let install = |kind| {
            signal(kind).map_err(|err| Exit::failure(format!("cannot handle signals: {err}")))
        };
        Ok(Self {
            terminate: install(SignalKind::terminate())?,
            interrupt: install(SignalKind::interrupt())?,
        })
    }

    async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
