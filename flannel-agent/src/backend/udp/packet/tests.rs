use proptest::prelude::*;

use super::*;

/// A UDP packet from 10.5.1.2 to 10.5.9.9 with a right checksum.
fn packet(ttl: u8, options: usize, payload: usize) -> Vec<u8> {
    let header = MIN_HEADER + options * 4;
    let mut bytes = vec![0_u8; header + payload];
    bytes[0] = 0x40 | u8::try_from(header / 4).expect("short");
    bytes[2..4].copy_from_slice(&u16::try_from(header + payload).expect("short").to_be_bytes());
    bytes[8] = ttl;
    bytes[9] = 17;
    bytes[12..16].copy_from_slice(&[10, 5, 1, 2]);
    bytes[16..20].copy_from_slice(&[10, 5, 9, 9]);
    bytes[MIN_HEADER..header].fill(1);
    let sum = checksum(&bytes[..header]);
    bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes
}

fn answer_to(bytes: &mut [u8]) -> Option<Vec<u8>> {
    let mut answer = [0xff; MAX_ERROR];
    let packet = Packet::new(bytes).expect("complete");
    let len = packet.unreachable(Ipv4Addr::new(10, 5, 1, 0), &mut answer)?;
    Some(answer[..len].to_vec())
}

#[test]
fn a_hop_costs_one_and_the_last_one_is_not_taken() {
    let mut bytes = packet(2, 0, 8);
    assert_eq!(Packet::new(&mut bytes).expect("complete").hop(), Ok(()));
    assert_eq!(bytes, packet(1, 0, 8));
    assert_eq!(Packet::new(&mut bytes).expect("complete").hop(), Err(Expired));
    assert_eq!(bytes, packet(1, 0, 8));
    let mut bytes = packet(0, 0, 8);
    assert_eq!(Packet::new(&mut bytes).expect("complete").hop(), Err(Expired));
}

#[test]
fn what_has_no_complete_ipv4_header_is_no_packet() {
    assert!(Packet::new(&mut []).is_none());
    assert!(Packet::new(&mut packet(9, 0, 0)[..19]).is_none());
    // Options announced, not there.
    assert!(Packet::new(&mut packet(9, 2, 0)[..27]).is_none());
    for first in [0x44, 0x65, 0x00] {
        let mut bytes = packet(9, 0, 40);
        bytes[0] = first;
        assert!(Packet::new(&mut bytes).is_none(), "{first:#x}");
    }
}

#[test]
fn unreachable_quotes_the_header_and_eight_bytes() {
    let mut bytes = packet(64, 1, 30);
    let answer = answer_to(&mut bytes).expect("may be answered");
    assert_eq!(answer.len(), 20 + 8 + 24 + 8);
    assert_eq!(answer[..4], [0x45, 0, 0, 60]);
    assert_eq!(answer[8..10], [8, 1]);
    assert_eq!(answer[12..20], [10, 5, 1, 0, 10, 5, 1, 2]);
    assert_eq!(answer[20..22], [3, 0]);
    assert_eq!(answer[28..], bytes[..32]);
    // The sum over a right checksum and what it covers is zero.
    assert_eq!(checksum(&answer[..20]), 0);
    assert_eq!(checksum(&answer[20..]), 0);
}

#[test]
fn unreachable_is_never_said_to_the_wrong() {
    let cases: [(&str, usize, &[u8]); 6] = [
        ("ICMP", 9, &[1]),
        ("a later fragment", 6, &[0x20, 1]),
        ("a multicast source", 12, &[224, 0, 0, 1]),
        ("no source", 12, &[0, 0, 0, 0]),
        ("a multicast destination", 16, &[239, 1, 1, 1]),
        ("everybody", 16, &[255, 255, 255, 255]),
    ];
    for (what, at, value) in cases {
        let mut bytes = packet(64, 0, 8);
        bytes[at..at + value.len()].copy_from_slice(value);
        assert_eq!(answer_to(&mut bytes), None, "{what}");
    }
    // A first fragment, and one that must not be cut, are answered.
    for flags in [0x20, 0x40] {
        let mut bytes = packet(64, 0, 8);
        bytes[6] = flags;
        assert!(answer_to(&mut bytes).is_some(), "{flags:#x}");
    }
}

proptest! {
    /// The incremental update gives what a checksum from scratch gives.
    #[test]
    fn the_updated_checksum_is_the_right_one(
        mut header in proptest::collection::vec(any::<u8>(), 20),
        ttl in 2_u8..,
    ) {
        header[0] = 0x45;
        header[8] = ttl;
        header[10..12].fill(0);
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        Packet::new(&mut header).expect("complete").hop().expect("time left");
        prop_assert_eq!(header[8], ttl - 1);
        prop_assert_eq!(checksum(&header), 0);
    }

    /// Whatever comes in, nothing panics and an answer fits its own length field.
    #[test]
    fn any_bytes_are_survived(mut bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        let mut answer = [0; MAX_ERROR];
        if let Some(mut packet) = Packet::new(&mut bytes) {
            if let Some(len) = packet.unreachable(Ipv4Addr::LOCALHOST, &mut answer) {
                prop_assert_eq!(usize::from(answer[3]), len);
                prop_assert_eq!(checksum(&answer[MIN_HEADER..len]), 0);
            }
            let _ = packet.hop();
        }
    }
}
