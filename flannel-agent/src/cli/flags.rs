//! Every flag of the agent: flanneld's (specification §1.1) and ours on top.

use std::{
    any::TypeId,
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use clap::{ArgAction, Args, ValueEnum};

use ipnet::IpNet;

use super::{
    Note,
    go_syntax::{parse_bool, parse_int, parse_port},
};
use crate::firewall::{FirewallPolicy, ForwardPosition};

/// Where the control socket is unless a flag says otherwise.
pub const DEFAULT_CONTROL_SOCKET: &str = "/run/flannel/agent.sock";

/// Where what survives a reboot is unless a flag says otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/flannel";

/// Where BPF objects are pinned unless told otherwise.
pub const DEFAULT_BPF_PIN_DIR: &str = "/sys/fs/bpf/flannel";
/// Where the subnet file is unless a flag says otherwise.
pub const DEFAULT_SUBNET_FILE: &str = "/run/flannel/subnet.env";

/// Text that must not be seen in logs, status or debug output.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// What a secret is replaced by wherever it would be shown.
    pub const MASK: &str = "(hidden)";

    /// The secret itself.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "\"\"" } else { Self::MASK })
    }
}

/// All options of a run. Every text option is empty unless given.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// The etcd store.
    #[command(flatten)]
    pub etcd: EtcdFlags,
    /// The Kubernetes store.
    #[command(flatten)]
    pub kube: KubeFlags,
    /// The local store and other places in the file system.
    #[command(flatten)]
    pub files: FileFlags,
    /// Which interface carries the tunnel.
    #[command(flatten)]
    pub interface: InterfaceFlags,
    /// The data path.
    #[command(flatten)]
    pub datapath: DatapathFlags,
    /// Firewall rules and routes beside the tunnel.
    #[command(flatten)]
    pub firewall: FirewallFlags,
    /// Health port, metrics.
    #[command(flatten)]
    pub telemetry: TelemetryFlags,
    /// Logging.
    #[command(flatten)]
    pub log: LogFlags,
    /// `--name=value` of every flag as it is in effect, secrets masked.
    #[arg(skip)]
    pub effective: Vec<String>,
    /// What parsing found that the log should tell.
    #[arg(skip)]
    pub notes: Vec<Note>,
}

/// Flags of the etcd store.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Leases in etcd")]
pub struct EtcdFlags {
    /// etcd endpoints, separated by commas.
    #[arg(
        long = "etcd-endpoints",
        value_name = "URLS",
        default_value = "http://127.0.0.1:4001,http://127.0.0.1:2379"
    )]
    pub endpoint_list: String,
    /// Prefix of all keys; one per network.
    #[arg(long = "etcd-prefix", value_name = "PREFIX", default_value = "/coreos.com/network")]
    pub prefix: String,
    /// Client key for TLS.
    #[arg(long = "etcd-keyfile", value_name = "PATH", default_value = "")]
    pub key_file: String,
    /// Client certificate for TLS.
    #[arg(long = "etcd-certfile", value_name = "PATH", default_value = "")]
    pub cert_file: String,
    /// Certificates of the authorities that may have signed etcd's.
    #[arg(long = "etcd-cafile", value_name = "PATH", default_value = "")]
    pub ca_file: String,
    /// User name for etcd.
    #[arg(long = "etcd-username", value_name = "NAME", default_value = "")]
    pub username: String,
    /// Password for etcd.
    #[arg(long = "etcd-password", value_name = "PASSWORD", default_value = "")]
    pub password: Secret,
    /// Minutes before its end at which a lease is renewed at the latest; 1 to 1439.
    #[arg(
        long = "subnet-lease-renew-margin",
        value_name = "MINUTES",
        default_value = "60",
        value_parser = parse_int
    )]
    pub renew_margin_minutes: i64,
}

impl EtcdFlags {
    /// The endpoints one by one, as they stand.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        self.endpoint_list.split(',')
    }
}

