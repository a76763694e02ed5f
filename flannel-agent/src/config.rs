//! The network configuration (`<prefix>/config`, `net-conf.json`): specification §3.

mod difference;

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::{
    go_json::{GoJsonError, Object},
    lease::RawJson,
};

/// A checked network configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// IPv4 settings, if IPv4 is enabled.
    pub ipv4: Option<Ipv4Settings>,
    /// IPv6 settings, if IPv6 is enabled.
    pub ipv6: Option<Ipv6Settings>,
    /// `EnableNFTables`.
    pub enable_nftables: bool,
    /// Lower-cased `Backend.Type`; `udp` if there is no `Backend` at all.
    pub backend_type: String,
    /// Whether `Backend` (or its `Type`) was missing: worth one warning.
    pub backend_type_missing: bool,
    /// The `Backend` object as it stands, for the backend's own parser.
    pub backend: RawJson,
    /// Keys nobody knows, as paths (`Comment`, `Backend.Future`): worth one warning.
    pub unknown_keys: Vec<String>,
}

/// Which IPv4 subnets may be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Settings {
    /// The cluster's network, host bits zero.
    pub network: Ipv4Net,
    /// Prefix length of one node's subnet.
    pub subnet_len: u8,
    /// First subnet that may be leased.
    pub subnet_min: Ipv4Addr,
    /// Last subnet that may be leased.
    pub subnet_max: Ipv4Addr,
}

/// Which IPv6 subnets may be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Settings {
    /// The cluster's network, host bits zero.
    pub network: Ipv6Net,
    /// Prefix length of one node's subnet.
    pub subnet_len: u8,
    /// First subnet that may be leased.
    pub subnet_min: Ipv6Addr,
    /// Last subnet that may be leased.
    pub subnet_max: Ipv6Addr,
}

/// Why a network configuration cannot be used. The text names the field and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text or one of its fields is malformed.
    #[error(transparent)]
    Format(#[from] GoJsonError),
    /// The fields are well-formed but do not make a usable network.
    #[error("{0}")]
    Incoherent(String),
}

const KNOWN_KEYS: [&str; 12] = [
    "EnableIPv4",
    "EnableIPv6",
    "EnableNFTables",
    "Network",
    "IPv6Network",
    "SubnetLen",
    "SubnetMin",
    "SubnetMax",
    "IPv6SubnetLen",
    "IPv6SubnetMin",
    "IPv6SubnetMax",
    "Backend",
];

/// The options each backend knows besides `Type`; `None` for a type nobody has heard of.
fn backend_keys(backend_type: &str) -> Option<&'static [&'static str]> {
    Some(match backend_type {
        "vxlan" => &["VNI", "Port", "MTU", "GBP", "Learning", "DirectRouting", "MacPrefix"],
        "udp" => &["Port"],
        "host-gw" | "alloc" => &[],
        "ipip" => &["DirectRouting"],
        "wireguard" => {
            &["ListenPort", "ListenPortV6", "MTU", "PSK", "PersistentKeepaliveInterval", "Mode"]
        }
        "ipsec" => &["PSK", "UDPEncap", "ESPProposal"],
        "extension" => &[
            "PreStartupCommand",
            "PostStartupCommand",
            "ShutdownCommand",
            "SubnetAddCommand",
            "SubnetRemoveCommand",
            "CommandTimeout",
        ],
        "tencent-vpc" => &["AccessKeyID", "AccessKeySecret"],
        _ => return None,
    })
}

