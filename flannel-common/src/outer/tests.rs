//! Packets built by hand and mutated by chance.

extern crate std;

use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;
use crate::map::Tunnel;

const NO_TUNNEL: Tunnel = Tunnel {
    ifindex: 0,
    mac: [0; 6],
    hop_limit: 64,
    prefix_len: 0,
    local: OuterAddress::from_v6([0; 16]),
    subnet: [0; 16],
};
const CONFIG: Config = Config {
    vni: 0x00ab_cdef,
    switches: 0,
    port: 8472,
    source_port_min: 0,
    source_port_max: 0,
    reserved: 0,
    epoch: 0,
    v4: NO_TUNNEL,
    v6: NO_TUNNEL,
};
const SOURCE_V4: [u8; 4] = [192, 0, 2, 7];
const SOURCE_V6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
const INNER_LEN: usize = 60;

fn udp(port: u16, flags: u8, vni: u32) -> Vec<u8> {
    let mut packet = vec![0xc0, 0x01];
    packet.extend(port.to_be_bytes());
    packet.extend(u16::try_from(16 + INNER_LEN).expect("small").to_be_bytes());
    packet.extend([0, 0, flags, 0, 0, 0]);
    packet.extend((vni << 8).to_be_bytes());
    packet.extend([0; INNER_LEN]);
    packet
}

fn over_v4(options: &[u8], fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 12];
    packet.extend(ETHERTYPE_IPV4);
    packet.push(0x45 + u8::try_from(options.len() / 4).expect("fits"));
    packet.push(0);
    let len = u16::try_from(20 + options.len() + payload.len()).expect("fits");
    packet.extend(len.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, PROTOCOL_UDP, 0, 0]);
    packet.extend(SOURCE_V4);
    packet.extend([192, 0, 2, 1]);
    packet.extend(options);
    packet.extend(payload);
    packet
}

fn over_v6(next: u8, extension: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 12];
    packet.extend(ETHERTYPE_IPV6);
    packet.extend([0x60, 0, 0, 0]);
    packet.extend(u16::try_from(extension.len() + payload.len()).expect("fits").to_be_bytes());
    packet.extend([next, 64]);
    packet.extend(SOURCE_V6);
    packet.extend([0; 16]);
    packet.extend(extension);
    packet.extend(payload);
    packet
}

fn ours() -> Vec<u8> {
    udp(8472, 0x08, CONFIG.vni)
}

/// What is seen, but for where the inner frame begins.
fn seen(packet: &[u8]) -> Seen {
    match recognise(packet, &CONFIG) {
        Seen::Tunnel { source, fragment, .. } => Seen::Tunnel { source, inner: 0, fragment },
        other => other,
    }
}

const fn from(source: OuterAddress, fragment: bool) -> Seen {
    Seen::Tunnel { source, inner: 0, fragment }
}

const FROM_V4: Seen = from(OuterAddress::from_v4(SOURCE_V4), false);
const FROM_V6: Seen = from(OuterAddress::from_v6(SOURCE_V6), false);

#[test]
fn both_families_are_recognised() {
    assert_eq!(seen(&over_v4(&[], 0x4000, &ours())), FROM_V4);
    assert_eq!(seen(&over_v6(PROTOCOL_UDP, &[], &ours())), FROM_V6);
}

#[test]
fn options_are_skipped() {
    for words in 1..=10 {
        let packet = over_v4(&vec![1; words * 4], 0, &ours());
        let inner = u32::try_from(50 + words * 4).expect("small");
        let found = recognise(&packet[..], &CONFIG);
        assert!(matches!(found, Seen::Tunnel { inner: at, .. } if at == inner), "{words} words");
        assert_eq!(seen(&over_v4(&vec![1; words * 4], 0, &ours())), FROM_V4, "{words} words");
    }
}

#[test]
fn unknown_flags_and_the_reserved_byte_are_ignored() {
    let mut payload = udp(8472, 0xff, CONFIG.vni);
    payload[15] = 0xff;
    assert_eq!(seen(&over_v4(&[], 0, &payload)), FROM_V4);
}

#[test]
fn what_is_not_for_the_port_is_other() {
    assert_eq!(seen(&over_v4(&[], 0, &udp(4789, 0x08, CONFIG.vni))), Seen::Other);
    assert_eq!(seen(&over_v6(PROTOCOL_UDP, &[], &udp(4789, 0x08, CONFIG.vni))), Seen::Other);
    let off = Config { port: 0, ..CONFIG };
    assert_eq!(recognise(&over_v4(&[], 0, &udp(0, 8, off.vni))[..], &off), Seen::Other);
    let mut tcp = over_v4(&[], 0, &ours());
    tcp[14 + 9] = 6;
    assert_eq!(seen(&tcp), Seen::Other);
    let mut arp = over_v4(&[], 0, &ours());
    arp[13] = 0x06;
    assert_eq!(seen(&arp), Seen::Other);
    for version_ihl in [0x55, 0x44, 0x40] {
        let mut packet = over_v4(&[], 0, &ours());
        packet[14] = version_ihl;
        assert_eq!(seen(&packet), Seen::Other);
    }
    assert_eq!(seen(&over_v6(0, &[PROTOCOL_UDP, 0, 0, 0, 0, 0, 0, 0], &ours())), Seen::Other);
}

