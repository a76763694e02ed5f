//! The udp backend: specification §7.3. Bare IPv4 packets in UDP, carried by threads of ours
//! between a TUN device and a socket. Slow, and flannel's default when no backend is named.

mod batch;
mod counters;
mod forwarder;
mod options;
mod packet;
mod peer_routes;
mod tun;

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use async_trait::async_trait;
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::time::Instant;
use tracing::{debug, info};

pub use self::options::UdpOptions;
use self::{
    forwarder::{Forwarder, Path, Shared},
    peer_routes::PeerRoutes,
    tun::Tun,
};
use super::{ApplyReport, Backend, BackendError};
use crate::{
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes},
    netlink::{
        address::Address,
        link::{self, Link},
        mirror::{Mirror, Scope},
        route::Via,
        socket::Request,
    },
    peer_table::PeerTable,
    reconciler::{Change, Wanted},
    telemetry::metrics::Metrics,
};

/// Bytes around an inner packet: outer IPv4 and UDP header.
const OVERHEAD: u32 = 28;

/// How often everything is read anew, in case a notification told less than it should.
const SAFETY_NET: Duration = Duration::from_mins(1);

/// Pause before another pass when something could not be done.
const RETRY: Duration = Duration::from_secs(1);

/// What the backend works with.
#[derive(Clone, Debug)]
pub struct UdpConfig {
    /// The options of the network configuration.
    pub options: UdpOptions,
    /// The interface that carries the tunnel, as chosen at start. Found again by its name.
    pub external: ExternalInterface,
    /// The cluster's IPv4 network, if IPv4 is enabled.
    pub ipv4_network: Option<Ipv4Net>,
    /// Whether a black hole stands behind our own subnets.
    pub blackhole_route: bool,
}

/// A device and the thread that serves it. The fields are dropped in this order: the thread has
/// its own handle of the device and ends first.
struct Tunnel {
    forwarder: Option<Forwarder>,
    /// Our address on the device that the thread was started with.
    forwards_as: Option<Ipv4Addr>,
    tun: Tun,
}

/// The backend.
pub struct UdpBackend {
    port: u16,
    external: ExternalInterface,
    /// `IfaceAddr`, which the socket is bound to.
    local: Ipv4Addr,
    network: Ipv4Net,
    mirror: Mirror,
    metrics: Metrics,
    blackhole_route: bool,
    socket: Option<UdpSocket>,
    tunnel: Option<Tunnel>,
    shared: Arc<Shared>,
    /// The device's MTU in bytes, or what the underlay lacks, as of the last pass.
    underlay: Result<u32, String>,
    mtu: u32,
    /// Our subnet and the wanted route of the last pass, to tell tampering from our own echo.
    own: Option<Ipv4Net>,
    wanted: Option<Wanted>,
    /// When to pass again whatever is heard.
    next_pass: Instant,
    /// Whether the pass to come mends what somebody else changed.
    repairing: bool,
    problems: usize,
}

impl UdpBackend {
    /// Opens the netlink sockets; changes nothing yet.
    ///
    /// # Errors
    /// [`BackendError::Config`] without IPv4, [`BackendError::Kernel`] if netlink is refused.
    pub fn new(config: UdpConfig, metrics: Metrics) -> Result<Self, BackendError> {
        let UdpConfig { options, external, ipv4_network, blackhole_route } = config;
        let network = ipv4_network.ok_or_else(|| {
            BackendError::Config(
                "Backend.Type udp carries IPv4 only, and EnableIPv4 is false".to_owned(),
            )
        })?;
        let local = external.addr.ok_or_else(|| {
            BackendError::Config(format!(
                "Backend.Type udp needs an IPv4 address, and {} has none",
                external.name
            ))
        })?;
        let scope = Scope { networks: vec![network.into()], devices: Vec::new() };
        let mirror = Mirror::open(scope)
            .map_err(|err| BackendError::Kernel(format!("cannot open netlink sockets: {err}")))?;
        Ok(Self {
            port: options.port,
            mtu: external.mtu.saturating_sub(OVERHEAD),
            external,
            local,
            network,
            mirror,
            metrics,
            blackhole_route,
            socket: None,
            tunnel: None,
            shared: Arc::default(),
            underlay: Err("not looked at yet".to_owned()),
            own: None,
            wanted: None,
            next_pass: Instant::now() + SAFETY_NET,
            repairing: false,
            problems: 0,
        })
    }