impl NetworkConfig {
    /// Reads and checks a configuration for a store that hands out subnets itself (etcd, local
    /// directory): specification §3 and §3.1. A configuration with IPv6 only passes.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        Self::parse_with(text, ipv4_settings, ipv6_settings)
    }

    /// Reads and checks a configuration for Kubernetes, where `podCIDR` says what a node leases:
    /// there are no subnets to hand out, so their length and range mean nothing (§3.1).
    pub fn parse_for_kube(text: &str) -> Result<Self, ConfigError> {
        Self::parse_with(
            text,
            |network, _| {
                let network = given(network)?;
                Ok(Ipv4Settings {
                    network,
                    subnet_len: network.prefix_len(),
                    subnet_min: network.network(),
                    subnet_max: network.broadcast(),
                })
            },
            |network, _| {
                let network = given_v6(network)?;
                Ok(Ipv6Settings {
                    network,
                    subnet_len: network.prefix_len(),
                    subnet_min: network.network(),
                    subnet_max: network.broadcast(),
                })
            },
        )
    }

    fn parse_with(
        text: &str,
        ipv4_settings: impl FnOnce(
            Option<Ipv4Net>,
            &Range<Ipv4Addr>,
        ) -> Result<Ipv4Settings, ConfigError>,
        ipv6_settings: impl FnOnce(
            Option<Ipv6Net>,
            &Range<Ipv6Addr>,
        ) -> Result<Ipv6Settings, ConfigError>,
    ) -> Result<Self, ConfigError> {
        let object = Object::parse(text)?;
        let (network, network_v6) =
            (object.get_ipv4_net("Network")?, object.get_ipv6_net("IPv6Network")?);
        let range = Range {
            len: object.get_uint("SubnetLen")?,
            min: object.get_ipv4("SubnetMin")?,
            max: object.get_ipv4("SubnetMax")?,
        };
        let range_v6 = Range {
            len: object.get_uint("IPv6SubnetLen")?,
            min: object.get_ipv6("IPv6SubnetMin")?,
            max: object.get_ipv6("IPv6SubnetMax")?,
        };
        let mut unknown_keys = object.unknown_keys(&KNOWN_KEYS);
        let backend = Backend::parse(&object)?;
        unknown_keys.extend(backend.unknown_keys);
        let enable_nftables = object.get_bool("EnableNFTables")?.unwrap_or(false);

        let ipv4 = object
            .get_bool("EnableIPv4")?
            .unwrap_or(true)
            .then(|| ipv4_settings(network, &range))
            .transpose()?;
        let ipv6 = object
            .get_bool("EnableIPv6")?
            .unwrap_or(false)
            .then(|| ipv6_settings(network_v6, &range_v6))
            .transpose()?;
        if ipv4.is_none() && ipv6.is_none() {
            return Err(ConfigError::Incoherent(
                "EnableIPv4 false and EnableIPv6 false: at least one must be true".to_owned(),
            ));
        }
        Ok(Self {
            ipv4,
            ipv6,
            enable_nftables,
            backend_type: backend.name,
            backend_type_missing: backend.missing,
            backend: backend.raw,
            unknown_keys,
        })
    }
}

/// The `Backend` object, as far as the configuration itself looks into it.
struct Backend {
    name: String,
    missing: bool,
    raw: RawJson,
    unknown_keys: Vec<String>,
}

impl Backend {
    fn parse(config: &Object) -> Result<Self, ConfigError> {
        let text = config.get_raw("Backend").filter(|raw| *raw != "null").unwrap_or("{}");
        let object = Object::parse(text).map_err(|_| {
            let shown: String = text.chars().take(64).collect();
            GoJsonError::field("Backend", shown, "must be an object")
        })?;
        let name = object
            .get_str("Type")
            .map_err(|e| match e {
                GoJsonError::Field { field, value, reason } => {
                    GoJsonError::Field { field: format!("Backend.{field}"), value, reason }
                }
                other => other,
            })?
            .unwrap_or_default()
            .to_lowercase();
        let missing = name.is_empty();
        let name = if missing { "udp".to_owned() } else { name };
        let unknown_keys = backend_keys(&name).map_or_else(Vec::new, |known| {
            let unknown = object.unknown_keys(&[known, &["Type"]].concat());
            unknown.into_iter().map(|key| format!("Backend.{key}")).collect()
        });
        Ok(Self { name, missing, raw: RawJson::parse(text)?, unknown_keys })
    }
}

/// The subnets to lease as the configuration gives them, before defaults.
struct Range<A> {
    len: Option<u64>,
    min: Option<A>,
    max: Option<A>,
}

/// What differs between the address families when a range is checked.
struct Family {
    /// In front of `Network`, `SubnetLen` and so on: empty or `IPv6`.
    prefix: &'static str,
    /// Address length in bits.
    bits: u8,
    /// Subnets of this length are made if the network leaves room for four of them.
    usual_len: u8,
}

const IPV4: Family = Family { prefix: "", bits: 32, usual_len: 24 };
const IPV6: Family = Family { prefix: "IPv6", bits: 128, usual_len: 64 };

