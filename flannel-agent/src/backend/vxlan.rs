//! The vxlan backend: specification §7.1. The kernel's data path, always programmed in full.

mod choice;
mod data;
mod device;
mod fast_path;
mod identity;
mod options;
mod peers;

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use async_trait::async_trait;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{debug, info};

use self::{
    choice::Choice,
    device::{Device, Family, Step, Target},
    fast_path::{FastPath, News},
    identity::StateFile,
    peers::{Compiler, Tunnel},
};
pub use self::{data::VxlanData, fast_path::FastPathConfig, options::VxlanOptions};
use super::{ApplyReport, Backend, BackendError, Reconfigured, on_link::OnLink};
use crate::{
    device_claim::DeviceClaim,
    external_interface::ExternalInterface,
    firewall::bypass::{Findings, RuleWatch},
    lease::{Lease, LeaseAttributes, RawJson, Subnets},
    mac::MacAddr,
    netlink::{
        link,
        mirror::{Heard, Keys, Mirror, Scope},
        route::Route,
        xfrm::IpsecPolicies,
    },
    peer_table::PeerTable,
    reconciler::Change,
    telemetry::metrics::Metrics,
};

/// How often everything is read anew, in case a notification told less than it should.
const SAFETY_NET: Duration = Duration::from_mins(1);

/// Pause before another pass when something could not be done.
const RETRY: Duration = Duration::from_secs(1);

/// Pause in which changes of the host's routes gather before peers' ways are looked up again.
const SETTLE: Duration = Duration::from_millis(20);

/// Pause before looking again at devices on which others do something.
const STRANGERS: Duration = Duration::from_secs(5);

/// Longest name of a device: `IFNAMSIZ` of `linux/if.h` less the closing zero.
const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// Passes over the devices in one go: make, change, look.
const DEVICE_PASSES: usize = 4;

/// What the backend works with.
#[derive(Clone, Debug)]
pub struct VxlanConfig {
    /// The options of the network configuration.
    pub options: VxlanOptions,
    /// The interface that carries the tunnel, as chosen at start. Found again by its name.
    pub external: ExternalInterface,
    /// The cluster's IPv4 network, if IPv4 is enabled.
    pub ipv4_network: Option<Ipv4Net>,
    /// The cluster's IPv6 network, if IPv6 is enabled.
    pub ipv6_network: Option<Ipv6Net>,
    /// Where the MAC survives a reboot.
    pub state_dir: PathBuf,
    /// The eBPF programs beside the kernel's device.
    pub fast_path: FastPathConfig,
    /// Whether a black hole stands behind our own subnets.
    pub blackhole_route: bool,
}

