//! The backends there are, and how each is made from the configuration. The one list.

use super::{
    Backend, BackendError,
    alloc::AllocBackend,
    extension::{ExtensionBackend, ExtensionConfig, ExtensionOptions},
    host_gw::{HostGwBackend, HostGwConfig},
    udp::{UdpBackend, UdpConfig, UdpOptions},
    vxlan::{FastPathConfig, VxlanBackend, VxlanConfig, VxlanOptions},
};
use crate::{
    cli::flags::{DatapathMode, Options},
    config::NetworkConfig,
    external_interface::ExternalInterface,
    telemetry::metrics::Metrics,
};

/// All that a backend may be made from.
pub struct Parts<'a> {
    /// The command line.
    pub options: &'a Options,
    /// The network configuration.
    pub config: &'a NetworkConfig,
    /// The interface that leads to the other nodes.
    pub external: ExternalInterface,
    /// Where repairs are counted.
    pub metrics: Metrics,
}

type Made = Result<Box<dyn Backend>, BackendError>;

/// A type of backend.
struct Kind {
    /// `Backend.Type`, in lower case.
    name: &'static str,
    make: fn(Parts<'_>) -> Made,
}

const KINDS: &[Kind] = &[
    Kind { name: "alloc", make: |parts| Ok(Box::new(AllocBackend::new(&parts.external)?)) },
    Kind { name: "extension", make: extension },
    Kind { name: "host-gw", make: host_gw },
    Kind { name: "udp", make: udp },
    Kind { name: "vxlan", make: vxlan },
];

/// Makes the backend that the configuration names.
///
/// # Errors
/// What the backend says, or [`BackendError::Config`] listing which types there are.
pub fn open(parts: Parts<'_>) -> Made {
    let wanted = &parts.config.backend_type;
    let kind = KINDS.iter().find(|kind| kind.name == wanted).ok_or_else(|| {
        let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
        BackendError::Config(format!(
            "Backend.Type \"{wanted}\" is not one of this version's backends: {}",
            names.join(", ")
        ))
    })?;
    (kind.make)(parts)
}

fn extension(parts: Parts<'_>) -> Made {
    let config = ExtensionConfig {
        options: ExtensionOptions::parse(&parts.config.backend)?,
        external: parts.external,
        ipv4_network: parts.config.ipv4.map(|settings| settings.network),
        ipv6_network: parts.config.ipv6.map(|settings| settings.network),
    };
    Ok(Box::new(ExtensionBackend::new(config)?))
}

fn host_gw(parts: Parts<'_>) -> Made {
    let config = HostGwConfig {
        blackhole_route: parts.options.firewall.ip_blackhole_route,
        external: parts.external,
        ipv4_network: parts.config.ipv4.map(|settings| settings.network),
        ipv6_network: parts.config.ipv6.map(|settings| settings.network),
    };
    Ok(Box::new(HostGwBackend::new(config, parts.metrics)?))
}

fn udp(parts: Parts<'_>) -> Made {
    let config = UdpConfig {
        blackhole_route: parts.options.firewall.ip_blackhole_route,
        options: UdpOptions::parse(&parts.config.backend)?,
        external: parts.external,
        ipv4_network: parts.config.ipv4.map(|settings| settings.network),
    };
    Ok(Box::new(UdpBackend::new(config, parts.metrics)?))
}

fn vxlan(parts: Parts<'_>) -> Made {
    let Parts { options, config, external, metrics } = parts;
    let config = VxlanConfig {
        options: VxlanOptions::parse(&config.backend)?,
        external,
        ipv4_network: config.ipv4.map(|settings| settings.network),
        ipv6_network: config.ipv6.map(|settings| settings.network),
        state_dir: options.files.state_dir.clone(),
        blackhole_route: options.firewall.ip_blackhole_route,
        fast_path: FastPathConfig {
            enabled: options.datapath.mode != DatapathMode::Kernel,
            demanded: options.datapath.mode == DatapathMode::Ebpf,
            pin_dir: options.datapath.bpf_pin_dir.clone(),
            log: options.log.verbosity >= 4,
            mode: options.datapath.fast_path,
            xdp: options.datapath.xdp,
            filter: options.datapath.peer_filter,
            flow_interval: std::time::Duration::from_millis(options.datapath.flow_interval_ms),
        },
    };
    Ok(Box::new(VxlanBackend::new(config, metrics)?))
}