/// Flags of the Kubernetes store.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Leases in Kubernetes")]
pub struct KubeFlags {
    /// Take leases from the Kubernetes API instead of etcd.
    #[arg(
        long = "kube-subnet-mgr",
        value_name = "BOOL",
        default_value = "false",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub enabled: bool,
    /// URL of the API server; overrides the kubeconfig's.
    #[arg(long = "kube-api-url", value_name = "URL", default_value = "")]
    pub api_url: String,
    /// Prefix of the node annotations.
    #[arg(
        long = "kube-annotation-prefix",
        value_name = "PREFIX",
        default_value = "flannel.alpha.coreos.com"
    )]
    pub annotation_prefix: String,
    /// kubeconfig file; empty means the pod's service account.
    #[arg(long = "kubeconfig-file", value_name = "PATH", default_value = "")]
    pub kubeconfig_file: String,
    /// Network configuration file.
    #[arg(
        long = "net-config-path",
        value_name = "PATH",
        default_value = "/etc/kube-flannel/net-conf.json"
    )]
    pub net_config_path: PathBuf,
    /// Set the node's condition `NetworkUnavailable` to false once the network is up.
    #[arg(
        long = "set-node-network-unavailable",
        value_name = "BOOL",
        default_value = "true",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub set_node_network_unavailable: bool,
}

/// Flags that name files and directories.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Files")]
pub struct FileFlags {
    /// Keep leases as files in this directory: no server needed. Instead of etcd.
    #[arg(long, value_name = "DIR", default_value = "")]
    pub local_subnet_mgr: OptionalPath,
    /// Where subnet and MTU are written for the CNI plugin.
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SUBNET_FILE)]
    pub subnet_file: PathBuf,
    /// What has to survive a reboot.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub state_dir: PathBuf,
    /// Unix socket on which the agent answers `status`, `peers` and the like; empty: none.
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_SOCKET)]
    pub control_socket: OptionalPath,
}

/// A path, or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptionalPath(pub Option<PathBuf>);

impl FromStr for OptionalPath {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self((!text.is_empty()).then(|| PathBuf::from(text))))
    }
}

/// Flags that choose the external interface (specification §2).
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "External interface")]
pub struct InterfaceFlags {
    /// Interface for traffic between nodes, by name or address. May be repeated: the first that
    /// exists is used.
    #[arg(long, value_name = "NAME|IP", action = ArgAction::Append)]
    pub iface: Vec<String>,
    /// Interface by a regular expression on its addresses or its name. May be repeated; tried
    /// after --iface.
    #[arg(long, value_name = "REGEX", action = ArgAction::Append)]
    pub iface_regex: Vec<String>,
    /// Interface and address from which this address is reached. Tried last.
    #[arg(long, value_name = "IP", default_value = "")]
    pub iface_can_reach: String,
    /// IPv4 address that peers send to. Without one of the flags above it also chooses the
    /// interface, and has to be an address of it.
    #[arg(long, value_name = "IP", default_value = "")]
    pub public_ip: String,
    /// IPv6 address that peers send to.
    #[arg(long, value_name = "IP", default_value = "")]
    pub public_ipv6: String,
}

/// Flags of the data path; all ours.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Data path (vxlan)")]
pub struct DatapathFlags {
    /// What stands beside the kernel's VXLAN: the best that works, eBPF (an error if it cannot be had), nothing.
    #[arg(long = "datapath", value_name = "MODE", value_enum, default_value_t)]
    pub mode: DatapathMode,
    /// How much of the host's stack known flows skip.
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub fast_path: FastPath,
    /// How often, in milliseconds, a flow that skips the host's stack sends a packet through it again.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub flow_interval_ms: u64,
    /// Whether tunnel packets are taken out in XDP, in the underlay's driver.
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub xdp: XdpMode,
    /// Who may send us tunnel packets.
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub peer_filter: PeerFilter,
    /// Where BPF maps and links are pinned, on a bpf file system.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPF_PIN_DIR)]
    pub bpf_pin_dir: PathBuf,
}

