//! The Kubernetes subnet manager through an outage of ten minutes, on a clock that skips what
//! nobody waits for.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use flannel_agent::{
    lease::{LeaseAttributes, RawJson, Subnets},
    peer_table::PeerUpdate,
    subnet_manager::{
        Connection, GrantedLease, LeaseRequest, StoreEvent, SubnetManager,
        kube::{KubeOptions, KubeSubnetManager, NodeIdentity},
    },
    telemetry::metrics::Metrics,
};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::LocalSet,
    time::{Instant, timeout},
};

#[derive(Default)]
struct State {
    down: bool,
    /// Connections taken while down.
    refused: u32,
    nodes: Vec<Value>,
    version: u64,
    open: Vec<TcpStream>,
}

/// An API server of one thread per connection that can be away.
#[derive(Clone)]
struct Server {
    port: u16,
    state: Arc<Mutex<State>>,
}

fn node(name: &str, number: u8) -> Value {
    let prefix = "flannel.alpha.coreos.com";
    json!({
        "metadata": {"name": name, "resourceVersion": "1", "annotations": {
            format!("{prefix}/backend-data"): format!("{{\"VNI\":1,\"VtepMAC\":\"02:fa:00:00:00:{number:02x}\"}}"),
            format!("{prefix}/backend-type"): "vxlan",
            format!("{prefix}/kube-subnet-manager"): "true",
            format!("{prefix}/public-ip"): format!("192.0.2.{number}"),
        }},
        "spec": {"podCIDR": format!("10.77.{number}.0/24")},
    })
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = State { nodes: vec![node("alder", 1)], version: 7, ..State::default() };
        let server = Self { port, state: Arc::new(Mutex::new(state)) };
        let this = server.clone();
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let mut state = this.state();
                if state.down {
                    state.refused += 1;
                    continue;
                }
                state.open.push(socket.try_clone().expect("a handle"));
                drop(state);
                let this = this.clone();
                // A client that went away ends this thread.
                thread::spawn(move || this.connection(socket).unwrap_or_default());
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_down(&self, down: bool) {
        let mut state = self.state();
        state.down = down;
        for socket in state.open.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn connection(&self, socket: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(socket.try_clone()?);
        let mut out = socket;
        loop {
            let mut request = String::new();
            lines.read_line(&mut request)?;
            let mut header = String::new();
            while lines.read_line(&mut header)? > 2 {
                header.clear();
            }
            let (watch, state) = (request.contains("watch=true"), self.state());
            let text = if watch && request.contains(&format!("resourceVersion={}", state.version)) {
                let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
                out.write_all(head.as_bytes())?;
                continue;
            } else if watch {
                // Ten minutes are more than the history goes back.
                let gone = json!({"kind": "Status", "code": 410, "reason": "Expired"});
                json!({"type": "ERROR", "object": gone}).to_string() + "\n"
            } else if request.starts_with("GET /api/v1/nodes?") {
                let metadata = json!({"resourceVersion": state.version.to_string()});
                json!({"kind": "NodeList", "metadata": metadata, "items": state.nodes}).to_string()
            } else {
                state.nodes[0].to_string()
            };
            drop(state);
            let length = text.len();
            write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}")?;
        }
    }
}

/// The events of a store at work until there are none for `quiet`.
async fn events(receiver: &mut mpsc::Receiver<StoreEvent>, quiet: Duration) -> Vec<StoreEvent> {
    let mut seen = Vec::new();
    while let Ok(Some(event)) = timeout(quiet, receiver.recv()).await {
        // That of the start; the file does not change here.
        if !matches!(event, StoreEvent::Config(_)) {
            seen.push(event);
        }
    }
    seen
}

async fn acquire(store: &KubeSubnetManager) -> GrantedLease {
    let config = store.network_config().await.expect("a configuration");
    let attributes = LeaseAttributes {
        public_ip: "192.0.2.1".parse().ok(),
        backend_type: "vxlan".to_owned(),
        backend_data: RawJson::parse(r#"{"VNI":1,"VtepMAC":"02:fa:00:00:00:01"}"#).ok(),
        ..LeaseAttributes::default()
    };
    let request = LeaseRequest { attributes, previous: Subnets::default() };
    store.acquire(&config, &request).await.expect("a lease")
}

fn subnets(event: &StoreEvent) -> Vec<String> {
    match event {
        StoreEvent::Peers(PeerUpdate::Snapshot(leases)) => {
            leases.iter().map(|lease| lease.subnets.to_string()).collect()
        }
        other => panic!("no list of all peers: {other:?}"),
    }
}

#[test]
fn ten_minutes_without_the_server_take_nothing_away() {
    let dir = tempfile::tempdir().expect("a directory");
    let net_conf = dir.path().join("net-conf.json");
    std::fs::write(&net_conf, r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)
        .expect("written");
    let server = Server::start();
    server.state().nodes.push(node("birch", 2));
    // Without this host's authorities, which take their time to read at every try.
    let url = format!("http://127.0.0.1:{}", server.port);
    let kubeconfig = dir.path().join("kubeconfig");
    let text = json!({
        "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": true}}],
        "users": [{"name": "u", "user": {}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).expect("written");
    let options = KubeOptions {
        api_url: String::new(),
        kubeconfig,
        annotation_prefix: "flannel.alpha.coreos.com".to_owned(),
        net_config_path: net_conf,
        set_network_unavailable: false,
        node: NodeIdentity::Name("alder".to_owned()),
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        let store = KubeSubnetManager::new(options, Metrics::default()).expect("good options");
        let lease = acquire(&store).await;
        let (sender, mut receiver) = mpsc::channel(64);
        tokio::task::spawn_local(async move { store.run(lease, sender).await });
        let seen = events(&mut receiver, Duration::from_millis(500)).await;
        assert_eq!(subnets(&seen[0]), ["10.77.2.0/24"]);
        assert!(matches!(seen[1..], [StoreEvent::Connection(Connection::Up)]), "{seen:?}");

        server.set_down(true);
        tokio::time::pause();
        let before = Instant::now();
        let seen = events(&mut receiver, Duration::from_mins(10)).await;
        assert!(before.elapsed() >= Duration::from_mins(10), "{:?}", before.elapsed());
        // Nothing but that it is away, once: no peer is lost, no lease.
        let [StoreEvent::Connection(Connection::Down(why))] = &seen[..] else { panic!("{seen:?}") };
        assert!(why.contains("127.0.0.1") && why.contains("node alder"), "{why}");
        // Often enough to notice soon, and no storm.
        let tries = server.state().refused;
        assert!((60..700).contains(&tries), "{tries} tries in ten minutes");

        // A node went, another came meanwhile.
        {
            let mut state = server.state();
            state.nodes[1] = node("cedar", 3);
            state.version = 99;
        }
        tokio::time::resume();
        server.set_down(false);
        let mut seen = Vec::new();
        while !seen.iter().any(|event| matches!(event, StoreEvent::Peers(_))) {
            let next = timeout(Duration::from_secs(10), receiver.recv()).await;
            seen.push(next.expect("in time").expect("an event"));
        }
        let list = seen.pop().expect("a list");
        assert_eq!(subnets(&list), ["10.77.3.0/24"]);
        seen.extend(events(&mut receiver, Duration::from_millis(500)).await);
        assert!(seen.iter().any(|e| matches!(e, StoreEvent::Connection(Connection::Up))));
    });
}
