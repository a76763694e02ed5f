//! Into the tunnel and out of it, each branch by a test run.

use std::{net::IpAddr, path::Path};

use aya::programs::{ProgramInfo, TcAttachType};
use flannel_agent::{
    datapath::ebpf::{EbpfDatapath, FastPathWanted, Filter, LeaseEntry, TunnelEnd, VtepName},
    mac::MacAddr,
};

use super::{
    V4_PEER, V6_PEER, load,
    namespace::{ifindex, in_namespace, ip, run, tcx, tcx_at, test_run_repeated},
    packet::Shape,
    peer, wanted,
};

const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;
const TC_ACT_REDIRECT: i32 = 7;

/// The device of a test run is the loopback device.
const LOOPBACK: u32 = 1;

pub const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);
const NEXT_HOP: &str = "02:00:00:00:00:99";

/// Our subnets are `10.5.9.0/24` and `fd05:9::/64`; the peers have `10.5.1.0/24` and `10.5.2.0/24` and,
/// over IPv6, `fd05:2::/64`.
pub fn node(tunnel: u32) -> FastPathWanted {
    let end = |local: &str, subnet: &str| TunnelEnd {
        ifindex: tunnel,
        mac: OUR_MAC,
        local: local.parse().expect("an address"),
        hop_limit: 64,
        subnet: subnet.parse().expect("a subnet"),
    };
    let vtep = |v6: bool, remote: &str| {
        (VtepName { v6, mac: PEER_MAC }, remote.parse::<IpAddr>().expect("an address"))
    };
    let lease = |subnet: &str, outer: &str| LeaseEntry {
        subnet: subnet.parse().expect("a subnet"),
        outer: outer.parse().expect("an address"),
        vtep_mac: Some(PEER_MAC),
        behind_nat: false,
    };
    let mut peers = vec![peer(V4_PEER, "10.5.1.0/24"), peer(V6_PEER, "10.5.2.0/24")];
    peers[1].subnets.v6 = "fd05:2::/64".parse().ok();
    peers.push(peer("192.0.2.8", "10.5.3.0/24"));
    FastPathWanted {
        peers,
        v4: Some(end("192.0.2.1", "10.5.9.0/24")),
        v6: Some(end("2001:db8::1", "fd05:9::/64")),
        vteps: [vtep(false, V4_PEER), vtep(true, V6_PEER)].into(),
        leases: vec![
            lease("10.5.1.0/24", V4_PEER),
            lease("fd05:2::/64", V6_PEER),
            lease("10.5.3.0/24", "192.0.2.8"),
        ],
        source_ports: (32768, 60999),
        forward: true,
        ..wanted(&[ifindex("v1")])
    }
}

/// Changes the host's routes or neighbours, and waits until no program remembers what was before:
/// two jiffies, at any HZ.
fn way(line: &str) {
    ip(line);
    std::thread::sleep(std::time::Duration::from_millis(50));
}

struct Probe {
    datapath: EbpfDatapath,
    egress: ProgramInfo,
    ingress: ProgramInfo,
}

