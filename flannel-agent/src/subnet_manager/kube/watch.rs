//! Follows all nodes: a list page by page, then a watch from there on, resumed where it broke.

use std::{rc::Rc, time::Duration};

use futures_util::FutureExt;
use kube::client::Body;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};

use super::{
    KubeSubnetManager,
    failure::{Call, Cause, Failure},
    lines::Lines,
    node::{ApiStatus, Node, NodeList, WatchEvent},
    node_table::{Claim, NodeTable, Scope},
};
use crate::{
    lease::{Lease, Subnets},
    peer_table::{LeaseChange, PeerUpdate},
    subnet_manager::{Connection, LeaseLost, StoreError, StoreEvent},
};

/// Nodes per page: some MiB, because a node may have 10 KiB and more.
const PAGE: usize = 250;
/// A watch without a word is opened anew: a bookmark comes every minute or so.
const SILENCE: Duration = Duration::from_secs(90);
/// Pauses between attempts; the longest still notices within 3 s that the server is back.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause that the server may ask for.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(30);
/// A watch that lived that long was a good one.
const GOOD_WATCH: Duration = Duration::from_secs(5);
/// Watches that may break at once, in a row, before the server counts as away.
const TOLERATED_BREAKS: u32 = 2;
/// Watches from one version that may break at once, in a row, before all nodes are listed again.
const BREAKS_BEFORE_LIST: u32 = 5;
/// Pieces of a watch that are taken in before the peers are told.
const PIECES_AT_ONCE: usize = 64;
/// The backend for which peers do not matter (specification §5.1).
const NO_PEERS: &str = "alloc";

const LIST: Call<'_> = Call { verb: "list", resource: "nodes", name: "" };
const WATCH: Call<'_> = Call { verb: "watch", resource: "nodes", name: "" };

/// How a watch ended.
enum End {
    /// Our lease is gone.
    Lost(LeaseLost),
    /// Nobody listens any more.
    Closed,
    /// The server ended it in peace, as it does every few minutes.
    Finished,
    /// It failed.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        Self::Failed(Failure::server(error.to_string()))
    }
}

/// What we know of the nodes while following them.
struct Following<'a> {
    store: &'a KubeSubnetManager,
    own_name: String,
    own: Subnets,
    scope: Scope,
    peers_matter: bool,
    table: NodeTable,
    /// Watch from here; `None` before the first list and when the history is gone.
    version: Option<String>,
    /// What was told about the connection last.
    connected: Option<bool>,
    /// When the server began to answer the last watch.
    opened: Option<Instant>,
    events: &'a mpsc::Sender<StoreEvent>,
}

