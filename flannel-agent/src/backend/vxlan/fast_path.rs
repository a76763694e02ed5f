//! The eBPF programs beside the kernel's device: which rung of the ladder is in use, and why not
//! the one above.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use ipnet::IpNet;
use serde_json::{Value, json};
use tracing::{error, info, warn};

use super::{VxlanOptions, choice::Choice, device::Family, peers::Tunnel};
use crate::{
    background::Background,
    cli::flags::{FastPath as FastPathMode, PeerFilter, XdpMode},
    datapath::{
        ebpf::{
            AttachMode, EbpfDatapath, EbpfError, EbpfOptions, FastPathWanted, Filter, FlowsWanted,
            LeaseEntry, Loaded, Loading, PeerEntry, Predecessor, Strangers, TunnelEnd, VtepName,
            XdpWanted, check_xdp_driver, detach_left_over,
        },
        pods,
    },
    firewall::bypass::Findings,
    lease::Subnets,
    memory,
    netlink::{link::Link, mirror::Tables},
    peer_table::PeerTable,
    reconciler::Wanted,
    telemetry::metrics::Metrics,
};

/// What the command line asks of the data path.
#[derive(Clone, Debug)]
pub struct FastPathConfig {
    /// Use eBPF if it can be had.
    pub enabled: bool,
    /// Somebody insisted on it: failing is an error in the log, though forwarding goes on.
    pub demanded: bool,
    /// Where maps and links are pinned.
    pub pin_dir: PathBuf,
    /// Whether the programs log unknown senders.
    pub log: bool,
    /// How much of the host's stack is skipped.
    pub mode: FastPathMode,
    /// Whether tunnel packets are taken out in XDP.
    pub xdp: XdpMode,
    /// Who may send us tunnel packets.
    pub filter: PeerFilter,
    /// How often a flow that bypasses the stack proves itself.
    pub flow_interval: Duration,
}

/// The programs, or why there are none.
pub enum FastPath {
    /// Not looked at yet: the kernel's path comes first.
    Pending,
    /// Being loaded, beside the loop.
    Loading(Box<Load>),
    /// Loaded.
    On(Box<EbpfDatapath>),
    /// The kernel's device carries everything; the text says why.
    Off(String),
}

/// The programs on their way into the kernel.
pub struct Load {
    work: Background<Result<Loaded, EbpfError>>,
    predecessor: Predecessor,
    demanded: bool,
    metrics: Metrics,
}

/// Why to look at the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// They are loaded, or will not be.
    Loaded,
    /// Flows have to be seen to.
    Flows,
}

impl FastPath {
    /// Begins to load the programs. Never fails: what cannot be had is said once, and the kernel's
    /// path goes on.
    pub fn open(config: &FastPathConfig, device: &str, metrics: &Metrics) -> Self {
        metrics.datapath_ebpf.set(0);
        if !config.enabled {
            detach_left_over(&config.pin_dir, device);
            return Self::Off("--datapath kernel".to_owned());
        }
        let options = EbpfOptions {
            pin_dir: config.pin_dir.clone(),
            device: device.to_owned(),
            attach: AttachMode::Auto,
            log: config.log,
        };
        let begun = Loading::open(options).and_then(|loading| {
            let predecessor = loading.predecessor();
            let work = Background::start("ebpf-load", move || loading.load());
            let work = work.map_err(|error| EbpfError::Load(format!("no thread: {error}")))?;
            Ok((work, predecessor))
        });
        match begun {
            Ok((work, predecessor)) => Self::Loading(Box::new(Load {
                work,
                predecessor,
                demanded: config.demanded,
                metrics: metrics.clone(),
            })),
            Err(reason) => Self::refused(&reason, config.demanded),
        }
    }

    fn refused(reason: &EbpfError, demanded: bool) -> Self {
        let text =
            format!("eBPF is not used: {reason}; the kernel's VXLAN device carries everything");
        if demanded {
            error!("--datapath ebpf: {text}");
        } else {
            warn!("{text}");
        }
        Self::Off(reason.to_string())
    }

    /// Tells that the kernel's path was changed. The programs of an agent before us, which know
    /// nothing of it, stand aside until ours are there.
    pub fn outdated(&mut self) {
        if let Self::Loading(load) = self {
            load.predecessor.retire();
        }
    }

