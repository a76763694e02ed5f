//! Who may send what, and what is plain enough.

extern crate std;

use std::{collections::BTreeMap, vec, vec::Vec};

use proptest::prelude::*;

use super::*;
use crate::map::NO_SUBNET;

const PEER: OuterAddress = OuterAddress::from_v4([192, 0, 2, 7]);
const OTHER_PEER: OuterAddress = OuterAddress::from_v4([192, 0, 2, 8]);
const STRANGER: OuterAddress = OuterAddress::from_v4([192, 0, 2, 99]);
const OUR_MAC: Mac = [2, 0, 0, 0, 0, 1];
const PEER_MAC: Mac = [2, 0, 0, 0, 0, 7];

/// We have 10.5.1.0/24, the peer 10.5.2.0/24, another 10.5.3.0/24.
struct Known {
    peers: BTreeMap<OuterAddress, Peer>,
    leases: BTreeMap<[u8; 3], Lease>,
}

impl Known {
    fn new() -> Self {
        let peer = |index: u32, third: u8| Peer {
            index,
            subnet_v4: [10, 5, third, 0],
            subnet_v6: [0; 16],
            prefix_len_v4: 24,
            prefix_len_v6: NO_SUBNET,
            reserved: 0,
        };
        let lease = |outer: OuterAddress, index: u32| Lease {
            outer,
            index,
            vtep_mac: PEER_MAC,
            tunnelled: 1,
            any_source: u8::from(index == 1),
        };
        Self {
            peers: [(PEER, peer(0, 2)), (OTHER_PEER, peer(1, 3))].into(),
            leases: [([10, 5, 2], lease(PEER, 0)), ([10, 5, 3], lease(OTHER_PEER, 1))].into(),
        }
    }
}

impl Leases for Known {
    fn peer(&self, outer: &OuterAddress) -> Option<&Peer> {
        self.peers.get(outer)
    }

    fn lease_v4(&self, inner: &[u8; 4]) -> Option<&Lease> {
        self.leases.get(&inner[..3])
    }

    fn lease_v6(&self, _: &[u8; 16]) -> Option<&Lease> {
        None
    }
}

fn config(switches: u32) -> Config {
    let mut subnet = [0; 16];
    subnet[..4].copy_from_slice(&[10, 5, 1, 0]);
    let v4 = Tunnel {
        ifindex: 5,
        mac: OUR_MAC,
        hop_limit: 64,
        prefix_len: 24,
        local: OuterAddress::from_v4([192, 0, 2, 1]),
        subnet,
    };
    Config { vni: 1, port: 8472, switches, v4, ..Config::default() }
}

fn judged(switches: u32, outer: OuterAddress, from: [u8; 4], to: [u8; 4]) -> Result<u32, Outcome> {
    let addresses = Addresses::V4 { source: from, destination: to };
    filter(&Known::new(), &config(switches), &outer, OUR_MAC, &addresses)
}

const US: [u8; 4] = [10, 5, 1, 9];
const BEHIND_PEER: [u8; 4] = [10, 5, 2, 9];
const BEHIND_OTHER: [u8; 4] = [10, 5, 3, 9];
const OUTSIDE: [u8; 4] = [192, 0, 2, 66];

#[test]
fn each_refusal_has_its_reason() {
    let filter_on = |outer, from, to| judged(switch::FILTER, outer, from, to);
    assert_eq!(filter_on(PEER, BEHIND_PEER, US), Ok(0));
    assert_eq!(filter_on(PEER, OUTSIDE, US), Ok(0), "a node's own address, an outside client");
    assert_eq!(filter_on(STRANGER, BEHIND_PEER, US), Err(Outcome::DropUnknownSource));
    assert_eq!(filter_on(PEER, BEHIND_PEER, BEHIND_OTHER), Err(Outcome::DropDestination));
    assert_eq!(filter_on(PEER, US, US), Err(Outcome::DropOwnSource));
    assert_eq!(filter_on(OTHER_PEER, BEHIND_PEER, US), Err(Outcome::DropOtherSource));
    let known = Known::new();
    let broadcast = filter(&known, &config(switch::FILTER), &PEER, [0xff; 6], &Addresses::Other);
    assert_eq!(broadcast, Err(Outcome::DropBroadcast));
    let arp = filter(&known, &config(switch::FILTER), &PEER, OUR_MAC, &Addresses::Other);
    assert_eq!(arp, Err(Outcome::DropNotIp));
}

