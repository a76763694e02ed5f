//! What is in `deploy/` is what Kubernetes takes: every object is read into the API's own type and
//! has to come out of it with every field, so that a misspelt one is found. The chart is rendered
//! with its values as they are and with those that operators change.

mod chart_values;
mod template;

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, Namespace, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

fn deploy(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(path)
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(deploy(path)).with_context(|| format!("deploy/{path}"))
}

/// The objects of a file with several.
fn objects(text: &str) -> Result<Vec<Value>> {
    format!("\n{text}")
        .split("\n---")
        .filter(|document| !document.trim().is_empty())
        .map(|document| {
            serde_saphyr::from_str(document).with_context(|| format!("not YAML:\n{document}"))
        })
        .collect()
}

/// Reads an object into its type, which has to know every field.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> Result<T> {
    let read: T = serde_json::from_value(object.clone())?;
    let written = serde_json::to_value(&read)?;
    let mut lost = Vec::new();
    compare(object, &written, "", &mut lost);
    ensure!(lost.is_empty(), "unknown to the type: {}", lost.join(", "));
    Ok(read)
}

fn compare(wanted: &Value, got: &Value, path: &str, lost: &mut Vec<String>) {
    match (wanted, got) {
        (Value::Object(wanted), Value::Object(got)) => {
            for (key, value) in wanted {
                let path = format!("{path}.{key}");
                match got.get(key) {
                    Some(other) => compare(value, other, &path, lost),
                    None => lost.push(path),
                }
            }
        }
        (Value::Array(wanted), Value::Array(got)) if wanted.len() == got.len() => {
            for (n, (value, other)) in wanted.iter().zip(got).enumerate() {
                compare(value, other, &format!("{path}[{n}]"), lost);
            }
        }
        (wanted, got) if wanted == got => {}
        _ => lost.push(format!("{path} ({wanted} became {got})")),
    }
}

/// A whole deployment, every object of the right type.
#[derive(Debug)]
struct Deployment {
    config: ConfigMap,
    set: DaemonSet,
    role: ClusterRole,
    kinds: Vec<String>,
}

impl Deployment {
    fn read(text: &str) -> Result<Self> {
        let (mut config, mut set, mut role) = (None, None, None);
        let (mut kinds, mut account, mut bound) = (Vec::new(), None, None);
        for object in objects(text)? {
            let kind = object["kind"].as_str().context("an object without kind")?.to_owned();
            let of = |part: Result<()>| part.with_context(|| format!("in the {kind}"));
            match &*kind {
                "Namespace" => of(typed::<Namespace>(&object).map(drop))?,
                "ServiceAccount" => of(typed(&object).map(|a: ServiceAccount| account = Some(a)))?,
                "ClusterRole" => of(typed(&object).map(|r| role = Some(r)))?,
                "ClusterRoleBinding" => {
                    of(typed(&object).map(|b: ClusterRoleBinding| bound = Some(b)))?;
                }
                "ConfigMap" => of(typed(&object).map(|c| config = Some(c)))?,
                "DaemonSet" => of(typed(&object).map(|s| set = Some(s)))?,
                other => bail!("a {other} is not expected here"),
            }
            kinds.push(kind);
        }
        let deployment = Self {
            config: config.context("no ConfigMap")?,
            set: set.context("no DaemonSet")?,
            role: role.context("no ClusterRole")?,
            kinds,
        };
        let account = account.context("no ServiceAccount")?.metadata;
        let bound = bound.context("no ClusterRoleBinding")?;
        let subject = &bound.subjects.as_ref().context("no subject")?[0];
        ensure!(
            bound.role_ref.name == "flannel" && account.name.as_deref() == Some(&*subject.name),
            "{bound:?}"
        );
        ensure!(account.namespace == subject.namespace, "{bound:?}");
        deployment.check()?;
        Ok(deployment)
    }