    fn refresh(&mut self) -> Result<(), String> {
        let heard = self.mirror.refresh();
        heard.map(drop).map_err(|err| format!("cannot read the kernel's links and routes: {err}"))
    }

    fn bind(&self) -> Result<UdpSocket, String> {
        let (address, port) = (self.local, self.port);
        let bound = UdpSocket::bind(SocketAddrV4::new(address, port))
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        bound.map_err(|err| {
            let advice = match err.kind() {
                io::ErrorKind::AddrInUse => {
                    "; stop the other program (another flannel?) or set another Backend.Port on \
                     all nodes"
                }
                io::ErrorKind::AddrNotAvailable => "; give the address back or restart the agent",
                io::ErrorKind::PermissionDenied => "; the agent needs CAP_NET_BIND_SERVICE",
                _ => "",
            };
            format!("cannot receive on {address} UDP port {port}: {err}{advice}")
        })
    }

    /// Our device, if the kernel still has it.
    fn link(&self) -> Option<&Link> {
        let name = &self.tunnel.as_ref()?.tun.name;
        self.mirror.tables().link(name)
    }

    /// The socket and a device, made anew if it went away. Returns how much was made.
    fn open(&mut self) -> Result<usize, String> {
        if self.socket.is_none() {
            self.socket = Some(self.bind()?);
            info!("receiving on {} UDP port {}", self.local, self.port);
        }
        self.refresh()?;
        if self.link().is_some() {
            return Ok(0);
        }
        // The old one's name is free only when its file is closed.
        self.tunnel = None;
        let tun = Tun::create().map_err(|err| explain_tun(&err))?;
        info!("made device {}", tun.name);
        self.tunnel = Some(Tunnel { forwarder: None, forwards_as: None, tun });
        self.refresh()?;
        Ok(1)
    }

    /// The device's MTU on the underlay as it is now.
    fn target_mtu(&self) -> Result<u32, String> {
        let (name, local) = (&self.external.name, self.local);
        let tables = self.mirror.tables();
        let parent =
            tables.link(name).ok_or_else(|| format!("external interface {name} is gone"))?;
        let has_local = |address: &Address| address.net.addr() == local;
        if !tables.addresses.keys().any(has_local) {
            return Err(format!(
                "external interface {name} has lost the address {local}, which the tunnel is \
                 bound to; give it back or restart the agent"
            ));
        }
        parent
            .mtu
            .checked_sub(OVERHEAD)
            .filter(|mtu| *mtu > 0)
            .ok_or_else(|| format!("MTU {} of {name} leaves no room for the tunnel", parent.mtu))
    }

    /// Changes of the link and its addresses that are to be made. In order: the kernel takes the
    /// routes of a device that goes down, and none before it is up.
    fn device_changes(&self, link: &Link, mtu: u32, own: Ipv4Net) -> Vec<Request> {
        let change = link::Change {
            mtu: (link.mtu != mtu).then_some(mtu),
            up: !link.up,
            ..link::Change::default()
        };
        let mut requests = Vec::new();
        if change != link::Change::default() {
            requests.push(link::change(link.index, &change));
        }
        let address = Address { link: link.index, net: Ipv4Net::from(own.network()).into() };
        let addresses = &self.mirror.tables().addresses;
        if !addresses.contains_key(&address) {
            requests.push(address.add());
        }
        let stale = addresses.keys().filter(|other| {
            let ip = other.net.addr();
            other.link == link.index
                && **other != address
                && matches!(ip, std::net::IpAddr::V4(ip) if self.network.contains(&ip))
        });
        requests.extend(stale.map(|other| other.delete()));
        requests
    }