impl Family {
    /// Applies defaults and bounds of §3.1. Addresses are numbers here; `show` prints them.
    fn check(
        &self,
        (network, prefix_len): (u128, u8),
        range: &Range<u128>,
        show: impl Fn(u128) -> String,
    ) -> Result<(u8, u128, u128), ConfigError> {
        let Self { prefix, bits, usual_len } = *self;
        let net = format!("{prefix}Network {}/{prefix_len}", show(network));
        let wrong = |text: String| Err(ConfigError::Incoherent(text));
        let (longest, shortest) = (bits - 2, prefix_len.saturating_add(2));

        let len = match range.len.filter(|len| *len > 0) {
            Some(len) => match u8::try_from(len) {
                Ok(len) if (shortest..=longest).contains(&len) => len,
                _ if shortest > longest => {
                    return wrong(format!(
                        "{prefix}SubnetLen {len}: {net} is too small for any, it may have {} bits at most",
                        bits - 4
                    ));
                }
                _ => {
                    return wrong(format!(
                        "{prefix}SubnetLen {len}: must be from {shortest} to {longest} for {net}"
                    ));
                }
            },
            None if shortest > longest => {
                return wrong(format!(
                    "{net}: too small for four subnets, its length may be {} at most",
                    bits - 4
                ));
            }
            None => usual_len.max(shortest),
        };

        let step = 1u128 << (bits - len);
        // Here the prefix length is at least 1 and at most `bits - 4`.
        let last = network | ((u128::MAX >> (128 - bits)) >> prefix_len);
        let bound = |name: &str, given: Option<u128>, default: u128| match given {
            None => Ok(default),
            Some(addr) if addr < network || addr > last => Err(ConfigError::Incoherent(format!(
                "{prefix}{name} {}: not inside {net}",
                show(addr)
            ))),
            Some(addr) if addr % step != 0 => Err(ConfigError::Incoherent(format!(
                "{prefix}{name} {}: not the first address of a /{len} subnet",
                show(addr)
            ))),
            Some(addr) => Ok(addr),
        };
        let min = bound("SubnetMin", range.min.filter(|min| *min != 0), network + step)?;
        let max = bound("SubnetMax", range.max.filter(|max| *max != 0), last - (step - 1))?;
        if min > max {
            return wrong(format!(
                "{prefix}SubnetMin {} is above {prefix}SubnetMax {}",
                show(min),
                show(max)
            ));
        }
        Ok((len, min, max))
    }
}

fn missing(field: &str) -> ConfigError {
    ConfigError::Incoherent(format!("{field} is missing: it must name the pods' network"))
}

/// The pods' network, which must not be all there is.
fn given(network: Option<Ipv4Net>) -> Result<Ipv4Net, ConfigError> {
    network.filter(|n| n.prefix_len() > 0).ok_or_else(|| missing("Network"))
}

/// The same for IPv6.
fn given_v6(network: Option<Ipv6Net>) -> Result<Ipv6Net, ConfigError> {
    network.filter(|n| n.prefix_len() > 0).ok_or_else(|| missing("IPv6Network"))
}

fn ipv4_settings(
    network: Option<Ipv4Net>,
    range: &Range<Ipv4Addr>,
) -> Result<Ipv4Settings, ConfigError> {
    let network = given(network)?;
    let number = |addr: Ipv4Addr| u128::from(addr.to_bits());
    #[expect(clippy::cast_possible_truncation, reason = "the numbers are IPv4 addresses")]
    let address = |number: u128| Ipv4Addr::from_bits(number as u32);
    let (subnet_len, min, max) = IPV4.check(
        (number(network.network()), network.prefix_len()),
        &Range { len: range.len, min: range.min.map(number), max: range.max.map(number) },
        |number| address(number).to_string(),
    )?;
    Ok(Ipv4Settings { network, subnet_len, subnet_min: address(min), subnet_max: address(max) })
}