    /// Resolves when there is news. Cancel-safe.
    pub async fn news(&mut self) -> News {
        match self {
            Self::Loading(load) => {
                let outcome = load.work.finished().await;
                let outcome = outcome.unwrap_or_else(|| {
                    Err(EbpfError::Load("the thread that loads them failed".to_owned()))
                });
                *self = match outcome.and_then(EbpfDatapath::adopt) {
                    Ok(datapath) => {
                        memory::give_back();
                        load.metrics.datapath_ebpf.set(1);
                        info!("eBPF programs loaded");
                        Self::On(Box::new(datapath))
                    }
                    Err(reason) => {
                        load.predecessor.retire();
                        Self::refused(&reason, load.demanded)
                    }
                };
                News::Loaded
            }
            Self::On(datapath) => {
                datapath.flows_due().await;
                News::Flows
            }
            Self::Pending | Self::Off(_) => std::future::pending().await,
        }
    }

    /// Makes maps and attachments equal to what is wanted.
    ///
    /// # Errors
    /// A sentence about what could not be had. Nothing is lost by it but counters.
    pub fn apply(&mut self, wanted: &FastPathWanted) -> Result<usize, String> {
        match self {
            Self::On(datapath) => datapath.apply(wanted).map_err(|err| err.to_string()),
            Self::Pending | Self::Loading(_) | Self::Off(_) => Ok(0),
        }
    }

    /// Sees to flows. Returns whether the programs have to be told anew about the pods.
    #[must_use]
    pub fn tend_flows(&mut self) -> bool {
        match self {
            Self::On(datapath) => datapath.tend_flows(),
            Self::Pending | Self::Loading(_) | Self::Off(_) => false,
        }
    }

    /// Brings what XDP has counted into the metrics.
    pub fn measure(&self, metrics: &Metrics) {
        if let Self::On(datapath) = self {
            let (attached, packets) = datapath.xdp();
            metrics.set_xdp(attached, packets);
        }
    }

    /// What others do by TC at the devices that all pods' packets cross, which flows do not.
    pub fn strangers(&self, tables: &Tables, tunnels: &[Tunnel]) -> Findings {
        let Self::On(datapath) = self else { return Findings::default() };
        let pods = pods(tables, tunnels);
        let mut findings = Findings::default();
        let bridges = pod_devices(tables, tunnels);
        let bridges = bridges.into_iter().filter(|device| !pods.contains(device));
        let tunnels = tunnels.iter().map(|tunnel| (tunnel.link, true));
        for (index, tunnel) in tunnels.chain(bridges.map(|device| (device, false))) {
            let Some(link) = tables.links.get(&index) else { continue };
            let name = &link.name;
            match datapath.strangers_at(index) {
                Strangers::None => {}
                // What the programs take at the tunnel's device never gets to its queue.
                Strangers::Shape if tunnel => {
                    findings.outer = Some(format!("device {name} has a shaping queue"));
                }
                _ => {
                    findings.inner =
                        Some(format!("device {name} has a TC program or queue of others"));
                }
            }
        }
        findings
    }

    /// What carries packets, and why not something better: `kernel`, or the mode of the fast path.
    pub fn in_use<'a>(&'a self, choice: &'a Choice) -> (&'static str, &'a str) {
        match self {
            Self::On(datapath) => (datapath.fast_path(), &choice.reason),
            Self::Off(reason) => ("kernel", reason),
            Self::Pending | Self::Loading(_) => ("kernel", "still starting"),
        }
    }

    /// For `status`: the mode in use and why not a better one.
    pub fn status(&self, choice: &Choice) -> Value {
        match self {
            Self::On(datapath) => json!({
                "mode": "ebpf",
                "reason": choice.reason,
                "fast_path": datapath.fast_path(),
                "programs": datapath.status(),
            }),
            Self::Pending => json!({"mode": "kernel", "reason": "still starting"}),
            Self::Loading(_) => {
                json!({"mode": "kernel", "reason": "loading the eBPF programs"})
            }
            Self::Off(reason) => json!({"mode": "kernel", "reason": reason}),
        }
    }
}

