//! The agent's env file as a CNI plugin reads it (specification §9.2). Stricter than the reading
//! back of §6.3: no quotes, no comments, no white space.

use std::{fs, path::Path};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::error::{CniError, code};

/// What the file says. Networks have no host bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubnetFile {
    /// The cluster's networks, IPv4 before IPv6.
    pub networks: Vec<IpNet>,
    /// This node's IPv4 subnet.
    pub subnet_v4: Option<Ipv4Net>,
    /// This node's IPv6 subnet.
    pub subnet_v6: Option<Ipv6Net>,
    /// MTU for containers, in bytes.
    pub mtu: u32,
    /// Whether the agent masquerades.
    pub ip_masq: bool,
}

impl SubnetFile {
    /// Reads the file. One that is not there (yet) is a reason to try again later.
    pub fn read(path: &Path) -> Result<Self, CniError> {
        let text = fs::read_to_string(path).map_err(|e| {
            let error = CniError::io(code::TRY_AGAIN_LATER, "open", path, &e);
            error.details("flannel has no subnet on this node yet; see its /readyz for the reason")
        })?;
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, CniError> {
        let (mut networks_v4, mut networks_v6) = (Vec::new(), Vec::new());
        let (mut subnet_v4, mut subnet_v6, mut mtu, mut ip_masq) = (None, None, None, None);
        for line in text.lines() {
            let (key, value) = line.split_once('=').map_or((line, None), |(k, v)| (k, Some(v)));
            let invalid = |what: &str| {
                CniError::new(
                    code::INVALID_NETWORK_CONFIG,
                    format!("{}: {line:?} is not {what}", path.display()),
                )
            };
            match key {
                "FLANNEL_NETWORK" => networks_v4 = networks(value, parse_v4, &invalid)?,
                "FLANNEL_IPV6_NETWORK" => networks_v6 = networks(value, parse_v6, &invalid)?,
                "FLANNEL_SUBNET" => {
                    let net = value.and_then(parse_v4).ok_or_else(|| invalid("an IPv4 subnet"))?;
                    subnet_v4 = Some(net);
                }
                "FLANNEL_IPV6_SUBNET" => {
                    let net = value.and_then(parse_v6).ok_or_else(|| invalid("an IPv6 subnet"))?;
                    subnet_v6 = Some(net);
                }
                "FLANNEL_MTU" => {
                    let number = value.filter(|v| v.bytes().all(|b| b.is_ascii_digit()));
                    let number = number.and_then(|v| v.parse().ok());
                    mtu = Some(number.ok_or_else(|| invalid("a number of bytes"))?);
                }
                "FLANNEL_IPMASQ" => {
                    ip_masq = Some(value.ok_or_else(|| invalid("true or false"))? == "true");
                }
                _ => {}
            }
        }
        let networks: Vec<IpNet> = networks_v4
            .into_iter()
            .map(IpNet::V4)
            .chain(networks_v6.into_iter().map(IpNet::V6))
            .collect();
        let mut missing: Vec<&str> = Vec::new();
        if networks.is_empty() {
            missing.extend(["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"]);
        }
        if subnet_v4.is_none() && subnet_v6.is_none() {
            missing.extend(["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"]);
        }
        if mtu.is_none() {
            missing.push("FLANNEL_MTU");
        }
        if ip_masq.is_none() {
            missing.push("FLANNEL_IPMASQ");
        }
        match (mtu, ip_masq) {
            (Some(mtu), Some(ip_masq)) if missing.is_empty() => {
                Ok(Self { networks, subnet_v4, subnet_v6, mtu, ip_masq })
            }
            _ => Err(CniError::new(
                code::INVALID_NETWORK_CONFIG,
                format!("{} is missing {}", path.display(), missing.join(", ")),
            )),
        }
    }
}

/// A comma-separated list of networks, each once, in order.
fn networks<N: PartialEq>(
    value: Option<&str>,
    parse: impl Fn(&str) -> Option<N>,
    invalid: &dyn Fn(&str) -> CniError,
) -> Result<Vec<N>, CniError> {
    let mut networks = Vec::new();
    for entry in value.unwrap_or_default().split(',') {
        let network = parse(entry).ok_or_else(|| invalid("a list of networks of its family"))?;
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    Ok(networks)
}

fn parse_v4(text: &str) -> Option<Ipv4Net> {
    crate::go_json::parse_ipv4_net(text)
}

fn parse_v6(text: &str) -> Option<Ipv6Net> {
    crate::go_json::parse_ipv6_net(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SubnetFile, String> {
        SubnetFile::parse(text, Path::new("/run/flannel/subnet.env")).map_err(|e| e.to_string())
    }

    #[test]
    fn both_families_and_several_networks() {
        let file = parse(
            "FLANNEL_NETWORK=10.1.0.0/16,10.2.0.0/16,10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\n\
             FLANNEL_IPV6_NETWORK=2001:cafe:42::/56\nFLANNEL_IPV6_SUBNET=2001:cafe:42::1/64\n\
             FLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\nOTHER\n",
        )
        .expect("complete");
        let networks: Vec<_> = file.networks.iter().map(ToString::to_string).collect();
        assert_eq!(networks, ["10.1.0.0/16", "10.2.0.0/16", "2001:cafe:42::/56"]);
        assert_eq!(file.subnet_v4.map(|n| n.to_string()).as_deref(), Some("10.1.17.0/24"));
        assert_eq!(file.subnet_v6.map(|n| n.to_string()).as_deref(), Some("2001:cafe:42::/64"));
        assert_eq!((file.mtu, file.ip_masq), (1472, true));
    }

    #[test]
    fn what_is_missing_is_named_in_order() {
        assert_eq!(
            parse("junk\n").expect_err("nothing there"),
            "/run/flannel/subnet.env is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, \
             FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ"
        );
        let some = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_IPMASQ=no\n";
        assert!(
            parse(some)
                .expect_err("half")
                .ends_with("is missing FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU")
        );
    }

    #[test]
    fn bad_values_are_errors_and_no_panic() {
        for line in [
            "FLANNEL_NETWORK",
            "FLANNEL_NETWORK=fd00::/8",
            "FLANNEL_SUBNET",
            "FLANNEL_SUBNET=10.1.17.1",
            "FLANNEL_IPV6_SUBNET=10.1.17.1/24",
            "FLANNEL_MTU=+1400",
            "FLANNEL_MTU",
            "FLANNEL_IPMASQ",
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(line) && error.contains("is not"), "{line}: {error}");
        }
    }
}
