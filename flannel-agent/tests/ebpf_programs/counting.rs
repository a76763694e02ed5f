//! What the program sees in a packet, each branch by a test run.

use std::{net::IpAddr, path::Path};

use aya::programs::ProgramInfo;
use flannel_agent::datapath::ebpf::{EbpfDatapath, FastPathWanted, read_pinned_peers};

use super::{
    V4_PEER, V6_PEER, load,
    namespace::{ifindex, in_namespace, tcx, test_run},
    packet::{Shape, UDP_V4, UDP_V6},
    peer, wanted,
};

/// What every packet gets: "next".
const TC_ACT_UNSPEC: i32 = -1;

struct Probe {
    datapath: EbpfDatapath,
    program: ProgramInfo,
}

impl Probe {
    fn new(pin_dir: &Path) -> Self {
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted(&[ifindex("v1")])).expect("applied");
        let program = tcx("v1").pop().expect("attached");
        Self { datapath, program }
    }

    fn outcome(&self, word: &str) -> (u64, u64) {
        let status = self.datapath.status();
        let count = |field: &str| status["outcomes"][word][field].as_u64().expect("a number");
        (count("packets"), count("bytes"))
    }

    fn all(&self) -> Vec<(u64, u64)> {
        let words = ["from-peer", "unknown-source", "wrong-vni", "no-vni", "malformed", "fragment"];
        words.iter().map(|word| self.outcome(word)).collect()
    }

    /// The packet must be passed on, and be counted as this and nothing else.
    fn expect(&self, what: &str, packet: &[u8], outcome: Option<&str>) {
        let before = (outcome.map(|word| self.outcome(word)), self.all());
        assert_eq!(test_run(&self.program, packet), TC_ACT_UNSPEC, "{what}");
        let changed = self.all().iter().zip(&before.1).filter(|(new, old)| new != old).count();
        assert_eq!(changed, usize::from(outcome.is_some()), "{what}");
        if let (Some(word), Some((packets, bytes))) = (outcome, before.0) {
            let expected = (packets + 1, bytes + packet.len() as u64);
            assert_eq!(self.outcome(word), expected, "{what}");
        }
    }

    fn from(&self, outer: &str) -> (u64, u64) {
        let counters = self.datapath.peer_counters().expect("read");
        let outer: IpAddr = outer.parse().expect("an address");
        let row = counters.iter().find(|row| row.outer == outer).expect("a peer");
        (row.packets, row.bytes)
    }
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn every_branch_counts_what_it_should() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir);
        let v4 = || Shape::from(V4_PEER);
        probe.expect("IPv4", &v4().packet(), Some("from-peer"));
        assert_eq!(probe.from(V4_PEER), (1, 14 + 20 + 16 + 84));
        assert_eq!(probe.from(V6_PEER), (0, 0));
        probe.expect("IPv6", &Shape::from(V6_PEER).packet(), Some("from-peer"));
        assert_eq!(probe.from(V6_PEER), (1, 14 + 40 + 16 + 84));
        for options in [4, 20, 40] {
            let packet = Shape { options, ..v4() }.packet();
            probe.expect("options", &packet, Some("from-peer"));
        }
        assert_eq!(probe.from(V4_PEER).0, 4);
        probe.expect("port", &Shape { port: 4789, ..v4() }.packet(), None);
        probe.expect("VNI", &Shape { vni: 1, ..v4() }.packet(), Some("wrong-vni"));
        probe.expect("I flag", &Shape { flags: 0, ..v4() }.packet(), Some("no-vni"));
        let first = Shape { fragment: 0x2000, ..v4() }.packet();
        probe.expect("first fragment", &first, Some("fragment"));
        probe.expect("later fragment", &Shape { fragment: 0x2001, ..v4() }.packet(), None);
        for stranger in ["192.0.2.8", "2001:db8::8", "::ffff:192.0.2.8"] {
            probe.expect(stranger, &Shape::from(stranger).packet(), Some("unknown-source"));
        }
        let mut elsewhere = v4().packet();
        elsewhere[5] = 1;
        probe.expect("another host's frame", &elsewhere, None);
        assert_eq!((probe.from(V4_PEER).0, probe.from(V6_PEER).0), (5, 1), "a first fragment too");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn truncation_is_noticed_at_every_length() {
    in_namespace(|pin_dir| {
        let probe = Probe::new(pin_dir);
        for (source, udp) in [(V4_PEER, UDP_V4), (V6_PEER, UDP_V6)] {
            let packet = Shape::from(source).packet();
            // The kernel refuses test runs without a whole IP header.
            for len in udp..packet.len() {
                let outcome = (len >= udp + 6).then_some("malformed");
                probe.expect(&format!("{len} bytes from {source}"), &packet[..len], outcome);
            }
            probe.expect("all of it", &packet, Some("from-peer"));
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn peers_come_and_go_with_their_counters() {
    in_namespace(|pin_dir| {
        let mut probe = Probe::new(pin_dir);
        let underlay = [ifindex("v1")];
        probe.expect("a peer", &Shape::from(V4_PEER).packet(), Some("from-peer"));
        assert_eq!(probe.datapath.apply(&wanted(&underlay)).expect("applied"), 0, "nothing to do");

        let new = "192.0.2.9";
        let peers = vec![peer(new, "10.5.3.0/24"), peer(V6_PEER, "10.5.2.0/24")];
        let replaced = FastPathWanted { peers, ..wanted(&underlay) };
        assert_eq!(probe.datapath.apply(&replaced).expect("applied"), 2, "one out, one in");
        assert_eq!(probe.from(new), (0, 0), "the place of another, but not its counters");
        probe.expect("gone", &Shape::from(V4_PEER).packet(), Some("unknown-source"));
        probe.expect("new", &Shape::from(new).packet(), Some("from-peer"));

        let moved = FastPathWanted { vni: 9, port: 4789, ..replaced };
        assert_eq!(probe.datapath.apply(&moved).expect("applied"), 1);
        let packet = Shape { vni: 9, port: 4789, ..Shape::from(new) }.packet();
        probe.expect("new port and VNI", &packet, Some("from-peer"));
        assert_eq!(probe.from(new).0, 2);

        drop(probe);
        let rows = read_pinned_peers(pin_dir).expect("read without the agent");
        let row = rows.as_array().expect("rows").iter().find(|row| row["outer"] == new);
        let row = row.expect("the peer");
        assert_eq!(row["subnet"], "10.5.3.0/24");
        assert_eq!((&row["packets"], &row["device"]), (&2.into(), &"flannel.66051".into()));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn thousands_of_peers_fit() {
    in_namespace(|pin_dir| {
        let mut datapath = load(pin_dir);
        let outer = |n: u32| std::net::Ipv4Addr::from(0xc612_0000 + n).to_string();
        let peers = (0..16_385).map(|n| peer(&outer(n), "10.5.1.0/24")).collect();
        let many = FastPathWanted { peers, ..wanted(&[]) };
        let start = std::time::Instant::now();
        assert_eq!(datapath.apply(&many).expect("applied"), 16_384 + 1);
        println!("{:?} for 16384 peers", start.elapsed());
        let status = datapath.status();
        assert_eq!((&status["peers"], &status["peers_left_out"]), (&16_384.into(), &1.into()));
        assert_eq!(datapath.apply(&wanted(&[])).expect("applied"), 16_384 + 2);
        assert_eq!(datapath.status()["peers_left_out"], 0);
    });
}