/// What the programs' wanted state is made of.
pub struct Sources<'a> {
    /// The options of the network configuration.
    pub options: &'a VxlanOptions,
    /// What the command line asks for.
    pub config: &'a FastPathConfig,
    /// What the kernel has.
    pub tables: &'a Tables,
    /// The underlay device.
    pub underlay: Option<&'a Link>,
    /// Our devices, as far as they are right.
    pub tunnels: &'a [Tunnel],
    /// What the kernel is to have.
    pub wanted: Option<&'a Wanted>,
    /// All peers.
    pub peers: &'a PeerTable,
    /// How much of the host's stack may be skipped.
    pub choice: &'a Choice,
}

/// What the programs shall do: what the kernel does already, and nothing that it does not.
pub fn wanted(sources: &Sources<'_>) -> FastPathWanted {
    let Sources { options, config, tables, underlay, tunnels, .. } = sources;
    let ours = |index: u32| tunnels.iter().any(|tunnel| tunnel.link == index);
    let forward = sources.choice.mode != FastPathMode::Off;
    FastPathWanted {
        underlay: underlay.iter().map(|link| link.index).collect(),
        xdp: xdp(sources),
        pod_devices: pod_devices(tables, tunnels),
        vni: options.vni,
        port: options.port,
        peers: entries(sources.peers),
        v4: end(sources, Family::V4),
        v6: end(sources, Family::V6),
        vteps: vteps(sources),
        leases: leases(sources),
        source_ports: source_ports().unwrap_or_default(),
        forward,
        filter: match config.filter {
            PeerFilter::Default => Filter::Default,
            PeerFilter::Strict => Filter::Strict,
            PeerFilter::Off => Filter::Off,
        },
        other_vnis: tables.links.values().any(|link| {
            link.vxlan.as_ref().is_some_and(|vxlan| vxlan.port == options.port) && !ours(link.index)
        }),
        flows: flows(sources),
    }
}

/// Whether packets are taken out in XDP, or why not.
fn xdp(sources: &Sources<'_>) -> XdpWanted {
    let Sources { config, underlay, .. } = sources;
    if config.xdp == XdpMode::Off {
        return XdpWanted::Off("--xdp off".to_owned());
    }
    if sources.choice.mode == FastPathMode::Off {
        return XdpWanted::Off(sources.choice.reason.clone());
    }
    let Some((link, mac)) = underlay.and_then(|link| Some((link, link.mac?))) else {
        return XdpWanted::Off("the external interface is not there, or has no MAC".to_owned());
    };
    // Then a packet handed over would look as if sent to the host itself.
    if sources.tunnels.iter().any(|tunnel| {
        sources.tables.links.get(&tunnel.link).is_some_and(|tunnel| tunnel.mac == Some(mac))
    }) {
        return XdpWanted::Off(format!("{} and a tunnel device have the same MAC", link.name));
    }
    if config.xdp == XdpMode::Auto
        && let Err(why) = check_xdp_driver(&link.name)
    {
        return XdpWanted::Off(why);
    }
    XdpWanted::Native { ifindex: link.index, mac }
}

/// What is asked of flows; `None` if none shall bypass the stack.
fn flows(sources: &Sources<'_>) -> Option<FlowsWanted> {
    if sources.choice.mode != FastPathMode::Flows {
        return None;
    }
    let mtu = |family| {
        let tunnel = sources.tunnels.iter().find(|tunnel| tunnel.family == family);
        tunnel.and_then(|tunnel| sources.tables.links.get(&tunnel.link)).map_or(0, |link| link.mtu)
    };
    let own = |family| sources.tunnels.iter().find(|tunnel| tunnel.family == family);
    Some(FlowsWanted {
        interval: sources.config.flow_interval,
        pods: pods(sources.tables, sources.tunnels),
        subnet_v4: own(Family::V4).and_then(|tunnel| match tunnel.own {
            IpNet::V4(net) => Some(net),
            IpNet::V6(_) => None,
        }),
        subnet_v6: own(Family::V6).and_then(|tunnel| match tunnel.own {
            IpNet::V6(net) => Some(net),
            IpNet::V4(_) => None,
        }),
        mtu_v4: mtu(Family::V4),
        mtu_v6: mtu(Family::V6),
    })
}

