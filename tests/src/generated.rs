//! Inner packets of every kind, made by chance from a seed, and sent as a pod's own.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::AsRawFd,
};

use anyhow::{Context, Result, ensure};

use crate::{
    capture,
    craft::{self, Mac},
    netns::Netns,
};

/// `PACKET_VNET_HDR` (`linux/if_packet.h`): what is sent begins with a `virtio_net_hdr`.
const PACKET_VNET_HDR: libc::c_int = 15;
const VNET_HEADER_LEN: usize = 10;
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;

/// The payload of each segment of a merged packet: what fits into the smallest tunnel.
const GSO_SIZE: u16 = 1300;

/// The two ends of an inner packet.
#[derive(Clone, Copy, Debug)]
pub enum Ends {
    /// IPv4.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6.
    V6(Ipv6Addr, Ipv6Addr),
}

/// A packet to be sent: a `virtio_net_hdr` and a frame.
#[derive(Clone, Debug)]
pub struct Generated {
    bytes: Vec<u8>,
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 16).unwrap_or_default() % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[2]
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }
}

/// How the transport checksum is.
#[derive(Clone, Copy, PartialEq)]
enum Checksum {
    Right,
    Wrong,
    None,
    /// The device shall complete it.
    Open,
}

/// What follows the IP header.
struct Transport {
    protocol: u8,
    bytes: Vec<u8>,
    /// Where the checksum is, if there is one.
    checksum_at: Option<usize>,
    checksum: Checksum,
    gso: u8,
}

/// `count` packets; the same seed makes the same packets. Each is told by its IPv4 id or flow label:
/// its number, or sixty-four times it, because a merged packet has an id for every segment.
pub fn packets(
    seed: u64,
    count: u16,
    ends: Ends,
    macs: (Mac, Mac),
    merged: bool,
) -> Vec<Generated> {
    let mut random = Random(seed);
    (0..count).map(|number| packet(&mut random, number, ends, macs, merged)).collect()
}

