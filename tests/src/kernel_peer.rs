//! A node built by hand on a plain kernel, exactly as flannel builds one: what our packets have
//! to be understood by. With a VXLAN device, or with routes only, as host-gw has it.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{agent::SubnetEnv, node::Node};

/// What a kernel peer is to look like.
#[derive(Clone, Debug)]
pub struct PeerSpec {
    /// VXLAN network identifier.
    pub vni: u32,
    /// UDP port.
    pub port: u16,
    /// IPv4 subnet, `10.77.9.0/24`.
    pub subnet: String,
    /// IPv6 subnet if it is to have one.
    pub subnet_v6: Option<String>,
    /// Without a VXLAN device: routes to the other hosts themselves (backend `host-gw`).
    pub routed: bool,
}

impl PeerSpec {
    /// Subnet `10.77.<n>.0/24` on VNI 1, port 8472.
    pub fn v4(n: u8) -> Self {
        Self {
            vni: 1,
            port: 8472,
            subnet: format!("10.77.{n}.0/24"),
            subnet_v6: None,
            routed: false,
        }
    }

    /// The same with `fd77:0:0:<n>::/64`.
    pub fn dual(n: u8) -> Self {
        Self { subnet_v6: Some(format!("fd77:0:0:{n}::/64")), ..Self::v4(n) }
    }
}

/// A node on a plain kernel.
#[derive(Debug)]
pub struct KernelPeer {
    node: Node,
    spec: PeerSpec,
    mac: String,
    mac_v6: String,
}

/// What a lease says about one family of a remote node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteVtep {
    /// Subnet with length.
    pub subnet: String,
    /// Address on the underlay.
    pub public_ip: String,
    /// MAC of its VXLAN device.
    pub mac: String,
}

/// The families of a lease, each if it has it: IPv4, IPv6.
pub fn vteps_of(key: &str, lease: &Value) -> Result<(Option<RemoteVtep>, Option<RemoteVtep>)> {
    let (v4, v6) = match key.split_once('&') {
        Some((v4, v6)) => (v4, Some(v6)),
        None => (key, None),
    };
    let vtep = |key: &str, ip: &Value, data: &Value| -> Result<RemoteVtep> {
        let (base, len) = key.rsplit_once('-').with_context(|| format!("key {key}"))?;
        Ok(RemoteVtep {
            subnet: format!("{base}/{len}"),
            public_ip: ip.as_str().with_context(|| format!("no public address in {lease}"))?.into(),
            mac: data["VtepMAC"].as_str().with_context(|| format!("no VtepMAC in {lease}"))?.into(),
        })
    };
    Ok((
        lease.get("BackendData").map(|data| vtep(v4, &lease["PublicIP"], data)).transpose()?,
        match (v6, lease.get("BackendV6Data")) {
            (Some(v6), Some(data)) => Some(vtep(v6, &lease["PublicIPv6"], data)?),
            _ => None,
        },
    ))
}

impl KernelPeer {
    /// Builds the VXLAN device(s) on a node, if there are to be any.
    pub fn new(node: Node, spec: PeerSpec) -> Result<Self> {
        let n: u8 = node
            .v4()
            .rsplit('.')
            .next()
            .and_then(|n| n.parse().ok())
            .context("a node without a number")?;
        let peer = Self {
            mac: format!("02:fa:00:00:04:{n:02x}"),
            mac_v6: format!("02:fa:00:00:06:{n:02x}"),
            node,
            spec,
        };
        let PeerSpec { vni, port, subnet, subnet_v6, routed } = &peer.spec;
        if *routed {
            return Ok(peer);
        }
        let base = base_of(subnet)?;
        let local = peer.node.v4();
        let mac = &peer.mac;
        peer.node.ns().ip(&[
            &format!(
                "link add flannel.{vni} address {mac} mtu 1450 type vxlan id {vni} dev eth0 local {local} dstport {port} nolearning"
            ),
            &format!("addr add {base}/32 dev flannel.{vni}"),
            &format!("link set flannel.{vni} up"),
        ])?;
        if let Some(subnet) = subnet_v6 {
            let base = base_of(subnet)?;
            let local = peer.node.v6();
            let mac = &peer.mac_v6;
            peer.node.ns().ip(&[
                &format!(
                    "link add flannel-v6.{vni} address {mac} mtu 1430 type vxlan id {vni} dev eth0 local {local} dstport {port} nolearning"
                ),
                &format!("addr add {base}/128 dev flannel-v6.{vni} nodad"),
                &format!("link set flannel-v6.{vni} up"),
            ])?;
        }
        Ok(peer)
    }

