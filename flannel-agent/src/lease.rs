//! Leases: a node's subnets and the attributes it publishes with them.
//!
//! The JSON form is a wire contract with real flannel (specification §4.1): it
//! is stored in etcd, in the local directory, and piecewise in node annotations.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::go_json::{self, GoJsonError, Object};

/// The subnets one node holds, one per address family at most.
///
/// This is the identity of a lease: everything the agent keeps about a peer is
/// keyed by it, so a peer that changes its address or MAC leaves nothing behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subnets {
    /// IPv4 subnet, host bits zero.
    pub v4: Option<Ipv4Net>,
    /// IPv6 subnet, host bits zero.
    pub v6: Option<Ipv6Net>,
}

impl fmt::Display for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.v4, self.v6) {
            (Some(v4), Some(v6)) => write!(f, "{v4} and {v6}"),
            (Some(v4), None) => v4.fmt(f),
            (None, Some(v6)) => v6.fmt(f),
            (None, None) => f.write_str("no subnet"),
        }
    }
}

impl Subnets {
    /// The name of the lease in a store: `10.5.1.0-24`, or `10.5.1.0-24&fd00:5:1::-64` with both
    /// families. Without IPv4 only the IPv6 half is left, which no etcd store accepts as a key.
    pub fn key(&self) -> String {
        match (self.v4, self.v6) {
            (Some(v4), Some(v6)) => format!("{}&{}", key_part(v4), key_part(v6)),
            (Some(v4), None) => key_part(v4),
            (None, Some(v6)) => key_part(v6),
            (None, None) => String::new(),
        }
    }

    /// Reads a key of the store; `None` if it does not name a subnet.
    ///
    /// Accepts what flannel's own pattern accepts, which is bound to the end of the key only and
    /// wants an IPv4 half: anything may stand before the address, /32 and /128 are refused.
    pub fn parse_key(key: &str) -> Option<Self> {
        let name = key.rsplit('/').next().unwrap_or(key);
        let (v4, v6) = match name.rsplit_once('&') {
            Some((v4, v6)) => (v4, Some(parse_v6_key_part(v6)?)),
            None => (name, None),
        };
        let (addr, len) = v4.rsplit_once('-')?;
        let len = go_json::parse_prefix_len(len).filter(|len| *len < 32)?;
        // The last four numbers; what stands before the first one's digits is not looked at.
        let start = addr.rmatch_indices('.').nth(2).map_or(0, |(dot, _)| {
            let head = addr.get(..dot).unwrap_or_default();
            head.trim_end_matches(|c: char| c.is_ascii_digit()).len()
        });
        let v4 = Ipv4Net::new(addr.get(start..)?.parse().ok()?, len).ok()?.trunc();
        Some(Self { v4: Some(v4), v6 })
    }

    /// Whether the two have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let v4 = self.v4.zip(other.v4).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a));
        v4 || self.v6.zip(other.v6).is_some_and(|(a, b)| a.contains(&b) || b.contains(&a))
    }
}

/// One address family's half of a key: the subnet with its slash turned into a hyphen.
fn key_part(net: impl fmt::Display) -> String {
    net.to_string().replace('/', "-")
}

/// The IPv6 half of a key: lower case, length below 128.
pub(crate) fn parse_v6_key_part(part: &str) -> Option<Ipv6Net> {
    let (addr, len) = part.rsplit_once('-')?;
    if !addr.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b':')) {
        return None;
    }
    let len = go_json::parse_prefix_len(len).filter(|len| *len < 128)?;
    Some(Ipv6Net::new(addr.parse().ok()?, len).ok()?.trunc())
}

/// JSON text kept as it came, in compact form: backend data is opaque to
/// everything but the backend that wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RawJson(Box<str>);