/// Values of `--datapath`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DatapathMode {
    /// The best rung that works.
    #[default]
    Auto,
    /// eBPF; an error in the log if it cannot be had, while the kernel carries on.
    Ebpf,
    /// The kernel's VXLAN device alone.
    Kernel,
}

/// Values of `--fast-path`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum FastPath {
    /// The best that works.
    #[default]
    Auto,
    /// Known flows skip the host's stack.
    Flows,
    /// BPF encapsulates and decapsulates; netfilter sees every inner packet.
    Stack,
    /// No BPF forwarding.
    Off,
}

/// Values of `--xdp`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum XdpMode {
    /// No XDP.
    #[default]
    Off,
    /// Native XDP on drivers proved good.
    Auto,
    /// Native XDP.
    Native,
}

/// Values of `--peer-filter`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PeerFilter {
    /// Malformed and clearly forged tunnel packets are dropped.
    #[default]
    Default,
    /// Outer and inner source have to match a lease.
    Strict,
    /// As the kernel does.
    Off,
}

/// Flags of rules and routes beside the tunnel.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Firewall and routes")]
pub struct FirewallFlags {
    /// Masquerade what leaves the network.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub ip_masq: bool,
    /// Do not choose masquerade ports fully at random.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub ip_masq_fully_random_disable: bool,
    /// Seconds between two checks of the rules; at least 1.
    #[arg(
        long = "iptables-resync",
        value_name = "SECONDS",
        default_value = "5",
        value_parser = parse_int
    )]
    pub resync_seconds: i64,
    /// Accept forwarded packets from and to the network (nftables too).
    #[arg(
        long = "iptables-forward-rules",
        value_name = "BOOL",
        default_value = "true",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub forward_rules: bool,
    /// Reach this destination with the pod's own address, without masquerading. May be repeated.
    #[arg(long, value_name = "CIDR", action = ArgAction::Append, value_parser = parse_excluded)]
    pub masq_exclude: Vec<IpNet>,
    /// Where iptables' FORWARD chain jumps to our accept rules: before all others, after what is
    /// there, not at all.
    #[arg(long, value_name = "PLACE", value_enum, default_value_t)]
    pub forward_position: ForwardPosition,
    /// Keep a blackhole route for our own subnet, so that packets to absent pods do not loop.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub ip_blackhole_route: bool,
}

impl FirewallFlags {
    /// What the rules are to do.
    pub fn policy(&self) -> FirewallPolicy {
        FirewallPolicy {
            masquerade: self.ip_masq,
            fully_random: !self.ip_masq_fully_random_disable,
            forward: if self.forward_rules { self.forward_position } else { ForwardPosition::None },
            exclude: self.masq_exclude.clone(),
        }
    }
}

/// Flags of the health port and metrics.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Health and metrics")]
pub struct TelemetryFlags {
    /// Address of the health port: /healthz, /readyz, /metrics, /status.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0", value_parser = parse_bind_ip)]
    pub healthz_ip: IpAddr,
    /// Number of the health port; 0 and less: none.
    #[arg(
        long,
        value_name = "PORT",
        default_value = "0",
        allow_negative_numbers = true,
        value_parser = parse_port
    )]
    pub healthz_port: i64,
    /// Serve /metrics and /status here (IP:PORT or :PORT) instead of on the health port.
    #[arg(long, value_name = "ADDRESS", default_value = "")]
    pub metrics_address: BindAddress,
}

