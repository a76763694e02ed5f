//! A host in a network namespace, and a backend on it driven as the agent's loop drives it.

use std::{
    collections::BTreeSet,
    future::Future,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use flannel_agent::{
    backend::{
        ApplyReport, Backend,
        vxlan::{FastPathConfig, VxlanBackend, VxlanConfig, VxlanOptions},
    },
    cli::flags::{FastPath as FastPathMode, PeerFilter, XdpMode},
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes, RawJson, Subnets},
    peer_table::{Changed, LeaseChange, PeerTable, PeerUpdate},
    telemetry::metrics::Metrics,
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};

/// How long anything may take to be put right.
pub const HEALED_WITHIN: Duration = Duration::from_secs(1);

/// Runs a story on a host with an underlay `eth0` (192.0.2.11 and `2001:db8:a::11`) whose cable ends
/// at `wire0`.
pub fn on_host<F: Future<Output = ()>>(story: impl FnOnce() -> F + Send + 'static) {
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace: be root");
        ip("link set lo up");
        plug_in_underlay(1500);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(story());
    };
    if let Err(panic) = thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

pub fn plug_in_underlay(mtu: u32) {
    ip(&format!("link add eth0 mtu {mtu} type veth peer name wire0 mtu {mtu}"));
    ip("addr add 192.0.2.11/24 dev eth0");
    ip("addr add 2001:db8:a::11/64 dev eth0 nodad");
    ip("link set wire0 up");
    ip("link set eth0 up");
}

/// Runs `ip`, which must succeed.
pub fn ip(arguments: &str) -> String {
    run("ip", arguments)
}

pub fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).output().expect(program);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The lines a command prints, in order, spaces evened out.
pub fn lines(program: &str, arguments: &str) -> BTreeSet<String> {
    let even = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    run(program, arguments).lines().map(even).filter(|line| !line.is_empty()).collect()
}

pub fn set(wanted: &[&str]) -> BTreeSet<String> {
    wanted.iter().map(|line| (*line).to_owned()).collect()
}

/// What a device has of routes, permanent neighbours and forwarding entries, without who made
/// them.
pub fn entries(device: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for family in ["-4", "-6"] {
        for line in lines("ip", &format!("{family} route show dev {device}")) {
            if !line.contains("proto kernel") {
                let words: Vec<_> = line.split(' ').filter(|word| *word != "onlink").collect();
                let onlink = if line.contains("onlink") { " onlink" } else { "" };
                all.insert(format!("route {}{onlink}", words[..3.min(words.len())].join(" ")));
            }
        }
    }
    for line in lines("ip", &format!("neigh show dev {device} nud permanent")) {
        all.insert(format!("neigh {}", line.trim_end_matches(" PERMANENT")));
    }
    for line in lines("bridge", &format!("fdb show dev {device}")) {
        if line.contains(" dst ") {
            let words: Vec<_> = line.split(' ').collect();
            all.insert(format!("fdb {} {}", words[0], words[2]));
        }
    }
    all
}

/// The entries that peers come to on `device`: subnet base, MAC and outer address of each.
pub fn entries_of(peers: &[(&str, &str, &str)]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (subnet, mac, remote) in peers {
        let base = subnet.split('/').next().expect("a subnet");
        all.insert(format!("route {subnet} via {base} onlink"));
        all.insert(format!("neigh {base} lladdr {mac}"));
        all.insert(format!("fdb {mac} {remote}"));
    }
    all
}

/// One word behind another in what `ip -d link show` prints.
pub fn link_word(device: &str, before: &str) -> Option<String> {
    let text = run("ip", &format!("-d link show {device}"));
    let mut words = text.split_whitespace().skip_while(|word| *word != before);
    words.nth(1).map(str::to_owned)
}

pub fn has_link(device: &str) -> bool {
    if_nametoindex(device).is_ok()
}

pub fn external() -> ExternalInterface {
    ExternalInterface {
        name: "eth0".to_owned(),
        index: if_nametoindex("eth0").expect("eth0"),
        mtu: 1500,
        addr: "192.0.2.11".parse().ok(),
        addr_v6: "2001:db8:a::11".parse().ok(),
        public_ip: "192.0.2.11".parse().ok(),
        public_ipv6: "2001:db8:a::11".parse().ok(),
    }
}

pub fn subnets(v4: &str, v6: Option<&str>) -> Subnets {
    Subnets { v4: v4.parse().ok(), v6: v6.and_then(|v6| v6.parse().ok()) }
}

