//! Packets built by hand and mutated by chance.

extern crate std;

use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;

const LOCAL: [u8; 4] = [10, 77, 1, 5];
const REMOTE: [u8; 4] = [10, 77, 2, 6];
const LOCAL_V6: [u8; 16] = [0xfd, 0x77, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
const REMOTE_V6: [u8; 16] = [0xfd, 0x77, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6];

fn tcp(flags: u8, data: usize) -> Vec<u8> {
    let mut segment = vec![0x9c, 0x40, 0x00, 0x50, 0, 0, 0, 1, 0, 0, 0, 2, 0x80, flags];
    segment.resize(32 + data, 0);
    segment
}

fn udp(data: usize) -> Vec<u8> {
    let mut datagram = vec![0x9c, 0x40, 0x00, 0x35];
    datagram.extend(u16::try_from(8 + data).expect("small").to_be_bytes());
    datagram.resize(8 + data, 0);
    datagram
}

fn over_v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 14];
    packet.extend([0x45, 0xb9]);
    packet.extend(u16::try_from(20 + payload.len()).expect("small").to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
    packet.extend(LOCAL);
    packet.extend(REMOTE);
    packet.extend(payload);
    packet
}

fn over_v6(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 14];
    packet.extend([0x6b, 0x90, 0, 0]);
    packet.extend(u16::try_from(payload.len()).expect("small").to_be_bytes());
    packet.extend([protocol, 63]);
    packet.extend(LOCAL_V6);
    packet.extend(REMOTE_V6);
    packet.extend(payload);
    packet
}

#[test]
fn both_directions_have_one_key() {
    let out = over_v4(TCP, &tcp(ACK, 10));
    let inner = v4(out.as_slice(), 14, Direction::Out).expect("read");
    let key = Flow4Key {
        local: LOCAL,
        remote: REMOTE,
        local_port: [0x9c, 0x40],
        remote_port: [0, 80],
        protocol: TCP,
        reserved: [0; 3],
    };
    assert_eq!(inner.key, key);
    assert_eq!((inner.hop_limit, inner.traffic_class), (64, 0xb9));
    assert_eq!((inner.length, inner.headers), (62, 52));
    // The answer: addresses and ports swapped.
    let mut back = out;
    back[26..30].copy_from_slice(&REMOTE);
    back[30..34].copy_from_slice(&LOCAL);
    back[34..38].copy_from_slice(&[0, 80, 0x9c, 0x40]);
    assert_eq!(v4(back.as_slice(), 14, Direction::In).expect("read").key, key);
}

#[test]
fn ipv6_is_read_the_same_way() {
    let packet = over_v6(UDP, &udp(4));
    let inner = v6(packet.as_slice(), 14, Direction::Out).expect("read");
    assert_eq!((inner.key.local, inner.key.remote), (LOCAL_V6, REMOTE_V6));
    assert_eq!((inner.key.local_port, inner.key.remote_port), ([0x9c, 0x40], [0, 0x35]));
    assert_eq!((inner.hop_limit, inner.traffic_class), (63, 0xb9));
    assert_eq!((inner.length, inner.headers), (52, 48));
    let back = v6(packet.as_slice(), 14, Direction::In).expect("read");
    assert_eq!((back.key.local, back.key.remote), (REMOTE_V6, LOCAL_V6));
}

#[test]
fn flags_tell_what_a_segment_is() {
    let of = |flags| {
        v4(over_v4(TCP, &tcp(flags, 0)).as_slice(), 14, Direction::Out).expect("read").segment
    };
    assert_eq!(of(ACK), Segment::Plain);
    assert_eq!(of(ACK | 0x08), Segment::Plain);
    assert_eq!(of(ACK | 0xc0), Segment::Plain);
    assert_eq!(of(SYN), Segment::Opening);
    assert_eq!(of(SYN | ACK), Segment::Opening);
    assert_eq!(of(FIN | ACK), Segment::Closing);
    assert_eq!(of(RST), Segment::Closing);
    assert_eq!(of(0), Segment::Odd);
    assert_eq!(of(ACK | URG), Segment::Odd);
}

