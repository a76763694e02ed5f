//! VXLAN frames built byte for byte from RFC 7348, and taken apart again.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result, bail, ensure};

/// A MAC address.
pub type Mac = [u8; 6];

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const PROTOCOL_UDP: u8 = 17;

/// Everything around the inner frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outer {
    /// Ethernet destination.
    pub destination_mac: Mac,
    /// Ethernet source.
    pub source_mac: Mac,
    /// Sending VTEP.
    pub source: IpAddr,
    /// Receiving VTEP.
    pub destination: IpAddr,
    /// DSCP and ECN: the TOS byte or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// IPv4: don't fragment.
    pub dont_fragment: bool,
    /// IPv4: identification.
    pub id: u16,
    /// IPv6: flow label.
    pub flow_label: u32,
    /// UDP source port.
    pub source_port: u16,
    /// UDP destination port.
    pub destination_port: u16,
    /// VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// Whether the UDP checksum is computed (else it is zero).
    pub udp_checksum: bool,
}

/// A VXLAN frame taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vxlan {
    /// The outer headers.
    pub outer: Outer,
    /// The inner Ethernet frame.
    pub inner: Vec<u8>,
}

/// Parses `02:fa:00:00:00:11`.
pub fn mac(text: &str) -> Result<Mac> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|pair| u8::from_str_radix(pair, 16))
        .collect::<Result<_, _>>()
        .with_context(|| format!("{text} is no MAC"))?;
    bytes.try_into().ok().with_context(|| format!("{text} is no MAC"))
}

/// The Internet checksum (RFC 1071) over several pieces, each of an even length but the last.
pub fn checksum(pieces: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for piece in pieces {
        for pair in piece.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
    }
    loop {
        match u16::try_from(sum) {
            Ok(sum) => return !sum,
            Err(_) => sum = (sum & 0xffff) + (sum >> 16),
        }
    }
}

/// The inner Ethernet frame around an IP packet.
pub fn ethernet(destination: Mac, source: Mac, packet: &[u8]) -> Result<Vec<u8>> {
    let ethertype = match packet.first().map(|byte| byte >> 4) {
        Some(4) => ETHERTYPE_IPV4,
        Some(6) => ETHERTYPE_IPV6,
        _ => bail!("no IP packet"),
    };
    let mut frame = Vec::with_capacity(14 + packet.len());
    frame.extend_from_slice(&destination);
    frame.extend_from_slice(&source);
    frame.extend_from_slice(&ethertype.to_be_bytes());
    frame.extend_from_slice(packet);
    Ok(frame)
}