    /// Our network leads to the device, and to nowhere else.
    fn wanted_routes(&self, link: u32, own: Ipv4Net, complete: bool) -> Wanted {
        Wanted {
            routes: BTreeMap::from([(self.network.into(), Via::Link(link))]),
            devices: vec![link],
            networks: vec![self.network.into()],
            own: vec![own.into()],
            blackhole_own: self.blackhole_route,
            complete,
            ..Wanted::default()
        }
    }

    /// Starts the thread, or another one if our address changed or it ended.
    fn forward(&mut self, own: Ipv4Net) -> Result<(), String> {
        let (Some(tunnel), Some(socket)) = (&mut self.tunnel, &self.socket) else {
            return Ok(());
        };
        let tun_ip = own.network();
        if tunnel.forwards_as == Some(tun_ip)
            && tunnel.forwarder.as_ref().is_some_and(Forwarder::alive)
        {
            return Ok(());
        }
        tunnel.forwarder = None;
        let path = tunnel.tun.file.try_clone().and_then(|tun| {
            Ok(Path {
                tun,
                tun_ip,
                socket: socket.try_clone()?,
                icmp: icmp_socket(),
                port: self.port,
            })
        });
        let started = path.and_then(|path| Forwarder::start(path, &self.shared));
        let started = started.map_err(|err| format!("cannot start forwarding: {err}"))?;
        info!("forwarding as {tun_ip}");
        tunnel.forwarder = Some(started);
        tunnel.forwards_as = Some(tun_ip);
        Ok(())
    }
}

impl UdpBackend {
    /// Runs requests that all have to work. Returns how many there were.
    fn run(&mut self, requests: Vec<Request>, what: &str) -> Result<usize, String> {
        let count = requests.len();
        let outcomes = self.mirror.requests().run(requests);
        let failed = match outcomes {
            Ok(outcomes) => outcomes.into_iter().find_map(Result::err),
            Err(err) => Some(err),
        };
        match failed {
            None => Ok(count),
            Some(err) => Err(format!("cannot {what}: {err}")),
        }
    }

    fn pass(
        &mut self,
        lease: &Lease,
        peers: &PeerTable,
        report: &mut ApplyReport,
    ) -> Result<(), String> {
        let own = lease.subnets.v4.ok_or("the lease has no IPv4 subnet")?;
        self.own = Some(own);
        // Before anything that may fail: what still forwards serves the right peers.
        let (routes, problems) = PeerRoutes::compile(peers, (own, self.external.public_ip));
        report.peers_applied = routes.len();
        report.problems = problems;
        if *self.shared.routes() != routes {
            report.changes += 1;
            self.shared.set_routes(routes);
        }

        report.changes += self.open()?;
        self.underlay = self.target_mtu();
        let mtu = self.underlay.clone()?;
        self.mtu = mtu;
        self.shared.mtu.store(u16::try_from(mtu).unwrap_or(u16::MAX), Ordering::Relaxed);
        let link = self.link().ok_or("the device was removed again at once")?.clone();
        let changes = self.device_changes(&link, mtu, own);
        report.changes += self.run(changes, &format!("set up device {}", link.name))?;
        self.refresh()?;

        let wanted = self.wanted_routes(link.index, own, peers.synced());
        let plan = wanted.plan(self.mirror.tables());
        self.wanted = Some(wanted);
        if let Some(foreign) = plan.taken.first() {
            return Err(format!(
                "the route to {} is somebody else's ({:?}); remove it: {} cannot be used beside it",
                foreign.destination, foreign.via, link.name
            ));
        }
        let requests = plan.changes.iter().map(Change::request).collect();
        let outcomes = self.mirror.requests().run(requests);
        let outcomes = outcomes.map_err(|err| format!("cannot talk to the kernel: {err}"))?;
        for (change, outcome) in plan.changes.iter().zip(&outcomes) {
            if change.worked(outcome) {
                report.changes += 1;
            } else if let Err(err) = outcome {
                return Err(format!("cannot {change}: {err}"));
            }
        }
        self.forward(own)?;
        // Our own echo, before it is taken for somebody else's work.
        self.refresh()
    }