/// The backend.
pub struct VxlanBackend {
    options: VxlanOptions,
    external: ExternalInterface,
    fast_path: FastPath,
    fast_path_config: FastPathConfig,
    devices: Vec<Device>,
    /// So that nobody takes the devices away while we run. An agent that is just stopping may
    /// still have them.
    _claims: Vec<DeviceClaim>,
    targets: HashMap<String, Target>,
    mirror: Mirror,
    ipsec: IpsecPolicies,
    /// The rules of others, if it depends on them how much of the stack is skipped.
    rules: Option<RuleWatch>,
    /// The same about what others do to devices.
    strangers: Findings,
    /// When that was looked at; `None` before the programs were there.
    strangers_seen: Option<Instant>,
    /// What carried packets at the last pass, and why not something better.
    carrier: (&'static str, String),
    compiler: Compiler,
    metrics: Metrics,
    /// Answers of the kernel to "is this address on our link", until routing changes.
    on_link: OnLink,
    /// Routes of others where ours is wanted.
    taken: BTreeSet<Route>,
    /// Whether the last pass left something undone: then the next one looks at everything.
    undone: bool,
    own: Vec<(String, IpNet)>,
    /// When to pass again whatever is heard.
    next_pass: Instant,
    /// Whether that pass is to distrust the mirror.
    read_anew: bool,
    /// Whether the pass to come mends what somebody else changed.
    repairing: bool,
    /// What the pass changed in the kernel's path; feeding the programs mends nothing.
    mended: usize,
    /// The devices that carried our pods at the last pass.
    pod_devices: Vec<u32>,
    counts: Counts,
    /// The pods' devices at the last pass.
    pods: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    served: usize,
    problems: usize,
}

impl VxlanBackend {
    /// Opens the sockets; changes nothing yet.
    pub fn new(config: VxlanConfig, metrics: Metrics) -> Result<Self, BackendError> {
        let VxlanConfig {
            options,
            external,
            ipv4_network,
            ipv6_network,
            state_dir,
            fast_path,
            blackhole_route,
        } = config;
        let vni = options.vni;
        let device = |family, name: String, network: IpNet, public: Option<IpAddr>| {
            let state = StateFile::new(&state_dir, &name, public);
            Device { family, name, network, mac: None, state }
        };
        let mut devices = Vec::new();
        devices.extend(ipv4_network.map(|network| {
            let public = external.public_ip.map(Into::into);
            device(Family::V4, format!("flannel.{vni}"), network.into(), public)
        }));
        devices.extend(ipv6_network.map(|network| {
            let public = external.public_ipv6.map(Into::into);
            device(Family::V6, format!("flannel-v6.{vni}"), network.into(), public)
        }));
        if let Some(device) = devices.iter().find(|device| device.name.len() > NAME_MAX) {
            let stem = device.name.trim_end_matches(|c: char| c.is_ascii_digit());
            let largest = "9".repeat(NAME_MAX.saturating_sub(stem.len()));
            return Err(BackendError::Config(format!(
                "Backend.VNI {vni}: device name {} would be longer than the {NAME_MAX} characters \
                 that the kernel allows; choose a VNI of {largest} at most",
                device.name
            )));
        }
        let scope = Scope {
            networks: devices.iter().map(|device| device.network).collect(),
            devices: devices.iter().map(|device| device.name.clone()).collect(),
        };
        let mirror = Mirror::open(scope)
            .map_err(|err| BackendError::Kernel(format!("cannot open netlink sockets: {err}")))?;
        Ok(Self {
            options,
            external,
            fast_path: FastPath::Pending,
            rules: choice::depends_on_rules(&fast_path).then(RuleWatch::open),
            strangers: Findings::default(),
            strangers_seen: None,
            carrier: ("", String::new()),
            fast_path_config: fast_path,
            _claims: devices.iter().filter_map(|d| DeviceClaim::take(&d.name).ok()).collect(),
            devices,
            targets: HashMap::new(),
            mirror,
            ipsec: IpsecPolicies::open(),
            compiler: Compiler::new(blackhole_route),
            metrics,
            on_link: OnLink::default(),
            taken: BTreeSet::new(),
            undone: true,
            own: Vec::new(),
            next_pass: Instant::now() + SAFETY_NET,
            read_anew: true,
            repairing: false,
            mended: 0,
            pod_devices: Vec::new(),
            counts: Counts::default(),
            pods: BTreeSet::new(),
        })
    }

    fn refresh(&mut self) -> Result<Heard, String> {
        let heard = self
            .mirror
            .refresh()
            .map_err(|err| format!("cannot read the kernel's links and routes: {err}"))?;
        if heard.routing && self.options.direct_routing {
            self.on_link.clear();
            self.pass_within(SETTLE);
        }
        Ok(heard)
    }

    /// Brings all devices to their targets, each whatever becomes of the other. Returns how much
    /// was changed and what is wrong.
    fn bring_up_devices(&mut self) -> (usize, Vec<String>) {
        let (mut changes, mut wrong) = (0, Vec::new());
        for at in 0..self.devices.len() {
            wrong.extend(self.bring_up_device(at, &mut changes).err());
        }
        (changes, wrong)
    }

    fn bring_up_device(&mut self, at: usize, changes: &mut usize) -> Result<(), String> {
        for _ in 0..DEVICE_PASSES {
            if self.step_device(at)? {
                return Ok(());
            }
            *changes += 1;
            self.refresh()?;
        }
        Err(format!(
            "device {} does not stay as it is set: something else keeps changing it",
            self.devices[at].name
        ))
    }