impl Probe {
    /// A host with a way to both peers.
    fn new(pin_dir: &Path, wanted: &FastPathWanted) -> Self {
        for setting in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            run("sysctl", &format!("-q -w {setting}"));
        }
        ip("addr add 192.0.2.1/24 dev v1");
        ip("addr add 2001:db8::1/64 dev v1 nodad");
        for peer in [V4_PEER, V6_PEER] {
            ip(&format!("neigh replace {peer} lladdr {NEXT_HOP} dev v1 nud permanent"));
        }
        let mut datapath = load(pin_dir);
        // The egress program hangs at the loopback device, which test runs use.
        let at_loopback = node(LOOPBACK);
        datapath.apply(&at_loopback).expect("applied");
        let egress = tcx_at("lo", TcAttachType::Egress).pop().expect("attached");
        datapath.apply(wanted).expect("applied");
        let ingress = tcx("v1").pop().expect("attached");
        Self { datapath, egress, ingress }
    }

    fn count(&self, word: &str) -> u64 {
        self.datapath.status()["outcomes"][word]["packets"].as_u64().expect("a number")
    }

    /// What the program makes of the packet, which has to be counted as this.
    fn expect(&self, program: &ProgramInfo, packet: &[u8], word: &str) -> (i32, Vec<u8>) {
        let before = self.count(word);
        let (action, out, _) = test_run_repeated(program, packet, 1);
        assert_eq!(self.count(word), before + 1, "{word}: {}", self.datapath.status()["outcomes"]);
        (action, out)
    }

    /// Left to the kernel as it was.
    fn left(&self, program: &ProgramInfo, packet: &[u8], word: &str) {
        let (action, out) = self.expect(program, packet, word);
        assert_eq!((action, &out[..]), (TC_ACT_UNSPEC, packet), "{word}");
    }

    fn refused(&self, packet: &[u8], word: &str) {
        let (action, _) = self.expect(&self.ingress, packet, word);
        assert_eq!(action, TC_ACT_SHOT, "{word}");
    }
}

pub fn frame(to: MacAddr, from: MacAddr, kind: [u8; 2], packet: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &kind, packet].concat()
}

/// An inner IPv4 packet of UDP.
pub fn inner_v4(from: [u8; 4], to: [u8; 4], tos: u8) -> Vec<u8> {
    let mut packet = vec![0x45, tos, 0, 48, 0, 9, 0x40, 0, 64, 17, 0, 0];
    packet.extend([from, to].concat());
    packet.extend([0x30, 1, 0, 53, 0, 28, 0, 0]);
    packet.extend([0xaa; 20]);
    let sum = !checksum(&packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet
}

pub fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("folded")
}

pub const US: [u8; 4] = [10, 5, 9, 5];
pub const THEM: [u8; 4] = [10, 5, 1, 5];

fn going() -> Vec<u8> {
    frame(PEER_MAC, OUR_MAC, [8, 0], &inner_v4(US, THEM, 0))
}

/// A tunnel packet with this frame inside.
pub fn coming(outer: &str, inner: &[u8]) -> Vec<u8> {
    let len = u16::try_from(inner.len()).expect("short");
    let mut packet = Shape { inner_len: len, ..Shape::from(outer) }.packet();
    let at = packet.len() - inner.len();
    packet[at..].copy_from_slice(inner);
    let sum = !checksum(&packet[14..34]);
    packet[24..26].copy_from_slice(&sum.to_be_bytes());
    packet
}

