//! What the API server holds: nodes, pods, versions, and the history that watches are fed from.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Events kept for watches to resume from.
const HISTORY: usize = 20_000;

/// One event of the history.
#[derive(Clone, Debug)]
pub(super) struct Event {
    /// Running number, whatever the versions say.
    pub number: u64,
    /// The version it made.
    pub version: u64,
    /// `ADDED`, `MODIFIED`, `DELETED`.
    pub kind: &'static str,
    pub name: String,
    pub object: Arc<str>,
}

/// A patch that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// The node.
    pub node: String,
    /// Whether it went to `nodes/status`.
    pub status: bool,
    /// `Content-Type`.
    pub content_type: String,
    /// The body to the byte.
    pub body: String,
}

/// A list from which pages are given out.
pub(super) type Snapshot = Arc<Vec<Arc<str>>>;

/// A node as it is told by itself: with its kind, which lists leave out.
pub(super) fn whole(node: &str) -> String {
    let rest = node.strip_prefix('{').unwrap_or(node);
    format!("{{\"kind\":\"Node\",\"apiVersion\":\"v1\",{rest}")
}

/// All objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Objects {
    pub version: u64,
    /// Without their kind.
    nodes: BTreeMap<String, Arc<str>>,
    /// By `NAMESPACE/NAME`.
    pub pods: BTreeMap<String, Value>,
    events: VecDeque<Event>,
    next_event: u64,
    /// Watches from before this version are told 410.
    pub oldest: u64,
    snapshots: BTreeMap<u64, Snapshot>,
    pub patches: Vec<Patch>,
}

impl Objects {
    /// None yet; versions begin behind this one.
    pub fn starting_at(version: u64) -> Self {
        Self { version, ..Self::default() }
    }

    /// The node as it is.
    pub fn node(&self, name: &str) -> Option<Arc<str>> {
        self.nodes.get(name).cloned()
    }