    /// One step for one device. Returns whether nothing was left to do.
    fn step_device(&mut self, at: usize) -> Result<bool, String> {
        let device = &mut self.devices[at];
        let name = device.name.clone();
        let target = device.target(self.mirror.tables(), &self.external, &self.options)?;
        let step = device.step(self.mirror.tables(), &target)?;
        if device.mac.is_none()
            && let (Step::Nothing | Step::Change(_), Some(link)) =
                (&step, self.mirror.tables().link(&name))
        {
            // Adopted: peers know this device by the MAC it has.
            device.mac = link.mac.filter(|mac| mac.is_station());
            info!("using the existing device {name}");
        }
        let mtu = target.mtu;
        let vxlan = target.vxlan.clone();
        self.targets.insert(name.clone(), target);
        match step {
            Step::Nothing => {
                if let Some(mac) = device.mac {
                    device.state.keep(mac);
                }
                Ok(true)
            }
            Step::Change(request) => {
                self.run(vec![request], &format!("change device {name}"))?;
                info!("changed device {name} to what is wanted");
                Ok(false)
            }
            Step::Make { instead_of } => {
                let mac = *device.mac.get_or_insert_with(MacAddr::random);
                if let Some(index) = instead_of {
                    info!("device {name} has other parameters than wanted: making it anew");
                    self.run(vec![link::delete(index)], &format!("delete device {name}"))?;
                }
                let request = link::create_vxlan(&name, mac, mtu, &vxlan);
                self.run(vec![request], &format!("make device {name}"))?;
                // Router advertisements from the overlay are nobody's business.
                let accept_ra = format!("/proc/sys/net/ipv6/conf/{name}/accept_ra");
                if let Err(err) = fs::write(&accept_ra, "0") {
                    debug!("{accept_ra}: {err}");
                }
                info!("made device {name} with MAC {mac}");
                Ok(false)
            }
        }
    }

    /// Runs requests that all have to work.
    fn run(
        &mut self,
        requests: Vec<crate::netlink::socket::Request>,
        what: &str,
    ) -> Result<(), String> {
        let outcomes = self.mirror.requests().run(requests);
        let failed = match outcomes {
            Ok(outcomes) => outcomes.into_iter().find_map(Result::err),
            Err(err) => Some(err),
        };
        match failed {
            None => Ok(()),
            Some(err) => Err(format!("cannot {what}: {}", self.explain(&err))),
        }
    }

    /// The kernel's word, with what it usually means.
    fn explain(&self, err: &io::Error) -> String {
        let port = self.options.port;
        match err.raw_os_error() {
            Some(libc::EPERM) => format!("{err}: the agent needs CAP_NET_ADMIN"),
            Some(libc::EOPNOTSUPP) => format!("{err}: does this kernel have vxlan?"),
            Some(libc::EADDRINUSE) => format!(
                "UDP port {port} is in use by another program (`ss -lunp sport = :{port}` names \
                 it); stop that or set another Backend.Port on all nodes"
            ),
            _ => err.to_string(),
        }
    }

    /// Another pass shortly, on what the mirror has.
    fn pass_within(&mut self, time: Duration) {
        let due = Instant::now() + time;
        if due < self.next_pass {
            self.next_pass = due;
            self.read_anew = false;
        }
    }

    /// Our addresses on the devices. Returns how much was changed and what is wrong.
    fn set_addresses(&mut self) -> (usize, Vec<String>) {
        let (mut changes, mut wrong) = (0, Vec::new());
        for (name, subnet) in self.own.clone() {
            let tables = self.mirror.tables();
            let device = self.devices.iter().find(|device| device.name == name);
            let Some((device, link)) = device.zip(tables.link(&name)) else { continue };
            let Some(own) = Device::address(link.index, subnet) else { continue };
            let requests = device.address_changes(tables, own);
            let count = requests.len();
            match self.run(requests, &format!("set the address of {name}")) {
                Ok(()) => changes += count,
                Err(problem) => wrong.push(problem),
            }
        }
        (changes, wrong)
    }

    fn own_subnets(&self, lease: &Lease) -> Result<Vec<(String, IpNet)>, String> {
        let mut own = Vec::new();
        for device in &self.devices {
            let subnet = match device.family {
                Family::V4 => lease.subnets.v4.map(IpNet::from),
                Family::V6 => lease.subnets.v6.map(IpNet::from),
            };
            let subnet = subnet
                .ok_or_else(|| format!("the lease has no subnet for device {}", device.name))?;
            own.push((device.name.clone(), subnet));
        }
        Ok(own)
    }

