//! `net-conf.json`: read at the start, watched from then on.
//!
//! What the agent works with is the configuration it was started with. A change is told, so that
//! nobody believes it to be in effect.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchMask};
use serde_json::{Map, Value};
use tokio::{sync::mpsc, time::sleep};

use super::KubeSubnetManager;
use crate::{
    config::NetworkConfig,
    subnet_manager::{StoreError, StoreEvent},
};

/// How often the file is looked at where the kernel does not tell about changes.
const POLL: Duration = Duration::from_secs(10);
/// Whoever writes the file gets this long to finish.
const SETTLE: Duration = Duration::from_millis(100);
/// No configuration is larger.
const LARGEST: u64 = 1 << 20;

/// The file.
#[derive(Debug)]
pub(super) struct ConfigFile {
    path: PathBuf,
}

impl ConfigFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads and checks it. The messages have the phrases that flannel's operators look for.
    pub(super) fn read(&self) -> Result<NetworkConfig, StoreError> {
        let path = self.path.display();
        let text = self.text().map_err(|error| {
            StoreError::NoConfig(format!("failed to read net conf {path}: {error}"))
        })?;
        NetworkConfig::parse_for_kube(&text).map_err(|error| {
            StoreError::BadConfig(format!("error parsing subnet config {path}: {error}"))
        })
    }

    fn text(&self) -> io::Result<String> {
        let metadata = std::fs::metadata(&self.path)?;
        if !metadata.is_file() || metadata.len() > LARGEST {
            return Err(io::Error::other("not a file of reasonable size"));
        }
        std::fs::read_to_string(&self.path)
    }

    /// Watches the folder of the file, and that of what it links to: a `ConfigMap` is a link into
    /// a folder that is exchanged as a whole by renaming another link.
    fn watch(&self) -> io::Result<EventStream<Vec<u8>>> {
        let changes =
            WatchMask::CREATE | WatchMask::MOVE | WatchMask::CLOSE_WRITE | WatchMask::DELETE;
        let inotify = Inotify::init()?;
        let folder = |path: &Path| match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut folders = BTreeSet::from([folder(&self.path)]);
        if let Ok(target) = std::fs::canonicalize(&self.path) {
            folders.insert(folder(&target));
        }
        for folder in folders {
            inotify.watches().add(folder, changes)?;
        }
        inotify.into_event_stream(vec![0; 4096])
    }
}

impl KubeSubnetManager {
    /// Tells about changes of the file. Never returns unless nobody listens.
    pub(super) async fn watch_config(&self, events: &mpsc::Sender<StoreEvent>) {
        let Ok(in_use) = self.config_in_use() else { return std::future::pending().await };
        let mut told = None;
        loop {
            let watch = self.config_file.watch();
            let news = match self.config_file.read() {
                Ok(config) => difference(&in_use, &config),
                Err(error) => {
                    Some(format!("{error}; the configuration read at the start stays in use"))
                }
            };
            if news != told {
                told.clone_from(&news);
                if events.send(StoreEvent::ConfigChanged(news)).await.is_err() {
                    return;
                }
            }
            match watch {
                Ok(mut changes) => {
                    // A watch that ends at once must not make us spin.
                    if changes.next().await.is_none_or(|event| event.is_err()) {
                        sleep(POLL).await;
                    }
                    sleep(SETTLE).await;
                    while let Some(Some(Ok(_))) = changes.next().now_or_never() {}
                }
                Err(_) => sleep(POLL).await,
            }
        }
    }
}

/// What of a new configuration is not in use, in words; `None` if nothing.
fn difference(in_use: &NetworkConfig, new: &NetworkConfig) -> Option<String> {
    if in_use == new {
        return None;
    }
    let (old_keys, new_keys) = (settings(in_use), settings(new));
    let names: BTreeSet<&String> = old_keys.keys().chain(new_keys.keys()).collect();
    let mut changes: Vec<String> = names
        .into_iter()
        .filter(|name| old_keys.get(*name) != new_keys.get(*name))
        .map(|name| {
            let text = |value: Option<&Value>| value.map_or("unset".to_owned(), Value::to_string);
            if ["psk", "accesskey"].iter().any(|word| name.to_lowercase().contains(word)) {
                return format!("{name} changed");
            }
            format!("{name}: {} is now {}", text(old_keys.get(name)), text(new_keys.get(name)))
        })
        .collect();
    if changes.is_empty() {
        // Keys that mean nothing to us, or the same in another way of writing.
        return None;
    }
    changes.sort();
    Some(format!(
        "net-conf.json has changed and the agent goes on with what it read at the start; restart it \
         for: {}",
        changes.join("; ")
    ))
}

/// The settings that have a meaning, by their names.
fn settings(config: &NetworkConfig) -> Map<String, Value> {
    let mut settings = Map::new();
    settings.insert("Network".into(), config.ipv4.map(|v4| v4.network.to_string()).into());
    settings.insert("IPv6Network".into(), config.ipv6.map(|v6| v6.network.to_string()).into());
    settings.insert("EnableNFTables".into(), config.enable_nftables.into());
    settings.insert("Backend.Type".into(), config.backend_type.clone().into());
    if let Ok(Value::Object(backend)) = serde_json::from_str(config.backend.as_str()) {
        for (name, value) in backend.into_iter().filter(|(name, _)| name.to_lowercase() != "type") {
            settings.insert(format!("Backend.{name}"), value);
        }
    }
    settings
}