    /// The same, to read in.
    pub fn node_value(&self, name: &str) -> Result<Value> {
        let text = self.node(name).with_context(|| format!("no node {name}"))?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Names of all nodes.
    pub fn names(&self) -> Vec<String> {
        self.nodes.keys().cloned().collect()
    }

    /// Creates or replaces a node. Nothing happens if it is as it was.
    pub fn put(&mut self, mut node: Value) -> Result<()> {
        let name = node["metadata"]["name"].as_str().context("a node without a name")?.to_owned();
        if let Some(fields) = node.as_object_mut() {
            fields.retain(|name, _| name != "kind" && name != "apiVersion");
        }
        let kind = if let Some(before) = self.nodes.get(&name) {
            let mut before: Value = serde_json::from_str(before)?;
            for object in [&mut before, &mut node] {
                if let Some(metadata) = object["metadata"].as_object_mut() {
                    metadata.remove("resourceVersion");
                }
            }
            if before == node {
                return Ok(());
            }
            "MODIFIED"
        } else {
            "ADDED"
        };
        let object = self.stamp(node);
        self.nodes.insert(name.clone(), Arc::clone(&object));
        self.record(kind, name, object, self.version);
        Ok(())
    }

    /// Deletes a node.
    pub fn delete(&mut self, name: &str) -> Result<()> {
        let text = self.nodes.remove(name).with_context(|| format!("no node {name}"))?;
        let object = self.stamp(serde_json::from_str(&text)?);
        self.record("DELETED", name.to_owned(), object, self.version);
        Ok(())
    }

    fn stamp(&mut self, mut node: Value) -> Arc<str> {
        self.version += 1;
        node["metadata"]["resourceVersion"] = json!(self.version.to_string());
        node.to_string().into()
    }

    fn record(&mut self, kind: &'static str, name: String, object: Arc<str>, version: u64) {
        self.next_event += 1;
        self.events.push_back(Event { number: self.next_event, version, kind, name, object });
        if self.events.len() > HISTORY
            && let Some(forgotten) = self.events.pop_front()
        {
            self.oldest = forgotten.version;
        }
    }

    /// Sends the latest `count` events once more, the last one first.
    pub fn replay(&mut self, count: usize) {
        let again: Vec<_> = self.events.iter().rev().take(count).cloned().collect();
        for event in again {
            self.record(event.kind, event.name, event.object, event.version);
        }
    }

    /// Puts nodes and version back to what they were, and begins a new history there.
    pub fn restore(&mut self, before: &Self) {
        self.nodes.clone_from(&before.nodes);
        self.version = before.version;
        self.compact();
    }

    /// Forgets the history: no watch can be resumed from before now.
    pub fn compact(&mut self) {
        self.oldest = self.version;
        self.events.clear();
        self.snapshots.clear();
    }

    /// The running number behind which events newer than a version come; `None` if those are
    /// gone.
    pub fn resume(&self, version: u64) -> Option<u64> {
        if version < self.oldest {
            return None;
        }
        let newer = self.events.iter().find(|event| event.version > version);
        Some(newer.map_or(self.next_event, |event| event.number - 1))
    }

    /// The running number of the last event.
    pub fn last_event(&self) -> u64 {
        self.next_event
    }

    /// The next event behind a running number.
    pub fn event_after(&self, number: u64) -> Option<Event> {
        let first = self.events.front()?.number;
        let index = usize::try_from((number + 1).saturating_sub(first)).ok()?;
        self.events.get(index).cloned()
    }

    /// Nodes in the order of their names as they are now, kept for further pages.
    pub fn snapshot(&mut self, keep: bool) -> (u64, Snapshot) {
        let snapshot: Snapshot = Arc::new(self.nodes.values().cloned().collect());
        if keep {
            self.snapshots.insert(self.version, Arc::clone(&snapshot));
            while self.snapshots.len() > 16 {
                self.snapshots.pop_first();
            }
        }
        (self.version, snapshot)
    }

    /// The snapshot of a version, unless it has expired.
    pub fn snapshot_of(&self, version: u64) -> Option<Snapshot> {
        self.snapshots.get(&version).cloned()
    }

    /// Lets all further pages expire.
    pub fn expire_pages(&mut self) {
        self.snapshots.clear();
    }

    /// A strategic merge patch.
    pub fn patch(&mut self, patch: Patch) -> Result<Arc<str>> {
        let before = self.node_value(&patch.node)?;
        let mut after = before.clone();
        let asked: Value = serde_json::from_str(&patch.body)?;
        check(&asked, &before)?;
        merge(&mut after, &asked, "");
        // Each endpoint writes its half, and both write metadata.
        let other = if patch.status { "spec" } else { "status" };
        after[other] = before[other].clone();
        let name = patch.node.clone();
        self.patches.push(patch);
        self.put(after)?;
        self.node(&name).context("the node has gone")
    }
}

/// What the types and the validation of a node would refuse.
fn check(patch: &Value, before: &Value) -> Result<()> {
    let fields = patch.as_object().context("a patch is an object")?;
    for (field, wanted) in [("kind", "Node"), ("apiVersion", "v1")] {
        ensure!(fields.get(field).is_none_or(|value| value == wanted), "{field} is not {wanted}");
    }
    let metadata = &patch["metadata"];
    for field in ["name", "uid", "resourceVersion"] {
        let value = &metadata[field];
        ensure!(value.is_null() || *value == before["metadata"][field], "{field} does not fit");
    }
    for map in ["annotations", "labels"] {
        for (name, value) in metadata[map].as_object().into_iter().flatten() {
            ensure!(value.is_string() || value.is_null(), "{map}: {name} is no string");
            let (prefix, bare) = name.rsplit_once('/').unwrap_or(("a", name));
            let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            ensure!(!bare.is_empty() && bare.len() <= 63 && bare.chars().all(good), "{name}");
            ensure!(!prefix.is_empty() && prefix.len() <= 253, "{name}");
        }
    }
    for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
        ensure!(condition["type"].is_string(), "a condition without its merge key type");
        let status = condition["status"].as_str().unwrap_or_default();
        ensure!(matches!(status, "True" | "False" | "Unknown"), "status {status}");
        for field in ["lastHeartbeatTime", "lastTransitionTime"] {
            let Some(time) = condition[field].as_str() else { continue };
            // RFC 3339 in UTC and whole seconds: the one form in which the API gives it back.
            let form: String =
                time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
            ensure!(form == "0000-00-00T00:00:00Z", "{field} {time} is no time");
        }
    }
    Ok(())
}

