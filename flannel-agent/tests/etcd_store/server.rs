//! A real etcd on loopback for one test, and a plain client to look into it.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use etcd_client::{Client, PutOptions};
use flannel_agent::{
    config::NetworkConfig,
    lease::{LeaseAttributes, RawJson, Subnets},
    peer_table::{LeaseChange, PeerTable, PeerUpdate},
    subnet_manager::{
        Connection, GrantedLease, LeaseRequest, StoreError, StoreEvent, SubnetManager,
        etcd::{EtcdOptions, EtcdSubnetManager, Password},
    },
    telemetry::metrics::Metrics,
};
use tokio::{sync::mpsc, time::Instant};

/// The prefix all tests use.
pub const PREFIX: &str = "/coreos.com/network";
/// The configuration all tests use unless they say otherwise.
pub const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// A running etcd that ends with the test.
pub struct Etcd {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
    peer_port: u16,
    extra: Vec<String>,
    scheme: &'static str,
}

fn binary() -> PathBuf {
    let path = std::env::var_os("FLANNEL_TEST_ETCD")
        .map_or_else(|| PathBuf::from("/usr/bin/etcd"), PathBuf::from);
    assert!(
        path.exists(),
        "{} is missing: install etcd-server, or run `cargo xtask setup`",
        path.display()
    );
    path
}

fn free_ports() -> (u16, u16) {
    let a = TcpListener::bind("127.0.0.1:0").unwrap();
    let b = TcpListener::bind("127.0.0.1:0").unwrap();
    (a.local_addr().unwrap().port(), b.local_addr().unwrap().port())
}

