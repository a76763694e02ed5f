//! What follows the IP header: TCP, UDP, ICMP, and what nobody here knows.

use super::{Ends, Recipe, random::Random};
use crate::craft;

const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;

/// The longest merged packet without its headers.
const LONGEST_MERGED: usize = 65_300;

/// One packet's segments have an IPv4 id each, and so many ids.
const MOST_SEGMENTS: usize = 60;

/// How the transport checksum is.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Checksum {
    Right,
    Wrong,
    None,
    /// The device shall complete it.
    Open,
}

/// How a packet is merged from several.
#[derive(Clone, Copy)]
pub(super) struct Merged {
    /// As a `virtio_net_hdr` has it.
    pub kind: u8,
    /// The payload of each segment.
    pub size: usize,
}

pub(super) struct Transport {
    pub protocol: u8,
    pub bytes: Vec<u8>,
    pub header_len: usize,
    /// Where the checksum is, if there is one.
    pub checksum_at: Option<usize>,
    pub checksum: Checksum,
    pub merged: Option<Merged>,
}

impl Transport {
    /// `room`: how long it may be if it is not merged.
    pub(super) fn random(
        random: &mut Random,
        v6: bool,
        merged: bool,
        room: usize,
        recipe: &Recipe,
    ) -> Self {
        let tcp = match recipe.tuple {
            Some(tuple) => tuple.tcp,
            None => random.below(2) == 0,
        };
        match (merged, recipe.tuple) {
            (true, _) => Self::merged(random, v6, tcp, recipe),
            (false, None) if random.below(3) == 0 => Self::other(random, v6, room),
            (false, _) if tcp => Self::tcp(random, room, recipe),
            (false, _) => Self::udp(random, room, recipe),
        }
    }

    fn tcp(random: &mut Random, room: usize, recipe: &Recipe) -> Self {
        let header = tcp_header(random, recipe);
        let len = length(random, room - header.len());
        Self {
            protocol: 6,
            header_len: header.len(),
            bytes: [header, random.bytes(len)].concat(),
            checksum_at: Some(16),
            checksum: checksum(random, recipe),
            merged: None,
        }
    }

    fn udp(random: &mut Random, room: usize, recipe: &Recipe) -> Self {
        let len = length(random, room - 8);
        Self {
            protocol: 17,
            header_len: 8,
            bytes: [udp_header(random, recipe, len), random.bytes(len)].concat(),
            checksum_at: Some(6),
            // Over IPv6 nobody should, but who knows.
            checksum: if random.below(5) == 0 { Checksum::None } else { checksum(random, recipe) },
            merged: None,
        }
    }