    /// Whether the kernel differs from the last pass's wanted state.
    fn differs(&self) -> bool {
        let (Some(own), Some(wanted)) = (self.own, &self.wanted) else { return true };
        let underlay = self.target_mtu();
        if underlay != self.underlay {
            return true;
        }
        // As long as the underlay is missing there is nothing to be done.
        let Ok(mtu) = underlay else { return false };
        let Some(link) = self.link() else { return true };
        !self.device_changes(link, mtu, own).is_empty()
            || !wanted.plan(self.mirror.tables()).changes.is_empty()
    }
}

#[async_trait(?Send)]
impl Backend for UdpBackend {
    fn name(&self) -> &'static str {
        "udp"
    }

    async fn prepare(&mut self, _stored: Option<&LeaseAttributes>) -> Result<(), BackendError> {
        self.open().map(drop).map_err(BackendError::Kernel)
    }

    fn attributes(&self) -> LeaseAttributes {
        LeaseAttributes { public_ip: self.external.public_ip, ..LeaseAttributes::default() }
    }

    async fn apply(&mut self, own: &Lease, peers: &PeerTable) -> ApplyReport {
        let mut report = ApplyReport::default();
        report.device_problem = self.pass(own, peers, &mut report).err();
        if std::mem::take(&mut self.repairing) && report.changes > 0 {
            self.metrics.repairs.inc_by(u64::try_from(report.changes).unwrap_or(u64::MAX));
            info!("put {} kernel objects back that somebody else had changed", report.changes);
        }
        let pause = if report.device_problem.is_some() { RETRY } else { SAFETY_NET };
        self.next_pass = Instant::now() + pause;
        self.problems = report.problems.len();
        report
    }

    async fn changed(&mut self) {
        loop {
            let due = self.next_pass;
            tokio::select! {
                () = self.mirror.readable() => {}
                () = self.shared.ended.notified() => {
                    let alive = |tunnel: &Tunnel| tunnel.forwarder.as_ref().is_some_and(Forwarder::alive);
                    // The word may be of threads that have been replaced meanwhile.
                    if self.tunnel.as_ref().is_some_and(|tunnel| !alive(tunnel)) {
                        self.repairing = true;
                        return;
                    }
                }
                () = tokio::time::sleep_until(due) => {
                    self.mirror.distrust();
                    return;
                }
            }
            match self.mirror.refresh() {
                Ok(heard) if heard.ours && self.differs() => {
                    self.repairing = true;
                    return;
                }
                Ok(_) => {}
                Err(err) => {
                    debug!("reading the kernel's state: {err}");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn tunnel_port(&self) -> Option<u16> {
        Some(self.port)
    }

    fn status(&self) -> Value {
        let link = self.link();
        let device = self.tunnel.as_ref().map(|tunnel| {
            json!({
                "name": tunnel.tun.name,
                "present": link.is_some(),
                "up": link.is_some_and(|link| link.up),
                "index": link.map(|link| link.index),
                "mtu": link.map(|link| link.mtu),
                "port": self.port,
                "local": self.local,
                "forwarding": tunnel.forwarder.as_ref().is_some_and(Forwarder::alive),
            })
        });
        json!({
            "devices": device.into_iter().collect::<Value>(),
            "peers_served": self.shared.routes().len(),
            "problems": self.problems,
            "packets": self.shared.counters.to_json(),
        })
    }
}

/// A socket to send ICMP errors with their own header. Without `CAP_NET_RAW` there is none.
fn icmp_socket() -> Option<Socket> {
    // Of this protocol a socket only sends.
    let raw = Protocol::from(libc::IPPROTO_RAW);
    let opened = Socket::new(Domain::IPV4, Type::RAW, Some(raw))
        .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
    opened
        .inspect_err(|err| {
            info!("pods are not told of destinations that no node has: {err} (CAP_NET_RAW)");
        })
        .ok()
}

/// The kernel's word about a TUN device, with what it usually means.
fn explain_tun(err: &io::Error) -> String {
    let advice = match err.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
            "; load the kernel module tun, or give the container that device"
        }
        Some(libc::EPERM | libc::EACCES) => "; the agent needs CAP_NET_ADMIN and that device",
        _ => "",
    };
    format!("cannot make a TUN device by {}: {err}{advice}", tun::CLONE_DEVICE)
}