fn packet(
    random: &mut Random,
    number: u16,
    ends: Ends,
    (to, from): (Mac, Mac),
    merged: bool,
) -> Generated {
    let v6 = matches!(ends, Ends::V6(..));
    let mut transport = transport(random, v6, merged);
    let extension = if transport.gso == 0 { random.below(8) } else { 8 };
    let fragment = extension == 0 && transport.checksum != Checksum::Open;
    let mut ip = match ends {
        Ends::V4(..) => v4_header(random, number, extension, fragment, transport.protocol),
        Ends::V6(..) => v6_header(random, number, extension, fragment, &mut transport),
    };
    let header_len = ip.len();
    close(&mut transport, ends);
    let len = u16::try_from(header_len + transport.bytes.len()).unwrap_or(u16::MAX);
    match ends {
        Ends::V4(source, destination) => {
            ip[2..4].copy_from_slice(&len.to_be_bytes());
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
            let sum = craft::checksum(&[&ip]);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        Ends::V6(source, destination) => {
            ip[4..6].copy_from_slice(&(len - 40).to_be_bytes());
            ip[8..24].copy_from_slice(&source.octets());
            ip[24..40].copy_from_slice(&destination.octets());
        }
    }
    let mut vnet = [0; VNET_HEADER_LEN];
    let start = 14 + header_len;
    let put = |vnet: &mut [u8], at: usize, value: usize| {
        vnet[at..at + 2].copy_from_slice(&u16::try_from(value).unwrap_or(u16::MAX).to_ne_bytes());
    };
    if let (Checksum::Open, Some(at)) = (transport.checksum, transport.checksum_at) {
        vnet[0] = NEEDS_CSUM;
        put(&mut vnet, 6, start);
        put(&mut vnet, 8, at);
    }
    if transport.gso != 0 {
        vnet[1] = transport.gso;
        put(&mut vnet, 2, start + if transport.protocol == 6 { 20 } else { 8 });
        put(&mut vnet, 4, usize::from(GSO_SIZE));
    }
    let kind: u16 = if v6 { 0x86dd } else { 0x0800 };
    let frame = [&to[..], &from, &kind.to_be_bytes(), &ip, &transport.bytes];
    Generated { bytes: [&vnet[..], &frame.concat()].concat() }
}

fn transport(random: &mut Random, v6: bool, merged: bool) -> Transport {
    let payload_len = match random.below(8) {
        0 => random.below(4),
        1 => 1300 + random.below(31),
        _ => random.below(1300),
    };
    let ports = [1024 + random.below(60000), 1024 + random.below(60000)]
        .map(|port| u16::try_from(port).unwrap_or_default().to_be_bytes())
        .concat();
    let checksum = random.pick(&[Checksum::Right, Checksum::Open, Checksum::Open, Checksum::Wrong]);
    let kind = random.below(if merged { 12 } else { 10 });
    let tcp = |random: &mut Random, len: usize| {
        let flags = random.pick(&[0x10, 0x18, 0x02, 0x11, 0x14, 0xd0]);
        let header = [&ports[..], &random.bytes(8), &[0x50, flags, 9, 9, 0, 0, 0, 0]].concat();
        [header, random.bytes(len)].concat()
    };
    let udp = |random: &mut Random, len: usize| {
        let all = u16::try_from(8 + len).unwrap_or(u16::MAX).to_be_bytes();
        [&ports[..], &all, &[0, 0], &random.bytes(len)].concat()
    };
    match kind {
        0..=3 => {
            let bytes = tcp(random, payload_len);
            Transport { protocol: 6, bytes, checksum_at: Some(16), checksum, gso: 0 }
        }
        4..=6 => {
            let checksum = if !v6 && random.below(4) == 0 { Checksum::None } else { checksum };
            let bytes = udp(random, payload_len);
            Transport { protocol: 17, bytes, checksum_at: Some(6), checksum, gso: 0 }
        }
        7..=8 => {
            // An answer to nothing: the receiver does not answer it.
            let kind = if v6 { 129 } else { 0 };
            let bytes = [vec![kind, 0, 0, 0], random.bytes(4 + payload_len)].concat();
            let protocol = if v6 { 58 } else { 1 };
            let checksum = random.pick(&[Checksum::Right, Checksum::Right, Checksum::Wrong]);
            Transport { protocol, bytes, checksum_at: Some(2), checksum, gso: 0 }
        }
        9 => {
            let protocol = random.pick(&[4, 41, 47, 50, 132, 253]);
            let bytes = random.bytes(20 + payload_len);
            Transport { protocol, bytes, checksum_at: None, checksum: Checksum::None, gso: 0 }
        }
        10 => {
            let len = 1301 + random.below(60_000);
            let mut bytes = tcp(random, len);
            bytes[13] = random.pick(&[0x10, 0x18]);
            let gso = if v6 { GSO_TCPV6 } else { GSO_TCPV4 };
            Transport { protocol: 6, bytes, checksum_at: Some(16), checksum: Checksum::Open, gso }
        }
        _ => {
            let len = 1301 + random.below(30_000);
            Transport {
                protocol: 17,
                bytes: udp(random, len),
                checksum_at: Some(6),
                checksum: Checksum::Open,
                gso: GSO_UDP_L4,
            }
        }
    }
}

fn v4_header(
    random: &mut Random,
    number: u16,
    extension: usize,
    fragment: bool,
    protocol: u8,
) -> Vec<u8> {
    // No operation, and nothing that a router would have to note.
    let options = if extension == 1 { 4 * (1 + random.below(5)) } else { 0 };
    let mut header =
        vec![0x45 + u8::try_from(options / 4).unwrap_or_default(), random.byte(), 0, 0];
    header.extend(number.wrapping_mul(64).to_be_bytes());
    let dont_fragment = if random.below(2) == 0 { 0x4000 } else { 0 };
    let offset: u16 = if fragment { random.pick(&[0x2000, 0x2010, 0x0123]) } else { dont_fragment };
    header.extend(offset.to_be_bytes());
    header.extend([random.pick(&[0, 1, 2, 3, 64, 64, 64, 255]), protocol]);
    header.extend([0; 10]);
    header.resize(20 + options, 1);
    header
}

/// Extension headers go before the transport, whose pseudo header does not know of them.
fn v6_header(
    random: &mut Random,
    number: u16,
    extension: usize,
    fragment: bool,
    transport: &mut Transport,
) -> Vec<u8> {
    let class = random.byte();
    let mut header = vec![0x60 | class >> 4, class << 4];
    header.extend(number.to_be_bytes());
    let next = match extension {
        _ if fragment => 44,
        1 => 60,
        _ => transport.protocol,
    };
    header.extend([0, 0, next, random.pick(&[0, 1, 2, 3, 64, 64, 64, 255])]);
    header.extend([0; 32]);
    if fragment {
        let offset: u16 = random.pick(&[0x0001, 0x0011, 0x0120]);
        header.extend([transport.protocol, 0]);
        header.extend(offset.to_be_bytes());
        header.extend([0, 0]);
        header.extend(number.to_be_bytes());
    } else if extension == 1 {
        // Destination options: padding.
        header.extend([transport.protocol, 0, 1, 4, 0, 0, 0, 0]);
    }
    header
}

/// Puts the checksum there.
fn close(transport: &mut Transport, ends: Ends) {
    let Some(at) = transport.checksum_at else { return };
    let len = u32::try_from(transport.bytes.len()).unwrap_or_default();
    let pseudo = match ends {
        // ICMP has none.
        Ends::V4(..) if transport.protocol == 1 => Vec::new(),
        Ends::V4(source, destination) => {
            let tail = [0, transport.protocol, 0, 0];
            let mut all = [source.octets(), destination.octets(), tail].concat();
            let [.., high, low] = len.to_be_bytes();
            all[10..].copy_from_slice(&[high, low]);
            all
        }
        Ends::V6(source, destination) => {
            let tail = [len.to_be_bytes(), [0, 0, 0, transport.protocol]].concat();
            [&source.octets()[..], &destination.octets(), &tail].concat()
        }
    };
    transport.bytes[at..at + 2].fill(0);
    let sum = match transport.checksum {
        Checksum::Right => craft::checksum(&[&pseudo, &transport.bytes]),
        Checksum::Wrong => craft::checksum(&[&pseudo, &transport.bytes]) ^ 0x0100,
        Checksum::Open => !craft::checksum(&[&pseudo]),
        Checksum::None => 0,
    };
    transport.bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Sends packets at an interface, a few at a time.
pub fn send(ns: &Netns, interface: &str, packets: &[Generated]) -> Result<()> {
    let name = interface.to_owned();
    let socket = ns.within(move || capture::open(&name))?;
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads one int, which is live.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_VNET_HDR,
            (&raw const on).cast(),
            libc::socklen_t::try_from(size_of_val(&on))?,
        )
    };
    ensure!(result == 0, "no virtio header: {}", std::io::Error::last_os_error());
    for (number, packet) in packets.iter().enumerate() {
        nix::sys::socket::send(
            socket.as_raw_fd(),
            &packet.bytes,
            nix::sys::socket::MsgFlags::empty(),
        )
        .with_context(|| format!("packet {number} of {} bytes", packet.bytes.len()))?;
        if number % 8 == 7 {
            // The receivers' queues are short; nothing here is about speed.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    Ok(())
}