    /// The devices that can be filled: right, or right but for what the underlay lacks just now.
    fn tunnels(&self) -> Vec<Tunnel> {
        let tables = self.mirror.tables();
        let tunnel = |(name, own): &(String, IpNet)| {
            let device = self.devices.iter().find(|device| device.name == *name)?;
            let link = tables.link(name)?;
            let vxlan = link.vxlan.as_ref()?;
            (vxlan.vni == self.options.vni).then_some(Tunnel {
                family: device.family,
                link: link.index,
                own: *own,
                network: device.network,
                local: vxlan.local,
            })
        };
        self.own.iter().filter_map(tunnel).collect()
    }

    /// Compiles the leases that changed, or all. Returns where the kernel is to be compared;
    /// `None` stands for everywhere.
    fn compile(&mut self, peers: &PeerTable, changed: Option<&BTreeSet<Subnets>>) -> Option<Keys> {
        let tunnels = self.tunnels();
        if self.options.direct_routing {
            let devices: Vec<_> = self.devices.iter().map(|device| device.name.clone()).collect();
            match changed {
                None => self.on_link.ask(&mut self.mirror, peers, &devices),
                Some(changed) => {
                    for attributes in changed.iter().filter_map(|subnets| peers.peer(subnets)) {
                        self.on_link.ask_of(&mut self.mirror, attributes, &devices);
                    }
                }
            }
        }
        self.compiler.compile(peers, changed, &tunnels, self.mirror.tables(), &self.on_link)
    }

    /// Makes the kernel equal to what is wanted, for the peers that changed or for all.
    fn pass(
        &mut self,
        lease: &Lease,
        peers: &PeerTable,
        changed: Option<&BTreeSet<Subnets>>,
        report: &mut ApplyReport,
    ) -> Result<Heard, String> {
        let heard = self.refresh()?;
        let (changes, mut wrong) = self.bring_up_devices();
        report.changes += changes;
        self.own = self.own_subnets(lease)?;
        let (changes, problems) = self.set_addresses();
        report.changes += changes;
        wrong.extend(problems);
        report.problems.extend(self.mtu_problem());
        // What is not a change of these peers alone is looked at as a whole.
        let more = report.changes > 0 || heard.anew || !heard.keys.is_empty() || self.undone;
        let rerouted = heard.routing && self.options.direct_routing;
        let changed = changed.filter(|_| !more && !rerouted);
        if report.changes > 0 {
            self.refresh()?;
        }
        let keys = self.compile(peers, changed);
        report.problems.extend(self.compiler.problems().cloned());
        report.peers_applied = self.compiler.served();
        let plan = self.compiler.wanted().plan_at(self.mirror.tables(), keys.as_ref());
        self.note_taken(plan.taken, keys.as_ref());
        for route in &self.taken {
            report.problems.push(format!(
                "the route {} {} is not ours: it stays, and peer {0} is not reached by the tunnel",
                route.destination,
                self.mirror.tables().way_of(route)
            ));
            report.peers_applied = report.peers_applied.saturating_sub(1);
        }
        let heard = self.make(&plan.changes, report)?;
        self.mended = report.changes;
        self.apply_fast_path(peers, report);
        if wrong.is_empty() { Ok(heard) } else { Err(wrong.join("; ")) }
    }

    /// Records which routes of others are where ours are wanted, of those that were compared.
    fn note_taken(&mut self, taken: Vec<Route>, compared: Option<&Keys>) {
        match compared {
            None => self.taken.clear(),
            Some(keys) => self.taken.retain(|route| !keys.routes.contains(&route.destination)),
        }
        self.taken.extend(taken);
    }

    /// Makes the changes. Returns what was heard meanwhile: our own echo, before it is taken for
    /// somebody else's work, and theirs.
    fn make(&mut self, changes: &[Change], report: &mut ApplyReport) -> Result<Heard, String> {
        if changes.is_empty() {
            return Ok(Heard::default());
        }
        let requests = changes.iter().map(Change::request).collect();
        let outcomes = self
            .mirror
            .requests()
            .run(requests)
            .map_err(|err| format!("cannot talk to the kernel: {err}"))?;
        for (change, outcome) in changes.iter().zip(&outcomes) {
            if change.worked(outcome) {
                report.changes += 1;
            } else if let Err(err) = outcome {
                report.problems.push(format!("cannot {change}: {}", self.explain(err)));
                let missing = usize::from(!change.is_removal());
                report.peers_applied = report.peers_applied.saturating_sub(missing);
            }
        }
        self.refresh()
    }