#[test]
fn strict_takes_nothing_but_the_senders_own() {
    let strict = |outer, from| judged(switch::FILTER | switch::STRICT, outer, from, US);
    assert_eq!(strict(PEER, BEHIND_PEER), Ok(0));
    assert_eq!(strict(PEER, OUTSIDE), Err(Outcome::DropForeignSource));
    assert_eq!(strict(PEER, BEHIND_OTHER), Err(Outcome::DropOtherSource));
    assert_eq!(strict(STRANGER, BEHIND_PEER), Err(Outcome::DropUnknownSource));
}

#[test]
fn whoever_is_behind_a_nat_is_known_by_the_subnet() {
    let nat = |outer, from| judged(switch::FILTER | switch::ANY_SOURCE, outer, from, US);
    assert_eq!(nat(STRANGER, BEHIND_OTHER), Ok(NO_PEER));
    assert_eq!(nat(PEER, BEHIND_OTHER), Ok(0), "several nodes behind one");
    assert_eq!(nat(STRANGER, BEHIND_PEER), Err(Outcome::DropUnknownSource), "not this one");
    assert_eq!(nat(STRANGER, OUTSIDE), Err(Outcome::DropUnknownSource));
    assert_eq!(nat(STRANGER, US), Err(Outcome::DropOwnSource));
    let both = switch::FILTER | switch::STRICT | switch::ANY_SOURCE;
    assert_eq!(judged(both, STRANGER, BEHIND_OTHER, US), Err(Outcome::DropUnknownSource));
    assert_eq!(judged(both, PEER, BEHIND_OTHER, US), Err(Outcome::DropOtherSource));
}

#[test]
fn without_a_filter_everybody_may_send_everything() {
    assert_eq!(judged(0, STRANGER, US, BEHIND_OTHER), Ok(NO_PEER));
    assert_eq!(judged(0, PEER, US, BEHIND_OTHER), Ok(0));
}

/// A packet of the peer's pod to ours: outer, inner, TCP flags, payload.
fn packet(flags: u8, payload: usize) -> Vec<u8> {
    let inner_len = u16::try_from(20 + 20 + payload).expect("short");
    let mut packet = vec![0; 12];
    packet.extend([8, 0, 0x45, 0]);
    packet.extend((inner_len + 50).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, UDP, 0, 0, 192, 0, 2, 7, 192, 0, 2, 1]);
    packet.extend([0xc0, 1, 0x21, 0x18]);
    packet.extend((inner_len + 30).to_be_bytes());
    packet.extend([0, 0, 8, 0, 0, 0, 0, 0, 1, 0]);
    packet.extend(OUR_MAC);
    packet.extend(PEER_MAC);
    packet.extend([8, 0, 0x45, 0]);
    packet.extend(inner_len.to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, TCP, 0, 0]);
    packet.extend(BEHIND_PEER);
    packet.extend(US);
    packet.extend([0; 12]);
    packet.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
    packet.resize(packet.len() + payload, 0);
    finish(&mut packet);
    packet
}

/// Makes the outer IP checksum right.
fn finish(packet: &mut [u8]) {
    packet[24..26].fill(0);
    let checksum = !fold(packet.sum(14, 20));
    packet[24..26].copy_from_slice(&checksum.to_ne_bytes());
}

fn plain(packet: &[u8]) -> Option<Plain> {
    plain_v4(packet, u32::try_from(packet.len()).expect("short"), &config(0))
}

#[test]
fn a_plain_packet_is_read() {
    let packet = packet(0x18, 30);
    let plain = plain(&packet).expect("plain");
    assert_eq!((plain.source, plain.frame_to, plain.frame_from), (PEER, OUR_MAC, PEER_MAC));
    assert_eq!(plain.addresses, Addresses::V4 { source: BEHIND_PEER, destination: US });
    assert!(checksum_fits_v4(packet.as_slice()));
}