pub fn coming_v4(from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    coming(V4_PEER, &frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(from, to, 0)))
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_packet_is_sent_with_the_kernels_headers() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir, &node(LOOPBACK));
        let packet = going();
        probe.left(&probe.egress, &packet, "kernel-refresh");
        let (action, out) = probe.expect(&probe.egress, &packet, "encapsulated");
        assert_eq!(action, TC_ACT_REDIRECT);
        assert_eq!(out.len(), packet.len() + 50);
        assert_eq!(out[..6], [2, 0, 0, 0, 0, 0x99]);
        assert_eq!(out[12..18], [8, 0, 0x45, 0, 0, 98]);
        assert_eq!(out[20..24], [0, 0, 64, 17]);
        assert_eq!(checksum(&out[14..34]), 0xffff);
        assert_eq!(out[26..34], [192, 0, 2, 1, 192, 0, 2, 7]);
        let port = u16::from_be_bytes([out[34], out[35]]);
        assert!((32768..60999).contains(&port), "{port}");
        assert_eq!(out[36..50], [0x21, 0x18, 0, 78, 0, 0, 8, 0, 0, 0, 1, 2, 3, 0]);
        assert_eq!(out[50..], packet);
        let (_, again) = probe.expect(&probe.egress, &packet, "encapsulated");
        assert_eq!(again[34..36], out[34..36], "a flow keeps its port");
        let id = |out: &[u8]| u16::from_be_bytes([out[18], out[19]]);
        assert_eq!(id(&again), id(&out).wrapping_add(1), "ids follow each other");
        for (inner, outer) in [(0xb8, 0), (0xb9, 1), (0xba, 2), (0xbb, 2)] {
            let packet = frame(PEER_MAC, OUR_MAC, [8, 0], &inner_v4(US, THEM, inner));
            let (_, out) = probe.expect(&probe.egress, &packet, "encapsulated");
            assert_eq!(out[15], outer, "{inner:#x}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn any_doubt_goes_to_the_kernel_unchanged() {
    in_namespace(|pin_dir| {
        let mut probe = Probe::new(pin_dir, &node(LOOPBACK));
        let packet = going();
        let left = |probe: &Probe, packet: &[u8], word| probe.left(&probe.egress, packet, word);
        left(&probe, &packet, "kernel-refresh");
        left(&probe, &frame(OUR_MAC, PEER_MAC, [8, 0], &packet[14..]), "kernel-no-vtep");
        left(&probe, &frame(PEER_MAC, OUR_MAC, [8, 6], &packet[14..]), "kernel-not-ip");
        let broadcast = frame(MacAddr([0xff; 6]), OUR_MAC, [8, 0], &packet[14..]);
        left(&probe, &broadcast, "kernel-no-vtep");
        let mut big = packet.clone();
        big.resize(14 + 1451, 0);
        left(&probe, &big, "kernel-too-big");
        big.truncate(14 + 1450);
        probe.expect(&probe.egress, &big, "encapsulated");
        way("route add 192.0.2.7/32 dev v1 mtu lock 1000");
        left(&probe, &big, "kernel-too-big");
        way("route del 192.0.2.7/32 dev v1");
        way("neigh del 192.0.2.7 dev v1");
        left(&probe, &packet, "kernel-no-neighbour");
        way("route add blackhole 192.0.2.7/32");
        left(&probe, &packet, "kernel-no-route");
        way("route del blackhole 192.0.2.7/32");
        let off = FastPathWanted { forward: false, ..node(LOOPBACK) };
        probe.datapath.apply(&off).expect("applied");
        left(&probe, &packet, "kernel-encap-off");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_packet_is_taken_out_for_the_tunnel_device() {
    in_namespace(|pin_dir| {
        let tunnel = ifindex("v0");
        let probe = Probe::new(pin_dir, &node(tunnel));
        let inner = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        let packet = coming(V4_PEER, &inner);
        let (action, out) = probe.expect(&probe.ingress, &packet, "decapsulated");
        assert_eq!((action, out), (TC_ACT_REDIRECT, inner.clone()));

        // All the pairs of the kernel: see RFC 6040.
        for (outer, inner_ecn, result) in [
            (1, 0, Some(0)),
            (2, 1, Some(1)),
            (3, 1, Some(3)),
            (3, 2, Some(3)),
            (3, 3, Some(3)),
            (1, 1, Some(1)),
            (1, 2, None),
            (3, 0, None),
        ] {
            let inner = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, inner_ecn));
            let mut packet = coming(V4_PEER, &inner);
            packet[15] = outer;
            packet[24..26].fill(0);
            let sum = !checksum(&packet[14..34]);
            packet[24..26].copy_from_slice(&sum.to_be_bytes());
            // Each flow of its own: what is left to the kernel keeps the flow there.
            packet[34] = outer << 4 | inner_ecn;
            if let Some(ecn) = result {
                let (_, out) = probe.expect(&probe.ingress, &packet, "decapsulated");
                assert_eq!(out[15], ecn, "{outer} {inner_ecn}");
                assert_eq!(checksum(&out[14..34]), 0xffff);
            } else {
                probe.left(&probe.ingress, &packet, "kernel-unusual");
            }
        }
        let mut burst = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        burst[14 + 9] = 6;
        burst[14 + 20 + 12..14 + 20 + 14].copy_from_slice(&[0x50, 0x10]);
        let mut burst = coming(V4_PEER, &burst);
        let mut behind = packet.clone();
        burst[34] = 0xe0;
        behind[34] = 0xe0;
        probe.expect(&probe.ingress, &behind, "decapsulated");
        probe.left(&probe.ingress, &burst, "kernel-burst");
        probe.left(&probe.ingress, &behind, "kernel-behind-burst");
        probe.expect(&probe.ingress, &packet, "decapsulated");

        ip("link del v0");
        probe.left(&probe.ingress, &packet, "kernel-no-device");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_nobody_may_send_is_refused_for_a_reason() {
    in_namespace(|pin_dir| {
        let filtering = |filter| FastPathWanted { filter, ..node(ifindex("v0")) };
        let mut probe = Probe::new(pin_dir, &filtering(Filter::Default));
        let other_peer = [10, 5, 3, 5];
        let outside = [198, 51, 100, 1];
        probe.expect(&probe.ingress, &coming_v4(THEM, US), "decapsulated");
        probe.expect(&probe.ingress, &coming_v4(outside, US), "decapsulated");
        probe.refused(&coming_v4(other_peer, US), "drop-other-source");
        probe.refused(&coming_v4(US, US), "drop-own-source");
        probe.refused(&coming_v4(THEM, outside), "drop-destination");
        let inner = inner_v4(THEM, US, 0);
        let stranger = coming("192.0.2.99", &frame(OUR_MAC, PEER_MAC, [8, 0], &inner));
        probe.refused(&stranger, "drop-unknown-source");
        let arp = coming(V4_PEER, &frame(OUR_MAC, PEER_MAC, [8, 6], &inner));
        probe.refused(&arp, "drop-not-ip");
        let all = coming(V4_PEER, &frame(MacAddr([0xff; 6]), PEER_MAC, [8, 0], &inner));
        probe.refused(&all, "drop-broadcast");
        let ours = || Shape::from(V4_PEER);
        probe.refused(&Shape { vni: 1, ..ours() }.packet(), "drop-wrong-vni");
        probe.refused(&Shape { flags: 0, ..ours() }.packet(), "drop-no-vni");
        let whole = coming_v4(THEM, US);
        probe.refused(&whole[..whole.len() - 1], "drop-malformed");
        // Options do not help, nor do fragments.
        for shape in [Shape { options: 4, ..ours() }, Shape { fragment: 0x2000, ..ours() }] {
            probe.refused(&shape.packet(), "drop-not-ip");
        }
        let mut congested = whole.clone();
        congested[15] = 3;
        congested[24..26].fill(0);
        let sum = !checksum(&congested[14..34]);
        congested[24..26].copy_from_slice(&sum.to_be_bytes());
        probe.refused(&congested, "drop-congested");

        probe.datapath.apply(&filtering(Filter::Strict)).expect("applied");
        probe.refused(&coming_v4(outside, US), "drop-foreign-source");
        probe.expect(&probe.ingress, &coming_v4(THEM, US), "decapsulated");
        probe.datapath.apply(&filtering(Filter::Off)).expect("applied");
        probe.expect(&probe.ingress, &stranger, "decapsulated");
    });
}

/// Not a test of speed: the figures are for whoever asks (`--nocapture`).
#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_programs_can_be_run_over_and_over() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir, &node(LOOPBACK));
        let packet = going();
        // Each run adds headers to what the last one left: the packet that the kernel cannot
        // encapsulate twice tells the cost up to the room.
        let (_, _, encap) = test_run_repeated(&probe.egress, &packet, 100_000);
        let (_, _, pass) = test_run_repeated(&probe.ingress, &packet, 100_000);
        let decap = coming_v4(THEM, US);
        let (_, _, decap) = test_run_repeated(&probe.ingress, &decap, 100_000);
        println!("egress {encap} ns, ingress {decap} ns, what is not the tunnel's {pass} ns");
        assert!(probe.count("decapsulated") > 0);
    });
}