    /// The configuration may ask for more than the underlay carries.
    fn mtu_problem(&self) -> Option<String> {
        let parent = self.mirror.tables().link(&self.external.name)?;
        let asked = self.options.mtu.filter(|mtu| *mtu > parent.mtu)?;
        Some(format!(
            "Backend.MTU {asked} is more than external interface {} carries: {} is used",
            parent.name, parent.mtu
        ))
    }

    /// The programs come after the kernel's path, which works without them.
    fn apply_fast_path(&mut self, peers: &PeerTable, report: &mut ApplyReport) {
        if !peers.synced() {
            return;
        }
        if matches!(self.fast_path, FastPath::Pending) {
            let name = format!("flannel.{}", self.options.vni);
            self.fast_path = FastPath::open(&self.fast_path_config, &name, &self.metrics);
        }
        if report.changes > 0 {
            self.fast_path.outdated();
        }
        self.ipsec.any();
        self.look_for_strangers();
        let choice = self.choice();
        let tables = self.mirror.tables();
        let tunnels = self.tunnels();
        let underlay = tables.link(&self.external.name);
        if let Some(rules) = &mut self.rules {
            rules.tell(choice::surroundings(&self.options, tables, underlay, &tunnels, peers));
        }
        let wanted = fast_path::wanted(&fast_path::Sources {
            options: &self.options,
            config: &self.fast_path_config,
            tables,
            underlay,
            tunnels: &tunnels,
            wanted: Some(self.compiler.wanted()),
            peers,
            choice: &choice,
        });
        self.pods = fast_path::pods(tables, &tunnels);
        self.pod_devices.clone_from(&wanted.pod_devices);
        match self.fast_path.apply(&wanted) {
            Ok(changes) => report.changes += changes,
            Err(problem) => report.problems.push(problem),
        }
        self.tell_carrier(&choice);
    }

    /// How much of the host's stack may be skipped, by what is known.
    fn choice(&self) -> Choice {
        let findings = self.rules.as_ref().map(|rules| {
            let (rules, devices) = (rules.findings(), &self.strangers);
            Findings {
                outer: rules.outer.clone().or_else(|| devices.outer.clone()),
                inner: rules.inner.clone().or_else(|| devices.inner.clone()),
            }
        });
        let mode = self.fast_path_config.mode;
        Choice::make(&self.options, mode, self.ipsec.found(), findings.as_ref())
    }

    /// Looks, once a second at most, at what others do to the devices that flows skip. Returns
    /// whether that is news.
    fn look_for_strangers(&mut self) -> bool {
        let recently = self.strangers_seen.is_some_and(|seen| seen.elapsed() < RETRY);
        if self.rules.is_none() || !matches!(self.fast_path, FastPath::On(_)) || recently {
            return false;
        }
        self.strangers_seen = Some(Instant::now());
        let found = self.fast_path.strangers(self.mirror.tables(), &self.tunnels());
        found != std::mem::replace(&mut self.strangers, found.clone())
    }

    /// Makes known what carries packets now.
    fn tell_carrier(&mut self, choice: &Choice) {
        let (mode, reason) = self.fast_path.in_use(choice);
        if (mode, reason) == (self.carrier.0, self.carrier.1.as_str()) {
            return;
        }
        self.metrics.set_fast_path(mode, reason);
        if matches!(self.fast_path, FastPath::On(_)) {
            match reason {
                "" => info!("fast path: {mode}"),
                reason => info!("fast path: {mode}; {reason}"),
            }
        }
        self.carrier = (mode, reason.to_owned());
    }

    /// Whether pods came or went since the programs were last told.
    fn pods_differ(&self) -> bool {
        (self.rules.is_some() || self.choice().mode == crate::cli::flags::FastPath::Flows)
            && self.pods != fast_path::pods(self.mirror.tables(), &self.tunnels())
    }

    /// Whether the programs have to be hung elsewhere: the CNI makes its bridge with the first pod.
    fn pod_devices_differ(&self) -> bool {
        matches!(self.fast_path, FastPath::On(_))
            && fast_path::pod_devices(self.mirror.tables(), &self.tunnels()) != self.pod_devices
    }

