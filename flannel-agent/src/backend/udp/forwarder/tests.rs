//! A datagram socket stands for the TUN device: one packet per read and write as well.

use std::{
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    time::Duration,
};

use super::*;
use crate::{
    lease::{Lease, LeaseAttributes, Subnets},
    peer_table::{PeerTable, PeerUpdate},
};

/// How long is waited for what has to come.
const PATIENCE: Duration = Duration::from_secs(5);

const OWN_IP: Ipv4Addr = Ipv4Addr::new(10, 5, 1, 0);

struct Bench {
    kernel: UnixDatagram,
    peer: UdpSocket,
    own: SocketAddrV4,
    shared: Arc<Shared>,
    forwarder: Forwarder,
}

impl Bench {
    /// A forwarder between a would-be kernel and a peer that has 10.5.2.0/24.
    fn new() -> Self {
        let (kernel, tun) = UnixDatagram::pair().expect("socket pair");
        let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
        // Another address than the peer's, as every node uses the same port.
        let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).expect("bound");
        for set in [tun.set_nonblocking(true), socket.set_nonblocking(true)] {
            set.expect("not blocking");
        }
        for set in [kernel.set_read_timeout(Some(PATIENCE)), peer.set_read_timeout(Some(PATIENCE))]
        {
            set.expect("patient");
        }
        let port = |socket: &UdpSocket| socket.local_addr().expect("bound").port();
        let own = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 2), port(&socket));
        let path = Path {
            tun: File::from(OwnedFd::from(tun)),
            tun_ip: OWN_IP,
            socket,
            icmp: None,
            port: port(&peer),
        };
        let shared = Arc::<Shared>::default();
        let lease = Lease {
            subnets: Subnets { v4: Some("10.5.2.0/24".parse().expect("a subnet")), v6: None },
            attributes: LeaseAttributes {
                public_ip: Some(Ipv4Addr::LOCALHOST),
                ..LeaseAttributes::default()
            },
        };
        let mut peers = PeerTable::new();
        peers.apply(PeerUpdate::Snapshot(vec![lease]));
        let own_subnet = "10.5.1.0/24".parse().expect("a subnet");
        shared.set_routes(PeerRoutes::compile(&peers, (own_subnet, None)).0);
        let forwarder = Forwarder::start(path, &shared).expect("started");
        Self { kernel, peer, own, shared, forwarder }
    }

    /// Waits until the packets by their fate are these: a packet arrives before it is counted.
    fn counts(&self, wanted: &[(&str, u64)]) {
        let start = std::time::Instant::now();
        loop {
            let json = self.shared.counters.to_json();
            let count = |name: &str| json.get(name).unwrap_or(&json["dropped"][name]).as_u64();
            if wanted.iter().all(|(name, wanted)| count(name) == Some(*wanted)) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{json}, not {wanted:?}");
            thread::yield_now();
        }
    }

    fn at_peer(&self) -> Vec<u8> {
        let mut bytes = [0; 200];
        let len = self.peer.recv(&mut bytes).expect("a packet for the peer");
        bytes[..len].to_vec()
    }

    fn at_kernel(&self) -> Vec<u8> {
        let mut bytes = [0; 200];
        let len = self.kernel.recv(&mut bytes).expect("a packet for the kernel");
        bytes[..len].to_vec()
    }
}

/// A packet whose checksum is not looked at.
fn packet(ttl: u8, destination: [u8; 4]) -> Vec<u8> {
    let mut bytes = vec![0x45, 0, 0, 28, 0, 0, 0, 0, ttl, 17, 0, 0, 10, 5, 1, 2];
    bytes.extend(destination);
    bytes.extend([0xab; 8]);
    bytes
}

