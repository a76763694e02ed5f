//! Our own node: its subnets, our annotations on it, its condition.

use std::{
    ffi::OsString,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::time::sleep;
use tracing::{info, warn};

use super::{
    KubeSubnetManager,
    failure::{Call, Failure},
    node::{Condition, Node, Pod, own_subnets},
};
use crate::{
    lease::{Lease, LeaseAttributes, Subnets},
    subnet_manager::{GrantedLease, StoreError},
};

/// How old our node, as read last, may be to spare another read while starting.
const RECENT: Duration = Duration::from_millis(700);
/// Pauses between repairs of our annotations, if somebody keeps changing them.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// The same while the API server refuses or is away.
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// The condition's name, and the reason that flannel gives.
const NETWORK_UNAVAILABLE: &str = "NetworkUnavailable";
const FLANNEL_IS_UP: &str = "FlannelIsUp";

/// How we know which node is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeIdentity {
    /// By name.
    Name(String),
    /// It is the one that this pod runs on.
    Pod {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
}

impl NodeIdentity {
    /// Reads `NODE_NAME`, else `POD_NAMESPACE` and `POD_NAME`.
    ///
    /// # Errors
    /// [`StoreError::Fatal`] if they are missing or are no names.
    pub fn from_environment(env: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, StoreError> {
        let variable = |name: &str| -> Result<Option<String>, StoreError> {
            let value = env(name).map(|value| value.to_string_lossy().into_owned());
            match value.filter(|value| !value.is_empty()) {
                Some(value) if !is_object_name(&value) => Err(StoreError::Fatal(format!(
                    "{name}={value}: no name of a Kubernetes object"
                ))),
                value => Ok(value),
            }
        };
        if let Some(name) = variable("NODE_NAME")? {
            return Ok(Self::Name(name));
        }
        match (variable("POD_NAMESPACE")?, variable("POD_NAME")?) {
            (Some(namespace), Some(name)) => Ok(Self::Pod { namespace, name }),
            _ => Err(StoreError::Fatal(
                "which node is this? Set NODE_NAME (from spec.nodeName by the downward API), or \
                 POD_NAME and POD_NAMESPACE"
                    .to_owned(),
            )),
        }
    }
}

/// Names of nodes, pods and namespaces are DNS names (RFC 1123), so they need no escape in URLs.
fn is_object_name(text: &str) -> bool {
    text.len() <= 253
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b))
}

/// What we know of our node and want of it.
#[derive(Default)]
pub(super) struct OwnNode {
    /// The node as read last, and when.
    latest: Option<(Vec<u8>, Instant)>,
    /// The lease we hold while [`run`](super::SubnetManager::run) is at work.
    held: Option<Lease>,
    /// Whether the condition has been as wanted since we started.
    condition_set: bool,
    /// What was said of its annotations last.
    told: Vec<String>,
}

impl KubeSubnetManager {
    /// The name of our node, asked for if it is not known yet.
    pub(super) async fn node_name(&self) -> Result<&str, StoreError> {
        if let Some(name) = self.node_name.get() {
            return Ok(name);
        }
        let name = match &self.identity {
            NodeIdentity::Name(name) => name.clone(),
            NodeIdentity::Pod { namespace, name } => {
                let call = Call { verb: "get", resource: "pods", name };
                let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
                let pod: Pod = self.api.get(call, &path).await?;
                if !is_object_name(&pod.spec.node_name) || pod.spec.node_name.is_empty() {
                    return Err(StoreError::Unavailable(format!(
                        "pod {namespace}/{name} has no spec.nodeName: set NODE_NAME"
                    )));
                }
                pod.spec.node_name
            }
        };
        Ok(self.node_name.get_or_init(|| name))
    }

