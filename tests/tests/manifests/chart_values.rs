//! Every value of the chart is there for something, whatever it is changed to the objects are
//! sound, and a values file of flannel's own chart is understood.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Deployment, chart, read};

/// All values by their paths, `flannel.image.tag`. Lists and empty objects count as one value.
fn leaves(value: &Value, path: &str, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(value, &path, found);
            }
        }
        leaf => found.push((path.to_owned(), leaf.clone())),
    }
}

/// Another value that could stand there.
fn another(path: &str, value: &Value) -> Value {
    match (path, value) {
        ("flannel.cniConf", _) => json!(
            "{\"name\": \"other\", \"cniVersion\": \"1.0.0\", \"plugins\": [{\"type\": \"flannel\"}]}"
        ),
        ("flannel.GBP" | "flannel.directRouting", _) => json!(true),
        ("flannel.macPrefix" | "flannel.psk" | "flannel.tunnelMode", _) => json!("x"),
        ("flannel.tolerations", _) => json!([]),
        ("flannel.args", _) => json!(["--kube-subnet-mgr", "--iface=eth1"]),
        (_, Value::Null) => json!(7),
        (_, Value::Bool(yes)) => json!(!yes),
        (_, Value::Number(number)) => json!(number.as_u64().unwrap_or(0) + 1),
        (_, Value::String(text)) => json!(format!("{text}9")),
        (_, Value::Array(_)) => json!([{"name": "x"}]),
        (_, Value::Object(_)) => json!({"x": "y"}),
    }
}

#[test]
fn every_value_changes_something_and_leaves_sound_objects() -> Result<()> {
    let values: Value = serde_saphyr::from_str(&read("chart/flannel/values.yaml")?)?;
    let mut found = Vec::new();
    leaves(&values, "", &mut found);
    ensure!(found.len() > 30, "{} values only", found.len());
    for (path, value) in found.iter().filter(|(path, _)| path != "netpol.enabled") {
        let mut differs = false;
        for backend in ["vxlan", "wireguard", "udp"] {
            let backend = ("flannel.backend", json!(backend));
            let before = chart(std::slice::from_ref(&backend))?;
            let changed = chart(&[backend, (path, another(path, value))])?;
            Deployment::read(&changed).with_context(|| format!("{path}:\n{changed}"))?;
            differs |= before != changed;
        }
        ensure!(differs, "{path} has no effect");
    }
    Ok(())
}

/// The names of flannel's chart (its values.yaml, 0.28). `flannel_cni` and `netpol` have no
/// counterpart here: docs/kubernetes.md says so.
const FLANNELS: [&str; 27] = [
    "global.imagePullSecrets",
    "podCidr",
    "podCidrv6",
    "flannel.image.repository",
    "flannel.image.tag",
    "flannel.cniBinDir",
    "flannel.cniConfDir",
    "flannel.skipCNIConfigInstallation",
    "flannel.enableNFTables",
    "flannel.args",
    "flannel.backend",
    "flannel.backendPort",
    "flannel.backendPortv6",
    "flannel.mtu",
    "flannel.vni",
    "flannel.GBP",
    "flannel.directRouting",
    "flannel.macPrefix",
    "flannel.psk",
    "flannel.tunnelMode",
    "flannel.keepaliveInterval",
    "flannel.cniConf",
    "flannel.resources",
    "flannel.healthz.port",
    "flannel.tolerations",
    "flannel.nodeSelector",
    "netpol.enabled",
];

#[test]
fn flannels_value_names_are_ours() -> Result<()> {
    let values: Value = serde_saphyr::from_str(&read("chart/flannel/values.yaml")?)?;
    for name in FLANNELS {
        let pointer = format!("/{}", name.replace('.', "/"));
        ensure!(values.pointer(&pointer).is_some(), "no value {name}");
    }
    // A port of 0 is flannel's way to say "the usual one".
    let usual = Deployment::read(&chart(&[("flannel.backendPort", json!(0))])?)?;
    ensure!(usual.net_conf()?["Backend"] == json!({"Type": "vxlan"}), "{}", usual.net_conf()?);
    // Its probes are merged into ours, whatever they hold.
    let slow = Deployment::read(&chart(&[(
        "flannel.healthz.readinessProbe",
        json!({"periodSeconds": 3, "failureThreshold": 9}),
    )])?)?;
    let probe = slow.container("kube-flannel")?.readiness_probe.clone().context("no probe")?;
    ensure!((probe.period_seconds, probe.failure_threshold) == (Some(3), Some(9)), "{probe:?}");
    Ok(())
}