impl KubeSubnetManager {
    /// Delivers the leases until ours is lost; `None` if nobody listens any more.
    pub(super) async fn follow(
        &self,
        lease: &Lease,
        events: &mpsc::Sender<StoreEvent>,
    ) -> Option<LeaseLost> {
        let (Ok(config), Some(own_name)) = (self.config_in_use(), self.node_name.get()) else {
            // Without having acquired there is nothing to follow; the agent asks again.
            return Some(LeaseLost { subnets: lease.subnets, holder: None });
        };
        let mut following = Following {
            store: self,
            own_name: own_name.clone(),
            own: lease.subnets,
            scope: Scope::new(&Rc::clone(&config), lease.subnets),
            peers_matter: config.backend_type != NO_PEERS,
            table: NodeTable::default(),
            version: None,
            connected: None,
            opened: None,
            events,
        };
        let mut pause = FIRST_PAUSE;
        let mut breaks = 0;
        loop {
            let end = following.once().await;
            let opened = following.opened.take();
            if opened.is_some_and(|opened| opened.elapsed() > GOOD_WATCH) {
                (pause, breaks) = (FIRST_PAUSE, 0);
            }
            let mut wait = pause;
            match end {
                End::Lost(lost) => return Some(lost),
                End::Closed => return None,
                End::Finished => {}
                End::Failed(failure) if failure.cause == Cause::Gone => {
                    info!("{failure}; listing all nodes again");
                    following.version = None;
                }
                End::Failed(failure) => {
                    breaks = if opened.is_some() { breaks + 1 } else { 0 };
                    if breaks >= BREAKS_BEFORE_LIST {
                        following.version = None;
                    }
                    if let Some(asked) = failure.retry_after {
                        wait = wait.max(asked.min(LONGEST_RETRY_AFTER));
                    }
                    // A watch may break now and then: what counts is whether another opens.
                    if opened.is_none() || breaks > TOLERATED_BREAKS {
                        following.down(self.with_node(&failure)).await.ok()?;
                    } else {
                        debug!("{failure}");
                    }
                }
            }
            sleep(wait.mul_f64(fastrand::f64().mul_add(0.5, 0.75))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl Following<'_> {
    /// Tells that the server does not answer (any more).
    async fn down(&mut self, text: String) -> Result<(), End> {
        if self.connected != Some(false) {
            self.connected = Some(false);
            self.send(StoreEvent::Connection(Connection::Down(text))).await?;
        }
        Ok(())
    }

    /// Lists if need be and watches until that ends.
    async fn once(&mut self) -> End {
        let result = async {
            if self.version.is_none() {
                let (claims, version) = self.list().await?;
                let leases = self.table.replace(claims);
                self.version = Some(version);
                self.send(StoreEvent::Peers(PeerUpdate::Snapshot(leases))).await?;
                self.up().await?;
            }
            self.watch().await
        };
        match result.await {
            Ok(()) => End::Finished,
            Err(end) => end,
        }
    }

    async fn send(&self, event: StoreEvent) -> Result<(), End> {
        self.events.send(event).await.map_err(|_| End::Closed)
    }

    async fn up(&mut self) -> Result<(), End> {
        if self.connected != Some(true) {
            self.connected = Some(true);
            self.send(StoreEvent::Connection(Connection::Up)).await?;
        }
        Ok(())
    }

    fn selector(&self) -> String {
        if self.peers_matter {
            String::new()
        } else {
            format!("&fieldSelector=metadata.name%3D{}", self.own_name)
        }
    }

    /// All nodes and the version from which to watch.
    async fn list(&mut self) -> Result<(Vec<Claim>, String), End> {
        match self.list_pages(PAGE).await {
            // The pages took longer than the server keeps a version; all in one cannot.
            Err(End::Failed(failure)) if failure.cause == Cause::Gone => {
                info!("{failure}; asking for all nodes in one page");
                self.list_pages(0).await
            }
            result => result,
        }
    }

    async fn list_pages(&mut self, limit: usize) -> Result<(Vec<Claim>, String), End> {
        let mut claims = Vec::new();
        let mut version = None;
        let mut next = String::new();
        let mut own_seen = false;
        loop {
            let mut path = format!("/api/v1/nodes?limit={limit}{}", self.selector());
            if !next.is_empty() {
                path.push_str("&continue=");
                push_escaped(&mut path, &next);
            }
            let text = self.store.api.get_bytes(LIST, &path).await?;
            let page: NodeList<'_> = serde_json::from_slice(&text)
                .map_err(|error| self.store.api.nonsense(LIST, &error))?;
            for node in &page.items {
                if *node.metadata.name == self.own_name {
                    own_seen = true;
                } else {
                    claims.push(Claim::read(&self.store.names, self.scope, node));
                }
            }
            version.get_or_insert(page.metadata.resource_version);
            next = page.metadata.next;
            if next.is_empty() {
                break;
            }
        }
        if !own_seen {
            return Err(self.own_gone());
        }
        // Our node is read by itself: of a list only the trimmed form is at hand.
        self.check_own_now().await?;
        match version {
            Some(version) if !version.is_empty() => Ok((claims, version)),
            _ => Err(self.store.api.nonsense(LIST, &"no resourceVersion").into()),
        }
    }

    async fn check_own_now(&mut self) -> Result<(), End> {
        let text = self.store.own_node_again().await?;
        let node = self.store.parse_own(&text)?;
        self.check_own(&node, &text)
    }

    fn own_gone(&self) -> End {
        warn!("node {} is gone from the API server", self.own_name);
        self.store.own_node_gone();
        End::Lost(LeaseLost { subnets: self.own, holder: None })
    }

    fn check_own(&self, node: &Node<'_>, text: &[u8]) -> Result<(), End> {
        match self.store.own_node_seen(node, text) {
            None => Ok(()),
            Some(now) => {
                warn!("node {} has {now} now, not {}", self.own_name, self.own);
                Err(End::Lost(LeaseLost { subnets: self.own, holder: None }))
            }
        }
    }

    async fn watch(&mut self) -> Result<(), End> {
        let version = self.version.clone().unwrap_or_default();
        let timeout = fastrand::u32(300..600);
        let mut path = format!(
            "/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds={timeout}{}\
             &resourceVersion=",
            self.selector()
        );
        // Only the server knows what a version looks like.
        push_escaped(&mut path, &version);
        let answer = self.store.api.stream(WATCH, &path).await?;
        self.opened = Some(Instant::now());
        self.up().await?;
        let mut body = answer.into_body();
        let mut lines = Lines::default();
        loop {
            let Some(mut bytes) = self.piece(&mut body).await? else { return Ok(()) };
            let mut changes = Vec::new();
            let mut end = Ok(());
            for _ in 0..PIECES_AT_ONCE {
                lines.add(&bytes).map_err(|why| self.store.api.nonsense(WATCH, &why))?;
                while let Some(line) = lines.next() {
                    end = self.event(line, &mut changes);
                    if end.is_err() {
                        break;
                    }
                }
                if end.is_err() {
                    break;
                }
                match self.piece(&mut body).now_or_never() {
                    Some(Ok(Some(more))) => bytes = more,
                    Some(Ok(None)) => {
                        end = Err(End::Finished);
                        break;
                    }
                    Some(Err(failed)) => {
                        end = Err(failed);
                        break;
                    }
                    None => break,
                }
            }
            if !changes.is_empty() {
                self.send(StoreEvent::Peers(PeerUpdate::Changes(changes))).await?;
            }
            end?;
        }
    }

    /// A server whose data were restored from before what we saw tells us nothing until its
    /// versions have caught up. By its bookmarks we notice.
    fn check_history(&self, bookmark: &str) -> Result<(), End> {
        let number = |text: &str| text.parse::<u64>().ok();
        let seen = self.version.as_deref().unwrap_or_default();
        if number(bookmark).zip(number(seen)).is_none_or(|(bookmark, seen)| bookmark >= seen) {
            return Ok(());
        }
        let server = self.store.api.server();
        let text = format!(
            "API server {server} is at version {bookmark} of the nodes, we have seen {seen}: its \
             data seem to be restored from a backup"
        );
        Err(Failure { cause: Cause::Gone, text, retry_after: None }.into())
    }

    async fn piece(
        &self,
        body: &mut Body,
    ) -> Result<Option<impl std::ops::Deref<Target = [u8]> + use<>>, End> {
        Ok(self.store.api.piece(WATCH, body, SILENCE).await?)
    }

    /// Takes one line of a watch in.
    fn event(&mut self, line: &[u8], changes: &mut Vec<LeaseChange>) -> Result<(), End> {
        let event: WatchEvent<'_> =
            serde_json::from_slice(line).map_err(|error| self.store.api.nonsense(WATCH, &error))?;
        let text = event.object.get();
        if event.kind == "ERROR" {
            let status: ApiStatus = serde_json::from_str(text).unwrap_or_default();
            let server = self.store.api.server();
            return Err(Failure::status(&server, WATCH, status.code, text.as_bytes(), None).into());
        }
        let node: Node<'_> = match serde_json::from_str(text) {
            Ok(node) => node,
            Err(error) => {
                warn!("a node in the API server's watch cannot be read and is left out: {error}");
                self.store.metrics.store_bad_entries.inc();
                return Ok(());
            }
        };
        let ours = *node.metadata.name == self.own_name;
        let result = match event.kind.as_ref() {
            "ADDED" | "MODIFIED" if ours => self.check_own(&node, text.as_bytes()),
            "DELETED" if ours => Err(self.own_gone()),
            "ADDED" | "MODIFIED" => {
                let claim = Claim::read(&self.store.names, self.scope, &node);
                changes.extend(self.table.put(claim));
                Ok(())
            }
            "DELETED" => {
                changes.extend(self.table.remove(&node));
                Ok(())
            }
            "BOOKMARK" => self.check_history(&node.metadata.resource_version),
            // What is yet to be invented: the version is all that counts.
            _ => Ok(()),
        };
        if !node.metadata.resource_version.is_empty() {
            self.version = Some((*node.metadata.resource_version).to_owned());
        }
        result
    }
}

const HEX: [&str; 16] =
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "A", "B", "C", "D", "E", "F"];

/// Adds text to a URL's query.
fn push_escaped(url: &mut String, text: &str) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            url.push(byte.into());
        } else {
            url.extend(["%", HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
}