/// What a router does to a packet: TTL or hop limit less one, IPv4 header checksum to match.
pub fn routed(packet: &[u8]) -> Result<Vec<u8>> {
    let mut packet = packet.to_vec();
    match packet.first().map(|byte| byte >> 4) {
        Some(4) if packet.len() >= 20 => {
            packet[8] -= 1;
            packet[10..12].fill(0);
            let header = usize::from(packet[0] & 15) * 4;
            let sum = checksum(&[&packet[..header]]);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        Some(6) if packet.len() >= 40 => packet[7] -= 1,
        _ => bail!("no IP packet"),
    }
    Ok(packet)
}

/// The whole frame: outer Ethernet, IP, UDP, VXLAN, inner frame.
pub fn encapsulate(outer: &Outer, inner: &[u8]) -> Result<Vec<u8>> {
    let udp_length = u16::try_from(8 + 8 + inner.len()).context("the inner frame is too long")?;
    let mut vxlan = vec![0x08, 0, 0, 0];
    // RFC 7348 section 5: 24 bits of VNI, then a reserved byte.
    vxlan.extend_from_slice(&(outer.vni << 8).to_be_bytes());

    let mut udp = Vec::with_capacity(8);
    udp.extend_from_slice(&outer.source_port.to_be_bytes());
    udp.extend_from_slice(&outer.destination_port.to_be_bytes());
    udp.extend_from_slice(&udp_length.to_be_bytes());
    udp.extend_from_slice(&[0, 0]);

    let (ethertype, ip, pseudo) = match (outer.source, outer.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => (
            ETHERTYPE_IPV4,
            ipv4_header(outer, source, destination, udp_length)?,
            [
                &source.octets()[..],
                &destination.octets(),
                &[0, PROTOCOL_UDP],
                &udp_length.to_be_bytes(),
            ]
            .concat(),
        ),
        (IpAddr::V6(source), IpAddr::V6(destination)) => (
            ETHERTYPE_IPV6,
            ipv6_header(outer, source, destination, udp_length),
            [
                &source.octets()[..],
                &destination.octets(),
                &u32::from(udp_length).to_be_bytes(),
                &[0, 0, 0, PROTOCOL_UDP],
            ]
            .concat(),
        ),
        _ => bail!("outer addresses of two families"),
    };
    if outer.udp_checksum {
        // Zero means "none" on the wire, so a sum of zero is sent as its other form.
        let sum = match checksum(&[&pseudo, &udp, &vxlan, inner]) {
            0 => 0xffff,
            sum => sum,
        };
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
    }
    Ok([
        &outer.destination_mac[..],
        &outer.source_mac,
        &ethertype.to_be_bytes(),
        &ip,
        &udp,
        &vxlan,
        inner,
    ]
    .concat())
}

fn ipv4_header(
    outer: &Outer,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    udp_length: u16,
) -> Result<Vec<u8>> {
    let total = udp_length.checked_add(20).context("the inner frame is too long")?;
    let flags: u16 = if outer.dont_fragment { 0x4000 } else { 0 };
    let mut header = [
        &[0x45, outer.traffic_class][..],
        &total.to_be_bytes(),
        &outer.id.to_be_bytes(),
        &flags.to_be_bytes(),
        &[outer.ttl, PROTOCOL_UDP, 0, 0],
        &source.octets(),
        &destination.octets(),
    ]
    .concat();
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    Ok(header)
}

fn ipv6_header(outer: &Outer, source: Ipv6Addr, destination: Ipv6Addr, udp_length: u16) -> Vec<u8> {
    let first = 6 << 28 | u32::from(outer.traffic_class) << 20 | outer.flow_label & 0xf_ffff;
    [
        &first.to_be_bytes()[..],
        &udp_length.to_be_bytes(),
        &[PROTOCOL_UDP, outer.ttl],
        &source.octets(),
        &destination.octets(),
    ]
    .concat()
}

/// Takes a frame apart if it is UDP to `port`. `None` if it is something else; an error if it
/// is VXLAN but breaks RFC 7348.
pub fn parse(frame: &[u8], port: u16) -> Result<Option<Vxlan>> {
    let Some((ethernet, rest)) = frame.split_at_checked(14) else { return Ok(None) };
    let ethertype = be16(ethernet, 12);
    let mut outer = Outer {
        destination_mac: ethernet[..6].try_into()?,
        source_mac: ethernet[6..12].try_into()?,
        source: Ipv4Addr::UNSPECIFIED.into(),
        destination: Ipv4Addr::UNSPECIFIED.into(),
        traffic_class: 0,
        ttl: 0,
        dont_fragment: false,
        id: 0,
        flow_label: 0,
        source_port: 0,
        destination_port: port,
        vni: 0,
        udp_checksum: false,
    };
    let udp = match ethertype {
        ETHERTYPE_IPV4 if rest.len() >= 20 && rest[9] == PROTOCOL_UDP => {
            outer.source = Ipv4Addr::from(<[u8; 4]>::try_from(&rest[12..16])?).into();
            outer.destination = Ipv4Addr::from(<[u8; 4]>::try_from(&rest[16..20])?).into();
            outer.traffic_class = rest[1];
            outer.ttl = rest[8];
            outer.dont_fragment = rest[6] & 0x40 != 0;
            outer.id = be16(rest, 4);
            rest.get(usize::from(rest[0] & 15) * 4..).unwrap_or_default()
        }
        ETHERTYPE_IPV6 if rest.len() >= 40 && rest[6] == PROTOCOL_UDP => {
            outer.source = Ipv6Addr::from(<[u8; 16]>::try_from(&rest[8..24])?).into();
            outer.destination = Ipv6Addr::from(<[u8; 16]>::try_from(&rest[24..40])?).into();
            let first = u32::from_be_bytes(rest[..4].try_into()?);
            outer.traffic_class = u8::try_from(first >> 20 & 0xff)?;
            outer.flow_label = first & 0xf_ffff;
            outer.ttl = rest[7];
            &rest[40..]
        }
        _ => return Ok(None),
    };
    if udp.len() < 8 || be16(udp, 2) != port {
        return Ok(None);
    }
    outer.source_port = be16(udp, 0);
    outer.udp_checksum = be16(udp, 6) != 0;
    let (vxlan, inner) =
        udp[8..].split_at_checked(8).context("a datagram too short for a VXLAN header")?;
    ensure!(vxlan[0] & 0x08 != 0, "VXLAN flags {:#04x}: the I flag is not set", vxlan[0]);
    ensure!(vxlan[7] == 0, "VXLAN reserved byte {:#04x}", vxlan[7]);
    outer.vni = u32::from_be_bytes(vxlan[4..].try_into()?) >> 8;
    ensure!(inner.len() >= 14, "an inner frame of {} bytes", inner.len());
    Ok(Some(Vxlan { outer, inner: inner.to_vec() }))
}

impl Vxlan {
    /// The inner IP packet.
    pub fn packet(&self) -> &[u8] {
        self.inner.get(14..).unwrap_or_default()
    }

    /// The inner destination MAC.
    pub fn inner_destination(&self) -> &[u8] {
        self.inner.get(..6).unwrap_or_default()
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from(bytes[at]) << 8 | u16::from(bytes[at + 1])
}

/// Two frames differ: where first, and both in hex.
pub fn difference(got: &[u8], expected: &[u8]) -> Option<String> {
    if got == expected {
        return None;
    }
    let at = got
        .iter()
        .zip(expected)
        .position(|(got, expected)| got != expected)
        .unwrap_or_else(|| got.len().min(expected.len()));
    Some(format!(
        "first difference at byte {at}\n got      {}\n expected {}",
        hex(got),
        hex(expected)
    ))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outer(source: &str, destination: &str) -> Outer {
        Outer {
            destination_mac: [2, 0, 0, 0, 0, 2],
            source_mac: [2, 0, 0, 0, 0, 1],
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            traffic_class: 0x02,
            ttl: 64,
            dont_fragment: false,
            id: 0x1234,
            flow_label: 0,
            source_port: 40000,
            destination_port: 8472,
            vni: 0x00ab_cdef,
            udp_checksum: true,
        }
    }

    #[test]
    fn a_frame_comes_apart_as_it_was_built() {
        for outer in [outer("192.0.2.1", "192.0.2.2"), outer("2001:db8::1", "2001:db8::2")] {
            let mut outer = outer;
            if outer.source.is_ipv6() {
                outer.id = 0;
            }
            let packet = [&[0x45_u8][..], &[0; 19]].concat();
            let inner = ethernet([1; 6], [2; 6], &packet).unwrap();
            let frame = encapsulate(&outer, &inner).unwrap();
            let parsed = parse(&frame, 8472).unwrap().unwrap();
            assert_eq!(parsed, Vxlan { outer, inner });
        }
    }

    #[test]
    fn the_vni_stands_where_rfc_7348_has_it() {
        let inner = [0; 14];
        let frame = encapsulate(&outer("192.0.2.1", "192.0.2.2"), &inner).unwrap();
        assert_eq!(frame.len(), 50 + inner.len());
        assert_eq!(frame[42..50], [0x08, 0, 0, 0, 0xab, 0xcd, 0xef, 0]);
        assert_eq!(checksum(&[&frame[14..34]]), 0, "the header sums up");
    }

    #[test]
    fn sums_as_in_rfc_1071() {
        assert_eq!(checksum(&[&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]]), !0xddf2);
    }

    #[test]
    fn a_router_counts_down() {
        let mut packet = vec![0_u8; 20];
        packet[0] = 0x45;
        packet[8] = 64;
        let packet = routed(&packet).unwrap();
        assert_eq!(packet[8], 63);
        assert_eq!(checksum(&[&packet]), 0);
    }
}