fn launch(dir: &Path, scheme: &str, port: u16, peer_port: u16, extra: &[String]) -> Child {
    let name = format!("m{peer_port}");
    let log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    let client = format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    Command::new(binary())
        .args(["--name", &name, "--log-level", "warn", "--data-dir"])
        .arg(dir.join("data"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("{name}={peer}")])
        .args(extra)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Etcd {
    /// An empty etcd.
    pub async fn empty(extra: &[&str]) -> Self {
        let etcd = Self::launched("http", tempfile::tempdir().unwrap(), extra);
        etcd.client().await;
        etcd
    }

    /// An etcd with [`CONFIG`] in it.
    pub async fn start() -> Self {
        let etcd = Self::empty(&[]).await;
        etcd.put("config", CONFIG, 0).await;
        etcd
    }

    /// An etcd just launched, perhaps not listening yet; `dir` is where it keeps its data.
    pub fn launched(scheme: &'static str, dir: tempfile::TempDir, extra: &[&str]) -> Self {
        let (port, peer_port) = free_ports();
        let extra: Vec<_> = extra.iter().map(ToString::to_string).collect();
        let child = launch(dir.path(), scheme, port, peer_port, &extra);
        Self { child, dir, port, peer_port, extra, scheme }
    }

    /// A cluster of three with [`CONFIG`] in it.
    pub async fn cluster() -> [Self; 3] {
        let ports = [free_ports(), free_ports(), free_ports()];
        let cluster = ports.map(|(_, p)| format!("m{p}=http://127.0.0.1:{p}")).join(",");
        let members = ports.map(|(port, peer_port)| {
            let dir = tempfile::tempdir().unwrap();
            // The last of two equal flags counts.
            let extra = vec!["--initial-cluster".to_owned(), cluster.clone()];
            let child = launch(dir.path(), "http", port, peer_port, &extra);
            Self { child, dir, port, peer_port, extra, scheme: "http" }
        });
        members[0].put("config", CONFIG, 0).await;
        members
    }

    /// Whether a watch is open on this member.
    pub async fn is_watched(&self) -> bool {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let line = text.lines().find(|l| l.starts_with("etcd_debugging_mvcc_watcher_total"));
        line.is_some_and(|line| !line.ends_with(" 0"))
    }

    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    pub fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn restart(&mut self) {
        self.child = launch(self.dir.path(), self.scheme, self.port, self.peer_port, &self.extra);
    }

    /// Stops it from answering, as a firewall that drops packets would.
    pub fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// A plain client, once etcd answers.
    pub async fn client(&self) -> Client {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Ok(mut client) = Client::connect([self.url()], None).await
                && client.get("x", None).await.is_ok()
            {
                return client;
            }
            assert!(
                Instant::now() < until,
                "etcd does not start: {}",
                std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Writes a key below the prefix. Returns the revision.
    pub async fn put(&self, key: &str, value: &str, etcd_lease: i64) -> i64 {
        let options = PutOptions::new().with_lease(etcd_lease);
        let key = format!("{PREFIX}/{key}");
        let answer = self.client().await.put(key, value, Some(options)).await.unwrap();
        answer.header().unwrap().revision()
    }

    pub async fn grant(&self, seconds: i64) -> i64 {
        self.client().await.lease_grant(seconds, None).await.unwrap().id()
    }

    pub async fn delete(&self, key: &str) {
        self.client().await.delete(format!("{PREFIX}/{key}"), None).await.unwrap();
    }

    /// Value, revision and etcd lease of a key below the prefix.
    pub async fn get(&self, key: &str) -> Option<(String, i64, i64)> {
        let answer = self.client().await.get(format!("{PREFIX}/{key}"), None).await.unwrap();
        let kv = answer.kvs().first()?;
        Some((kv.value_str().unwrap().to_owned(), kv.mod_revision(), kv.lease()))
    }

    /// A manager for this etcd, after `change` had its way with the options.
    pub fn manager_with(
        &self,
        change: impl FnOnce(&mut EtcdOptions),
    ) -> (EtcdSubnetManager, Metrics) {
        let mut options = EtcdOptions {
            endpoints: vec![self.url()],
            prefix: PREFIX.to_owned(),
            keyfile: None,
            certfile: None,
            cafile: None,
            username: None,
            password: None,
            lease_ttl: Duration::from_hours(24),
            renew_margin: Duration::from_hours(1),
        };
        change(&mut options);
        let metrics = Metrics::default();
        (EtcdSubnetManager::new(options, metrics.clone()).unwrap(), metrics)
    }

    pub fn manager(&self) -> EtcdSubnetManager {
        self.manager_with(|_| {}).0
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn with_user(name: &str, password: &str) -> impl FnOnce(&mut EtcdOptions) {
    move |options| {
        options.username = Some(name.to_owned());
        options.password = Some(Password::from(password.to_owned()));
    }
}

pub fn attributes(ip: &str, mac: &str) -> LeaseAttributes {
    LeaseAttributes {
        public_ip: Some(ip.parse().unwrap()),
        backend_type: "vxlan".to_owned(),
        backend_data: Some(RawJson::from_compact(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#))),
        ..LeaseAttributes::default()
    }
}

pub fn value(ip: &str, mac: &str) -> String {
    attributes(ip, mac).to_json()
}

pub fn subnet(v4: &str) -> Subnets {
    Subnets { v4: Some(v4.parse().unwrap()), v6: None }
}

pub fn request(ip: &str, previous: Option<&str>) -> LeaseRequest {
    LeaseRequest {
        attributes: attributes(ip, "02:fa:00:00:00:11"),
        previous: previous.map(subnet).unwrap_or_default(),
    }
}

pub async fn acquire(
    manager: &EtcdSubnetManager,
    request: &LeaseRequest,
) -> Result<GrantedLease, StoreError> {
    let config: NetworkConfig = manager.network_config().await?;
    manager.acquire(&config, request).await
}

/// Everything a running manager has told so far, and what follows from it.
pub struct Listener {
    events: mpsc::Receiver<StoreEvent>,
    pub table: PeerTable,
    pub connections: Vec<Connection>,
    pub renewed: usize,
    pub snapshots: usize,
}

impl Listener {
    pub fn new() -> (mpsc::Sender<StoreEvent>, Self) {
        let (sender, events) = mpsc::channel(64);
        let listener = Self {
            events,
            table: PeerTable::new(),
            connections: Vec::new(),
            renewed: 0,
            snapshots: 0,
        };
        (sender, listener)
    }

    /// Takes events in until `done` or the lease is lost. Panics after `limit`.
    pub async fn until(
        &mut self,
        limit: Duration,
        mut done: impl FnMut(&Self) -> bool,
    ) -> Option<flannel_agent::subnet_manager::LeaseLost> {
        let until = Instant::now() + limit;
        while !done(self) {
            let event = tokio::time::timeout_at(until, self.events.recv()).await;
            let event = event.expect("what was waited for did not come in time");
            match event.expect("the manager has ended") {
                StoreEvent::Peers(update) => {
                    self.snapshots += usize::from(matches!(update, PeerUpdate::Snapshot(_)));
                    if let PeerUpdate::Changes(changes) = &update {
                        assert!(!changes.is_empty());
                        let _: &[LeaseChange] = changes;
                    }
                    self.table.apply(update);
                }
                StoreEvent::Renewed { .. } => self.renewed += 1,
                StoreEvent::Connection(connection) => self.connections.push(connection),
                StoreEvent::Config(read) => panic!("etcd does not watch it: {read:?}"),
                StoreEvent::Lost(lost) => return Some(lost),
            }
        }
        None
    }

    /// The peer's attributes as last delivered.
    pub fn peer(&self, v4: &str) -> Option<&LeaseAttributes> {
        let wanted = subnet(v4);
        self.table.peers().find(|(subnets, _)| **subnets == wanted).map(|(_, a)| a)
    }
}

/// Runs a manager beside a story that listens to it.
pub async fn beside<T>(
    manager: &EtcdSubnetManager,
    lease: GrantedLease,
    story: impl AsyncFnOnce(&mut Listener) -> T,
) -> T {
    let (sender, mut listener) = Listener::new();
    listener.table.set_own(Some(lease.lease.subnets));
    let mut run = manager.run(lease, sender);
    let mut ended = false;
    let mut told = Box::pin(story(&mut listener));
    loop {
        tokio::select! {
            biased;
            result = &mut told => return result,
            () = &mut run, if !ended => ended = true,
        }
    }
}
