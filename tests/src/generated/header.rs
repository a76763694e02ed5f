//! IP headers: options, extension headers, fragments, hop limits of every kind.

use super::{Ends, random::Random};
use crate::craft;

const FRAGMENT: u8 = 44;

const HOP_LIMITS: [u8; 8] = [0, 1, 2, 3, 64, 64, 64, 255];

/// An IP header that does not know yet what follows.
pub(super) struct Header {
    bytes: Vec<u8>,
    /// Where the number of the transport protocol goes.
    protocol_at: usize,
    fragment: bool,
}

impl Header {
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn is_fragment(&self) -> bool {
        self.fragment
    }

    /// The header of a packet that is this long in all.
    pub(super) fn finish(mut self, ends: Ends, protocol: u8, len: usize) -> Vec<u8> {
        let ip = &mut self.bytes;
        let len = u16::try_from(len).unwrap_or(u16::MAX);
        ip[self.protocol_at] = protocol;
        match ends {
            Ends::V4(source, destination) => {
                ip[2..4].copy_from_slice(&len.to_be_bytes());
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                let sum = craft::checksum(&[ip]);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            Ends::V6(source, destination) => {
                ip[4..6].copy_from_slice(&(len - 40).to_be_bytes());
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
            }
        }
        self.bytes
    }
}

pub(super) fn v4(random: &mut Random, number: u16, whole: bool) -> Header {
    let fragment = !whole && random.below(8) == 0;
    let options = if random.below(6) == 0 { options(random) } else { Vec::new() };
    let [_, ds_field] = number.to_be_bytes();
    let words = u8::try_from(options.len() / 4).unwrap_or_default();
    let mut bytes = vec![0x45 + words, ds_field, 0, 0];
    bytes.extend(number.wrapping_mul(64).to_be_bytes());
    let dont_fragment = if random.below(2) == 0 { 0x4000 } else { 0 };
    let offset: u16 = if fragment { random.pick(&[0x2000, 0x2010, 0x0123]) } else { dont_fragment };
    bytes.extend(offset.to_be_bytes());
    bytes.extend([random.pick(&HOP_LIMITS), 0]);
    bytes.extend([0; 10]);
    bytes.extend(options);
    Header { bytes, protocol_at: 9, fragment }
}

/// Options that change the packet by nothing but its way. (A timestamp would tell the runs apart.)
fn options(random: &mut Random) -> Vec<u8> {
    match random.below(5) {
        // Router alert.
        0 => vec![0x94, 4, 0, 0],
        // Record route, with room for two routers, and the end.
        1 => vec![7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        // An unknown one.
        2 => vec![0x5e, 4, 1, 2],
        // No operation, as much as there is room for.
        3 => vec![1; 40],
        _ => vec![1; 4 * (1 + random.below(5))],
    }
}

pub(super) fn v6(random: &mut Random, number: u16, whole: bool) -> Header {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const DESTINATION: u8 = 60;
    const CHAINS: [&[u8]; 10] = [
        &[HOP_BY_HOP],
        &[DESTINATION],
        &[ROUTING],
        &[FRAGMENT],
        &[FRAGMENT],
        &[HOP_BY_HOP, DESTINATION],
        &[HOP_BY_HOP, ROUTING, DESTINATION],
        &[DESTINATION, FRAGMENT],
        &[HOP_BY_HOP, ROUTING, FRAGMENT, DESTINATION],
        &[DESTINATION, DESTINATION, DESTINATION],
    ];
    let chain: &[u8] = if !whole && random.below(4) == 0 { random.pick(&CHAINS) } else { &[] };
    let [_, class] = number.to_be_bytes();
    let mut bytes = vec![0x60 | class >> 4, class << 4];
    bytes.extend(number.to_be_bytes());
    bytes.extend([0, 0, 0, random.pick(&HOP_LIMITS)]);
    bytes.extend([0; 32]);
    let mut protocol_at = 6;
    let mut fragment = false;
    for kind in chain {
        bytes[protocol_at] = *kind;
        protocol_at = bytes.len();
        match *kind {
            FRAGMENT => {
                // The last is all of a packet (RFC 6946).
                let offset: u16 = random.pick(&[0x0001, 0x0011, 0x0120, 0]);
                bytes.extend([0, 0]);
                bytes.extend(offset.to_be_bytes());
                bytes.extend([0, 0]);
                bytes.extend(number.to_be_bytes());
                fragment = true;
            }
            // One address on the way, which the packet has passed.
            ROUTING => {
                bytes.extend([0, 2, random.pick(&[0, 2, 253]), 0, 0, 0, 0, 0]);
                bytes.extend(random.bytes(16));
            }
            // A router alert, or padding.
            HOP_BY_HOP if random.below(2) == 0 => bytes.extend([0, 0, 5, 2, 0, 0, 1, 0]),
            _ => bytes.extend([0, 0, 1, 4, 0, 0, 0, 0]),
        }
    }
    Header { bytes, protocol_at, fragment }
}
