//! A stand-in for the Kubernetes API server: nodes and pods over HTTPS with a bearer token, as
//! far as a network agent uses them, and faults on demand.
//!
//! It follows the documented API: lists in pages from one version, watches with bookmarks that
//! resume from a version or end in 410, strategic merge patches, the split of `nodes` and
//! `nodes/status`, RBAC refusals. Where it knows less than a real server it refuses; it never lets
//! pass what a real one would not. It runs in the story's own process.

mod access;
mod certificates;
mod http;
mod leases;
mod objects;
mod server;
mod status;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fs,
    net::TcpListener,
    path::PathBuf,
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use self::{
    access::Access,
    certificates::Certificates,
    objects::Objects,
    server::{Shared, State},
};
pub use self::{leases::node_of, objects::Patch, server::Fault};
use crate::{
    base64,
    lab::{Lab, Segment},
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
            access: Access {
                tokens: BTreeSet::from([FIRST_TOKEN.to_owned()]),
                denied: BTreeSet::new(),
            },
            requests: Vec::new(),
            generation: 0,
            rounds: 0,
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
    pub fn kubeconfig(&self) -> PathBuf {
        self.host.dir().join("kubeconfig")
    }

    /// `net-conf.json`.
    pub fn net_conf(&self) -> PathBuf {
        self.host.dir().join("net-conf/net-conf.json")
    }

    /// Where the token is kept.
    pub fn token_file(&self) -> PathBuf {
        self.host.dir().join("token")
    }

    /// A token that is good now.
    pub fn token(&self) -> String {
        self.shared.lock().access.tokens.first().cloned().unwrap_or_default()
    }

    /// `https://ADDRESS:PORT`.
    pub fn url(&self) -> String {
        format!("https://{}:{PORT}", self.host.v4())
    }

    /// The authority that signed the server's certificate, PEM.
    pub fn authority(&self) -> &str {
        &self.certificates.authority
    }

    /// A certificate that stands for the service account, and its key, PEM.
    pub fn client_certificate(&self) -> Result<(String, String)> {
        self.certificates.client()
    }

    fn write_token(&self, token: &str) -> Result<()> {
        let new = self.host.dir().join(".token");
        fs::write(&new, token)?;
        Ok(fs::rename(new, self.token_file())?)
    }

    fn write_kubeconfig(&self) -> Result<()> {
        let authority = base64::encode(self.authority().as_bytes());
        let cluster = json!({"server": self.url(), "certificate-authority-data": authority});
        let user = json!({"tokenFile": self.token_file()});
        fs::create_dir_all(self.host.dir().join("net-conf"))?;
        Ok(fs::write(self.kubeconfig(), kubeconfig(&cluster, &user).to_string())?)
    }

    /// Makes a new token the only good one; its file has it only if `written`.
    pub fn rotate_token(&self, written: bool) -> Result<String> {
        self.tokens_made.set(self.tokens_made.get() + 1);
        let token = format!("token-of-the-lab-{}", self.tokens_made.get());
        self.shared.lock().access.tokens = BTreeSet::from([token.clone()]);
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
            state.access.denied.insert(rule);
        } else {
            state.access.denied.remove(&rule);
        }
    }

    /// Breaks all watches in mid-air.
    pub fn drop_watches(&self) {
        self.shared.lock().generation += 1;
        self.shared.notify();
    }

    /// Ends all watches as a server does every few minutes, whatever time was asked for.
    pub fn finish_watches(&self) {
        self.shared.lock().rounds += 1;
        self.shared.notify();
    }

    /// Sends bookmarks that far apart to watches that begin from now on.
    pub fn set_bookmarks(&self, apart: Duration) {
        self.shared.lock().bookmarks = apart;
    }

    /// How many watches are open.
    pub fn watches(&self) -> usize {
        self.shared.lock().watches
    }

    /// Puts the data back to a version, as from a backup: nodes put since are gone, and versions
    /// count from there.
    pub fn restore(&self, backup: &Backup) {
        self.shared.lock().objects.restore(&backup.0);
        self.drop_watches();
    }

    /// All data as they are.
    pub fn back_up(&self) -> Backup {
        Backup(self.shared.lock().objects.clone())
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
        self.shared.lock().objects.pods.insert(format!("{namespace}/{name}"), pod);
    }
}

/// See [`KubeStub::back_up`].
#[derive(Debug)]
pub struct Backup(Objects);

impl Drop for KubeStub {
    fn drop(&mut self) {
        // Threads end with the process at the latest.
        let _ = self.stop();
    }
}

/// A kubeconfig file with one cluster and one user.
pub fn kubeconfig(cluster: &Value, user: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": "flannel", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "flannel"}}],
    })
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