fn ipv6_settings(
    network: Option<Ipv6Net>,
    range: &Range<Ipv6Addr>,
) -> Result<Ipv6Settings, ConfigError> {
    let network = given_v6(network)?;
    let (subnet_len, min, max) = IPV6.check(
        (network.network().to_bits(), network.prefix_len()),
        &Range {
            len: range.len,
            min: range.min.map(Ipv6Addr::to_bits),
            max: range.max.map(Ipv6Addr::to_bits),
        },
        |number| Ipv6Addr::from_bits(number).to_string(),
    )?;
    Ok(Ipv6Settings {
        network,
        subnet_len,
        subnet_min: Ipv6Addr::from_bits(min),
        subnet_max: Ipv6Addr::from_bits(max),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> NetworkConfig {
        NetworkConfig::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn message(text: &str) -> String {
        NetworkConfig::parse(text).map(|_| ()).expect_err(text).to_string()
    }

    fn range(config: &NetworkConfig) -> (u8, String, String) {
        let v4 = config.ipv4.expect("IPv4");
        (v4.subnet_len, v4.subnet_min.to_string(), v4.subnet_max.to_string())
    }

    #[test]
    fn ipv4_defaults() {
        let config = parse(r#"{"network":"10.3.0.0/16"}"#);
        assert_eq!(config.ipv4.map(|v4| v4.network), "10.3.0.0/16".parse().ok());
        assert_eq!(range(&config), (24, "10.3.1.0".to_owned(), "10.3.255.0".to_owned()));
        assert_eq!(config.ipv6, None);
        assert!(!config.enable_nftables);
        assert_eq!((config.backend_type.as_str(), config.backend_type_missing), ("udp", true));
    }

    #[test]
    fn ipv6_defaults_and_overrides() {
        let v6 = |text| parse(text).ipv6.expect("IPv6");
        let config = v6(r#"{"enableIPv4":false,"enableIPv6":true,"ipv6Network":"fc00::/48"}"#);
        assert_eq!(config.subnet_len, 64);
        assert_eq!(config.subnet_min.to_string(), "fc00:0:0:1::");
        assert_eq!(config.subnet_max.to_string(), "fc00:0:0:ffff::");
        let config = v6(
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fc00::/48","IPv6SubnetLen":56,
                "IPv6SubnetMin":"fc00:0:0:100::","IPv6SubnetMax":"fc00:0:0:f00::"}"#,
        );
        assert_eq!(config.subnet_len, 56);
        assert_eq!(config.subnet_min.to_string(), "fc00:0:0:100::");
        assert_eq!(config.subnet_max.to_string(), "fc00:0:0:f00::");
        let config = v6(
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"8000::/1","IPv6SubnetMin":null}"#,
        );
        assert_eq!(config.subnet_max.to_string(), "ffff:ffff:ffff:ffff::");
    }

    #[test]
    fn ipv4_overrides() {
        let config = parse(
            r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.5.0","SubnetMax":"10.3.8.0","SubnetLen":28}"#,
        );
        assert_eq!(range(&config), (28, "10.3.5.0".to_owned(), "10.3.8.0".to_owned()));
    }

    #[test]
    fn loose_json_is_accepted() {
        let config = parse(
            r#"{"network":"10.77.5.9/16","subnetlen":24,"backend":{"type":"VXLAN","vni":7,"Directrouting":true}}"#,
        );
        assert_eq!(config.ipv4.map(|v4| v4.network), "10.77.0.0/16".parse().ok());
        assert_eq!((config.backend_type.as_str(), config.backend_type_missing), ("vxlan", false));
        assert!(config.unknown_keys.is_empty(), "{:?}", config.unknown_keys);
        assert_eq!(config.backend.as_str(), r#"{"type":"VXLAN","vni":7,"Directrouting":true}"#);
    }

    #[test]
    fn unknown_keys_are_named_once() {
        let config = parse(
            r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","Future":{"x":1},"PSK":"x"},"Comment":"ours","Comment":2}"#,
        );
        assert_eq!(config.unknown_keys, ["Comment", "Backend.Future", "Backend.PSK"]);
    }

    #[test]
    fn a_backend_without_a_type_is_udp() {
        for backend in ["", r#","Backend":null"#, r#","Backend":{}"#, r#","Backend":{"Type":""}"#] {
            let config = parse(&format!(r#"{{"Network":"10.77.0.0/16"{backend}}}"#));
            assert_eq!((config.backend_type.as_str(), config.backend_type_missing), ("udp", true));
        }
    }

    #[test]
    fn subnet_bounds_table() {
        for (text, len, min, max) in [
            (r#"{"Network":"10.77.8.0/22"}"#, 24, "10.77.9.0", "10.77.11.0"),
            (r#"{"Network":"10.77.8.0/24"}"#, 26, "10.77.8.64", "10.77.8.192"),
            (r#"{"Network":"10.77.8.0/28"}"#, 30, "10.77.8.4", "10.77.8.12"),
            (r#"{"Network":"128.0.0.0/1"}"#, 24, "128.0.1.0", "255.255.255.0"),
            (
                r#"{"Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.8.64","SubnetMax":"10.77.8.192"}"#,
                26,
                "10.77.8.64",
                "10.77.8.192",
            ),
        ] {
            assert_eq!(range(&parse(text)), (len, min.to_owned(), max.to_owned()), "{text}");
        }
    }

    #[test]
    fn rejections_name_field_and_value() {
        for (text, wants) in [
            (r#"{"Network":"10.77.8.0/29"}"#, &["Network 10.77.8.0/29"][..]),
            (r#"{"Network":"10.77.8.0/32"}"#, &["Network 10.77.8.0/32"]),
            (r#"{"Network":"10.77.8.0/32","SubnetLen":30}"#, &["SubnetLen 30", "10.77.8.0/32"]),
            (r#"{"Network":"10.77.8.0/22","SubnetLen":31}"#, &["SubnetLen 31"]),
            (r#"{"Network":"10.77.8.0/22","SubnetLen":23}"#, &["SubnetLen 23", "10.77.8.0/22"]),
            (r#"{"Network":"10.77.8.0/22","SubnetLen":4096}"#, &["SubnetLen 4096"]),
            (r#"{"Network":"10.77.8.0/22","SubnetLen":"24"}"#, &["SubnetLen \"24\""]),
            (
                r#"{"Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.8.70"}"#,
                &["SubnetMin 10.77.8.70"],
            ),
            (
                r#"{"Network":"10.77.8.0/22","SubnetLen":26,"SubnetMax":"10.78.0.0"}"#,
                &["SubnetMax 10.78.0.0"],
            ),
            (
                r#"{"Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.9.0","SubnetMax":"10.77.8.64"}"#,
                &["SubnetMin 10.77.9.0", "SubnetMax 10.77.8.64"],
            ),
            (r#"{"Network":"10.77.8.0/22","SubnetMin":""}"#, &["SubnetMin"]),
            ("{}", &["Network"]),
            (r#"{"Network":""}"#, &["Network"]),
            (r#"{"Network":null}"#, &["Network null"]),
            (r#"{"Network":"10.77.0.0/33"}"#, &["Network 10.77.0.0/33"]),
            (r#"{"Network":"fd77::/48"}"#, &["Network fd77::/48"]),
            (r#"{"Network":"10.77.0.0/16","EnableIPv6":true}"#, &["IPv6Network"]),
            (r#"{"Network":"10.77.0.0/16","IPv6Network":"10.78.0.0/16"}"#, &["IPv6Network 10.78"]),
            (
                r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd77::/125"}"#,
                &["IPv6Network fd77::/125"],
            ),
            (r#"{"Network":"10.77.0.0/16","EnableIPv4":false}"#, &["EnableIPv4 false"]),
            (r#"{"Network":"10.77.0.0/16","EnableIPv4":"yes"}"#, &["EnableIPv4 \"yes\""]),
            (r#"{"Network":"10.77.0.0/16","Backend":"vxlan"}"#, &["Backend \"vxlan\""]),
            (r#"{"Network":"10.77.0.0/16","Backend":{"Type":1}}"#, &["Backend.Type 1"]),
            (r#"{"Network":"10.77.0.0/16"} {}"#, &["JSON"]),
        ] {
            let message = message(text);
            for want in wants {
                assert!(message.contains(want), "{text} -> {message}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in any::<String>()) {
            let _ = NetworkConfig::parse(&text);
        }

        #[test]
        fn accepted_ranges_are_sound(
            addr in any::<u32>(),
            prefix_len in 0..=32u8,
            len in proptest::option::of(0..40u64),
            min in proptest::option::of(any::<u32>()),
            max in proptest::option::of(any::<u32>()),
        ) {
            let mut text = format!(r#"{{"Network":"{}/{prefix_len}""#, Ipv4Addr::from_bits(addr));
            for (name, value) in [("SubnetMin", min), ("SubnetMax", max)] {
                // Half the time inside the network and aligned, or hardly any would pass.
                if let Some(value) = value {
                    let host = value.checked_shr(prefix_len.into()).unwrap_or(0);
                    let value = if value % 2 == 0 { (addr & !(u32::MAX.checked_shr(prefix_len.into()).unwrap_or(0)) | host) & !0xff } else { value };
                    text.extend([",\"", name, "\":\"", &Ipv4Addr::from_bits(value).to_string(), "\""]);
                }
            }
            if let Some(len) = len {
                text.extend([",\"SubnetLen\":", &len.to_string()]);
            }
            text.push('}');
            if let Ok(NetworkConfig { ipv4: Some(v4), .. }) = NetworkConfig::parse(&text) {
                for bound in [v4.subnet_min, v4.subnet_max] {
                    let subnet = Ipv4Net::new(bound, v4.subnet_len).expect("length in range");
                    prop_assert_eq!(subnet, subnet.trunc());
                    prop_assert!(v4.network.contains(&subnet), "{} {}", v4.network, subnet);
                }
                prop_assert!(v4.subnet_min <= v4.subnet_max);
                prop_assert!(v4.subnet_len <= 30 && v4.subnet_len >= v4.network.prefix_len() + 2);
            }
        }
    }
}
