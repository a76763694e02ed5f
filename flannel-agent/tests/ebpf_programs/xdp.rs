//! In XDP, each branch by a test run: what is taken out, what passes as it came, what is dropped.

use std::{path::Path, thread, time::Duration};

use aya::programs::{ProgramInfo, loaded_programs};
use flannel_agent::{
    datapath::ebpf::{EbpfDatapath, FastPathWanted, Filter, XdpWanted},
    mac::MacAddr,
};

use super::{
    V4_PEER, V6_PEER,
    forwarding::{OUR_MAC, PEER_MAC, THEM, US, checksum, coming, coming_v4, frame, inner_v4, node},
    load,
    namespace::{ifindex, in_namespace, ip, run, tcx, test_run_repeated, test_run_xdp},
    packet::Shape,
};

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const TC_ACT_UNSPEC: i32 = -1;

/// The cookie's length.
const META: usize = 8;

/// What is wanted of a node with the program in XDP at `v1`, to whose MAC test packets are: zero.
fn front(tunnel: u32) -> FastPathWanted {
    let xdp = XdpWanted::Native { ifindex: ifindex("v1"), mac: MacAddr([0; 6]) };
    FastPathWanted { xdp, ..node(tunnel) }
}

struct Probe {
    datapath: EbpfDatapath,
    xdp: ProgramInfo,
    tc: ProgramInfo,
}

/// The program in XDP at a device.
fn program_at(device: &str) -> Option<u32> {
    let text = run("ip", &format!("-j link show {device}"));
    let links: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    links[0]["xdp"]["prog"]["id"].as_u64().and_then(|id| id.try_into().ok())
}

fn program_info(id: u32) -> ProgramInfo {
    loaded_programs().flatten().find(|program| program.id() == id).expect("loaded")
}

impl Probe {
    fn new(pin_dir: &Path, wanted: &FastPathWanted) -> Self {
        let mut datapath = load(pin_dir);
        datapath.apply(wanted).expect("applied");
        let id = program_at("v1");
        let id = id.unwrap_or_else(|| panic!("not attached: {}", datapath.status()["xdp"]));
        let tc = tcx("v1").pop().expect("attached");
        Self { xdp: program_info(id), tc, datapath }
    }

    /// What XDP makes of a packet while TC is at work.
    fn run(&self, packet: &[u8]) -> (i32, Vec<u8>) {
        // Any packet of the tunnel is a sign of life; this one leaves no flow behind.
        test_run_repeated(&self.tc, &Shape { vni: 1, ..Shape::from(V4_PEER) }.packet(), 1);
        test_run_xdp(&self.xdp, packet, ifindex("v1"))
    }

    fn count(&self, word: &str) -> u64 {
        self.datapath.status()["xdp"]["outcomes"][word]["packets"].as_u64().expect("a number")
    }

    /// What becomes of a packet, which has to be counted as this.
    fn expect(&self, packet: &[u8], word: &str) -> (i32, Vec<u8>) {
        let before = self.count(word);
        let result = self.run(packet);
        assert_eq!(self.count(word), before + 1, "{word}: {}", self.datapath.status()["xdp"]);
        result
    }

    /// Taken out; returns cookie and frame.
    fn taken(&self, packet: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (action, mut out) = self.expect(packet, "decapsulated");
        assert_eq!(action, XDP_PASS);
        let frame = out.split_off(META);
        (out, frame)
    }

    fn left(&self, packet: &[u8], word: &str) {
        let (action, out) = self.expect(packet, word);
        assert_eq!((action, &out[..]), (XDP_PASS, packet), "{word}");
    }

    fn refused(&self, packet: &[u8], word: &str) {
        assert_eq!(self.expect(packet, word).0, XDP_DROP, "{word}");
    }
}

