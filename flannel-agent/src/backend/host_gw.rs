//! The host-gw backend: specification §7.2. Peers' subnets are routed to their hosts, without a
//! tunnel: all hosts have to share a link.

mod peers;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use async_trait::async_trait;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{debug, info};

use self::peers::{Compiled, Segment};
use super::{ApplyReport, Backend, BackendError, on_link::OnLink};
use crate::{
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes},
    netlink::{
        mirror::{Mirror, Scope},
        route::Route,
    },
    peer_table::PeerTable,
    reconciler::{Change, Wanted},
    telemetry::metrics::Metrics,
};

/// The name peers find in leases.
pub const NAME: &str = "host-gw";

/// How often everything is read anew, in case a notification told less than it should.
const SAFETY_NET: Duration = Duration::from_mins(1);

/// Pause before another pass when something could not be done.
const RETRY: Duration = Duration::from_secs(1);

/// Pause in which changes of the host's routes gather before peers' ways are looked up again.
const SETTLE: Duration = Duration::from_millis(20);

/// What the backend works with.
#[derive(Clone, Debug)]
pub struct HostGwConfig {
    /// The interface whose link the peers are on, as chosen at start. Found again by its name.
    pub external: ExternalInterface,
    /// The cluster's IPv4 network, if IPv4 is enabled.
    pub ipv4_network: Option<Ipv4Net>,
    /// The cluster's IPv6 network, if IPv6 is enabled.
    pub ipv6_network: Option<Ipv6Net>,
    /// Whether a black hole stands behind our own subnets.
    pub blackhole_route: bool,
}

/// The backend.
pub struct HostGwBackend {
    external: ExternalInterface,
    networks: Vec<IpNet>,
    blackhole_route: bool,
    mirror: Mirror,
    metrics: Metrics,
    on_link: OnLink,
    mtu: u32,
    /// What we are to be reached at: the chosen addresses, or what the interface has instead.
    public_ip: Option<Ipv4Addr>,
    public_ipv6: Option<Ipv6Addr>,
    /// The wanted state of the last pass, to tell tampering from our own echo.
    wanted: Option<Wanted>,
    /// Routes of others where the last pass wanted its own.
    taken: Vec<Route>,
    /// When to pass again whatever is heard.
    next_pass: Instant,
    /// Whether that pass is to distrust the mirror.
    read_anew: bool,
    /// Whether the pass to come mends what somebody else changed.
    repairing: bool,
    served: usize,
    problems: usize,
}

impl HostGwBackend {
    /// Opens the netlink sockets; changes nothing yet.
    ///
    /// # Errors
    /// [`BackendError::Config`] if the advertised address is not the interface's own: peers use
    /// it as a gateway. [`BackendError::Kernel`] if netlink is refused.
    pub fn new(config: HostGwConfig, metrics: Metrics) -> Result<Self, BackendError> {
        let HostGwConfig { external, ipv4_network, ipv6_network, blackhole_route } = config;
        if ipv4_network.is_some() && external.public_ip != external.addr {
            let show = |ip: Option<Ipv4Addr>| ip.map_or("none".to_owned(), |ip| ip.to_string());
            return Err(BackendError::Config(format!(
                "the public address {} is not that of interface {} ({}): peers route to it \
                 directly, so there can be no NAT between them; leave --public-ip out",
                show(external.public_ip),
                external.name,
                show(external.addr),
            )));
        }
        let v4 = ipv4_network.map(IpNet::from);
        let networks: Vec<_> = v4.into_iter().chain(ipv6_network.map(IpNet::from)).collect();
        let scope = Scope { networks: networks.clone(), devices: Vec::new() };
        let mirror = Mirror::open(scope)
            .map_err(|err| BackendError::Kernel(format!("cannot open netlink sockets: {err}")))?;
        Ok(Self {
            mtu: external.mtu,
            public_ip: external.public_ip.filter(|_| ipv4_network.is_some()),
            public_ipv6: external.public_ipv6.filter(|_| ipv6_network.is_some()),
            external,
            networks,
            blackhole_route,
            mirror,
            metrics,
            on_link: OnLink::default(),
            wanted: None,
            taken: Vec::new(),
            next_pass: Instant::now() + SAFETY_NET,
            read_anew: true,
            repairing: false,
            served: 0,
            problems: 0,
        })
    }

