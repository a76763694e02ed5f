//! Generated packets as they arrived, to be compared with those of another run.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, bail, ensure};

use crate::craft;

/// Packets by what tells them: family, and id or flow label.
#[derive(Debug, Default)]
pub struct Arrivals(BTreeMap<(u8, u32), Vec<Vec<u8>>>);

impl Arrivals {
    /// Files `whole`, if the IP packet at its end is one of these senders' generated ones.
    pub fn note(&mut self, packet: &[u8], whole: &[u8], sources: &[IpAddr]) {
        let word = |at: usize| u32::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
        let (key, source, echo) = match packet.first().map(|byte| byte >> 4) {
            Some(4) if packet.len() >= 20 => {
                let source: [u8; 4] = packet[12..16].try_into().unwrap_or_default();
                (
                    (4, word(4) / 64),
                    IpAddr::from(source),
                    packet[9] == 1 && packet.get(20) == Some(&8),
                )
            }
            Some(6) if packet.len() >= 40 => {
                let source: [u8; 16] = packet[8..24].try_into().unwrap_or_default();
                let generated = matches!(packet.get(40), Some(129 | 1..=4));
                let other = packet[6] == 58 && !generated;
                ((6, word(2)), IpAddr::from(source), other)
            }
            _ => return,
        };
        // Not our pings, nor what neighbours ask each other.
        if sources.contains(&source) && !echo {
            let mut bytes = whole.to_vec();
            let inner = bytes.len() - packet.len();
            settle(&mut bytes[inner..]);
            self.0.entry(key).or_default().push(bytes);
        }
    }

    /// Compares what the kernel's path brought (this) with what the programs brought: the first
    /// difference, if any; else how many packets are equal. `least` is how many different ones there have to be.
    pub fn compare(&self, what: &str, programs: &Self, least: usize) -> Result<usize> {
        let (kernel, programs) = (&self.0, &programs.0);
        ensure!(kernel.len() > least, "only {} kinds of packets {what}", kernel.len());
        for key in kernel.keys().chain(programs.keys()) {
            let (expected, got) = (kernel.get(key), programs.get(key));
            if expected == got {
                continue;
            }
            let count = |found: Option<&Vec<Vec<u8>>>| found.map_or(0, Vec::len);
            let first = expected.and_then(|e| e.first()).zip(got.and_then(|g| g.first()));
            let difference = first.and_then(|(expected, got)| craft::difference(got, expected));
            bail!(
                "{what}: packet {key:?}: {} by the kernel, {} by the programs; {difference:?}; {:02x?}",
                count(expected),
                count(got),
                first.map(|(expected, _)| &expected[..expected.len().min(130)])
            );
        }
        Ok(kernel.values().map(Vec::len).sum())
    }
}

/// The outer headers without what differs from network to network, or may differ at all.
pub fn outer(frame: &[u8]) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    bytes[..12].fill(0);
    let ip_v4 = bytes[12..14] == [8, 0];
    let udp = if ip_v4 { 34 } else { 54 };
    if ip_v4 {
        bytes[18..20].fill(0);
        bytes[24..26].fill(0);
    }
    bytes[udp + 6..udp + 8].fill(0);
    bytes[udp + 16..udp + 28].fill(0);
    bytes
}

/// A transport checksum that is right, or open for a device to complete, is as good as another.
fn settle(packet: &mut [u8]) {
    let v6 = packet[0] >> 4 == 6;
    let (start, protocol) =
        if v6 { (40, packet[6]) } else { (usize::from(packet[0] & 15) * 4, packet[9]) };
    let at = start
        + match protocol {
            6 => 16,
            17 => 6,
            _ => return,
        };
    let end = if v6 { 40 + be(packet, 4) } else { be(packet, 2) };
    let fragment = !v6 && be(packet, 6) & 0x3fff != 0;
    if fragment || packet.len() < at + 2 || packet.len() < end || end < at + 2 {
        return;
    }
    let len = u32::try_from(end - start).unwrap_or_default();
    let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
    let pseudo = [addresses, &len.to_be_bytes(), &[0, 0, 0, protocol]].concat();
    let open = (!craft::checksum(&[&pseudo])).to_be_bytes();
    if craft::checksum(&[&pseudo, &packet[start..end]]) == 0 || packet[at..at + 2] == open {
        packet[at..at + 2].fill(0);
    }
}

fn be(packet: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]))
}