#[test]
fn only_data_in_the_middle_of_a_burst_is_mergeable() {
    let mergeable = |flags, payload| plain(&packet(flags, payload)).expect("plain").mergeable;
    assert!(mergeable(0x10, 1));
    assert!(!mergeable(0x18, 1), "the end of a write");
    assert!(!mergeable(0x10, 0), "an acknowledgement");
    for flags in [0x02, 0x11, 0x14] {
        assert!(!mergeable(flags, 10), "flags {flags:#x}");
    }
}

#[test]
fn whatever_is_unusual_is_not_plain() {
    type Change = (&'static str, fn(&mut Vec<u8>));
    let changes: [Change; 12] = [
        ("options", |p| p[14] = 0x46),
        ("more fragments", |p| p[20] = 0x20),
        ("an offset", |p| p[21] = 1),
        ("padding", |p| p.push(0)),
        ("cut", |p| p.truncate(p.len() - 1)),
        ("UDP length", |p| p[39] ^= 1),
        ("no VNI", |p| p[42] = 0),
        ("more flags", |p| p[42] = 0x88),
        ("reserved", |p| p[44] = 1),
        ("another VNI", |p| p[48] = 2),
        ("reserved byte", |p| p[49] = 1),
        ("IP length", |p| p[17] ^= 1),
    ];
    for (what, change) in changes {
        let mut packet = packet(0x18, 30);
        change(&mut packet);
        finish(&mut packet);
        assert_eq!(plain(&packet), None, "{what}");
    }
    let mut wrong = packet(0x18, 30);
    wrong[24] ^= 1;
    assert_eq!(plain(&wrong), None, "IP checksum");
}

#[test]
fn only_what_is_surely_right_is_taken_out() {
    let tunnel = config(0).v4;
    let good = Plain { checksum_fits: true, ..plain(&packet(0x18, 1)).expect("plain") };
    let taken = |change: fn(&mut Plain)| {
        let mut plain = good;
        change(&mut plain);
        plain.decapsulate(&tunnel, true)
    };
    assert_eq!(taken(|_| ()), Ok(Decapsulate::Keep));
    assert_eq!(taken(|p| p.frame_to = PEER_MAC), Err(Outcome::InnerMac));
    assert_eq!(taken(|p| p.frame_from = OUR_MAC), Err(Outcome::InnerMac));
    assert_eq!(taken(|p| p.checksum_fits = false), Err(Outcome::VerifyChecksum));
    assert_eq!(taken(|p| p.addresses = Addresses::Other), Err(Outcome::Unusual));
    assert_eq!(taken(|p| p.outer_ds_field = 3), Err(Outcome::DropCongested));
    let congested = |inner: u8| Plain { outer_ds_field: 3, inner_ds_field: inner, ..good };
    assert_eq!(congested(2).decapsulate(&tunnel, true), Ok(Decapsulate::SetCe));
    assert_eq!(congested(0).decapsulate(&tunnel, false), Err(Outcome::Unusual));
    let ect = Plain { outer_ds_field: 1, inner_ds_field: 2, ..good };
    assert_eq!(ect.decapsulate(&tunnel, true), Err(Outcome::Unusual), "the kernel sets ECT(1)");
}

proptest! {
    #[test]
    fn subnets_contain_what_masks_say(net: u32, address: u32, len in 0_u8..34) {
        let mask = u32::MAX.checked_shl(32 - u32::from(len.min(32))).unwrap_or(0);
        let expected = len <= 32 && net & mask == address & mask;
        prop_assert_eq!(in_v4(net.to_be_bytes(), len, address.to_be_bytes()), expected);
    }

    #[test]
    fn ipv6_subnets_contain_what_masks_say(net: u128, differ: u128, at in 0_u32..128, len: u8) {
        let address = net ^ (differ & 1) << at;
        let mask = u128::MAX.checked_shl(128 - u32::from(len.min(128))).unwrap_or(0);
        let expected = len <= 128 && net & mask == address & mask;
        prop_assert_eq!(in_v6(&net.to_be_bytes(), len, &address.to_be_bytes()), expected);
    }

    #[test]
    fn any_bytes_are_survived(mut bytes: Vec<u8>, len: u32) {
        bytes.resize(98, 0);
        plain_v4(bytes.as_slice(), len, &config(0));
    }
}
