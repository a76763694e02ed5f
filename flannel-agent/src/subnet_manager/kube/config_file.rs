//! `net-conf.json`: read at the start, watched from then on.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt};
use inotify::{EventStream, Inotify, WatchMask};
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
    /// Tells what the file says, now and at every change. Never returns unless nobody listens.
    pub(super) async fn watch_config(&self, events: &mpsc::Sender<StoreEvent>) {
        let mut told = None;
        loop {
            let watch = self.config_file.watch();
            let read = self.config_file.read().map_err(|error| error.to_string());
            if told.as_ref() != Some(&read) {
                told = Some(read.clone());
                if events.send(StoreEvent::Config(read)).await.is_err() {
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