/// The devices of our pods.
pub fn pods(tables: &Tables, tunnels: &[Tunnel]) -> BTreeSet<u32> {
    let subnets: Vec<IpNet> = tunnels.iter().map(|tunnel| tunnel.own).collect();
    pods::devices(tables, &subnets)
}

/// The devices with an address in our own subnet: the CNI's bridge, or the host's ends of pods'
/// cables where there is none.
pub fn pod_devices(tables: &Tables, tunnels: &[Tunnel]) -> Vec<u32> {
    let carries = |link: u32| {
        tables.addresses.keys().any(|address| {
            address.link == link
                && tunnels.iter().any(|tunnel| tunnel.own.contains(&address.net.addr()))
        })
    };
    let ours = |link: u32| tunnels.iter().any(|tunnel| tunnel.link == link);
    tables.links.keys().copied().filter(|link| !ours(*link) && carries(*link)).collect()
}

fn end(sources: &Sources<'_>, family: Family) -> Option<TunnelEnd> {
    let tunnel = sources.tunnels.iter().find(|tunnel| tunnel.family == family)?;
    let link = sources.tables.links.get(&tunnel.link).filter(|link| link.up)?;
    Some(TunnelEnd {
        ifindex: link.index,
        mac: link.mac?,
        local: link.vxlan.as_ref()?.local?,
        hop_limit: hop_limit(family, &sources.underlay?.name)?,
        subnet: tunnel.own,
    })
}

/// The entries that are both wanted and there. Peers whose route has an MTU of its own are left to
/// the kernel's device: a program's packets would be too big for the way.
fn vteps(sources: &Sources<'_>) -> BTreeMap<VtepName, IpAddr> {
    let mut vteps = BTreeMap::new();
    for (key, remote) in sources.wanted.iter().flat_map(|wanted| &wanted.forwarding) {
        let tunnel = sources.tunnels.iter().find(|tunnel| tunnel.link == key.0);
        if let Some(tunnel) = tunnel
            && sources.tables.forwarding.get(key) == Some(remote)
            && !sources.tables.is_narrow(*remote)
        {
            vteps.insert(VtepName { v6: tunnel.family == Family::V6, mac: key.1 }, *remote);
        }
    }
    vteps
}

fn leases(sources: &Sources<'_>) -> Vec<LeaseEntry> {
    let mut leases = Vec::new();
    for (subnets, attributes) in sources.peers.peers() {
        let v4 = subnets.v4.map(IpNet::from).zip(attributes.public_ip.map(IpAddr::from));
        let v6 = subnets.v6.map(IpNet::from).zip(attributes.public_ipv6.map(IpAddr::from));
        for (subnet, outer) in v4.into_iter().chain(v6) {
            let vtep_mac = sources.tunnels.iter().find_map(|tunnel| {
                let key = (tunnel.link, subnet.network());
                sources.wanted?.neighbours.get(&key).copied()
            });
            let behind_nat = attributes.behind_nat;
            leases.push(LeaseEntry { subnet, outer, vtep_mac, behind_nat });
        }
    }
    leases
}

/// What the kernel's device takes for its outer source ports.
fn source_ports() -> Option<(u16, u16)> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut numbers = text.split_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// What the kernel's device takes for the hop limit of outer packets, unless a route says otherwise.
fn hop_limit(family: Family, underlay: &str) -> Option<u8> {
    let path = match family {
        Family::V4 => "/proc/sys/net/ipv4/ip_default_ttl".to_owned(),
        Family::V6 => format!("/proc/sys/net/ipv6/conf/{underlay}/hop_limit"),
    };
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The peers as the programs know them: by the address they send from. Nodes that share one
/// (behind a NAT) are one sender.
fn entries(peers: &PeerTable) -> Vec<PeerEntry> {
    let mut by_address: BTreeMap<IpAddr, Subnets> = BTreeMap::new();
    for (subnets, attributes) in peers.peers() {
        let v4 = attributes.public_ip.map(IpAddr::from);
        let v6 = attributes.public_ipv6.map(IpAddr::from);
        for outer in v4.into_iter().chain(v6) {
            by_address.entry(outer).or_insert(*subnets);
        }
    }
    by_address.into_iter().map(|(outer, subnets)| PeerEntry { outer, subnets }).collect()
}