impl RawJson {
    /// Wraps text that is known to be valid compact JSON.
    pub fn from_compact(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// Reads any JSON value and drops the white space between its tokens.
    pub fn parse(text: &str) -> Result<Self, GoJsonError> {
        Ok(Self(go_json::compact(text)?.into()))
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a node publishes about itself with its lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseAttributes {
    /// Outer IPv4 address peers send to; `None` is written as `0.0.0.0`.
    pub public_ip: Option<Ipv4Addr>,
    /// Outer IPv6 address peers send to.
    pub public_ipv6: Option<Ipv6Addr>,
    /// `vxlan`, `host-gw`, …; empty for `udp` and `alloc`.
    pub backend_type: String,
    /// The backend's IPv4 data, for vxlan `{"VNI":1,"VtepMAC":"…"}`.
    pub backend_data: Option<RawJson>,
    /// The backend's IPv6 data.
    pub backend_v6_data: Option<RawJson>,
    /// Whether an operator has declared the node to be behind a NAT, so that it may send from
    /// other addresses than the public ones. Only the Kubernetes store can tell; no lease in JSON
    /// has it.
    pub behind_nat: bool,
}

/// Why a lease value cannot be used: not JSON, or a field that does not hold what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a lease: {0}")]
pub struct LeaseFormatError(#[from] GoJsonError);

impl LeaseAttributes {
    /// Reads the value of a lease (specification §4.1). Keys may come in any case and order,
    /// unknown ones and missing ones are fine. Bytes that are not UTF-8 read as U+FFFD.
    pub fn from_json(value: impl AsRef<[u8]>) -> Result<Self, LeaseFormatError> {
        let object = Object::parse(&String::from_utf8_lossy(value.as_ref()))?;
        Self::from_object(&object)
    }

    /// Reads the fields of a lease out of an object that may hold others besides.
    pub(crate) fn from_object(object: &Object) -> Result<Self, LeaseFormatError> {
        let raw = |field| {
            object.get_raw(field).filter(|raw| *raw != "null").map(RawJson::parse).transpose()
        };
        Ok(Self {
            public_ip: object.get_ipv4("PublicIP")?.filter(|ip| !ip.is_unspecified()),
            public_ipv6: object.get_ipv6("PublicIPv6")?,
            backend_type: object.get_str("BackendType")?.unwrap_or_default(),
            backend_data: raw("BackendData")?,
            backend_v6_data: raw("BackendV6Data")?,
            behind_nat: false,
        })
    }

    /// The value of a lease, byte for byte as flannel writes it.
    pub fn to_json(&self) -> String {
        let mut out = String::with_capacity(128);
        out.push_str("{\"PublicIP\":\"");
        out.push_str(&self.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED).to_string());
        out.push_str("\",\"PublicIPv6\":");
        match self.public_ipv6 {
            Some(ip) => go_json::push_string(&mut out, &ip.to_string()),
            None => out.push_str("null"),
        }
        if !self.backend_type.is_empty() {
            out.push_str(",\"BackendType\":");
            go_json::push_string(&mut out, &self.backend_type);
        }
        for (field, data) in
            [("BackendData", &self.backend_data), ("BackendV6Data", &self.backend_v6_data)]
        {
            if let Some(data) = data {
                out.extend([",\"", field, "\":"]);
                go_json::push_embedded(&mut out, data.as_str());
            }
        }
        out.push('}');
        out
    }
}

/// A subnet and the attributes of the node that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// What is leased.
    pub subnets: Subnets,
    /// Who holds it and how to reach it.
    pub attributes: LeaseAttributes,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn subnets(v4: &str, v6: Option<&str>) -> Subnets {
        Subnets { v4: v4.parse().ok(), v6: v6.and_then(|v6| v6.parse().ok()) }
    }

    #[test]
    fn keys_read_and_write_back() {
        for (key, want) in [
            ("10.5.1.0-24", subnets("10.5.1.0/24", None)),
            ("10.12.13.0-24&fd00:12:13::-56", subnets("10.12.13.0/24", Some("fd00:12:13::/56"))),
            ("0.0.0.0-0", subnets("0.0.0.0/0", None)),
            ("10.77.8.4-31&::-127", subnets("10.77.8.4/31", Some("::/127"))),
        ] {
            assert_eq!(Subnets::parse_key(key), Some(want), "{key}");
            assert_eq!(want.key(), key);
        }
    }

    #[test]
    fn keys_are_masked_and_bound_to_the_end_only() {
        for key in [
            "10.5.1.7-24",
            "/coreos.com/network/subnets/10.5.1.0-24",
            "old10.5.1.0-24",
            "9.10.5.1.0-24",
            "a-b&c10.5.1.0-24",
            "10.5.1.0-024",
        ] {
            let want = (key != "a-b&c10.5.1.0-24").then(|| subnets("10.5.1.0/24", None));
            assert_eq!(Subnets::parse_key(key), want, "{key}");
        }
        assert_eq!(
            Subnets::parse_key("10.5.1.0-24&fd00:0:0:1::9-64"),
            Some(subnets("10.5.1.0/24", Some("fd00:0:0:1::/64")))
        );
    }

    #[test]
    fn malformed_keys_are_refused() {
        for key in [
            "",
            "foo",
            "10.12.13.0",
            "10.12.13-24",
            "10.12.13.256-24",
            "10.12.13.0-32",
            "10.12.13.0-24x",
            "10.12.13.0-",
            "-24",
            "fd00:12:13::-56",
            "&fd00:12:13::-56",
            "10.12.13.0-24&",
            "10.12.13.0-24&fd00:12:13::",
            "10.12.13.0-24&fd00::12::-56",
            "10.12.13.0-24&fd00:12:13::-128",
            "10.12.13.0-24&FD00:12:13::-56",
            "10.12.13.0-24&fd00:12:13::-56x",
            "010.12.13.0-24",
            "10x12.13.0-24",
            "10.12.13.0-+4",
        ] {
            assert_eq!(Subnets::parse_key(key), None, "{key}");
        }
    }

    #[test]
    fn overlap_is_seen_across_lengths_and_families() {
        let a = subnets("10.5.1.0/24", Some("fd00::/64"));
        assert!(a.overlaps(&subnets("10.5.0.0/16", None)));
        assert!(a.overlaps(&subnets("10.5.1.128/25", None)));
        assert!(a.overlaps(&subnets("10.9.1.0/24", Some("fd00::/56"))));
        assert!(!a.overlaps(&subnets("10.5.2.0/24", Some("fd01::/64"))));
    }

    #[test]
    fn writes_what_flannel_writes() {
        let vxlan = LeaseAttributes {
            public_ip: Some(Ipv4Addr::new(192, 168, 64, 3)),
            backend_type: "vxlan".to_owned(),
            backend_data: RawJson::parse("{ \"VNI\": 1, \"VtepMAC\": \"c6:d2:32:6f:8f:44\" }").ok(),
            ..LeaseAttributes::default()
        };
        assert_eq!(
            vxlan.to_json(),
            r#"{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}}"#
        );
        assert_eq!(
            LeaseAttributes::default().to_json(),
            r#"{"PublicIP":"0.0.0.0","PublicIPv6":null}"#
        );
        let both = LeaseAttributes {
            public_ipv6: "2001:db8::5".parse().ok(),
            backend_type: "extension".to_owned(),
            backend_data: RawJson::parse(r#""a<b>&c""#).ok(),
            backend_v6_data: RawJson::parse("{}").ok(),
            ..vxlan
        };
        assert_eq!(
            both.to_json(),
            r#"{"PublicIP":"192.168.64.3","PublicIPv6":"2001:db8::5","BackendType":"extension","BackendData":"a\u003cb\u003e\u0026c","BackendV6Data":{}}"#
        );
    }

    #[test]
    fn reads_what_others_may_write() {
        let read = |text: &str| LeaseAttributes::from_json(text);
        assert_eq!(
            read(r#"{"PublicIP":"192.0.2.11"}"#).map(|a| a.public_ip),
            Ok(Some(Ipv4Addr::new(192, 0, 2, 11)))
        );
        assert_eq!(read("{}"), Ok(LeaseAttributes::default()));
        assert_eq!(
            read(r#"{"PublicIP":"0.0.0.0","BackendType":null,"BackendData":null,"X":[]}"#),
            Ok(LeaseAttributes::default())
        );
        let a = read(r#"{"backendtype":"vxlan","BACKENDDATA":{"VNI": 7},"publicIP":"1.2.3.4"}"#);
        assert_eq!(
            a.map(|a| (a.backend_type, a.backend_data.map(|d| d.as_str().to_owned()))),
            Ok(("vxlan".to_owned(), Some("{\"VNI\":7}".to_owned())))
        );
        for bad in [
            "",
            "null",
            "[]",
            "{",
            r#"{"PublicIP":null}"#,
            r#"{"PublicIP":""}"#,
            r#"{"PublicIP":7}"#,
            r#"{"PublicIP":"fd00::1"}"#,
            r#"{"PublicIPv6":"1.2.3.4"}"#,
            r#"{"PublicIP":"1.2.3.4"} x"#,
            r#"{"BackendType":1}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    /// The pattern flannel itself matches keys with, written for the `regex` crate.
    fn flannels_pattern(key: &str) -> Option<Subnets> {
        let pattern = r"([0-9]+\.[0-9]+.[0-9]+.[0-9]+)-([0-9]+)(?:&([a-f0-9:]+)-([0-9]+))?$";
        let m = regex::Regex::new(pattern).ok()?.captures(key)?;
        // Address by address: the parser of whole networks lets leading zeros pass, Go does not.
        let addr: Ipv4Addr = m.get(1)?.as_str().parse().ok()?;
        let len = m.get(2)?.as_str().parse::<u8>().ok()?;
        let v4 = Ipv4Net::new(addr, len).ok().filter(|n| n.prefix_len() < 32)?;
        let v6 = match (m.get(3), m.get(4)) {
            (Some(addr), Some(len)) => {
                let addr: Ipv6Addr = addr.as_str().parse().ok()?;
                let len = len.as_str().parse::<u8>().ok()?;
                Some(Ipv6Net::new(addr, len).ok().filter(|n| n.prefix_len() < 128)?.trunc())
            }
            _ => None,
        };
        Some(Subnets { v4: Some(v4.trunc()), v6 })
    }

    pub(crate) fn any_subnets() -> impl Strategy<Value = Subnets> {
        let v4 = (any::<u32>(), 0..32u8)
            .prop_map(|(a, l)| Ipv4Net::new(a.into(), l).expect("short enough").trunc());
        let v6 = (any::<u128>(), 0..128u8)
            .prop_map(|(a, l)| Ipv6Net::new(a.into(), l).expect("short enough").trunc());
        (v4, proptest::option::of(v6)).prop_map(|(v4, v6)| Subnets { v4: Some(v4), v6 })
    }

    proptest! {
        #[test]
        fn keys_round_trip(subnets in any_subnets()) {
            // Rust prints some addresses with an embedded IPv4 part, as Go prints mapped ones.
            prop_assume!(!subnets.v6.is_some_and(|v6| v6.to_string().contains('.')));
            prop_assert_eq!(Subnets::parse_key(&subnets.key()), Some(subnets));
        }

        #[test]
        fn keys_match_flannels_pattern(key in "(x|[0-9.]{0,4})?[0-9]{1,3}\\.[0-9]{1,3}[.x&-]?[0-9]{1,3}[.x&-][0-9]{1,3}-[0-9]{0,3}(&[a-f0-9:g]{0,7}-[0-9]{1,3}x?)?") {
            prop_assert_eq!(Subnets::parse_key(&key), flannels_pattern(&key), "{}", key);
        }

        #[test]
        fn values_round_trip(
            public_ip in proptest::option::of(1..=u32::MAX),
            public_ipv6 in proptest::option::of(any::<u128>()),
            backend_type in any::<String>(),
            text in any::<String>(),
        ) {
            let mut data = String::new();
            go_json::push_string(&mut data, &text);
            let attributes = LeaseAttributes {
                public_ip: public_ip.map(Into::into),
                public_ipv6: public_ipv6.map(Into::into),
                backend_type,
                backend_data: Some(RawJson::parse(&format!("{{\"k\": {data}}}")).expect("JSON")),
                backend_v6_data: None,
                behind_nat: false,
            };
            let read = LeaseAttributes::from_json(attributes.to_json()).expect("our own writing");
            // Go's escapes stay in the raw data, so compare what is written, and the rest as is.
            prop_assert_eq!(read.to_json(), attributes.to_json());
            prop_assert_eq!(read.public_ip, attributes.public_ip);
            prop_assert_eq!(read.public_ipv6, attributes.public_ipv6);
            prop_assert_eq!(read.backend_type, attributes.backend_type);
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in any::<Vec<u8>>(), key in any::<String>()) {
            let _ = LeaseAttributes::from_json(bytes);
            let _ = Subnets::parse_key(&key);
        }
    }
}
