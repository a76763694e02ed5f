//! Pods: namespaces on a bridge, as a CNI bridge plugin would make them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};

use crate::{
    agent::SubnetEnv,
    craft::{self, Mac},
    netns::Netns,
    node::Node,
};

/// A pod of a node.
#[derive(Clone, Debug)]
pub struct Pod {
    ns: Netns,
    name: String,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
}

/// The bridge `cni0` with the subnets' gateway addresses.
pub(crate) fn make_bridge(node: &Node, env: &SubnetEnv) -> Result<()> {
    let mut lines = vec![
        "link add cni0 type bridge mcast_snooping 0".to_owned(),
        format!("link set cni0 mtu {} up", env.mtu()?),
    ];
    if let Some((gateway, len)) = env.gateway_v4()? {
        lines.push(format!("addr add {gateway}/{len} brd + dev cni0"));
    }
    if let Some((gateway, len)) = env.gateway_v6()? {
        lines.push(format!("addr add {gateway}/{len} dev cni0 nodad"));
    }
    let lines: Vec<_> = lines.iter().map(String::as_str).collect();
    node.ns().ip(&lines)
}

impl Pod {
    /// Pod number `index` of a node: the address after the gateway's and so on.
    pub(crate) fn new(node: &Node, env: &SubnetEnv, index: u8) -> Result<Self> {
        let name = format!("{}-pod{index}", node.name());
        let ns = Netns::new(node.ns().run(), &name)?;
        let mtu = env.mtu()?;
        let veth = format!("veth{index}");
        node.ns().ip(&[
            &format!(
                "link add {veth} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {}",
                ns.name()
            ),
            &format!("link set {veth} master cni0 up"),
        ])?;
        let mut lines = vec!["link set eth0 up".to_owned()];
        let (mut v4, mut v6) = (None, None);
        if let Some((gateway, len)) = env.gateway_v4()? {
            let address = Ipv4Addr::from_bits(gateway.to_bits() + 1 + u32::from(index));
            lines.push(format!("addr add {address}/{len} dev eth0"));
            lines.push(format!("route add default via {gateway}"));
            v4 = Some(address);
        }
        if let Some((gateway, len)) = env.gateway_v6()? {
            let address = Ipv6Addr::from_bits(gateway.to_bits() + 1 + u128::from(index));
            lines.push(format!("addr add {address}/{len} dev eth0 nodad"));
            lines.push(format!("route add default via {gateway}"));
            v6 = Some(address);
        }
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        ns.ip(&lines)?;
        Ok(Self { ns, name, v4, v6 })
    }

    /// `<node>-pod<index>`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its namespace.
    pub fn ns(&self) -> &Netns {
        &self.ns
    }

    /// Its IPv4 address.
    pub fn v4(&self) -> Result<IpAddr> {
        Ok(self.v4.with_context(|| format!("{} has no IPv4 address", self.name))?.into())
    }

    /// Its IPv6 address.
    pub fn v6(&self) -> Result<IpAddr> {
        Ok(self.v6.with_context(|| format!("{} has no IPv6 address", self.name))?.into())
    }

    /// Its own MAC.
    pub fn mac(&self) -> Result<Mac> {
        let links = self.ns.ip_json("link show eth0")?;
        craft::mac(links.first().and_then(|link| link["address"].as_str()).context("no MAC")?)
    }

    /// The MAC of its gateway for this address' family, once it has talked to somebody.
    pub fn gateway_mac(&self, family: IpAddr) -> Result<Mac> {
        let flag = if family.is_ipv4() { "-4" } else { "-6" };
        let routes = self.ns.ip_json(&format!("{flag} route show default"))?;
        let gateway = routes.first().and_then(|route| route["gateway"].as_str());
        let gateway = gateway.with_context(|| format!("{} has no gateway", self.name))?;
        let neighbours = self.ns.ip_json(&format!("neigh show {gateway} dev eth0"))?;
        let mac = neighbours.first().and_then(|entry| entry["lladdr"].as_str());
        craft::mac(mac.with_context(|| format!("{gateway} has no MAC: {neighbours:?}"))?)
    }

    /// All its addresses, IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.v4.map(IpAddr::from).into_iter().chain(self.v6.map(IpAddr::from)).collect()
    }
}