    fn pod(&self) -> Result<&k8s_openapi::api::core::v1::PodSpec> {
        self.set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).context("no pod")
    }

    fn container(&self, name: &str) -> Result<&Container> {
        let pod = self.pod()?;
        let all = pod.init_containers.iter().flatten().chain(&pod.containers);
        all.into_iter().find(|c| c.name == name).with_context(|| format!("no container {name}"))
    }

    fn net_conf(&self) -> Result<Value> {
        Ok(serde_json::from_str(self.data("net-conf.json")?)?)
    }

    fn data(&self, key: &str) -> Result<&str> {
        let text = self.config.data.as_ref().and_then(|data| data.get(key));
        text.map(String::as_str).with_context(|| format!("no {key}"))
    }

    /// What has to hold for every deployment.
    fn check(&self) -> Result<()> {
        // What the agent may do, and no more.
        let rules: BTreeSet<String> = self
            .role
            .rules
            .iter()
            .flatten()
            .flat_map(|rule| {
                let verbs = rule.verbs.iter();
                verbs.flat_map(|verb| {
                    rule.resources.iter().flatten().map(move |of| format!("{verb} {of}"))
                })
            })
            .collect();
        let wanted = ["get nodes", "list nodes", "patch nodes/status", "watch nodes"];
        ensure!(rules == wanted.map(str::to_owned).into(), "{rules:?}");

        let spec = self.set.spec.as_ref().context("no spec")?;
        let labels = spec.template.metadata.as_ref().and_then(|meta| meta.labels.as_ref());
        for (key, value) in spec.selector.match_labels.iter().flatten() {
            ensure!(labels.and_then(|l| l.get(key)) == Some(value), "{key} is not on the pod");
        }
        let pod = self.pod()?;
        ensure!(pod.host_network == Some(true), "no host network");
        ensure!(pod.priority_class_name.as_deref() == Some("system-node-critical"));
        // Every mount has its volume and every volume its mount, or it would not start, or lie.
        let all = || pod.init_containers.iter().flatten().chain(&pod.containers);
        let mounts: BTreeSet<&str> =
            all().flat_map(|c| c.volume_mounts.iter().flatten()).map(|m| &*m.name).collect();
        let volumes: BTreeSet<&str> = pod.volumes.iter().flatten().map(|v| &*v.name).collect();
        ensure!(mounts.is_subset(&volumes), "mounts {mounts:?}, volumes {volumes:?}");
        let files = self.config.data.iter().flatten().map(|(key, _)| &**key).collect::<Vec<_>>();
        ensure!(files == ["cni-conf.json", "net-conf.json"], "{files:?}");
        let conflist: Value = serde_json::from_str(self.data("cni-conf.json")?)?;
        ensure!(conflist["plugins"][0]["type"] == "flannel", "{conflist}");
        for probe in ["liveness", "readiness"] {
            let container = self.container("kube-flannel")?;
            let probe = if probe == "liveness" {
                &container.liveness_probe
            } else {
                &container.readiness_probe
            };
            let Some(get) = probe.as_ref().and_then(|p| p.http_get.as_ref()) else { continue };
            let named = container.ports.iter().flatten().any(|port| port.name.is_some());
            ensure!(named && get.path.is_some(), "a probe of a port that is not there");
        }
        Ok(())
    }
}

fn words(container: &Container) -> Vec<&str> {
    let parts = [&container.command, &container.args];
    parts.into_iter().flat_map(|part| part.iter().flatten()).map(String::as_str).collect()
}

#[test]
fn the_manifest_is_flannels_with_our_image() -> Result<()> {
    let deployment = Deployment::read(&read("kube-flannel.yml")?)?;
    let kinds = [
        "Namespace",
        "ClusterRole",
        "ClusterRoleBinding",
        "ServiceAccount",
        "ConfigMap",
        "DaemonSet",
    ];
    ensure!(deployment.kinds == kinds, "{:?}", deployment.kinds);
    ensure!(deployment.set.metadata.name.as_deref() == Some("kube-flannel-ds"));
    ensure!(deployment.config.metadata.name.as_deref() == Some("kube-flannel-cfg"));
    ensure!(deployment.net_conf()?["Backend"]["Type"] == "vxlan");
    let main = deployment.container("kube-flannel")?;
    let wanted = ["/opt/bin/flanneld", "--ip-masq", "--kube-subnet-mgr", "--healthz-port=8081"];
    ensure!(words(main) == wanted, "{:?}", words(main));
    let init = words(deployment.container("install-cni")?);
    ensure!(init.starts_with(&["/opt/bin/flannel-agent", "install-cni"]), "{init:?}");
    Ok(())
}