/// The outer DS field and a flow of its own, with the checksum made right.
fn outer_v4(mut packet: Vec<u8>, ds_field: u8, flow: u8) -> Vec<u8> {
    packet[15] = ds_field;
    packet[34] = flow;
    packet[24..26].fill(0);
    let sum = !checksum(&packet[14..34]);
    packet[24..26].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// An IPv6 packet of UDP from the peer's pod to ours, its checksum right.
fn inner_v6(traffic_class: u8) -> Vec<u8> {
    let mut packet = vec![0x60 | traffic_class >> 4, traffic_class << 4, 0, 9, 0, 28, 17, 64];
    for subnet in [2, 9] {
        packet.extend([0xfd, 5, 0, subnet, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
    }
    packet.extend([0x30, 1, 0, 53, 0, 28, 0, 0]);
    packet.extend([0xaa; 20]);
    let sum = udp_v6(&packet);
    packet[46..48].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// The checksum of a UDP packet over IPv6 whose own is zero.
fn udp_v6(packet: &[u8]) -> u16 {
    let pseudo = [&packet[8..40], &[0, 0], &packet[4..6], &[0, 17], &packet[40..]].concat();
    !checksum(&pseudo)
}

/// The same in the tunnel.
fn coming_v6(outer: u8, inner: &[u8], port: u16) -> Vec<u8> {
    let mut packet = coming_over_v6(&frame(OUR_MAC, PEER_MAC, [0x86, 0xdd], inner));
    packet[14] |= outer >> 4;
    packet[15] |= outer << 4;
    packet[38..54].copy_from_slice(&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    packet[54..56].copy_from_slice(&port.to_be_bytes());
    let sum = udp_v6(&packet[14..]);
    packet[60..62].copy_from_slice(&sum.to_be_bytes());
    packet
}

fn coming_over_v6(inner: &[u8]) -> Vec<u8> {
    let len = u16::try_from(inner.len()).expect("short");
    let mut packet = Shape { inner_len: len, ..Shape::from(V6_PEER) }.packet();
    let at = packet.len() - inner.len();
    packet[at..].copy_from_slice(inner);
    packet
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn packets_are_taken_out_with_a_cookie_before_them() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir, &front(ifindex("v0")));
        let v4 = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        let (cookie, out) = probe.taken(&coming(V4_PEER, &v4));
        assert_eq!(out, v4);
        assert_ne!(cookie, [0; META]);
        let v6 = inner_v6(0);
        let (again, out) = probe.taken(&coming_v6(0, &v6, 0xc000));
        assert_eq!(out[14..], v6);
        assert_eq!(again, cookie, "different ones would keep packets from being merged");
        // All the pairs of the kernel: see RFC 6040.
        for (outer, inner, result) in [
            (1, 0, Some(0)),
            (2, 1, Some(1)),
            (3, 1, Some(3)),
            (3, 2, Some(3)),
            (3, 3, Some(3)),
            (1, 1, Some(1)),
            (1, 2, None),
            (3, 0, None),
        ] {
            // Each flow of its own: what is left to the kernel keeps the flow there.
            let flow = outer << 4 | inner;
            let v4 = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0xb8 | inner));
            let v4 = outer_v4(coming(V4_PEER, &v4), 0x40 | outer, flow);
            let v6 = coming_v6(0x40 | outer, &inner_v6(0xb8 | inner), u16::from(flow) << 8);
            if let Some(ecn) = result {
                let (_, out) = probe.taken(&v4);
                assert_eq!(out[15], 0xb8 | ecn, "{outer} {inner}");
                assert_eq!(checksum(&out[14..34]), 0xffff, "{outer} {inner}");
                assert_eq!(out[34..], v4[84..]);
                let (_, out) = probe.taken(&v6);
                assert_eq!(out[14..], inner_v6(0xb8 | ecn), "{outer} {inner}");
            } else {
                probe.left(&v4, "kernel-unusual");
                probe.left(&v6, "kernel-unusual");
            }
        }
        // In several pieces.
        let mut jumbo = inner_v4(THEM, US, 0);
        jumbo.resize(8000, 0x55);
        jumbo[2..4].copy_from_slice(&8000_u16.to_be_bytes());
        let jumbo = frame(OUR_MAC, PEER_MAC, [8, 0], &jumbo);
        let (again, out) = probe.taken(&coming(V4_PEER, &jumbo));
        assert_eq!((again, out == jumbo), (cookie, true));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn any_doubt_passes_as_it_came() {
    in_namespace(|pin_dir| {
        let mut probe = Probe::new(pin_dir, &front(ifindex("v0")));
        let good = coming_v4(THEM, US);
        probe.taken(&good);
        let unseen = |probe: &Probe, packet: &[u8]| {
            let before = probe.datapath.status()["xdp"].clone();
            assert_eq!(probe.run(packet), (XDP_PASS, packet.to_vec()));
            assert_eq!(probe.datapath.status()["xdp"], before);
        };
        // Another host's, another port's, ARP, IP options.
        let mut other = good.clone();
        other[5] = 1;
        unseen(&probe, &other);
        unseen(&probe, &Shape { port: 53, ..Shape::from(V4_PEER) }.packet());
        unseen(&probe, &frame(MacAddr([0; 6]), PEER_MAC, [8, 6], &good[14..]));
        unseen(&probe, &Shape { options: 4, ..Shape::from(V4_PEER) }.packet());
        let elsewhere = {
            let mut packet = good.clone();
            packet[33] = 77;
            outer_v4(packet, 0, 0xc1)
        };
        probe.left(&elsewhere, "kernel-unusual");
        let fragment = Shape { fragment: 0x2000, ..Shape::from(V4_PEER) }.packet();
        probe.left(&fragment, "kernel-unusual");
        probe.left(&Shape { vni: 7, ..Shape::from(V4_PEER) }.packet(), "kernel-unusual");
        // Without a checksum over IPv6, and with a wrong one.
        let mut open = coming_v6(0, &inner_v6(0), 0xd000);
        open[60..62].fill(0);
        probe.left(&open, "kernel-verify-checksum");
        open[61] = 9;
        open[54] = 0xd1;
        probe.left(&open, "kernel-verify-checksum");
        let not_ours = frame(PEER_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        probe.left(&outer_v4(coming(V4_PEER, &not_ours), 0, 0xc2), "kernel-inner-mac");
        let mut burst = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        burst[14 + 9] = 6;
        burst[14 + 20 + 12..14 + 20 + 14].copy_from_slice(&[0x50, 0x10]);
        let behind = outer_v4(good.clone(), 0, 0xe0);
        probe.taken(&behind);
        probe.left(&outer_v4(coming(V4_PEER, &burst), 0, 0xe0), "kernel-burst");
        probe.left(&behind, "kernel-behind-burst");
        let stranger = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        probe.left(&coming("192.0.2.99", &stranger), "unknown-source");
        // Nobody has been at TC for a while.
        thread::sleep(Duration::from_millis(500));
        let (action, out) = test_run_xdp(&probe.xdp, &good, ifindex("v1"));
        assert_eq!((action, &out), (XDP_PASS, &good));
        assert_eq!(probe.count("kernel-unattended"), 1);
        probe.taken(&good);
        ip("link del v0");
        assert_eq!(probe.datapath.status()["xdp"]["mode"], "native");
        // `v1` went with it, and the program.
        probe.datapath.apply(&FastPathWanted::default()).ok();
        assert_eq!(probe.datapath.status()["xdp"]["mode"], "off");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_is_cut_short_or_garbled_is_never_changed() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir, &front(ifindex("v0")));
        // Each flow of its own: what is left to the kernel keeps the flow there.
        let v4 = |port: u16| {
            let mut packet = coming_v4(THEM, US);
            packet[34..36].copy_from_slice(&port.to_be_bytes());
            packet
        };
        let v6 = |port: u16| coming_v6(0, &inner_v6(0), port);
        let makers: [&dyn Fn(u16) -> Vec<u8>; 2] = [&v4, &v6];
        for (make, overhead) in makers.into_iter().zip([50, 70]) {
            let whole = make(0xc000);
            for len in 14..whole.len() {
                let short = &whole[..len];
                assert_eq!(probe.run(short), (XDP_PASS, short.to_vec()), "{len} bytes");
            }
            let mut taken = 0;
            let mut random = 0x9e37_79b9_u32;
            let places = (0..overhead + 62).cycle();
            for (port, at) in (0..4000).zip(places) {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let mut garbled = make(port);
                garbled[at] ^= random.to_be_bytes()[0] | 1;
                let (action, out) = probe.run(&garbled);
                if action == XDP_PASS && out != garbled {
                    // Taken out: then it is the inner frame, but for its ECN bits and checksum.
                    assert_eq!(out.len(), META + garbled.len() - overhead);
                    assert_eq!(out[META..META + 14], garbled[overhead..overhead + 14]);
                    assert_eq!(out[META + 26..], garbled[overhead + 26..]);
                    taken += 1;
                } else {
                    assert!(action == XDP_PASS || action == XDP_DROP, "{action}");
                }
            }
            // What matters to nobody: addresses of the frame, lengths of life, the payload over IPv4.
            assert!(taken > 200, "{taken} garbled, but good ones");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_nobody_may_send_ends_in_xdp() {
    in_namespace(|pin_dir| {
        let filtering = |filter| FastPathWanted { filter, ..front(ifindex("v0")) };
        let mut probe = Probe::new(pin_dir, &filtering(Filter::Default));
        let outside = [198, 51, 100, 1];
        probe.taken(&coming_v4(THEM, US));
        probe.taken(&coming_v4(outside, US));
        probe.refused(&coming_v4([10, 5, 3, 5], US), "drop-other-source");
        probe.refused(&coming_v4(US, US), "drop-own-source");
        probe.refused(&coming_v4(THEM, outside), "drop-destination");
        let inner = inner_v4(THEM, US, 0);
        let stranger = coming("192.0.2.99", &frame(OUR_MAC, PEER_MAC, [8, 0], &inner));
        probe.refused(&stranger, "drop-unknown-source");
        let arp = coming(V4_PEER, &frame(OUR_MAC, PEER_MAC, [8, 6], &inner));
        probe.refused(&arp, "drop-not-ip");
        let all = coming(V4_PEER, &frame(MacAddr([0xff; 6]), PEER_MAC, [8, 0], &inner));
        probe.refused(&all, "drop-broadcast");
        probe.refused(&outer_v4(coming_v4(THEM, US), 3, 0xc3), "drop-congested");
        probe.datapath.apply(&filtering(Filter::Strict)).expect("applied");
        probe.refused(&coming_v4(outside, US), "drop-foreign-source");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_frame_in_clear_is_nobodys_at_tc() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir, &front(ifindex("v0")));
        let inner = frame(OUR_MAC, PEER_MAC, [8, 0], &inner_v4(THEM, US, 0));
        let (cookie, _) = probe.taken(&coming(V4_PEER, &inner));
        // Nor with what would be the cookie, were it metadata.
        for packet in [inner.clone(), [&cookie[..], &inner].concat()] {
            let before = probe.datapath.status()["outcomes"].clone();
            let (action, out, _) = test_run_repeated(&probe.tc, &packet, 1);
            assert_eq!((action, out), (TC_ACT_UNSPEC, packet));
            assert_eq!(probe.datapath.status()["outcomes"], before);
        }
    });
}

/// The answer is not the same everywhere, but there is one: a kernel whose headers tell of the flag
/// has it.
#[test]
#[ignore = "needs root: cargo xtask test"]
fn whether_merged_packets_could_be_taken_out_is_known() {
    in_namespace(|pin_dir| {
        let status = load(pin_dir).status();
        let btf = std::fs::read("/sys/kernel/btf/vmlinux").expect("BTF");
        let name = b"BPF_F_ADJ_ROOM_DECAP_L4_UDP";
        let known = btf.windows(name.len()).any(|bytes| bytes == name);
        assert_eq!(status["kernel_has_decap_l4_udp"], known, "{status:#}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_driver_without_native_xdp_is_named_and_never_gets_generic_xdp() {
    in_namespace(|pin_dir| {
        ip("link add br0 type bridge");
        let xdp = XdpWanted::Native { ifindex: ifindex("br0"), mac: MacAddr([0; 6]) };
        let mut datapath = load(pin_dir);
        let bridge = FastPathWanted { xdp, underlay: vec![ifindex("br0")], ..node(ifindex("v0")) };
        datapath.apply(&bridge).expect("applied by TC");
        let status = datapath.status();
        assert_eq!(status["xdp"]["why_not"], "the driver bridge of br0 has no native XDP");
        assert_eq!(program_at("br0"), None);
        assert_eq!(tcx("br0").len(), 1, "TC goes on alone");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_tc_never_gets_to_see_ends_xdp() {
    in_namespace(|pin_dir| {
        let mut probe = Probe::new(pin_dir, &front(ifindex("v0")));
        let mut look = |handed_over: u16| {
            // Test runs end in XDP: TC gets none of them.
            (0..handed_over).for_each(|_| drop(probe.taken(&coming_v4(THEM, US))));
            thread::sleep(Duration::from_millis(1100));
            assert!(!probe.datapath.tend_flows());
            probe.datapath.status()["xdp"].clone()
        };
        // The first look has nothing to compare with; once may be chance, a few may be under way.
        for handed_over in [40, 40, 5, 40] {
            assert_eq!(look(handed_over)["mode"], "native");
        }
        let status = look(40);
        assert_eq!(status["mode"], "off", "{status:#}");
        let why = status["why_not"].as_str().unwrap_or_default().to_owned();
        assert!(why.contains("none was seen at TC"), "{why}");
        assert_eq!(program_at("v1"), None);
    });
}
