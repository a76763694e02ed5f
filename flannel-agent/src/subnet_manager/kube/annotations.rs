//! The node annotations by which flannel's nodes know each other (specification §5.3).

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use regex::Regex;

use super::node::Node;
use crate::{
    lease::{LeaseAttributes, RawJson},
    subnet_manager::{NodePublicAddresses, StoreError},
};

/// Full names of the annotations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AnnotationNames {
    prefix: String,
}

/// What follows the prefix.
pub(super) const MANAGED: &str = "kube-subnet-manager";
const BACKEND_TYPE: &str = "backend-type";
const PUBLIC_IP: Family =
    Family { v6: false, data: "backend-data", ip: "public-ip", overwrite: "public-ip-overwrite" };
const PUBLIC_IPV6: Family = Family {
    v6: true,
    data: "backend-v6-data",
    ip: "public-ipv6",
    overwrite: "public-ipv6-overwrite",
};
const NODE_PUBLIC_IP: &str = "node-public-ip";
const NODE_PUBLIC_IPV6: &str = "node-public-ipv6";

/// The annotations of one address family.
struct Family {
    v6: bool,
    data: &'static str,
    ip: &'static str,
    overwrite: &'static str,
}

impl AnnotationNames {
    /// Checks and completes what `--kube-annotation-prefix` says.
    pub(super) fn new(given: &str) -> Result<Self, StoreError> {
        let wrong = |why: &str| {
            StoreError::Fatal(format!(
                "-kube-annotation-prefix {given}: {why}; give a domain in lower case, a name after \
                 a slash is optional: flannel.alpha.coreos.com or example.org/flannel"
            ))
        };
        if given.matches('/').count() > 1 {
            return Err(wrong("there is more than one slash"));
        }
        let mut prefix = given.to_owned();
        if !prefix.contains('/') {
            prefix.push('/');
        }
        if !prefix.ends_with(['/', '-']) {
            prefix.push('-');
        }
        let form = Regex::new("(?:[a-z0-9_-]+\\.)+[a-z0-9_-]+/(?:[a-z0-9_-]+-)?$")
            .map_err(|error| StoreError::Fatal(error.to_string()))?;
        if !form.is_match(&prefix) {
            return Err(wrong("that is no prefix of an annotation"));
        }
        Ok(Self { prefix })
    }

