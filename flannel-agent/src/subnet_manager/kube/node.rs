//! The few fields of a Node that flannel needs. A Node of a real cluster has 10 KiB and more,
//! mostly names of images; all of that is skipped while parsing and never kept.

use std::{borrow::Cow, fmt, ops::Deref};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::{config::NetworkConfig, go_json, lease::Subnets};

/// A Node, borrowed from the text it was read from.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Node<'a> {
    #[serde(borrow, default)]
    pub metadata: Metadata<'a>,
    #[serde(default)]
    pub spec: Spec,
    #[serde(default)]
    pub status: Status,
}

/// `metadata`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata<'a> {
    #[serde(borrow)]
    pub name: Text<'a>,
    #[serde(borrow)]
    pub resource_version: Text<'a>,
    /// RFC 3339 in UTC and whole seconds: sorts as text. `null` in a bookmark.
    #[serde(borrow)]
    pub creation_timestamp: Text<'a>,
    #[serde(borrow)]
    pub annotations: Annotations<'a>,
}

/// `spec`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Spec {
    #[serde(rename = "podCIDR", default, deserialize_with = "null_is_default")]
    pub pod_cidr: String,
    #[serde(rename = "podCIDRs", default, deserialize_with = "null_is_default")]
    pub pod_cidrs: Vec<String>,
}

/// `status`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    #[serde(deserialize_with = "null_is_default")]
    pub conditions: Vec<Condition>,
}

/// One of `status.conditions`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub reason: String,
}

/// A string, borrowed where it has no escapes. `null` is the empty one.
#[derive(Debug, Default)]
pub(super) struct Text<'a>(Cow<'a, str>);

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowing;
        impl<'de> Visitor<'de> for Borrowing {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Text::default())
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_any(Borrowing)
    }
}

/// Annotations in the order of the text.
#[derive(Debug, Default)]
pub(super) struct Annotations<'a>(pub Vec<(Text<'a>, Text<'a>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Annotations<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Annotations<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("annotations")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(Annotations::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Annotations(pairs))
            }
        }
        deserializer.deserialize_any(Pairs)
    }
}

/// Reads `null` as what a missing field is.
fn null_is_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A page of a list of nodes.
#[derive(Debug, Deserialize)]
pub(super) struct NodeList<'a> {
    #[serde(default)]
    pub metadata: ListMetadata,
    #[serde(borrow, default)]
    pub items: Vec<Node<'a>>,
}

/// `metadata` of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListMetadata {
    pub resource_version: String,
    /// Says where the next page begins; empty on the last.
    #[serde(rename = "continue")]
    pub next: String,
}

/// One line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct WatchEvent<'a> {
    #[serde(rename = "type", borrow)]
    pub kind: Cow<'a, str>,
    /// A Node, or with kind `ERROR` a Status.
    #[serde(borrow)]
    pub object: &'a RawValue,
}

/// The error document of the API.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiStatus {
    pub code: u16,
    pub reason: String,
    pub message: String,
}

/// A Pod, as far as it tells where it runs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub spec: PodSpec,
}

/// `spec` of a Pod.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PodSpec {
    pub node_name: String,
}

impl Spec {
    /// All CIDRs: `podCIDRs`, or the one of a cluster that knows no list.
    pub(super) fn cidrs(&self) -> &[String] {
        if !self.pod_cidrs.is_empty() {
            &self.pod_cidrs
        } else if self.pod_cidr.is_empty() {
            &[]
        } else {
            std::slice::from_ref(&self.pod_cidr)
        }
    }

    /// The first CIDR of each family, in whatever order they stand. The error says which CIDR
    /// cannot be read, or that there are too many.
    pub(super) fn subnets(&self) -> Result<Subnets, String> {
        let cidrs = self.cidrs();
        if cidrs.len() > 2 {
            return Err(format!(
                "spec.podCIDRs has {} entries ({}); a node has two at most, one per address family",
                cidrs.len(),
                cidrs.join(", ")
            ));
        }
        let mut subnets = Subnets::default();
        for cidr in cidrs {
            if let Some(net) = go_json::parse_ipv4_net(cidr) {
                subnets.v4.get_or_insert(net);
            } else if let Some(net) = go_json::parse_ipv6_net(cidr) {
                subnets.v6.get_or_insert(net);
            } else {
                return Err(format!("podCIDR \"{cidr}\" is no subnet"));
            }
        }
        Ok(subnets)
    }
}

/// What a node with this `spec` leases under a configuration; the error names the node and says
/// what is wrong and who can mend it.
pub(super) fn own_subnets(
    name: &str,
    spec: &Spec,
    config: &NetworkConfig,
) -> Result<Subnets, String> {
    let wrong = |why: String| format!("node {name}: {why}");
    if spec.cidrs().is_empty() {
        return Err(wrong(
            "pod cidr not assigned (spec.podCIDR is empty): the controller manager assigns it if it \
             runs with --allocate-node-cidrs and --cluster-cidr (kubeadm init --pod-network-cidr)"
                .to_owned(),
        ));
    }
    let Subnets { v4, v6 } = spec.subnets().map_err(wrong)?;
    let v4 = match (config.ipv4, v4) {
        (None, _) => None,
        (Some(_), None) => return Err(wrong(no_family("IPv4", spec))),
        (Some(settings), Some(net)) => Some(inside(net, settings.network).map_err(wrong)?),
    };
    let v6 = match (config.ipv6, v6) {
        (None, _) => None,
        (Some(_), None) => return Err(wrong(no_family("IPv6", spec))),
        (Some(settings), Some(net)) => Some(inside_v6(net, settings.network).map_err(wrong)?),
    };
    Ok(Subnets { v4, v6 })
}