fn data(mac: &str) -> RawJson {
    RawJson::from_compact(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#))
}

/// A peer's lease of IPv4.
pub fn peer(subnet: &str, mac: &str, public: &str) -> Lease {
    Lease {
        subnets: subnets(subnet, None),
        attributes: LeaseAttributes {
            public_ip: public.parse().ok(),
            backend_type: "vxlan".to_owned(),
            backend_data: Some(data(mac)),
            ..LeaseAttributes::default()
        },
    }
}

/// The lease of dual-stack peer number `n`: MACs `02:fa:00:00:04:n` and `…:06:n`.
pub fn dual_peer(n: u8) -> Lease {
    Lease {
        subnets: subnets(&format!("10.77.{n}.0/24"), Some(&format!("fd77:0:0:{n}::/64"))),
        attributes: LeaseAttributes {
            public_ip: format!("192.0.2.{n}").parse().ok(),
            public_ipv6: format!("2001:db8:a::{n}").parse().ok(),
            backend_type: "vxlan".to_owned(),
            backend_data: Some(data(&format!("02:fa:00:00:04:{n:02}"))),
            backend_v6_data: Some(data(&format!("02:fa:00:00:06:{n:02}"))),
            behind_nat: false,
        },
    }
}

/// A backend, its lease and its peers.
pub struct Node {
    pub backend: VxlanBackend,
    pub peers: PeerTable,
    pub metrics: Metrics,
    own: Lease,
    state_dir: PathBuf,
    _temporary: tempfile::TempDir,
}

impl Node {
    /// A node with `10.77.1.0/24` that has not prepared its devices yet.
    pub fn new(options: &str, dual_stack: bool) -> Self {
        let temporary = tempfile::tempdir().expect("a directory");
        let state_dir = temporary.path().join("state");
        let metrics = Metrics::default();
        let config = config(options, dual_stack, state_dir.clone());
        let backend = VxlanBackend::new(config, metrics.clone()).expect("a backend");
        let mut peers = PeerTable::new();
        let own = Lease {
            subnets: subnets("10.77.1.0/24", dual_stack.then_some("fd77:0:0:1::/64")),
            attributes: LeaseAttributes::default(),
        };
        peers.set_own(Some(own.subnets));
        Self { backend, peers, metrics, own, state_dir, _temporary: temporary }
    }

    /// A node whose devices are there.
    pub async fn up(options: &str, dual_stack: bool) -> Self {
        let mut node = Self::new(options, dual_stack);
        node.backend.prepare(None).await.expect("devices");
        node
    }

    /// The agent restarts: another backend on the same host, which has not prepared yet.
    pub fn restart(&mut self, options: &str, dual_stack: bool) {
        let config = config(options, dual_stack, self.state_dir.clone());
        self.backend = VxlanBackend::new(config, self.metrics.clone()).expect("a backend");
    }

    /// The store lists these peers and no other; all of it must work.
    pub async fn list(&mut self, peers: impl IntoIterator<Item = Lease>) -> ApplyReport {
        self.peers.apply(PeerUpdate::Snapshot(peers.into_iter().collect()));
        self.apply().await
    }

    /// The store changes some.
    pub async fn change(&mut self, changes: Vec<LeaseChange>) -> ApplyReport {
        match self.peers.apply(PeerUpdate::Changes(changes)) {
            Changed::Nothing => ApplyReport::default(),
            Changed::Peers(changed) => {
                self.backend.apply_changed(&self.own, &self.peers, &changed).await
            }
            Changed::Everything => self.apply().await,
        }
    }

    pub async fn apply(&mut self) -> ApplyReport {
        self.backend.apply(&self.own, &self.peers).await
    }

    /// Turns the agent's loop until `check` holds.
    ///
    /// # Panics
    /// If it does not within the time.
    pub async fn until(&mut self, within: Duration, what: &str, mut check: impl FnMut() -> bool) {
        let start = Instant::now();
        while !check() {
            assert!(start.elapsed() < within, "{what}: not within {within:?}");
            self.turn(Duration::from_millis(10)).await;
        }
    }

    /// Until `device` has exactly these entries.
    pub async fn until_entries(&mut self, what: &str, device: &str, wanted: &BTreeSet<String>) {
        let start = Instant::now();
        loop {
            let there = entries(device_or_lo(device));
            if there == *wanted && has_link(device) {
                return;
            }
            assert!(start.elapsed() < HEALED_WITHIN, "{what}: {there:#?}, not {wanted:#?}");
            self.turn(Duration::from_millis(10)).await;
        }
    }

    /// Turns the agent's loop for a time. Returns how often it had to apply.
    pub async fn turn(&mut self, time: Duration) -> usize {
        let end = tokio::time::Instant::now() + time;
        let mut passes = 0;
        loop {
            tokio::select! {
                () = self.backend.changed() => {
                    self.apply().await;
                    passes += 1;
                }
                () = tokio::time::sleep_until(end) => return passes,
            }
        }
    }

    /// The MAC that the node publishes for IPv4.
    pub fn published_mac(&self) -> String {
        let data = self.backend.attributes().backend_data.expect("published");
        data.as_str().split('"').nth(5).expect("a MAC").to_owned()
    }
}

fn device_or_lo(device: &str) -> &str {
    if has_link(device) { device } else { "lo" }
}

fn config(options: &str, dual_stack: bool, state_dir: PathBuf) -> VxlanConfig {
    let options = RawJson::parse(options).expect("JSON");
    VxlanConfig {
        options: VxlanOptions::parse(&options).expect("options"),
        external: external(),
        ipv4_network: "10.77.0.0/16".parse().ok(),
        ipv6_network: dual_stack.then(|| "fd77::/48".parse().expect("a network")),
        fast_path: FastPathConfig {
            enabled: false,
            demanded: false,
            pin_dir: state_dir.join("bpf"),
            log: false,
            mode: FastPathMode::Auto,
            xdp: XdpMode::Off,
            filter: PeerFilter::Default,
            flow_interval: Duration::from_secs(1),
        },
        blackhole_route: false,
        state_dir,
    }
}