    fn refresh(&mut self) -> Result<(), String> {
        let heard = self
            .mirror
            .refresh()
            .map_err(|err| format!("cannot read the kernel's links and routes: {err}"))?;
        if heard.routing {
            self.on_link.clear();
        }
        Ok(())
    }

    /// Looks at the interface as it is now.
    ///
    /// # Errors
    /// A sentence that says what it lacks.
    fn look_at_interface(&mut self) -> Result<(), String> {
        let name = &self.external.name;
        let link = self.mirror.tables().link(name);
        let link = link.ok_or_else(|| format!("external interface {name} is gone"))?;
        if !link.up {
            return Err(format!("external interface {name} is down"));
        }
        self.mtu = link.mtu;
        let index = link.index;
        let v4 = self.public_ip.is_some().then(|| self.address(index, self.external.public_ip));
        let v6 = self.public_ipv6.is_some().then(|| self.address(index, self.external.public_ipv6));
        let lost = |family| format!("external interface {name} has no usable {family} address");
        let v4 = v4.map(|ip| ip.ok_or_else(|| lost("IPv4"))).transpose()?;
        let v6 = v6.map(|ip| ip.ok_or_else(|| lost("IPv6"))).transpose()?;
        (self.public_ip, self.public_ipv6) = (v4, v6);
        Ok(())
    }

    /// The chosen address if this host has it, else the first one the interface has by now.
    fn address<A>(&self, link: u32, chosen: Option<A>) -> Option<A>
    where
        A: Into<IpAddr> + Copy + TryFrom<Ip>,
    {
        let usable = || {
            let addresses = self.mirror.tables().addresses.iter();
            addresses.filter_map(|(address, usable)| usable.then_some(address))
        };
        if chosen.is_some_and(|ip| usable().any(|address| address.net.addr() == ip.into())) {
            return chosen;
        }
        let on_link = usable().filter(|address| address.link == link);
        let mut addresses = on_link.map(|address| address.net.addr());
        addresses.find_map(|ip| A::try_from(Ip(ip)).ok())
    }

    fn pass(
        &mut self,
        lease: &Lease,
        peers: &PeerTable,
        report: &mut ApplyReport,
    ) -> Result<(), String> {
        self.refresh()?;
        self.look_at_interface()?;
        self.on_link.ask(&mut self.mirror, peers, &[]);
        let segment = Segment::new(&self.mirror, &self.external.name, &self.on_link)?;
        let Compiled { mut wanted, problems, served } =
            peers::compile(peers, lease.subnets, &self.networks, &segment);
        wanted.blackhole_own = self.blackhole_route;
        report.problems.extend(problems);
        report.peers_applied = served;
        let plan = wanted.plan(self.mirror.tables());
        self.wanted = Some(wanted);
        for route in &plan.taken {
            report.problems.push(format!(
                "the route {} {} is not ours: it stays, and peer {0} is not reached",
                route.destination,
                self.mirror.tables().way_of(route)
            ));
            report.peers_applied = report.peers_applied.saturating_sub(1);
        }
        self.taken = plan.taken;
        let requests = plan.changes.iter().map(Change::request).collect();
        let outcomes = self.mirror.requests().run(requests);
        let outcomes = outcomes.map_err(|err| format!("cannot talk to the kernel: {err}"))?;
        for (change, outcome) in plan.changes.iter().zip(&outcomes) {
            if change.worked(outcome) {
                report.changes += 1;
            } else if let Err(err) = outcome {
                report.problems.push(peers::explain(change, err));
                let missing = usize::from(!change.is_removal());
                report.peers_applied = report.peers_applied.saturating_sub(missing);
            }
        }
        // Our own echo, before it is taken for somebody else's work.
        self.refresh()
    }