impl TelemetryFlags {
    /// Where to serve health, if at all.
    pub fn health_address(&self) -> Option<SocketAddr> {
        let port = u16::try_from(self.healthz_port).ok().filter(|port| *port > 0)?;
        Some(SocketAddr::new(self.healthz_ip, port))
    }
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindAddress(pub Option<SocketAddr>);

impl FromStr for BindAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let address = match text.strip_prefix(':') {
            Some(port) => {
                port.parse().ok().map(|port| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port))
            }
            None => text.parse().ok(),
        };
        address
            .map(|address| Self(Some(address)))
            .ok_or_else(|| "expected IP:PORT, [IPv6]:PORT or :PORT".to_owned())
    }
}

/// Flags of the log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logging and version")]
pub struct LogFlags {
    /// Verbosity: up to 2 is normal, 3 debug, 4 trace, 6 also what the libraries say. The
    /// variable `RUST_LOG` overrides it.
    #[arg(
        long = "v",
        value_name = "LEVEL",
        default_value = "0",
        allow_negative_numbers = true,
        value_parser = parse_int
    )]
    pub verbosity: i64,
    /// Accepted for flanneld's sake, without effect: use `RUST_LOG`.
    #[arg(long, value_name = "PATTERN=N,...", default_value = "")]
    pub vmodule: String,
    /// Accepted for flanneld's sake, without effect.
    #[arg(long = "log_backtrace_at", value_name = "FILE:LINE", default_value = "")]
    pub backtrace_at: String,
    /// How log lines look.
    #[arg(long = "log-format", value_name = "FORMAT", value_enum, default_value_t)]
    pub format: LogFormat,
    /// Print the version and stop.
    #[arg(
        long,
        value_name = "BOOL",
        default_value = "false",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        value_parser = parse_bool
    )]
    pub version: bool,
}

/// Values of `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line per event for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Whether `--version` is set.
pub(super) fn wants_version(matches: &clap::ArgMatches) -> bool {
    matches.get_one("version").copied().unwrap_or(false)
}

/// `--name=value` of all flags that have a value, secrets masked.
pub(super) fn effective(clap: &clap::Command, matches: &clap::ArgMatches) -> Vec<String> {
    let mut words = Vec::new();
    for arg in clap.get_arguments() {
        let (Some(name), Ok(Some(values))) =
            (arg.get_long(), matches.try_get_raw(arg.get_id().as_str()))
        else {
            continue;
        };
        let secret = arg.get_value_parser().type_id() == TypeId::of::<Secret>();
        for value in values {
            let value = value.to_string_lossy();
            words.push(match (value.is_empty(), secret) {
                (false, true) => format!("--{name}={}", Secret::MASK),
                _ => format!("--{name}={}", without_userinfo(&value)),
            });
        }
    }
    words
}

/// Text with the passwords masked that stand in URLs (`scheme://user:password@host`).
fn without_userinfo(text: &str) -> String {
    let mask = |url: &str| match url.split_once("://") {
        Some((scheme, rest)) => {
            let authority_end = rest.find('/').unwrap_or(rest.len());
            match rest[..authority_end].rfind('@') {
                Some(at) => format!("{scheme}://{}{}", Secret::MASK, &rest[at..]),
                None => url.to_owned(),
            }
        }
        None => url.to_owned(),
    };
    text.split(',').map(mask).collect::<Vec<_>>().join(",")
}

fn parse_excluded(text: &str) -> Result<IpNet, String> {
    let net: IpNet = text.parse().map_err(|_| "expected a network, ADDRESS/LENGTH".to_owned())?;
    if net.prefix_len() == 0 {
        return Err("this is every address: leave --ip-masq out instead".to_owned());
    }
    Ok(net.trunc())
}

fn parse_bind_ip(text: &str) -> Result<IpAddr, String> {
    match text {
        "" => Ok(Ipv4Addr::UNSPECIFIED.into()),
        "localhost" => Ok(Ipv4Addr::LOCALHOST.into()),
        _ => text
            .trim_start_matches('[')
            .trim_end_matches(']')
            .parse()
            .map_err(|_| "expected an IP address".to_owned()),
    }
}