#[test]
fn another_network_and_no_network_are_told_apart() {
    let wrong = Seen::Odd(Outcome::WrongVni);
    assert_eq!(seen(&over_v4(&[], 0, &udp(8472, 0x08, CONFIG.vni ^ 1))), wrong);
    assert_eq!(seen(&over_v6(PROTOCOL_UDP, &[], &udp(8472, 8, CONFIG.vni ^ 0x80_0000))), wrong);
    assert_eq!(seen(&over_v4(&[], 0, &udp(8472, 0xf7, CONFIG.vni))), Seen::Odd(Outcome::NoVni));
}

#[test]
fn only_first_fragments_can_be_told() {
    let first = from(OuterAddress::from_v4(SOURCE_V4), true);
    assert_eq!(seen(&over_v4(&[], 0x2000, &ours())), first);
    let mut cut = over_v4(&[], 0x2000, &ours());
    cut.truncate(14 + 20 + 8 + 8 + 14);
    assert_eq!(seen(&cut), first, "the rest comes later");
    cut.pop();
    assert_eq!(seen(&cut), Seen::Odd(Outcome::Malformed), "nobody makes fragments so small");
    assert_eq!(seen(&over_v4(&[], 0x2001, &ours())), Seen::Other);
    assert_eq!(seen(&over_v4(&[], 0x0001, &ours())), Seen::Other);
    let first = from(OuterAddress::from_v6(SOURCE_V6), true);
    let header = |offset_flags: u16| {
        let [high, low] = offset_flags.to_be_bytes();
        [PROTOCOL_UDP, 0, high, low, 0, 0, 0, 1]
    };
    assert_eq!(seen(&over_v6(PROTOCOL_FRAGMENT, &header(1), &ours())), first);
    assert_eq!(seen(&over_v6(PROTOCOL_FRAGMENT, &header(0), &ours())), first);
    assert_eq!(seen(&over_v6(PROTOCOL_FRAGMENT, &header(8), &ours())), Seen::Other);
}

#[test]
fn lengths_that_contradict_each_other_are_malformed() {
    let malformed = Seen::Odd(Outcome::Malformed);
    for len in [1_u16, 7, 8, 15, 16, 29, 77, 0xffff] {
        let mut payload = ours();
        payload[4..6].copy_from_slice(&len.to_be_bytes());
        assert_eq!(seen(&over_v4(&[], 0, &payload)), malformed, "UDP length {len}");
        assert_eq!(seen(&over_v6(PROTOCOL_UDP, &[], &payload)), malformed, "UDP length {len}");
    }
    let mut short_total = over_v4(&[], 0, &ours());
    short_total[16..18].copy_from_slice(&19_u16.to_be_bytes());
    assert_eq!(seen(&short_total), malformed);
    // Beyond 64 KiB a merged packet has no lengths, and padding after the packet is no fault.
    let mut big = ours();
    big[4..6].fill(0);
    let mut merged = over_v4(&[], 0, &big);
    merged[16..18].fill(0);
    assert_eq!(seen(&merged), FROM_V4);
    let mut padded = over_v4(&[], 0, &ours());
    padded.extend([0; 20]);
    assert_eq!(seen(&padded), FROM_V4);
}

#[test]
fn every_truncation_is_noticed() {
    let cases = [
        (over_v4(&[], 0, &ours()), 14 + 20),
        (over_v4(&[1; 8], 0, &ours()), 14 + 28),
        (over_v6(PROTOCOL_UDP, &[], &ours()), 14 + 40),
    ];
    for (packet, udp_start) in cases {
        for len in 0..packet.len() {
            // Before the ports are there, nobody can tell whose packet it is.
            let expected =
                if len < udp_start + 6 { Seen::Other } else { Seen::Odd(Outcome::Malformed) };
            assert_eq!(seen(&packet[..len]), expected, "{len} of {} bytes", packet.len());
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_survived(packet: Vec<u8>, vni: u32, port: u16) {
        recognise(&packet[..], &Config { vni, port, ..CONFIG });
    }

    #[test]
    fn a_packet_with_one_byte_changed_keeps_its_sender(
        v6: bool, position in 0_usize..150, byte: u8,
    ) {
        let mut packet = if v6 {
            over_v6(PROTOCOL_UDP, &[], &ours())
        } else {
            over_v4(&[], 0, &ours())
        };
        let source = if v6 { 22..38 } else { 26..30 };
        if let Some(place) = packet.get_mut(position) {
            *place = byte;
        }
        let sender = packet.get(source).expect("long enough");
        if let Seen::Tunnel { source, .. } = seen(&packet) {
            let wanted = if v6 { &source.octets[..] } else { &source.octets[12..] };
            prop_assert_eq!(sender, wanted);
        }
    }

    #[test]
    fn any_network_and_port_are_matched_exactly(
        vni in 0_u32..1 << 24, port in 1_u16.., ours in 0_u32..1 << 24,
    ) {
        let config = Config { vni: ours, port, ..CONFIG };
        let seen = recognise(&over_v4(&[], 0, &udp(port, 8, vni))[..], &config);
        prop_assert_eq!(matches!(seen, Seen::Tunnel { inner: 50, .. }), vni == ours);
    }
}
