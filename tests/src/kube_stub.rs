//! A stand-in for the Kubernetes API server: nodes and pods over HTTPS with a bearer token, as
//! far as a network agent uses them, and faults on demand.
//!
//! It follows the documented API: lists in pages from one version, watches with bookmarks that
//! resume from a version or end in 410, strategic merge patches, the split of `nodes` and
//! `nodes/status`, RBAC refusals. It runs in the story's own process.

mod certificates;
mod objects;
mod server;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fs,
    net::TcpListener,
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use self::{
    certificates::Certificates,
    objects::Objects,
    server::{Shared, State},
};
pub use self::{objects::Patch, server::Fault};
use crate::{
    base64,
    lab::{Lab, Segment},
    lease_store::LeaseStore,
    node::Node,
};

/// What flannel's annotations begin with unless it is told otherwise.
pub const ANNOTATIONS: &str = "flannel.alpha.coreos.com/";

const PORT: u16 = 6443;
const FIRST_TOKEN: &str = "token-of-the-lab-1";

/// The API server, at `https://192.0.2.6:6443`.
#[derive(Debug)]
pub struct KubeStub {
    host: Node,
    shared: Arc<Shared>,
    certificates: Certificates,
    acceptor: RefCell<Option<JoinHandle<Result<()>>>>,
    tokens_made: Cell<u32>,
    next_subnet: Cell<u8>,
    /// Whether new nodes get an IPv6 podCIDR too.
    dual_stack: Cell<bool>,
}

impl KubeStub {
    /// Starts an empty one.
    pub fn new(lab: &Lab) -> Result<Self> {
        let host = lab.node_at("apiserver", Segment::A, 6)?;
        let addresses = [host.v4().parse()?, host.v6().parse()?];
        let state = State {
            objects: Objects::starting_at(1000),
            fault: None,
            tokens: BTreeSet::from([FIRST_TOKEN.to_owned()]),
            denied: BTreeSet::new(),
            requests: Vec::new(),
            generation: 0,
            bookmarks: Duration::from_secs(5),
            stopping: false,
            watches: 0,
        };
        let stub = Self {
            certificates: Certificates::new(&addresses)?,
            host,
            shared: Arc::new(Shared::new(state)),
            acceptor: RefCell::default(),
            tokens_made: Cell::new(1),
            next_subnet: Cell::new(1),
            dual_stack: Cell::new(false),
        };
        stub.write_token(FIRST_TOKEN)?;
        stub.write_kubeconfig()?;
        stub.start()?;
        Ok(stub)
    }

    /// Serves again after [`stop`](Self::stop); what it holds stays.
    pub fn start(&self) -> Result<()> {
        ensure!(self.acceptor.borrow().is_none(), "the stub is running");
        let address = format!("{}:{PORT}", self.host.v4());
        let listener = self.host.ns().within(|| {
            TcpListener::bind(&address).with_context(|| format!("cannot listen at {address}"))
        })?;
        listener.set_nonblocking(true)?;
        self.shared.lock().stopping = false;
        let (shared, tls) = (Arc::clone(&self.shared), Arc::clone(&self.certificates.config));
        let acceptor = self.host.ns().spawn(move || {
            shared.serve(&listener, &tls);
            Ok(())
        })?;
        *self.acceptor.borrow_mut() = Some(acceptor);
        Ok(())
    }

    /// Refuses connections and cuts those there are, as a server does that has ended.
    pub fn stop(&self) -> Result<()> {
        self.shared.lock().stopping = true;
        self.shared.notify();
        self.shared.cut();
        match self.acceptor.borrow_mut().take() {
            Some(acceptor) => acceptor.join().map_err(|_| anyhow::anyhow!("the stub panicked"))?,
            None => Ok(()),
        }
    }

    /// The host it runs on.
    pub fn host(&self) -> &Node {
        &self.host
    }

    /// The kubeconfig file.
    pub fn kubeconfig(&self) -> std::path::PathBuf {
        self.host.dir().join("kubeconfig")
    }

    /// `net-conf.json`.
    pub fn net_conf(&self) -> std::path::PathBuf {
        self.host.dir().join("net-conf/net-conf.json")
    }

    fn token_file(&self) -> std::path::PathBuf {
        self.host.dir().join("token")
    }

    fn write_token(&self, token: &str) -> Result<()> {
        let new = self.host.dir().join(".token");
        fs::write(&new, token)?;
        Ok(fs::rename(new, self.token_file())?)
    }