    /// Reads our node's text.
    pub(super) fn parse_own<'t>(&self, text: &'t [u8]) -> Result<Node<'t>, StoreError> {
        serde_json::from_slice(text).map_err(|error| {
            let name = self.node_name.get().map_or("", String::as_str);
            self.api.nonsense(Call { verb: "get", resource: "nodes", name }, &error).into()
        })
    }

    /// Our node, as read a moment ago or now.
    pub(super) async fn own_node_again(&self) -> Result<Vec<u8>, StoreError> {
        let recent = self
            .own
            .borrow()
            .latest
            .as_ref()
            .and_then(|(text, at)| (at.elapsed() < RECENT).then(|| text.clone()));
        match recent {
            Some(text) => Ok(text),
            None => self.own_node_now().await,
        }
    }

    async fn own_node_now(&self) -> Result<Vec<u8>, StoreError> {
        let name = self.node_name().await?;
        let call = Call { verb: "get", resource: "nodes", name };
        let text = self.api.get_bytes(call, &format!("/api/v1/nodes/{name}")).await?;
        self.parse_own(&text)?;
        self.own.borrow_mut().latest = Some((text.clone(), Instant::now()));
        Ok(text)
    }

    /// Leases what `podCIDRs` says and publishes how to reach it.
    pub(super) async fn claim_pod_cidrs(
        &self,
        own: &LeaseAttributes,
    ) -> Result<GrantedLease, StoreError> {
        let config = self.config_in_use()?;
        let name = self.node_name().await?;
        let text = self.own_node_again().await?;
        // The next try needs a fresh one.
        self.own.borrow_mut().latest = None;
        let node = self.parse_own(&text)?;
        let subnets = own_subnets(name, &node.spec, &config).map_err(StoreError::NoLease)?;
        self.annotate(own, &text).await?;
        let lease = Lease { subnets, attributes: own.clone() };
        Ok(GrantedLease { lease, expires: None })
    }

    /// Publishes other attributes with the lease that we hold.
    pub(super) async fn publish_attributes(&self, lease: &Lease) -> Result<(), StoreError> {
        let held = self.own.borrow().held.as_ref().map(|held| held.subnets);
        if held != Some(lease.subnets) {
            let subnets = lease.subnets;
            return Err(StoreError::NoLease(format!("we do not hold the lease of {subnets}")));
        }
        // First of all, so that what fails now is made up for later.
        self.hold(lease.clone());
        let text = self.own_node_now().await?;
        self.annotate(&lease.attributes, &text).await?;
        Ok(())
    }

    pub(super) fn hold(&self, lease: Lease) {
        self.own.borrow_mut().held = Some(lease);
        self.own_changed.notify_one();
    }

    pub(super) fn let_go(&self) {
        self.own.borrow_mut().held = None;
    }

    /// Writes what our annotations lack; says what that was.
    async fn annotate(
        &self,
        own: &LeaseAttributes,
        text: &[u8],
    ) -> Result<Vec<String>, StoreError> {
        let node = self.parse_own(text)?;
        let unusable = self.names.unusable_overwrites(&node);
        let told = std::mem::replace(&mut self.own.borrow_mut().told, unusable.clone());
        for problem in unusable.iter().filter(|problem| !told.contains(problem)) {
            warn!("{problem}");
        }
        let missing = self.names.missing(own, &node);
        if !missing.is_empty() {
            let body = json!({"metadata": {"annotations": missing}}).to_string();
            self.patch_status(body).await?;
        }
        Ok(missing.into_keys().collect())
    }

    async fn patch_status(&self, body: String) -> Result<(), StoreError> {
        let name = self.node_name().await?;
        let call = Call { verb: "patch", resource: "nodes/status", name };
        let text = self.api.patch(call, &format!("/api/v1/nodes/{name}/status"), body).await?;
        self.parse_own(&text)?;
        self.own.borrow_mut().latest = Some((text, Instant::now()));
        Ok(())
    }

    /// Takes in what the watch says about our node. Returns its subnets if those are not the
    /// ones we hold (any more).
    pub(super) fn own_node_seen(&self, node: &Node<'_>, text: &[u8]) -> Option<Subnets> {
        let version = |node: &Node<'_>| node.metadata.resource_version.parse::<u64>().ok();
        let config = self.config_in_use().ok()?;
        let known = self
            .own
            .borrow()
            .latest
            .as_ref()
            .and_then(|(text, _)| version(&self.parse_own(text).ok()?));
        // An event may be older than the answer to our own patch.
        if known.zip(version(node)).is_none_or(|(known, seen)| known < seen) {
            self.own.borrow_mut().latest = Some((text.to_vec(), Instant::now()));
        }
        self.own_changed.notify_one();
        let held = self.own.borrow().held.as_ref()?.subnets;
        let now = own_subnets(&node.metadata.name, &node.spec, &config).unwrap_or_else(|why| {
            warn!("{why}");
            Subnets::default()
        });
        (now != held).then_some(now)
    }

    /// Keeps annotations and condition of our node as they have to be. Never returns.
    pub(super) async fn tend_own_node(&self) {
        let mut pause = FIRST_PAUSE;
        let mut last_work: Option<Instant> = None;
        let mut told = String::new();
        loop {
            self.own_changed.notified().await;
            if last_work.is_none_or(|at| at.elapsed() > LONGEST_PAUSE) {
                pause = FIRST_PAUSE;
            }
            loop {
                let longest = match self.mend_own_node().await {
                    Ok(false) => break,
                    Ok(true) => {
                        told.clear();
                        LONGEST_PAUSE
                    }
                    Err(error) => {
                        let text = error.to_string();
                        if text != told {
                            warn!("our node cannot be kept as it has to be: {text}; trying on");
                            told = text;
                        }
                        LONGEST_RETRY
                    }
                };
                last_work = Some(Instant::now());
                sleep(pause.mul_f64(fastrand::f64().mul_add(0.5, 0.75))).await;
                pause = (pause * 2).min(longest);
            }
        }
    }

    /// One step of that; whether there was something to do.
    async fn mend_own_node(&self) -> Result<bool, StoreError> {
        let Some(text) = self.own.borrow().latest.as_ref().map(|(text, _)| text.clone()) else {
            return Ok(false);
        };
        let Some(attributes) = self.own.borrow().held.as_ref().map(|l| l.attributes.clone()) else {
            return Ok(false);
        };
        let put_back = self.annotate(&attributes, &text).await?;
        if !put_back.is_empty() {
            warn!("annotations of our node were changed and are put back: {}", put_back.join(", "));
            return Ok(true);
        }
        if !self.set_network_unavailable || !self.network_up.get() {
            return Ok(false);
        }
        let node = self.parse_own(&text)?;
        let condition = node.status.conditions.iter().find(|c| c.kind == NETWORK_UNAVAILABLE);
        let set_before = std::mem::replace(&mut self.own.borrow_mut().condition_set, true);
        if condition.is_some_and(|condition| condition_holds(condition, set_before)) {
            return Ok(false);
        }
        if let Err(error) = self.patch_status(condition_patch(Timestamp::now())).await {
            self.own.borrow_mut().condition_set = set_before;
            return Err(error);
        }
        info!("told Kubernetes that the network of this node is available");
        Ok(true)
    }

    /// Our node is gone from the list.
    pub(super) fn own_node_gone(&self) {
        self.own.borrow_mut().latest = None;
    }

    /// A failure of the store's own watch names our node, so that `/readyz` says where to look.
    pub(super) fn with_node(&self, failure: &Failure) -> String {
        match self.node_name.get() {
            Some(name) => format!("{failure} (node {name})"),
            None => failure.to_string(),
        }
    }
}

/// Once it was ours, whoever says that the network is available is right.
fn condition_holds(condition: &Condition, set_before: bool) -> bool {
    condition.status == "False" && (set_before || condition.reason == FLANNEL_IS_UP)
}

/// Specification §5.6.
fn condition_patch(now: Timestamp) -> String {
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"status": {"conditions": [{
        "type": NETWORK_UNAVAILABLE,
        "status": "False",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
        "reason": FLANNEL_IS_UP,
        "message": "Flannel is running on this node",
    }]}})
    .to_string()
}