/// Merges as Kubernetes does: objects by their members, `null` removes, lists of conditions and
/// addresses by the member `type`, other lists as a whole.
fn merge(target: &mut Value, patch: &Value, field: &str) {
    match (target, patch) {
        (target, Value::Object(members)) => {
            if !target.is_object() {
                *target = json!({});
            }
            for (name, value) in members {
                if value.is_null() {
                    if let Some(target) = target.as_object_mut() {
                        target.remove(name);
                    }
                } else {
                    merge(&mut target[name.as_str()], value, name);
                }
            }
        }
        (Value::Array(target), Value::Array(items))
            if matches!(field, "conditions" | "addresses") =>
        {
            for item in items {
                match target.iter_mut().find(|known| known["type"] == item["type"]) {
                    Some(known) => merge(known, item, ""),
                    None => target.push(item.clone()),
                }
            }
        }
        (target, value) => *target = value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch(body: &Value, status: bool) -> Patch {
        Patch {
            node: "alder".into(),
            status,
            content_type: "application/strategic-merge-patch+json".into(),
            body: body.to_string(),
        }
    }

    #[test]
    fn a_patch_merges_by_type_and_leaves_the_rest() -> Result<()> {
        let mut objects = Objects::default();
        objects.put(json!({
            "metadata": {"name": "alder", "annotations": {"a": "1", "b": "2"}},
            "spec": {"podCIDR": "10.77.1.0/24"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }))?;
        objects.patch(patch(
            &json!({
                "metadata": {"annotations": {"a": null, "c": "3"}},
                "spec": {"podCIDR": "no"},
                "status": {"conditions": [{"type": "NetworkUnavailable", "status": "False"}]},
            }),
            true,
        ))?;
        let node = objects.node_value("alder")?;
        assert_eq!(node["metadata"]["annotations"], json!({"b": "2", "c": "3"}));
        assert_eq!(node["spec"]["podCIDR"], "10.77.1.0/24");
        assert_eq!(node["status"]["conditions"].as_array().map(Vec::len), Some(2));
        let version = objects.version;
        objects.patch(patch(&json!({"metadata": {"annotations": {"b": "2"}}}), true))?;
        assert_eq!(objects.version, version, "a patch that changes nothing made a version");
        for bad in [
            json!({"metadata": {"annotations": {"a": 1}}}),
            json!({"metadata": {"annotations": {"a/": "x"}}}),
            json!({"metadata": {"resourceVersion": "1"}}),
            json!({"kind": "Pod"}),
            json!({"status": {"conditions": [{"status": "False"}]}}),
            json!({"status": {"conditions": [{"type": "X", "status": false}]}}),
        ] {
            assert!(objects.patch(patch(&bad, true)).is_err(), "{bad}");
        }
        assert_eq!(objects.version, version, "a refused patch made a version");
        Ok(())
    }

    #[test]
    fn a_watch_resumes_behind_its_version_or_is_told_that_it_cannot() -> Result<()> {
        let mut objects = Objects::default();
        for name in ["alder", "birch"] {
            objects.put(json!({"metadata": {"name": name}}))?;
        }
        let number = objects.resume(1).context("gone")?;
        assert_eq!(objects.event_after(number).context("no event")?.name, "birch");
        let number = objects.resume(2).context("gone")?;
        assert!(objects.event_after(number).is_none());
        objects.compact();
        assert!(objects.resume(1).is_none());
        assert!(objects.resume(2).is_some());
        Ok(())
    }
}
