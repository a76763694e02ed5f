//! Frames as the eBPF programs get them: those of one UDP flow between two pods, inside and
//! outside of the tunnel.

use std::net::SocketAddrV4;

use anyhow::Result;

use crate::craft::{self, Mac, Outer};

/// What is in a UDP packet besides its payload: IPv4 and UDP headers.
const HEADERS: usize = 28;

/// An IPv4 packet with `payload` bytes in UDP.
pub fn udp(from: SocketAddrV4, to: SocketAddrV4, payload: usize) -> Result<Vec<u8>> {
    let total = u16::try_from(HEADERS + payload)?;
    let mut packet = vec![0x45, 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0, 1, 0x40, 0, 63, 17, 0, 0]);
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    let sum = craft::checksum(&[&packet]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend((total - 20).to_be_bytes());
    // No checksum, as IPv4 allows.
    packet.extend([0, 0]);
    packet.resize(HEADERS + payload, 0x5a);
    Ok(packet)
}

/// Two ends, for a frame between them.
#[derive(Clone, Copy, Debug)]
pub struct Hop {
    /// Who sent the frame.
    pub from: Mac,
    /// Who gets it.
    pub to: Mac,
}

impl Hop {
    /// The way back.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { from: self.to, to: self.from }
    }

    /// A frame with this packet.
    pub fn frame(self, packet: &[u8]) -> Result<Vec<u8>> {
        craft::ethernet(self.to, self.from, packet)
    }
}

/// The tunnel's frame with this inner frame.
pub fn tunnelled(
    cable: Hop,
    from: SocketAddrV4,
    to: SocketAddrV4,
    vni: u32,
    inner: &[u8],
) -> Result<Vec<u8>> {
    let outer = Outer {
        destination_mac: cable.to,
        source_mac: cable.from,
        source: (*from.ip()).into(),
        destination: (*to.ip()).into(),
        traffic_class: 0,
        ttl: 64,
        dont_fragment: false,
        id: 1,
        flow_label: 0,
        source_port: from.port(),
        destination_port: to.port(),
        vni,
        udp_checksum: false,
    };
    craft::encapsulate(&outer, inner)
}