    fn write_kubeconfig(&self) -> Result<()> {
        let authority = base64::encode(self.certificates.authority.as_bytes());
        let server = format!("https://{}:{PORT}", self.host.v4());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": {
                "server": server, "certificate-authority-data": authority}}],
            "users": [{"name": "flannel", "user": {"tokenFile": self.token_file()}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "flannel"}}],
        });
        fs::create_dir_all(self.host.dir().join("net-conf"))?;
        Ok(fs::write(self.kubeconfig(), config.to_string())?)
    }

    /// Makes a new token the only good one; its file has it only if `written`.
    pub fn rotate_token(&self, written: bool) -> Result<String> {
        self.tokens_made.set(self.tokens_made.get() + 1);
        let token = format!("token-of-the-lab-{}", self.tokens_made.get());
        self.shared.lock().tokens = BTreeSet::from([token.clone()]);
        if written {
            self.write_token(&token)?;
        }
        Ok(token)
    }

    /// Puts a token into its file.
    pub fn deliver_token(&self, token: &str) -> Result<()> {
        self.write_token(token)
    }

    /// Begins or ends a fault.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.shared.lock().fault = fault;
        self.shared.notify();
    }

    /// Denies a verb on a resource, or allows it again.
    pub fn deny(&self, verb: &str, resource: &str, denied: bool) {
        let rule = (verb.to_owned(), resource.to_owned());
        let mut state = self.shared.lock();
        if denied {
            state.denied.insert(rule);
        } else {
            state.denied.remove(&rule);
        }
    }

    /// Breaks all watches in mid-air.
    pub fn drop_watches(&self) {
        self.shared.lock().generation += 1;
        self.shared.notify();
    }

    /// How many watches are open.
    pub fn watches(&self) -> usize {
        self.shared.lock().watches
    }

    /// Forgets the history and breaks all watches: whoever resumes is told 410.
    pub fn compact(&self) {
        self.shared.lock().objects.compact();
        self.drop_watches();
    }

    /// Sends the latest events once more, newest first: duplicates, and out of order.
    pub fn replay(&self, count: usize) {
        self.shared.lock().objects.replay(count);
        self.shared.notify();
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.shared.lock().requests.clone()
    }

    /// All patches so far.
    pub fn patches(&self) -> Vec<Patch> {
        self.shared.lock().objects.patches.clone()
    }

    /// A node as it is.
    pub fn get(&self, name: &str) -> Result<Value> {
        self.shared.lock().objects.node_value(name)
    }

    /// Creates or replaces a node.
    pub fn put(&self, node: Value) -> Result<()> {
        self.shared.lock().objects.put(node)?;
        self.shared.notify();
        Ok(())
    }

    /// Creates many nodes.
    pub fn put_all(&self, nodes: impl IntoIterator<Item = Value>) -> Result<()> {
        let mut state = self.shared.lock();
        nodes.into_iter().try_for_each(|node| state.objects.put(node))?;
        drop(state);
        self.shared.notify();
        Ok(())
    }

    /// Changes a node.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) -> Result<()> {
        let mut node = self.get(name)?;
        change(&mut node);
        self.put(node)
    }

    /// Deletes a node.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.shared.lock().objects.delete(name)?;
        self.shared.notify();
        Ok(())
    }

    /// Creates a pod that runs on a node.
    pub fn put_pod(&self, namespace: &str, name: &str, node: &str) {
        let pod = json!({
            "kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": namespace},
            "spec": {"nodeName": node},
        });
        self.shared.lock().objects.pods.insert(name.to_owned(), pod);
    }
}

impl Drop for KubeStub {
    fn drop(&mut self) {
        // Threads end with the process at the latest.
        let _ = self.stop();
    }
}

/// A node as kubelet registers it, with these podCIDRs.
pub fn plain_node(name: &str, cidrs: &[&str]) -> Value {
    let mut spec = Map::new();
    if let Some(first) = cidrs.first() {
        spec.insert("podCIDR".into(), json!(first));
        spec.insert("podCIDRs".into(), json!(cidrs));
    }
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": format!("uid-{name}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
            "annotations": {"example.org/keep": "as it is"},
        },
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]},
    })
}

/// Annotations as real flannel's vxlan backend leaves them on a node.
pub fn flannel_annotations(ip: &str, mac: &str) -> Value {
    json!({
        "flannel.alpha.coreos.com/backend-data": format!("{{\"VNI\":1,\"VtepMAC\":\"{mac}\"}}"),
        "flannel.alpha.coreos.com/backend-type": "vxlan",
        "flannel.alpha.coreos.com/kube-subnet-manager": "true",
        "flannel.alpha.coreos.com/public-ip": ip,
    })
}

/// Adds members to a node's annotations.
pub fn annotate(node: &mut Value, annotations: &Value) {
    if let Some(new) = annotations.as_object() {
        for (name, value) in new {
            node["metadata"]["annotations"][name] = value.clone();
        }
    }
}

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