    /// Another pass shortly, on what the mirror has.
    fn pass_within(&mut self, time: Duration) {
        let due = Instant::now() + time;
        if due < self.next_pass {
            self.next_pass = due;
            self.read_anew = false;
        }
    }

    /// Whether the kernel differs from the last pass's wanted state.
    fn differs(&self) -> bool {
        let Some(wanted) = &self.wanted else { return true };
        let tables = self.mirror.tables();
        let mtu = tables.link(&self.external.name).map(|link| link.mtu);
        let plan = wanted.plan(tables);
        mtu.is_some_and(|mtu| mtu != self.mtu)
            || !plan.changes.is_empty()
            || plan.taken != self.taken
    }
}

/// An address of either family, to be narrowed to one.
struct Ip(IpAddr);

impl TryFrom<Ip> for Ipv4Addr {
    type Error = ();

    fn try_from(ip: Ip) -> Result<Self, ()> {
        match ip.0 {
            IpAddr::V4(ip) if !ip.is_link_local() => Ok(ip),
            _ => Err(()),
        }
    }
}

impl TryFrom<Ip> for Ipv6Addr {
    type Error = ();

    fn try_from(ip: Ip) -> Result<Self, ()> {
        match ip.0 {
            IpAddr::V6(ip) if !ip.is_unicast_link_local() => Ok(ip),
            _ => Err(()),
        }
    }
}

#[async_trait(?Send)]
impl Backend for HostGwBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn prepare(&mut self, _stored: Option<&LeaseAttributes>) -> Result<(), BackendError> {
        self.refresh().and_then(|()| self.look_at_interface()).map_err(BackendError::Kernel)
    }

    fn attributes(&self) -> LeaseAttributes {
        LeaseAttributes {
            public_ip: self.public_ip,
            public_ipv6: self.public_ipv6,
            backend_type: NAME.to_owned(),
            ..LeaseAttributes::default()
        }
    }

    async fn apply(&mut self, own: &Lease, peers: &PeerTable) -> ApplyReport {
        let mut report = ApplyReport::default();
        report.device_problem = self.pass(own, peers, &mut report).err();
        if std::mem::take(&mut self.repairing) && report.changes > 0 {
            self.metrics.repairs.inc_by(u64::try_from(report.changes).unwrap_or(u64::MAX));
            info!("put {} routes back that somebody else had changed", report.changes);
        }
        let failed = report.device_problem.is_some()
            || report.problems.iter().any(|problem| problem.starts_with("cannot "));
        self.next_pass = Instant::now() + if failed { RETRY } else { SAFETY_NET };
        self.read_anew = true;
        // Somebody may have changed things while we did: what was heard then is in the mirror.
        if !failed && self.differs() {
            self.repairing = true;
            self.pass_within(SETTLE);
        }
        (self.served, self.problems) = (report.peers_applied, report.problems.len());
        report
    }

    async fn changed(&mut self) {
        loop {
            let due = self.next_pass;
            tokio::select! {
                () = self.mirror.readable() => {}
                () = tokio::time::sleep_until(due) => {
                    if self.read_anew {
                        self.mirror.distrust();
                    }
                    return;
                }
            }
            match self.mirror.refresh() {
                Ok(heard) => {
                    if heard.routing {
                        self.on_link.clear();
                        self.pass_within(SETTLE);
                    }
                    if heard.ours && self.differs() {
                        self.repairing = true;
                        return;
                    }
                }
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

    fn status(&self) -> Value {
        let link = self.mirror.tables().link(&self.external.name);
        json!({
            "interface": {
                "name": self.external.name,
                "present": link.is_some(),
                "up": link.is_some_and(|link| link.up),
                "index": link.map(|link| link.index),
                "mtu": link.map(|link| link.mtu),
            },
            "peers_served": self.served,
            "problems": self.problems,
            "routes": self.mirror.tables().routes.len(),
        })
    }
}