    fn other(random: &mut Random, v6: bool, room: usize) -> Self {
        let (protocol, checksum_at, mut bytes) = match random.below(3) {
            0 => {
                // An answer to nothing: the receiver does not answer it.
                (if v6 { 58 } else { 1 }, Some(2), vec![if v6 { 129 } else { 0 }, 0, 0, 0])
            }
            1 => {
                // An error about a packet that the receiver has not sent.
                let (kind, code) = if v6 {
                    random.pick(&[(1, 0), (2, 0), (3, 0), (4, 1)])
                } else {
                    random.pick(&[(3, 1), (3, 4), (11, 0), (12, 0)])
                };
                let embedded = if v6 {
                    let addresses = [[0x20, 1, 0xd, 0xb8], [0; 4], [0; 4], [1; 4]].concat();
                    let start = [0x60, 0, 0, 0, 0, 8, 17, 64];
                    [&start[..], &addresses, &addresses, &[9, 9, 9, 9, 0, 8, 0, 0]].concat()
                } else {
                    let start = [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
                    let addresses = [198, 18, 0, 1, 198, 18, 0, 2];
                    [&start[..], &addresses, &[9, 9, 9, 9, 0, 8, 0, 0]].concat()
                };
                let head = [kind, code, 0, 0, 0, 0, 5, 0];
                (if v6 { 58 } else { 1 }, Some(2), [&head[..], &embedded].concat())
            }
            _ => (random.pick(&[4, 41, 47, 50, 51, 132, 253]), None, random.bytes(20)),
        };
        let len = length(random, room - bytes.len());
        bytes.extend(random.bytes(len));
        let checksum = random.pick(&[Checksum::Right, Checksum::Right, Checksum::Wrong]);
        Self { protocol, header_len: 8, bytes, checksum_at, checksum, merged: None }
    }

    fn merged(random: &mut Random, v6: bool, tcp: bool, recipe: &Recipe) -> Self {
        // The last is more than one of these segments can have in the tunnel.
        let size = random.pick(&[500, 1001, 1300, 1300, 1350, 1390, 1420]);
        let longest = LONGEST_MERGED.min(size * MOST_SEGMENTS);
        let len = match random.below(4) {
            0 => size + 1,
            1 => longest,
            _ => size + 1 + random.below(longest - size),
        };
        let (protocol, kind, checksum_at, header) = if tcp {
            let mut header = tcp_header(random, recipe);
            header[13] = random.pick(&[0x10, 0x18]);
            (6, if v6 { GSO_TCPV6 } else { GSO_TCPV4 }, 16, header)
        } else {
            (17, GSO_UDP_L4, 6, udp_header(random, recipe, len))
        };
        Self {
            protocol,
            header_len: header.len(),
            bytes: [header, random.bytes(len)].concat(),
            checksum_at: Some(checksum_at),
            checksum: Checksum::Open,
            merged: Some(Merged { kind, size }),
        }
    }

    /// Puts the checksum there.
    pub(super) fn close(&mut self, ends: Ends) {
        let Some(at) = self.checksum_at else { return };
        let len = u32::try_from(self.bytes.len()).unwrap_or_default();
        let pseudo = match ends {
            // ICMP has none.
            Ends::V4(..) if self.protocol == 1 => Vec::new(),
            Ends::V4(source, destination) => {
                let tail = [0, self.protocol, 0, 0];
                let mut all = [source.octets(), destination.octets(), tail].concat();
                let [.., high, low] = len.to_be_bytes();
                all[10..].copy_from_slice(&[high, low]);
                all
            }
            Ends::V6(source, destination) => {
                let tail = [len.to_be_bytes(), [0, 0, 0, self.protocol]].concat();
                [&source.octets()[..], &destination.octets(), &tail].concat()
            }
        };
        self.bytes[at..at + 2].fill(0);
        let sum = match self.checksum {
            Checksum::Right => craft::checksum(&[&pseudo, &self.bytes]),
            Checksum::Wrong => craft::checksum(&[&pseudo, &self.bytes]) ^ 0x0100,
            Checksum::Open => !craft::checksum(&[&pseudo]),
            Checksum::None => 0,
        };
        self.bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Nothing, a few bytes, all there is room for, or anything between.
fn length(random: &mut Random, room: usize) -> usize {
    match random.below(8) {
        0 => random.below(4),
        1 => room - random.below(2),
        _ => random.below(room),
    }
}

fn checksum(random: &mut Random, recipe: &Recipe) -> Checksum {
    let kinds = [Checksum::Right, Checksum::Wrong, Checksum::Open, Checksum::Open];
    match random.pick(&kinds) {
        Checksum::Open if !recipe.open => Checksum::Right,
        checksum => checksum,
    }
}

fn ports(random: &mut Random, recipe: &Recipe) -> Vec<u8> {
    let any = |random: &mut Random| u16::try_from(1024 + random.below(60_000)).unwrap_or_default();
    let (source, destination) = match recipe.tuple {
        Some(tuple) => (tuple.source_port, tuple.destination_port),
        None => (any(random), any(random)),
    };
    [source.to_be_bytes(), destination.to_be_bytes()].concat()
}

fn udp_header(random: &mut Random, recipe: &Recipe, len: usize) -> Vec<u8> {
    let all = u16::try_from(8 + len).unwrap_or(u16::MAX).to_be_bytes();
    [&ports(random, recipe)[..], &all, &[0, 0]].concat()
}

fn tcp_header(random: &mut Random, recipe: &Recipe) -> Vec<u8> {
    // No operation twice, then timestamps, as most connections have them.
    const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
    let options: &[u8] = if random.below(2) == 0 { &TIMESTAMPS } else { &[] };
    let offset = u8::try_from((20 + options.len()) / 4 * 16).unwrap_or_default();
    let flags: &[u8] = match recipe.tuple {
        // Data, acknowledgements, ECN's; urgent data and nonsense are not for a bypass.
        Some(_) => &[0x10, 0x18, 0x10, 0x18, 0xd0, 0x50, 0x30, 0x00],
        None => &[0x10, 0x18, 0x02, 0x11, 0x14, 0xd0],
    };
    let flags = random.pick(flags);
    let fixed = [&ports(random, recipe)[..], &random.bytes(8), &[offset, flags, 9, 9, 0, 0, 0, 0]];
    [&fixed.concat()[..], options].concat()
}
