//! Inner packets of every kind, made by chance from a seed, and sent as a pod's own.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::AsRawFd,
};

use anyhow::{Context, Result, ensure};

use crate::{capture, craft::Mac, netns::Netns};

mod header;
mod random;
mod transport;

use random::Random;
use transport::{Checksum, Transport};

/// `PACKET_VNET_HDR` (`linux/if_packet.h`): what is sent begins with a `virtio_net_hdr`.
const PACKET_VNET_HDR: libc::c_int = 15;
const VNET_HEADER_LEN: usize = 10;
const NEEDS_CSUM: u8 = 1;

/// The longest IP packet that is not merged, in bytes: the MTU of a tunnel over IPv6.
const LONGEST: usize = 1430;

/// The two ends of an inner packet.
#[derive(Clone, Copy, Debug)]
pub enum Ends {
    /// IPv4.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6.
    V6(Ipv6Addr, Ipv6Addr),
}

/// The connection that all packets shall belong to.
#[derive(Clone, Copy, Debug)]
pub struct Tuple {
    /// Else UDP.
    pub tcp: bool,
    /// The sender's port.
    pub source_port: u16,
    /// The receiver's port.
    pub destination_port: u16,
}

/// What packets to make.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// The same seed makes the same packets.
    pub seed: u64,
    /// Whence and where to.
    pub ends: Ends,
    /// The frame's destination and source.
    pub macs: (Mac, Mac),
    /// Whether packets merged from several are among them.
    pub merged: bool,
    /// Whether frames with VLAN tags are among them.
    pub tagged: bool,
    /// Whether checksums that a device has to complete are among them.
    pub open: bool,
    /// Only packets of this connection, none of which opens or ends it; else of any.
    pub tuple: Option<Tuple>,
}

/// A packet to be sent: a `virtio_net_hdr` and a frame.
#[derive(Clone, Debug)]
pub struct Generated {
    bytes: Vec<u8>,
}

impl Generated {
    /// A frame that needs nothing done to it.
    pub fn from_frame(frame: &[u8]) -> Self {
        Self { bytes: [&[0; VNET_HEADER_LEN][..], frame].concat() }
    }

    /// Sends it to another MAC.
    pub fn readdress(&mut self, to: Mac) {
        self.bytes[VNET_HEADER_LEN..VNET_HEADER_LEN + 6].copy_from_slice(&to);
    }

    /// The frame alone: all there is to it, if it is neither merged nor open.
    pub fn frame(&self) -> &[u8] {
        &self.bytes[VNET_HEADER_LEN..]
    }
}

/// `count` packets. Each is told by its IPv4 id or flow label: its number, or sixty-four times it,
/// because a merged packet has an id for every segment. The DS field is the number, too: 256
/// packets have every DSCP with every ECN.
pub fn packets(recipe: &Recipe, count: u16) -> Vec<Generated> {
    let mut random = Random::new(recipe.seed);
    (0..count).map(|number| packet(&mut random, number, recipe)).collect()
}

fn packet(random: &mut Random, number: u16, recipe: &Recipe) -> Generated {
    let v6 = matches!(recipe.ends, Ends::V6(..));
    let gso = recipe.merged && random.below(6) == 0;
    let ip = if v6 { header::v6(random, number, gso) } else { header::v4(random, number, gso) };
    let tags = if recipe.tagged { tags(random) } else { Vec::new() };
    // A device takes a tag on top of its MTU, but not everybody's.
    let room = LONGEST - tags.len() - ip.len();
    let mut transport = Transport::random(random, v6, gso, room, recipe);
    if ip.is_fragment() && transport.checksum == Checksum::Open {
        transport.checksum = Checksum::Right;
    }
    let header_len = ip.len();
    transport.close(recipe.ends);
    let len = header_len + transport.bytes.len();
    let ip = ip.finish(recipe.ends, transport.protocol, len);
    let mut vnet = [0; VNET_HEADER_LEN];
    let start = 14 + tags.len() + header_len;
    let put = |vnet: &mut [u8], at: usize, value: usize| {
        vnet[at..at + 2].copy_from_slice(&u16::try_from(value).unwrap_or(u16::MAX).to_ne_bytes());
    };
    if let (Checksum::Open, Some(at)) = (transport.checksum, transport.checksum_at) {
        vnet[0] = NEEDS_CSUM;
        put(&mut vnet, 6, start);
        put(&mut vnet, 8, at);
    }
    if let Some(merged) = transport.merged {
        vnet[1] = merged.kind;
        put(&mut vnet, 2, start + transport.header_len);
        put(&mut vnet, 4, merged.size);
    }
    let kind: u16 = if v6 { 0x86dd } else { 0x0800 };
    let (to, from) = recipe.macs;
    let frame = [&to[..], &from, &tags, &kind.to_be_bytes(), &ip, &transport.bytes];
    Generated { bytes: [&vnet[..], &frame.concat()].concat() }
}

/// VLAN tags: those with a priority alone are as good as none, others are of another network.
fn tags(random: &mut Random) -> Vec<u8> {
    const PRIORITY: [u8; 2] = [0x60, 0];
    const VLAN_5: [u8; 2] = [0, 5];
    let customer = |tag: [u8; 2]| [[0x81, 0], tag].concat();
    let provider = |tag: [u8; 2]| [[0x88, 0xa8], tag].concat();
    match random.below(24) {
        0 => customer(PRIORITY),
        1 => customer(VLAN_5),
        2 => provider(PRIORITY),
        3 => provider(VLAN_5),
        _ => Vec::new(),
    }
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