    /// Whether the kernel differs from what the last pass wanted, where something was heard of.
    fn differs(&self, heard: &Heard) -> bool {
        let tables = self.mirror.tables();
        let device_right = |device: &Device| {
            let target = device.target(tables, &self.external, &self.options);
            let Ok(target) = target else { return false };
            matches!(device.step(tables, &target), Ok(Step::Nothing))
                && self.own.iter().filter(|(name, _)| *name == device.name).all(|(name, subnet)| {
                    tables.link(name).is_some_and(|link| {
                        Device::address(link.index, *subnet)
                            .is_some_and(|own| device.address_changes(tables, own).is_empty())
                    })
                })
        };
        if !self.devices.iter().all(device_right) {
            return true;
        }
        let compared = (!heard.anew).then_some(&heard.keys);
        let plan = self.compiler.wanted().plan_at(tables, compared);
        let known = self
            .taken
            .iter()
            .filter(|route| compared.is_none_or(|keys| keys.routes.contains(&route.destination)));
        !plan.changes.is_empty() || !known.eq(BTreeSet::from_iter(plan.taken).iter())
    }

    /// A pass, for the peers that changed or for all, and what it came to.
    fn report(
        &mut self,
        own: &Lease,
        peers: &PeerTable,
        changed: Option<&BTreeSet<Subnets>>,
    ) -> ApplyReport {
        let mut report = ApplyReport::default();
        let mut repairing = false;
        self.mended = 0;
        if changed.is_none() {
            self.next_pass = Instant::now() + SAFETY_NET;
            self.read_anew = true;
            repairing = std::mem::take(&mut self.repairing);
        }
        let heard = match self.pass(own, peers, changed, &mut report) {
            Ok(heard) => heard,
            Err(problem) => {
                report.device_problem = Some(problem);
                Heard::default()
            }
        };
        if repairing {
            let mended = u64::try_from(self.mended).unwrap_or(u64::MAX);
            self.metrics.repairs.inc_by(mended);
            if mended > 0 {
                info!("put {mended} kernel objects back that somebody else had changed");
            }
        }
        self.undone = report.device_problem.is_some()
            || report.problems.iter().any(|problem| problem.starts_with("cannot "));
        if self.undone {
            self.next_pass = self.next_pass.min(Instant::now() + RETRY);
            self.read_anew = true;
        } else if heard.ours && self.differs(&heard) {
            // Somebody changed things while we did.
            self.repairing = true;
            self.pass_within(SETTLE);
        }
        self.counts = Counts { served: report.peers_applied, problems: report.problems.len() };
        report
    }
}

/// Resolves when other rules of others matter. Cancel-safe.
async fn rules_changed(rules: &mut Option<RuleWatch>) {
    match rules {
        Some(rules) => rules.changed().await,
        None => std::future::pending().await,
    }
}

#[async_trait(?Send)]
impl Backend for VxlanBackend {
    fn name(&self) -> &'static str {
        "vxlan"
    }

    async fn prepare(&mut self, stored: Option<&LeaseAttributes>) -> Result<(), BackendError> {
        self.refresh().map_err(BackendError::Kernel)?;
        for device in self.devices.iter_mut().filter(|device| device.mac.is_none()) {
            let tables = self.mirror.tables();
            let there = tables.link(&device.name).is_some_and(|link| link.vxlan.is_some());
            // Peers know a device that can stay by its own MAC; one that has to go, or is not
            // there, by the MAC on record.
            let stays = device
                .target(tables, &self.external, &self.options)
                .and_then(|target| device.step(tables, &target))
                .map_or(there, |step| !matches!(step, Step::Make { .. }));
            if stays {
                continue;
            }
            let data = stored.and_then(|stored| match device.family {
                Family::V4 => stored.backend_data.as_ref(),
                Family::V6 => stored.backend_v6_data.as_ref(),
            });
            let published = data.and_then(|data| VxlanData::parse(data).ok());
            device.mac = published.map(|data| data.vtep_mac).or_else(|| device.state.read());
        }
        let (_, wrong) = self.bring_up_devices();
        if wrong.is_empty() { Ok(()) } else { Err(BackendError::Kernel(wrong.join("; "))) }
    }