/// kubectl itself puts the patch on the manifest's `DaemonSet`; no server is asked.
#[test]
fn the_patch_takes_privileges_away() -> Result<()> {
    let manifest = read("kube-flannel.yml")?;
    let set = objects(&manifest)?.into_iter().find(|object| object["kind"] == "DaemonSet");
    let file = std::env::temp_dir().join(format!("flannel-daemonset-{}.json", std::process::id()));
    fs::write(&file, set.context("no DaemonSet")?.to_string())?;
    let output = Command::new("kubectl")
        .args(["patch", "--local", "--output=json", "--filename"])
        .arg(&file)
        .arg("--patch-file")
        .arg(deploy("unprivileged.yaml"))
        .output();
    fs::remove_file(&file)?;
    let output = output.context("cannot run kubectl")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let patched: DaemonSet = serde_json::from_slice(&output.stdout)?;
    let privileged = Deployment::read(&manifest)?;
    let before = privileged.container("kube-flannel")?.security_context.clone();
    ensure!(before.context("none")?.privileged == Some(true), "the simple way is another");
    let unprivileged = Deployment { set: patched, ..privileged };
    unprivileged.check()?;
    let security = unprivileged.container("kube-flannel")?.security_context.clone();
    let security = security.context("no security context")?;
    let capabilities = security.capabilities.context("no capabilities")?;
    ensure!(security.privileged == Some(false) && capabilities.drop == Some(vec!["ALL".into()]));
    let added = capabilities.add.unwrap_or_default();
    ensure!(added == ["NET_ADMIN", "NET_RAW", "BPF", "PERFMON"], "{added:?}");
    Ok(())
}

/// kubectl reads every object, of the manifest and of the chart, and the `DaemonSet` into its type,
/// as it swaps the images.
#[test]
fn kubectl_takes_every_object() -> Result<()> {
    let manifest = read("kube-flannel.yml")?;
    for (text, count) in [(manifest.clone(), 6), (chart(&[])?, 5)] {
        let names = kubectl(&text, &["annotate", "checked=yes", "--output=name"])?;
        ensure!(names.lines().count() == count, "{names}");
        let set = objects(&text)?.into_iter().find(|object| object["kind"] == "DaemonSet");
        let set = set.context("no DaemonSet")?.to_string();
        let image = "registry.example/flannel-agent:9";
        let words = ["set", "image", &format!("*={image}"), "--output=json"];
        let swapped: DaemonSet = serde_json::from_str(&kubectl(&set, &words)?)?;
        let swapped = Deployment { set: swapped, ..Deployment::read(&text)? };
        for name in ["kube-flannel", "install-cni"] {
            ensure!(swapped.container(name)?.image.as_deref() == Some(image), "{name}");
        }
    }
    let refused = kubectl(
        &objects(&manifest)?
            .pop()
            .context("no object")?
            .to_string()
            .replace("\"hostNetwork\":true", "\"hostNetwork\":17"),
        &["set", "image", "*=x", "--output=name"],
    );
    ensure!(refused.is_err(), "kubectl reads anything");
    Ok(())
}

