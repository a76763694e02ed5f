//! The headers, read back by hand.

extern crate std;

use proptest::prelude::*;

use super::*;
use crate::map::OuterAddress;

const LOCAL: [u8; 4] = [192, 0, 2, 1];
const REMOTE: [u8; 4] = [192, 0, 2, 7];

fn config() -> Config {
    let tunnel = Tunnel {
        ifindex: 5,
        mac: [2, 0, 0, 0, 0, 1],
        hop_limit: 64,
        prefix_len: 24,
        local: OuterAddress::from_v4(LOCAL),
        subnet: [0; 16],
    };
    let v6 = Tunnel { local: OuterAddress::from_v6([0x20; 16]), ..tunnel };
    Config { vni: 0x00ab_cdef, port: 8472, v4: tunnel, v6, ..Config::default() }
}

fn bytes<const N: usize>(words: &Words<N>) -> std::vec::Vec<u8> {
    words.0.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The sum of RFC 1071 over bytes.
fn checksum(parts: &[&[u8]]) -> u16 {
    let all: std::vec::Vec<u8> = parts.concat();
    let mut sum = 0_u64;
    for pair in all.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u64::from(u16::from_be_bytes([pair[0], low]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

#[test]
fn the_headers_over_ipv4() {
    let config = config();
    let outer = Outer {
        config: &config,
        tunnel: &config.v4,
        remote: &OuterAddress::from_v4(REMOTE).octets,
        source_port: 0xc123,
        inner: &[0x0101_u16.to_be(); 7],
        next_hop: &[0x0202_u16.to_be(); 6],
    };
    let mut head = HeadV4::ZERO;
    let sum = begin_v4(&mut head, &outer);
    // Another packet of the flow first: nothing of it may be left.
    complete_v4(&mut head, sum, Each { ds_field: 0xff, len: 1500 }, 0xffff);
    assert_eq!(checksum(&[&bytes(&head)[14..34]]), 0);
    complete_v4(&mut head, sum, Each { ds_field: 0xbb, len: 50 + 84 }, 0x1234);
    let head = bytes(&head);
    assert_eq!(head[..14], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 8, 0]);
    // DSCP none, CE as ECT(0); no flags; TTL and UDP.
    assert_eq!(head[14..24], [0x45, 2, 0, 134, 0x12, 0x34, 0, 0, 64, 17]);
    assert_eq!(checksum(&[&head[14..34]]), 0);
    assert_eq!(head[26..34], [LOCAL, REMOTE].concat());
    assert_eq!(head[34..42], [0xc1, 0x23, 0x21, 0x18, 0, 114, 0, 0]);
    assert_eq!(head[42..50], [8, 0, 0, 0, 0xab, 0xcd, 0xef, 0]);
    assert_eq!(head[50..], [1; 14]);
}

#[test]
fn source_ports_are_the_kernels() {
    // What Linux made of these hashes with the default range, (hash ^ hash << 16) scaled.
    assert_eq!(source_port(0x0001_0000, 32768, 60999), Some(32768));
    assert_eq!(source_port(0xffff_ffff, 32768, 60999), Some(32768));
    assert_eq!(source_port(0x8000_0000, 32768, 60999), Some(32768 + 28231 / 2));
    assert_eq!(source_port(0, 32768, 60999), None);
    assert_eq!(source_port(1, 5, 5), None);
}

#[test]
fn no_packet_is_longer_than_ip_allows() {
    assert_eq!(outer_len(65_535 - 50, OVERHEAD_V4), Some(65_535));
    assert_eq!(outer_len(65_536 - 50, OVERHEAD_V4), None);
    assert_eq!(outer_len(u32::MAX, OVERHEAD_V6), None);
}

/// An inner packet with the checksum field as a pod's stack leaves it for its device to complete.
fn unfinished(next: u8, payload: &[u8], addresses: [u8; 32]) -> std::vec::Vec<u8> {
    let at = if next == TCP { 16 } else { 6 };
    let mut transport = std::vec![0; 20];
    transport.extend(payload);
    let len = u16::try_from(transport.len()).expect("short");
    let pseudo = [&addresses[..], &u32::from(len).to_be_bytes(), &[0, 0, 0, next]].concat();
    transport[at..at + 2].copy_from_slice(&(!checksum(&[&pseudo])).to_be_bytes());
    let mut packet = std::vec![0; 14];
    packet.extend([0x60, 0, 0, 0]);
    packet.extend(len.to_be_bytes());
    packet.extend([next, 64]);
    packet.extend(addresses);
    packet.extend(transport);
    packet
}

fn head<const N: usize>(packet: &[u8]) -> Words<N> {
    let mut words = Words::ZERO;
    for (word, pair) in words.0.iter_mut().zip(packet.chunks_exact(2)) {
        *word = u16::from_ne_bytes([pair[0], pair[1]]);
    }
    words
}

proptest! {
    #[test]
    fn the_checksum_over_ipv6_is_right_once_the_inner_one_is(
        tcp: bool, payload in prop::collection::vec(any::<u8>(), 0..200), addresses: [u8; 32],
        remote: [u8; 16], ds_field: u8, source_port: u16,
    ) {
        let next = if tcp { TCP } else { UDP };
        let mut inner = unfinished(next, &payload, addresses);
        let sum = inner_sum(inner.as_slice()).expect("to be completed");
        let config = config();
        let frame: Words<7> = head(&inner);
        let outer = Outer {
            config: &config,
            tunnel: &config.v6,
            remote: &remote,
            source_port,
            inner: &frame.0,
            next_hop: &[0; 6],
        };
        let mut head_words = HeadV6::ZERO;
        let len = u32::try_from(inner.len() - 14).expect("short");
        let each = Each { ds_field, len: outer_len(len, OVERHEAD_V6).expect("fits") };
        head_v6(&mut head_words, &outer, each, sum);
        let mut packet = bytes(&head_words);
        // The receiver's device completes the inner checksum.
        let at = 14 + 40 + if tcp { 16 } else { 6 };
        let complete = checksum(&[&inner[54..]]);
        inner[at..at + 2].copy_from_slice(&complete.to_be_bytes());
        packet.extend(&inner[14..]);
        let udp_len = u32::try_from(packet.len() - 54).expect("short").to_be_bytes();
        let pseudo = [&packet[22..54], &udp_len, &[0, 0, 0, UDP]].concat();
        prop_assert_eq!(checksum(&[&pseudo, &packet[54..]]), 0);
        prop_assert!(packet[60..62] != [0, 0]);
        prop_assert_eq!(outer_checksum_fits_v6(packet.as_slice()), true);
        packet[60] ^= 1;
        prop_assert_eq!(outer_checksum_fits_v6(packet.as_slice()), false);
    }

    #[test]
    fn finished_packets_are_not_taken_for_unfinished(payload: [u8; 9], addresses: [u8; 32]) {
        let mut inner = unfinished(UDP, &payload, addresses);
        inner[14 + 40 + 6] ^= 0x10;
        prop_assert_eq!(inner_sum(inner.as_slice()), None);
        inner[14 + 6] = ICMPV6;
        prop_assert_eq!(inner_sum(inner.as_slice()), None);
    }
}