#[test]
fn packets_go_both_ways_and_lose_a_hop_each() {
    let bench = Bench::new();
    bench.kernel.send(&packet(1, [10, 5, 2, 9])).expect("sent");
    bench.kernel.send(&packet(9, [10, 5, 2, 9])).expect("sent");
    let arrived = bench.at_peer();
    assert_eq!((arrived[8], &arrived[12..]), (8, &packet(9, [10, 5, 2, 9])[12..]));

    for bytes in [&[0x45; 19][..], &packet(1, [10, 5, 1, 2]), &packet(64, [10, 5, 1, 2])] {
        bench.peer.send_to(bytes, bench.own).expect("sent");
    }
    let arrived = bench.at_kernel();
    assert_eq!((arrived[8], &arrived[12..]), (63, &packet(64, [10, 5, 1, 2])[12..]));
    bench.counts(&[("sent", 1), ("ttl_expired", 2), ("malformed", 1)]);
}

#[test]
fn a_destination_without_peer_is_unreachable_until_there_is_one() {
    let bench = Bench::new();
    bench.kernel.send(&[0x60; 48]).expect("sent");
    bench.kernel.send(&packet(9, [10, 5, 3, 9])).expect("sent");
    let answer = bench.at_kernel();
    assert_eq!(answer[12..20], [10, 5, 1, 0, 10, 5, 1, 2]);
    assert_eq!((answer[20], answer[21]), (3, 0));
    assert_eq!(answer[28..], packet(9, [10, 5, 3, 9]));
    bench.counts(&[("no_peer", 1), ("not_ipv4", 1)]);

    // The peer leaves: it is asked for in vain from the next packet on.
    bench.shared.set_routes(PeerRoutes::default());
    bench.kernel.send(&packet(9, [10, 5, 2, 9])).expect("sent");
    assert_eq!(bench.at_kernel()[28..], packet(9, [10, 5, 2, 9]));
}

#[test]
fn what_is_too_long_for_the_device_is_answered_unless_it_may_be_fragmented() {
    let bench = Bench::new();
    bench.shared.mtu.store(100, Ordering::Relaxed);
    let long = |flags: u8| {
        let mut bytes = packet(64, [10, 5, 1, 2]);
        bytes[3] = 101;
        bytes[6] = flags;
        bytes[12..16].copy_from_slice(&[10, 5, 2, 9]);
        bytes.resize(101, 0xcd);
        bytes
    };
    bench.peer.send_to(&long(0x40), bench.own).expect("sent");
    let answer = bench.at_peer();
    // From our device to the sender: "fragmentation needed", our MTU, the packet's head.
    assert_eq!(answer[12..20], [10, 5, 1, 0, 10, 5, 2, 9]);
    assert_eq!(answer[20..22], [3, 4]);
    assert_eq!(answer[26..28], [0, 100]);
    assert_eq!(answer[28..], long(0x40)[..28]);
    bench.peer.send_to(&long(0), bench.own).expect("sent");
    assert_eq!(bench.at_kernel().len(), 101);
    bench.counts(&[("too_long", 1), ("received", 1)]);
}

#[tokio::test]
async fn the_end_of_a_thread_is_told() {
    // A device that cannot be read from, as one that was removed.
    let (reader, writer) = io::pipe().expect("a pipe");
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
    let path = Path {
        tun: File::from(OwnedFd::from(writer)),
        tun_ip: OWN_IP,
        socket,
        icmp: None,
        port: 1,
    };
    let shared = Arc::<Shared>::default();
    let forwarder = Forwarder::start(path, &shared).expect("started");
    assert!(forwarder.alive());
    drop(reader);
    let told = tokio::time::timeout(PATIENCE, shared.ended.notified()).await;
    assert!(told.is_ok() && !forwarder.alive());
}

#[test]
fn dropping_ends_the_thread() {
    let bench = Bench::new();
    assert!(bench.forwarder.alive());
    let Bench { forwarder, kernel, .. } = bench;
    drop(forwarder);
    // Its end of the pair is closed.
    assert!(kernel.send(&packet(9, [10, 5, 2, 9])).is_err());
}