/// A kubectl command on objects that no server is asked about.
fn kubectl(text: &str, words: &[&str]) -> Result<String> {
    let mut child = Command::new("kubectl")
        .args(words)
        .args(["--local", "--filename=-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run kubectl")?;
    child.stdin.take().context("no pipe")?.write_all(text.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The chart with these values changed, `("flannel.vni", 7)`.
fn chart(changes: &[(&str, Value)]) -> Result<String> {
    let mut values: Value = serde_saphyr::from_str(&read("chart/flannel/values.yaml")?)?;
    for (path, value) in changes {
        let pointer = format!("/{}", path.replace('.', "/"));
        *values.pointer_mut(&pointer).with_context(|| format!("no value {path}"))? = value.clone();
    }
    let root = json!({"Values": values, "Release": {"Namespace": "kube-flannel"}});
    let mut texts = Vec::new();
    for name in ["rbac.yaml", "config.yaml", "daemonset.yaml"] {
        let template = read(&format!("chart/flannel/templates/{name}"))?;
        texts.push(template::render(&template, &root).with_context(|| name.to_owned())?);
    }
    Ok(texts.join("\n---\n"))
}

#[test]
fn the_chart_gives_what_the_manifest_gives() -> Result<()> {
    let manifest = Deployment::read(&read("kube-flannel.yml")?)?;
    let chart = Deployment::read(&chart(&[])?)?;
    ensure!(chart.net_conf()? == manifest.net_conf()?);
    ensure!(chart.data("cni-conf.json")?.trim() == manifest.data("cni-conf.json")?.trim());
    ensure!(chart.role == manifest.role);
    ensure!(
        chart.pod()?.volumes == manifest.pod()?.volumes
            && chart.pod()?.init_containers == manifest.pod()?.init_containers
            && chart.pod()?.affinity == manifest.pod()?.affinity
    );
    let (ours, theirs) = (chart.container("kube-flannel")?, manifest.container("kube-flannel")?);
    let sorted = |container: &Container| {
        let mut args = container.args.clone().unwrap_or_default();
        args.sort();
        args
    };
    ensure!(sorted(ours) == sorted(theirs), "{:?}", ours.args);
    let rest = Container { args: None, ..ours.clone() };
    ensure!(rest == Container { args: None, ..theirs.clone() }, "{rest:#?}");
    Ok(())
}

#[test]
fn the_charts_values_do_what_they_say() -> Result<()> {
    let v6 = Deployment::read(&chart(&[
        ("podCidr", json!("")),
        ("podCidrv6", json!("fd00:10::/56")),
        ("flannel.vni", json!(7)),
        ("flannel.backendPort", json!(4789)),
        ("flannel.directRouting", json!(true)),
        ("flannel.GBP", json!(true)),
        ("flannel.mtu", json!(1400)),
        ("flannel.macPrefix", json!("0E-2A")),
        ("flannel.enableNFTables", json!(true)),
    ])?)?;
    let wanted = json!({
        "EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fd00:10::/56",
        "EnableNFTables": true,
        "Backend": {"Type": "vxlan", "VNI": 7, "Port": 4789, "DirectRouting": true, "GBP": true,
            "MTU": 1400, "MacPrefix": "0E-2A"},
    });
    ensure!(v6.net_conf()? == wanted, "{}", v6.net_conf()?);

    let wireguard = Deployment::read(&chart(&[
        ("flannel.backend", json!("wireguard")),
        ("flannel.backendPort", json!(51900)),
        ("flannel.backendPortv6", json!(51901)),
        ("flannel.psk", json!("a \"key\"")),
        ("flannel.tunnelMode", json!("separate")),
        ("flannel.keepaliveInterval", json!(25)),
    ])?)?;
    let wanted = json!({"Type": "wireguard", "ListenPort": 51900, "ListenPortV6": 51901,
        "PSK": "a \"key\"", "Mode": "separate", "PersistentKeepaliveInterval": 25});
    ensure!(wireguard.net_conf()?["Backend"] == wanted, "{}", wireguard.net_conf()?);

    let bare = Deployment::read(&chart(&[
        ("flannel.healthz.port", json!(0)),
        ("flannel.skipCNIConfigInstallation", json!(true)),
        ("flannel.privileged", json!(false)),
        ("flannel.nodeSelector", json!({"role": "edge"})),
        ("flannel.cniBinDir", json!("/usr/libexec/cni")),
        ("flannel.args", json!(["--kube-subnet-mgr", "--iface=eth1"])),
        ("global.imagePullSecrets", json!([{"name": "a"}])),
    ])?)?;
    let main = bare.container("kube-flannel")?;
    ensure!(words(main) == ["/opt/bin/flanneld", "--kube-subnet-mgr", "--iface=eth1"]);
    ensure!(main.ports.is_none() && main.liveness_probe.is_none());
    ensure!(main.security_context.as_ref().and_then(|s| s.privileged) == Some(false));
    ensure!(words(bare.container("install-cni")?).last() == Some(&"--conf-file="));
    let pod = bare.pod()?;
    ensure!(pod.node_selector.as_ref().is_some_and(|s| s["role"] == "edge"));
    ensure!(pod.image_pull_secrets.as_ref().is_some_and(|s| s[0].name == "a"));

    let refused = chart(&[("netpol.enabled", json!(true))]);
    let refused = format!("{:#}", refused.err().context("netpol is ignored")?);
    ensure!(refused.contains("network policy"), "{refused}");
    Ok(())
}

#[test]
fn a_misspelt_field_is_found() -> Result<()> {
    let manifest = read("kube-flannel.yml")?;
    for (right, wrong) in [("hostNetwork:", "hostNetwrk:"), ("periodSeconds:", "periodSecond:")] {
        let refused = Deployment::read(&manifest.replace(right, wrong));
        let refused = format!("{:#}", refused.err().with_context(|| wrong.to_owned())?);
        ensure!(refused.contains(wrong.trim_end_matches(':')), "{refused}");
    }
    Ok(())
}
