//! Nodes of the API server as leases, so that stories need not know which store they run on.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use super::{ANNOTATIONS, KubeStub, annotate, plain_node};
use crate::{lease_store::LeaseStore, node::Node};

impl LeaseStore for KubeStub {
    fn flags(&self) -> Vec<String> {
        vec![
            "--kube-subnet-mgr".to_owned(),
            format!("--kubeconfig-file={}", self.kubeconfig().display()),
            format!("--net-config-path={}", self.net_conf().display()),
        ]
    }

    fn put_config(&self, text: &str) -> Result<()> {
        let config: Value = serde_json::from_str(text).unwrap_or_default();
        self.dual_stack.set(config["EnableIPv6"] == true);
        let path = self.net_conf();
        let new = path.with_file_name(".net-conf.json");
        fs::write(&new, text)?;
        Ok(fs::rename(new, path)?)
    }

    fn register(&self, node: &Node) -> Result<()> {
        if self.get(node.name()).is_ok() {
            return Ok(());
        }
        let n = self.next_subnet.get();
        self.next_subnet.set(n + 1);
        let (v4, v6) = (format!("10.77.{n}.0/24"), format!("fd77:0:0:{n:x}::/64"));
        let mut cidrs = vec![v4.as_str()];
        if self.dual_stack.get() {
            // Either family may stand first.
            cidrs.insert(usize::from(n.is_multiple_of(2)), &v6);
        }
        self.put(plain_node(node.name(), &cidrs))
    }

    fn put_lease(&self, key: &str, lease: &Value) -> Result<()> {
        let (v4, v6) = match key.split_once('&') {
            Some((v4, v6)) => (v4, Some(v6)),
            None => (key, None),
        };
        let cidr = |part: &str| {
            part.rsplit_once('-').map(|(net, len)| format!("{net}/{len}")).context("no length")
        };
        let mut cidrs = vec![cidr(v4)?];
        cidrs.extend(v6.map(cidr).transpose()?);
        let cidrs: Vec<&str> = cidrs.iter().map(String::as_str).collect();
        let mut node = plain_node(&node_of(key), &cidrs);
        let mut annotations = json!({"kube-subnet-manager": "true"});
        for (field, suffix) in FIELDS {
            match &lease[field] {
                Value::Null => {}
                Value::String(text) => annotations[suffix] = json!(text),
                data => annotations[suffix] = json!(data.to_string()),
            }
        }
        let named: Map<String, Value> = annotations
            .as_object()
            .into_iter()
            .flatten()
            .map(|(suffix, value)| (format!("{ANNOTATIONS}{suffix}"), value.clone()))
            .collect();
        annotate(&mut node, &Value::Object(named));
        self.put(node)
    }

    fn delete_lease(&self, key: &str) -> Result<()> {
        self.delete(&node_of(key))
    }

    fn leases(&self) -> Result<BTreeMap<String, Value>> {
        let names = self.shared.lock().objects.names();
        let mut leases = BTreeMap::new();
        for name in names {
            let node = self.get(&name)?;
            let annotation = |suffix: &str| {
                node["metadata"]["annotations"][format!("{ANNOTATIONS}{suffix}")].as_str()
            };
            if annotation("kube-subnet-manager") != Some("true") {
                continue;
            }
            let mut cidrs: Vec<_> =
                node["spec"]["podCIDRs"].as_array().into_iter().flatten().collect();
            cidrs.sort_by_key(|cidr| cidr.as_str().is_some_and(|text| text.contains(':')));
            let parts = cidrs.into_iter().filter_map(Value::as_str).map(|c| c.replace('/', "-"));
            let mut lease = json!({"PublicIP": "0.0.0.0", "PublicIPv6": null});
            for (field, suffix) in FIELDS {
                let Some(text) = annotation(suffix) else { continue };
                lease[field] = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
            }
            leases.insert(parts.collect::<Vec<_>>().join("&"), lease);
        }
        Ok(leases)
    }
}

/// Fields of a lease and the annotations that stand for them.
const FIELDS: [(&str, &str); 5] = [
    ("PublicIP", "public-ip"),
    ("PublicIPv6", "public-ipv6"),
    ("BackendType", "backend-type"),
    ("BackendData", "backend-data"),
    ("BackendV6Data", "backend-v6-data"),
];

/// The name of the node that stands for a lease put by hand.
pub fn node_of(key: &str) -> String {
    let name: String =
        key.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    format!("lease-{}", name.trim_end_matches('-'))
}
