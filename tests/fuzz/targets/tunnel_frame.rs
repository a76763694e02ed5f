//! A frame from the underlay, as the BPF programs read it: no read beyond its end, and what is
//! taken for a flow's packet has its IP header inside it.

#![no_main]

use flannel_common::{
    flow::{Direction, packet},
    map::Config,
    outer::{Seen, recognise},
};
use libfuzzer_sys::fuzz_target;

const PORT: u16 = 8472;
const VNI: u32 = 1;

fuzz_target!(|frame: &[u8]| {
    let config = Config { port: PORT, vni: VNI, ..Config::default() };
    let Seen::Tunnel { inner, fragment, .. } = recognise(frame, &config) else { return };
    let ip = inner as usize + 14;
    assert!(ip <= frame.len() || fragment, "an inner frame at {inner} of {} bytes", frame.len());
    for direction in [Direction::In, Direction::Out] {
        let read = packet::v4(frame, ip, direction).map(|read| read.length);
        assert!(read.is_none() || ip + 20 <= frame.len(), "an IPv4 packet without a header");
        let read = packet::v6(frame, ip, direction).map(|read| read.length);
        assert!(read.is_none() || ip + 40 <= frame.len(), "an IPv6 packet without a header");
    }
});
