//! A host in a network namespace, and any backend on it driven as the agent's loop drives it.

use std::{
    future::Future,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use flannel_agent::{
    backend::{ApplyReport, Backend},
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes, Subnets},
    peer_table::{PeerTable, PeerUpdate},
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};

/// Runs a story on a host with an underlay `eth0` (192.0.2.11 and `2001:db8:a::11`) whose cable ends
/// at `wire0`.
pub fn on_host<F: Future<Output = ()>>(story: impl FnOnce() -> F + Send + 'static) {
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace: be root");
        ip("link set lo up");
        ip("link add eth0 type veth peer name wire0");
        ip("addr add 192.0.2.11/24 dev eth0");
        ip("addr add 2001:db8:a::11/64 dev eth0 nodad");
        ip("link set wire0 up");
        ip("link set eth0 up");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(story());
    };
    if let Err(panic) = thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `ip`, which must succeed.
pub fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The lines `ip` prints, spaces evened out.
pub fn lines(arguments: &str) -> Vec<String> {
    let even = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    ip(arguments).lines().map(even).filter(|line| !line.is_empty()).collect()
}

pub fn has_link(device: &str) -> bool {
    if_nametoindex(device).is_ok()
}

/// One word behind another in what `ip link show` prints.
pub fn link_word(device: &str, before: &str) -> String {
    let text = ip(&format!("link show {device}"));
    let mut words = text.split_whitespace().skip_while(|word| *word != before);
    words.nth(1).unwrap_or_default().to_owned()
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

/// A peer's lease of IPv4, without backend data.
pub fn peer(subnet: &str, public: &str, backend: &str) -> Lease {
    Lease {
        subnets: Subnets { v4: subnet.parse().ok(), v6: None },
        attributes: LeaseAttributes {
            public_ip: public.parse().ok(),
            backend_type: backend.to_owned(),
            ..LeaseAttributes::default()
        },
    }
}

/// A backend, its lease and its peers.
pub struct Host<B> {
    pub backend: B,
    peers: PeerTable,
    own: Lease,
}

impl<B: Backend> Host<B> {
    /// A host with `10.77.1.0/24` and `fd77:0:0:1::/64` whose backend is prepared.
    pub fn new(backend: B) -> Self {
        let own = Lease {
            subnets: Subnets {
                v4: "10.77.1.0/24".parse().ok(),
                v6: "fd77:0:0:1::/64".parse().ok(),
            },
            attributes: LeaseAttributes::default(),
        };
        let mut peers = PeerTable::new();
        peers.set_own(Some(own.subnets));
        Self { backend, peers, own }
    }

    /// The store lists these peers and no other.
    pub async fn list(&mut self, peers: impl IntoIterator<Item = Lease>) -> ApplyReport {
        self.peers.apply(PeerUpdate::Snapshot(peers.into_iter().collect()));
        self.apply().await
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
}