    /// The whole name.
    pub(super) fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.prefix)
    }

    /// The value that a node carries, empty if none.
    pub(super) fn value<'n>(&self, node: &'n Node<'_>, suffix: &str) -> &'n str {
        let value = node.metadata.annotations.0.iter().find_map(|(name, value)| {
            (name.strip_prefix(self.prefix.as_str())? == suffix).then_some(&**value)
        });
        value.unwrap_or_default()
    }

    /// Whether flannel has a node in its care.
    pub(super) fn managed(&self, node: &Node<'_>) -> bool {
        self.value(node, MANAGED) == "true"
    }

    /// `node-public-ip` and `node-public-ipv6`.
    pub(super) fn node_public_addresses(&self, node: &Node<'_>) -> NodePublicAddresses {
        let text = |suffix| Some(self.value(node, suffix).to_owned()).filter(|v| !v.is_empty());
        NodePublicAddresses { v4: text(NODE_PUBLIC_IP), v6: text(NODE_PUBLIC_IPV6) }
    }

    /// What a node publishes, each family by itself: what cannot be read is left out and told.
    pub(super) fn read(&self, node: &Node<'_>) -> (LeaseAttributes, Vec<String>) {
        let mut problems = Vec::new();
        let mut data = |family: &Family| match self.value(node, family.data) {
            "" | "null" => Ok(None),
            text => RawJson::parse(text).map(Some).map_err(|error| {
                let name = self.name(family.data);
                problems.push(format!("annotation {name} ({}): {error}", shown(text)));
            }),
        };
        let (data_v4, data_v6) = (data(&PUBLIC_IP), data(&PUBLIC_IPV6));
        let mut attributes = LeaseAttributes {
            backend_type: self.value(node, BACKEND_TYPE).to_owned(),
            behind_nat: [PUBLIC_IP, PUBLIC_IPV6]
                .iter()
                .any(|family| !self.value(node, family.overwrite).is_empty()),
            ..LeaseAttributes::default()
        };
        if let Ok(data) = data_v4 {
            let text = self.value(node, PUBLIC_IP.ip);
            match text.parse::<Ipv4Addr>() {
                Ok(ip) if !ip.is_unspecified() => {
                    attributes.public_ip = Some(ip);
                    attributes.backend_data = data;
                }
                Ok(_) => {}
                Err(_) if text.is_empty() => {}
                Err(_) => problems.push(self.no_address(&PUBLIC_IP, "IPv4", text)),
            }
        }
        if let Ok(data) = data_v6 {
            let text = self.value(node, PUBLIC_IPV6.ip);
            match text.parse() {
                Ok(ip) => {
                    attributes.public_ipv6 = Some(ip);
                    attributes.backend_v6_data = data;
                }
                Err(_) if text.is_empty() => {}
                Err(_) => problems.push(self.no_address(&PUBLIC_IPV6, "IPv6", text)),
            }
        }
        (attributes, problems)
    }

    fn no_address(&self, family: &Family, kind: &str, text: &str) -> String {
        format!("annotation {} is \"{}\", no {kind} address", self.name(family.ip), shown(text))
    }

    /// The address that an operator wants to be told to peers, as text. Peers leave out a node
    /// whose address they cannot read, so an error is one that is none of its family.
    fn overwrite<'n>(
        &self,
        family: &Family,
        node: &'n Node<'_>,
    ) -> Result<Option<&'n str>, &'n str> {
        let text = self.value(node, family.overwrite);
        match text.parse::<IpAddr>() {
            _ if text.is_empty() => Ok(None),
            Ok(ip) if ip.is_ipv6() == family.v6 => Ok(Some(text)),
            _ => Err(text),
        }
    }

    /// What is wrong with the addresses that are to be told to peers instead of ours.
    pub(super) fn unusable_overwrites(&self, node: &Node<'_>) -> Vec<String> {
        let wrong = |family: &Family| {
            let text = self.overwrite(family, node).err()?;
            let (name, kind) =
                (self.name(family.overwrite), if family.v6 { "IPv6" } else { "IPv4" });
            Some(format!(
                "annotation {name} is \"{}\", no {kind} address: peers are told our own",
                shown(text)
            ))
        };
        [PUBLIC_IP, PUBLIC_IPV6].iter().filter_map(wrong).collect()
    }

    /// The annotations a node with these attributes carries. What an operator wants to be told
    /// to peers instead of our address is found on the node itself.
    pub(super) fn wanted(
        &self,
        own: &LeaseAttributes,
        node: &Node<'_>,
    ) -> BTreeMap<String, String> {
        let mut wanted = BTreeMap::new();
        let mut put = |suffix: &str, value: String| {
            wanted.insert(self.name(suffix), value);
        };
        let kind = own.backend_type.as_str();
        let address = |family: &Family, ours: String| match self.overwrite(family, node) {
            Ok(Some(address)) => address.to_owned(),
            Ok(None) | Err(_) => ours,
        };
        put(MANAGED, "true".to_owned());
        put(BACKEND_TYPE, kind.to_owned());
        if kind != "vxlan" || own.backend_data.is_some() {
            let ip = own.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED).to_string();
            put(PUBLIC_IP.data, data_text(kind, own.backend_data.as_ref()));
            put(PUBLIC_IP.ip, address(&PUBLIC_IP, ip));
        }
        let with_v6 = match kind {
            "vxlan" => own.backend_v6_data.is_some(),
            "wireguard" => own.backend_v6_data.is_some() && own.public_ipv6.is_some(),
            "host-gw" | "extension" => own.public_ipv6.is_some(),
            _ => false,
        };
        if with_v6 {
            let ip = own.public_ipv6.map_or_else(String::new, |ip| ip.to_string());
            put(PUBLIC_IPV6.data, data_text(kind, own.backend_v6_data.as_ref()));
            put(PUBLIC_IPV6.ip, address(&PUBLIC_IPV6, ip));
        }
        wanted
    }

    /// What of the wanted annotations a node does not carry yet.
    pub(super) fn missing(
        &self,
        own: &LeaseAttributes,
        node: &Node<'_>,
    ) -> BTreeMap<String, String> {
        let mut wanted = self.wanted(own, node);
        for (name, value) in &node.metadata.annotations.0 {
            if wanted.get(&**name).is_some_and(|wanted| *wanted == **value) {
                wanted.remove(&**name);
            }
        }
        wanted
    }
}

/// The text of backend data: what the backend gave, to the byte.
fn data_text(kind: &str, data: Option<&RawJson>) -> String {
    match data {
        Some(data) => data.as_str().to_owned(),
        // The extension backend without a command is the one that writes nothing at all.
        None if kind == "extension" => String::new(),
        None => "null".to_owned(),
    }
}