    fn attributes(&self) -> LeaseAttributes {
        let mut attributes = LeaseAttributes {
            public_ip: self.external.public_ip,
            public_ipv6: self.external.public_ipv6,
            backend_type: self.name().to_owned(),
            ..LeaseAttributes::default()
        };
        for device in &self.devices {
            let Some(vtep_mac) = device.mac else { continue };
            let data = VxlanData { vni: self.options.vni, vtep_mac }.to_json();
            let local = self.targets.get(&device.name).and_then(|target| target.vxlan.local);
            let (public, own) = device.configured(&self.external);
            // The interface's address was advertised and has changed: advertise the new one.
            let moved = (public == own && local != own).then_some(local).flatten();
            match device.family {
                Family::V4 => {
                    attributes.backend_data = Some(data);
                    if let Some(IpAddr::V4(ip)) = moved {
                        attributes.public_ip = Some(ip);
                    }
                }
                Family::V6 => {
                    attributes.backend_v6_data = Some(data);
                    if let Some(IpAddr::V6(ip)) = moved {
                        attributes.public_ipv6 = Some(ip);
                    }
                }
            }
        }
        attributes
    }

    async fn apply(&mut self, own: &Lease, peers: &PeerTable) -> ApplyReport {
        self.report(own, peers, None)
    }

    async fn apply_changed(
        &mut self,
        own: &Lease,
        peers: &PeerTable,
        changed: &BTreeSet<Subnets>,
    ) -> ApplyReport {
        self.report(own, peers, Some(changed))
    }

    fn reconfigure(&mut self, backend: &RawJson) -> Result<Reconfigured, BackendError> {
        let options = self.options.with_changes(&VxlanOptions::parse(backend)?);
        let differs = options != self.options;
        if differs {
            // Answers that nobody may heed any more, or that nobody asked for before.
            self.on_link.clear();
            self.options = options;
        }
        Ok(Reconfigured { options: options::CHANGEABLE, differs })
    }

    async fn changed(&mut self) {
        loop {
            let due = self.next_pass;
            // Nobody tells when they are gone.
            let strangers = self.strangers != Findings::default();
            let look = self.strangers_seen.map_or(due, |seen| seen + STRANGERS);
            tokio::select! {
                () = self.mirror.readable() => {}
                () = self.ipsec.changed() => return,
                () = rules_changed(&mut self.rules) => return,
                news = self.fast_path.news() => {
                    if news == News::Loaded || self.fast_path.tend_flows() {
                        return;
                    }
                    if self.look_for_strangers() {
                        return;
                    }
                    continue;
                }
                () = tokio::time::sleep_until(look), if strangers => {
                    if self.look_for_strangers() {
                        return;
                    }
                    continue;
                }
                () = tokio::time::sleep_until(due) => {
                    if self.read_anew {
                        self.mirror.distrust();
                    }
                    return;
                }
            }
            match self.refresh() {
                Ok(heard) => {
                    if self.pod_devices_differ() {
                        self.pass_within(SETTLE);
                    }
                    if heard.ours && self.differs(&heard) {
                        self.repairing = true;
                        return;
                    }
                    if heard.narrow || heard.ours && self.pods_differ() {
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
        self.targets.values().map(|target| target.mtu).min().unwrap_or(0)
    }

    fn tunnel_port(&self) -> Option<u16> {
        Some(self.options.port)
    }

    fn status(&self) -> Value {
        self.fast_path.measure(&self.metrics);
        let tables = self.mirror.tables();
        let devices = self.devices.iter().map(|device| {
            let link = tables.link(&device.name);
            let vxlan = link.and_then(|link| link.vxlan.as_ref());
            json!({
                "name": device.name,
                "present": link.is_some(),
                "up": link.is_some_and(|link| link.up),
                "index": link.map(|link| link.index),
                "mac": link.and_then(|link| link.mac).map(|mac| mac.to_string()),
                "mtu": link.map(|link| link.mtu),
                "vni": vxlan.map(|vxlan| vxlan.vni),
                "port": vxlan.map(|vxlan| vxlan.port),
                "local": vxlan.and_then(|vxlan| vxlan.local),
            })
        });
        json!({
            "devices": devices.collect::<Value>(),
            "peers_served": self.counts.served,
            "problems": self.counts.problems,
            "routes": tables.routes.len(),
            "datapath": self.fast_path.status(&self.choice()),
        })
    }
}