    /// Its host.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The host alone; what was built there stays.
    pub fn into_node(self) -> Node {
        self.node
    }

    /// What it is like.
    pub fn spec(&self) -> &PeerSpec {
        &self.spec
    }

    /// MAC of its IPv4 device.
    pub fn mac(&self) -> &str {
        &self.mac
    }

    /// MAC of its IPv6 device.
    pub fn mac_v6(&self) -> &str {
        &self.mac_v6
    }

    /// The env file a flannel would have written there.
    pub fn env(&self) -> Result<SubnetEnv> {
        let mtu = match (self.spec.routed, &self.spec.subnet_v6) {
            (true, _) => 1500,
            (false, Some(_)) => 1430,
            (false, None) => 1450,
        };
        SubnetEnv::by_hand(Some(&self.spec.subnet), self.spec.subnet_v6.as_deref(), mtu)
    }

    /// Key and value of its lease.
    pub fn lease(&self) -> (String, Value) {
        let mut key = self.spec.subnet.replace('/', "-");
        let mut lease = json!({
            "PublicIP": self.node.v4(),
            "PublicIPv6": null,
            "BackendType": "vxlan",
            "BackendData": {"VNI": self.spec.vni, "VtepMAC": self.mac},
        });
        if let Some(subnet) = &self.spec.subnet_v6 {
            key.push('&');
            key.push_str(&subnet.replace('/', "-"));
            lease["PublicIPv6"] = json!(self.node.v6());
            lease["BackendV6Data"] = json!({"VNI": self.spec.vni, "VtepMAC": self.mac_v6});
        }
        if self.spec.routed {
            lease["BackendType"] = json!("host-gw");
            lease["BackendData"] = Value::Null;
            lease["BackendV6Data"] = Value::Null;
        }
        (key, lease)
    }

    /// Tells it of another node by that node's lease: neighbour, FDB entry, route; or the route
    /// alone.
    pub fn learn(&self, key: &str, lease: &Value) -> Result<()> {
        if self.spec.routed {
            let (v4, v6) = key.split_once('&').map_or((key, None), |(v4, v6)| (v4, Some(v6)));
            for (subnet, address) in [(Some(v4), "PublicIP"), (v6, "PublicIPv6")] {
                if let (Some(subnet), Some(via)) = (subnet, lease[address].as_str()) {
                    let (base, len) = subnet.rsplit_once('-').context("a key without length")?;
                    self.node
                        .ns()
                        .ip(&[&format!("route replace {base}/{len} via {via} dev eth0")])?;
                }
            }
            return Ok(());
        }
        let (v4, v6) = vteps_of(key, lease)?;
        if let Some(vtep) = v4 {
            self.program(&format!("flannel.{}", self.spec.vni), &vtep)?;
        }
        if let (Some(vtep), Some(_)) = (v6, &self.spec.subnet_v6) {
            self.program(&format!("flannel-v6.{}", self.spec.vni), &vtep)?;
        }
        Ok(())
    }

    fn program(&self, device: &str, vtep: &RemoteVtep) -> Result<()> {
        let RemoteVtep { subnet, public_ip, mac } = vtep;
        let base = base_of(subnet)?;
        self.node
            .ns()
            .ip(&[&format!("neigh replace {base} lladdr {mac} dev {device} nud permanent")])?;
        self.node
            .ns()
            .bridge(&[&format!("fdb replace {mac} dev {device} dst {public_ip} self permanent")])?;
        self.node.ns().ip(&[&format!("route replace {subnet} via {base} dev {device} onlink")])
    }
}

fn base_of(subnet: &str) -> Result<&str> {
    Ok(subnet.split_once('/').with_context(|| format!("{subnet} has no length"))?.0)
}