/// Foreign text, short enough for a log line.
fn shown(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> Node<'_> {
        serde_json::from_str(text).expect("a node")
    }

    fn names() -> AnnotationNames {
        AnnotationNames::new("flannel.alpha.coreos.com").expect("good")
    }

    #[test]
    fn prefixes_as_flannel_takes_them() {
        for (given, want) in [
            ("org.com", "org.com/backend-type"),
            ("org.com/", "org.com/backend-type"),
            ("org.com/9", "org.com/9-backend-type"),
            ("org.com/9-", "org.com/9-backend-type"),
            ("org.com/prefix", "org.com/prefix-backend-type"),
            ("flannel.alpha.coreos.com/prefix-", "flannel.alpha.coreos.com/prefix-backend-type"),
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/backend-type"),
        ] {
            let name = AnnotationNames::new(given).map(|names| names.name(BACKEND_TYPE));
            assert_eq!(name.expect(given), want);
        }
        for bad in ["org", "org/x", "org.COM", "org.com/PREFIX", "a.b/c/d", ""] {
            let error = AnnotationNames::new(bad).expect_err(bad).to_string();
            assert!(error.contains(&format!("prefix {bad}:")), "{error}");
        }
    }

    #[test]
    fn vxlan_annotations_are_flannels_to_the_byte() {
        let own = LeaseAttributes {
            public_ip: "192.0.2.11".parse().ok(),
            backend_type: "vxlan".to_owned(),
            backend_data: RawJson::parse(r#"{"VNI":1,"VtepMAC":"12:c6:65:89:b4:e3"}"#).ok(),
            ..LeaseAttributes::default()
        };
        let bare = node(r#"{"metadata":{"name":"alder"}}"#);
        let text = serde_json::to_string(&names().wanted(&own, &bare)).expect("JSON");
        assert_eq!(
            text,
            r#"{"flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"12:c6:65:89:b4:e3\"}","flannel.alpha.coreos.com/backend-type":"vxlan","flannel.alpha.coreos.com/kube-subnet-manager":"true","flannel.alpha.coreos.com/public-ip":"192.0.2.11"}"#
        );
        let nat = node(
            r#"{"metadata":{"annotations":{"flannel.alpha.coreos.com/public-ip-overwrite":"203.0.113.9","flannel.alpha.coreos.com/backend-type":"vxlan"}}}"#,
        );
        let missing = names().missing(&own, &nat);
        assert_eq!(missing["flannel.alpha.coreos.com/public-ip"], "203.0.113.9");
        assert!(!missing.contains_key("flannel.alpha.coreos.com/backend-type"));
    }

    #[test]
    fn other_backends_write_null_and_only_the_families_they_have() {
        let text = |kind: &str, v6: Option<&str>| {
            let own = LeaseAttributes {
                public_ipv6: v6.and_then(|ip| ip.parse().ok()),
                backend_type: kind.to_owned(),
                ..LeaseAttributes::default()
            };
            let wanted = names().wanted(&own, &node("{}"));
            let mut texts: Vec<_> = wanted
                .iter()
                .filter_map(|(name, value)| Some((name.rsplit('/').next()?, value.as_str())))
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            texts.retain(|text| text != "kube-subnet-manager=true");
            texts.join(" ")
        };
        assert_eq!(
            text("host-gw", None),
            "backend-data=null backend-type=host-gw public-ip=0.0.0.0"
        );
        assert_eq!(
            text("host-gw", Some("2001:db8::1")),
            "backend-data=null backend-type=host-gw backend-v6-data=null public-ip=0.0.0.0 public-ipv6=2001:db8::1"
        );
        assert_eq!(text("", Some("::1")), "backend-data=null backend-type= public-ip=0.0.0.0");
        assert_eq!(
            text("extension", None),
            "backend-data= backend-type=extension public-ip=0.0.0.0"
        );
        assert_eq!(text("vxlan", Some("::1")), "backend-type=vxlan");
    }

    #[test]
    fn an_address_set_by_hand_means_that_the_node_is_behind_a_nat() {
        for (annotation, behind_nat) in [
            (r#""flannel.alpha.coreos.com/public-ip-overwrite":"203.0.113.9""#, true),
            (r#""flannel.alpha.coreos.com/public-ipv6-overwrite":"2001:db8::9""#, true),
            (r#""flannel.alpha.coreos.com/public-ip-overwrite":"""#, false),
            (r#""flannel.alpha.coreos.com/public-ip":"203.0.113.9""#, false),
        ] {
            let text = format!(r#"{{"metadata":{{"annotations":{{{annotation}}}}}}}"#);
            let (read, _) = names().read(&node(&text));
            assert_eq!(read.behind_nat, behind_nat, "{annotation}");
        }
    }

    #[test]
    fn rubbish_in_one_family_leaves_the_other() {
        let node = node(
            r#"{"metadata":{"annotations":{
                "flannel.alpha.coreos.com/backend-type":"vxlan",
                "flannel.alpha.coreos.com/public-ip":"192.0.2.300",
                "flannel.alpha.coreos.com/backend-data":"{\"VNI\":1}",
                "flannel.alpha.coreos.com/public-ipv6":"2001:db8::7",
                "flannel.alpha.coreos.com/backend-v6-data":"{\"VNI\": 1}"}}}"#,
        );
        let (read, problems) = names().read(&node);
        assert_eq!((read.public_ip, read.backend_data), (None, None));
        assert_eq!(read.public_ipv6, "2001:db8::7".parse().ok());
        assert_eq!(read.backend_v6_data.as_ref().map(RawJson::as_str), Some("{\"VNI\":1}"));
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("192.0.2.300"), "{problems:?}");
    }
}