#[test]
fn what_has_no_ports_in_plain_sight_is_no_flow() {
    let good = over_v4(UDP, &udp(4));
    let with = |at: usize, value: u8| {
        let mut packet = good.clone();
        packet[at] = value;
        v4(packet.as_slice(), 14, Direction::Out)
    };
    assert!(v4(good.as_slice(), 14, Direction::Out).is_some());
    assert_eq!(with(14, 0x46), None, "options");
    assert_eq!(with(14, 0x65), None, "another version");
    assert_eq!(with(20, 0x20), None, "more fragments");
    assert_eq!(with(20, 0x01), None, "an offset");
    assert_eq!(with(21, 0x01), None, "an offset");
    assert_eq!(with(23, 1), None, "ICMP");
    assert_eq!(v4(&good[..41], 14, Direction::Out), None, "too short");
    let six = over_v6(UDP, &udp(4));
    for extension in [0, 43, 44, 51, 60, 58] {
        let mut packet = six.clone();
        packet[20] = extension;
        assert_eq!(v6(packet.as_slice(), 14, Direction::Out), None, "{extension}");
    }
}

#[test]
fn what_the_kernel_has_to_answer_does_not_bypass() {
    let inner = v4(over_v4(TCP, &tcp(ACK, 1398)).as_slice(), 14, Direction::Out).expect("read");
    assert_eq!(inner.length, 1450);
    assert!(inner.may_bypass(1450, 0, 1450));
    assert!(!inner.may_bypass(1450, 0, 1449), "too big");
    assert!(!inner.may_bypass(1451, 0, 1500), "longer than it says");
    assert!(!Inner { hop_limit: 1, ..inner }.may_bypass(1450, 0, 1450));
    // A TCP header that says to be longer than the packet.
    let mut garbled = over_v4(TCP, &tcp(ACK, 0));
    garbled[14 + 20 + 12] = 0xf0;
    let garbled = v4(garbled.as_slice(), 14, Direction::Out).expect("read");
    assert_eq!((garbled.length, garbled.headers), (52, 80));
    assert!(!garbled.may_bypass(52, 0, 1450), "shorter than its headers");
    let merged = Inner { length: 60_000, ..inner };
    assert!(merged.may_bypass(60_000, 1398, 1450));
    assert!(!merged.may_bypass(60_000, 1399, 1450), "too big a segment");
    assert!(!merged.may_bypass(60_000, 0, 1450));
}

/// RFC 1071, over a header whose checksum field is zero.
fn checksum(header: &[u8; 20]) -> u16 {
    let words = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("folded")
}

proptest! {
    #[test]
    fn the_checksum_follows_the_hop(mut header: [u8; 20], hops in 2_u8..) {
        header[8] = hops;
        header[10..12].fill(0);
        let before = checksum(&header);
        header[8] -= 1;
        let after = checksum(&header);
        let ours = checksum_after_hop(before);
        // One's complement has two zeros; a header is never all zero, so its sum is not either.
        prop_assert_eq!(ours % 0xffff, after % 0xffff);
        prop_assert_ne!(ours, 0xffff);
    }

    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>, at in 0_usize..40) {
        let _ = v4(bytes.as_slice(), at, Direction::Out);
        let _ = v6(bytes.as_slice(), at, Direction::In);
    }

    #[test]
    fn a_flipped_bit_never_reads_beyond(bit in 0_usize..(62 + 14) * 8, cut in 0_usize..76) {
        let mut packet = over_v4(TCP, &tcp(ACK, 10));
        packet[bit / 8] ^= 1 << (bit % 8);
        packet.truncate(packet.len() - cut);
        if let Some(inner) = v4(packet.as_slice(), 14, Direction::Out) {
            prop_assert!(packet.len() >= 14 + 28);
            prop_assert!(inner.headers <= 20 + 60);
        }
    }
}