fn no_family(family: &str, spec: &Spec) -> String {
    format!(
        "{family} is enabled in net-conf.json, but there is no {family} podCIDR among {}",
        spec.cidrs().join(", ")
    )
}

fn inside(net: Ipv4Net, network: Ipv4Net) -> Result<Ipv4Net, String> {
    if net == network {
        Err(all_of_it("", &net.to_string()))
    } else if network.contains(&net) {
        Ok(net)
    } else {
        Err(outside("", &net.to_string(), &network.to_string()))
    }
}

fn inside_v6(net: Ipv6Net, network: Ipv6Net) -> Result<Ipv6Net, String> {
    if net == network {
        Err(all_of_it("IPv6", &net.to_string()))
    } else if network.contains(&net) {
        Ok(net)
    } else {
        Err(outside("IPv6", &net.to_string(), &network.to_string()))
    }
}

fn all_of_it(prefix: &str, net: &str) -> String {
    format!(
        "podCIDR {net} is all of {prefix}Network {net} of net-conf.json: no subnet is left for \
         another node; make {prefix}Network the cluster's CIDR"
    )
}

fn outside(prefix: &str, net: &str, network: &str) -> String {
    format!(
        "podCIDR {net} is not inside {prefix}Network {network} of net-conf.json: make \
         {prefix}Network the same as the controller manager's --cluster-cidr"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> NetworkConfig {
        NetworkConfig::parse_for_kube(text).expect("good")
    }

    fn spec(cidrs: &[&str]) -> Spec {
        Spec { pod_cidr: String::new(), pod_cidrs: cidrs.iter().map(|c| (*c).to_owned()).collect() }
    }

    #[test]
    fn what_is_not_needed_is_skipped_and_what_is_missing_is_empty() {
        let node: Node<'_> = serde_json::from_str(
            r#"{"kind":"Node","metadata":{"name":"a\u006cder","labels":{"x":"y"},"annotations":{"k\n":"v\"","l":"w"},
                "managedFields":[{"fieldsV1":{"f:x":{}}}]},"spec":{"podCIDR":"10.77.1.0/24","taints":null},
                "status":{"images":[{"names":["x"],"sizeBytes":1}],"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":null}]}}"#,
        )
        .expect("a node");
        assert_eq!(&*node.metadata.name, "alder");
        assert_eq!(node.metadata.annotations.0.len(), 2);
        assert_eq!(&*node.metadata.annotations.0[0].1, "v\"");
        assert_eq!(node.spec.cidrs(), ["10.77.1.0/24"]);
        assert_eq!(node.status.conditions[0].kind, "Ready");
        let bookmark: Node<'_> = serde_json::from_str(
            r#"{"kind":"Node","metadata":{"resourceVersion":"77","creationTimestamp":null},"spec":{},"status":{"conditions":null}}"#,
        )
        .expect("a node");
        assert_eq!(&*bookmark.metadata.resource_version, "77");
        let empty: Node<'_> =
            serde_json::from_str(r#"{"metadata":{"annotations":null}}"#).expect("a node");
        assert!(empty.metadata.annotations.0.is_empty() && empty.spec.cidrs().is_empty());
    }

    #[test]
    fn families_may_come_in_any_order() {
        let both = config(
            r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","SubnetLen":99}"#,
        );
        let want = Subnets { v4: "10.77.1.0/24".parse().ok(), v6: "fd77:0:0:1::/64".parse().ok() };
        for cidrs in [["10.77.1.0/24", "fd77:0:0:1::/64"], ["fd77:0:0:1::/64", "10.77.1.0/24"]] {
            assert_eq!(own_subnets("alder", &spec(&cidrs), &both), Ok(want));
        }
        let one = config(r#"{"Network":"10.77.0.0/16"}"#);
        let got = own_subnets("alder", &spec(&["fd77:0:0:1::/64", "10.77.1.9/24"]), &one);
        assert_eq!(got, Ok(Subnets { v6: None, ..want }));
    }

    #[test]
    fn what_cannot_be_leased_names_node_and_value() {
        let config = config(r#"{"Network":"10.77.0.0/16"}"#);
        for (cidrs, wants) in [
            (&[][..], &["pod cidr not assigned"][..]),
            (&["10.77.1.0/24", "10.77.2.0/24", "10.77.3.0/24"], &["3 entries", "10.77.3.0/24"]),
            (&["10.177.1.0/24"], &["10.177.1.0/24", "Network 10.77.0.0/16"]),
            (&["10.77.0.0/16"], &["podCIDR 10.77.0.0/16", "all of Network 10.77.0.0/16"]),
            (&["10.0.0.0/8"], &["10.0.0.0/8", "not inside"]),
            (&["fd77:0:0:1::/64"], &["IPv4 is enabled", "fd77:0:0:1::/64"]),
            (&["10.77.1.0"], &["\"10.77.1.0\""]),
        ] {
            let error = own_subnets("alder", &spec(cidrs), &config).expect_err("bad");
            for want in wants.iter().chain(&["node alder"]) {
                assert!(error.contains(want), "{want}: {error}");
            }
        }
    }
}
