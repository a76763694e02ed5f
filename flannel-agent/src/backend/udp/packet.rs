//! IPv4 packets as a router sees them: time to live, checksum and "net unreachable".

use std::net::Ipv4Addr;

/// Length of an IPv4 header without options, in bytes (RFC 791).
pub const MIN_HEADER: usize = 20;

/// Longest ICMP error: its own headers, the longest IPv4 header and eight bytes after it.
pub const MAX_ERROR: usize = MIN_HEADER + ICMP_HEADER + MAX_HEADER + QUOTED;

/// Longest IPv4 header: fifteen words.
const MAX_HEADER: usize = 60;

/// Length of an ICMP header, in bytes (RFC 792).
const ICMP_HEADER: usize = 8;

/// Bytes that an ICMP error quotes after the offending header (RFC 792).
const QUOTED: usize = 8;

/// Time to live of what we say ourselves, as flannel has it (specification §7.3).
const OWN_TTL: u8 = 8;

const PROTOCOL_ICMP: u8 = 1;

/// A packet's time to live is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired;

/// A packet with a complete IPv4 header.
#[derive(Debug)]
pub struct Packet<'a> {
    bytes: &'a mut [u8],
    header_len: usize,
}

impl<'a> Packet<'a> {
    /// Looks at the header. `None` if there is no complete one.
    pub fn new(bytes: &'a mut [u8]) -> Option<Self> {
        let first = *bytes.first()?;
        let header_len = usize::from(first & 0xf) * 4;
        let complete = first >> 4 == 4 && (MIN_HEADER..=bytes.len()).contains(&header_len);
        complete.then_some(Self { bytes, header_len })
    }

    /// The packet as it is now.
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Source address.
    pub fn source(&self) -> Ipv4Addr {
        self.address(12)
    }

    /// Destination address.
    pub fn destination(&self) -> Ipv4Addr {
        self.address(16)
    }

    fn address(&self, at: usize) -> Ipv4Addr {
        let b = &self.bytes;
        Ipv4Addr::new(b[at], b[at + 1], b[at + 2], b[at + 3])
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Takes one hop off the time to live.
    ///
    /// # Errors
    /// [`Expired`] if none is left; the packet is then unchanged.
    pub fn hop(&mut self) -> Result<(), Expired> {
        let ttl = self.bytes[8];
        if ttl <= 1 {
            return Err(Expired);
        }
        let before = self.word(8);
        self.bytes[8] = ttl - 1;
        let checksum = updated_checksum(self.word(10), before, self.word(8));
        self.bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
        Ok(())
    }

    /// Whether an ICMP error may answer this packet (RFC 1122 §3.2.2): never ICMP itself, a
    /// fragment but the first (13 bits of offset), or what came from or goes to more than one host.
    fn may_be_answered(&self) -> bool {
        let (source, destination) = (self.source(), self.destination());
        let several = |ip: Ipv4Addr| ip.is_multicast() || ip.is_broadcast();
        self.bytes[9] != PROTOCOL_ICMP
            && self.word(6).trailing_zeros() >= 13
            && !several(source)
            && !source.is_unspecified()
            && !several(destination)
    }

    /// Whether "do not fragment" is set.
    pub fn dont_fragment(&self) -> bool {
        self.bytes[6] & 0x40 != 0
    }

    /// Writes "net unreachable" from `source` into `answer` and returns its length in bytes;
    /// `None` if this packet may not be answered.
    pub fn unreachable(&self, source: Ipv4Addr, answer: &mut [u8; MAX_ERROR]) -> Option<usize> {
        // Code 0, "net".
        self.error(source, 0, 0, answer)
    }

    /// Writes "fragmentation needed" (RFC 1191) for a link of `mtu` bytes, else as
    /// [`unreachable`](Self::unreachable).
    pub fn too_long(
        &self,
        source: Ipv4Addr,
        mtu: u16,
        answer: &mut [u8; MAX_ERROR],
    ) -> Option<usize> {
        // Code 4, "fragmentation needed and DF set".
        self.error(source, 4, mtu, answer)
    }

    /// Writes "destination unreachable" with a code and its parameter.
    fn error(
        &self,
        source: Ipv4Addr,
        code: u8,
        parameter: u16,
        answer: &mut [u8; MAX_ERROR],
    ) -> Option<usize> {
        if !self.may_be_answered() {
            return None;
        }
        let quoted = self.bytes.len().min(self.header_len + QUOTED);
        let len = MIN_HEADER + ICMP_HEADER + quoted;
        let answer = &mut answer[..len];
        answer.fill(0);
        answer[0] = 0x45;
        // At most 96.
        answer[3] = u8::try_from(len).ok()?;
        answer[8] = OWN_TTL;
        answer[9] = PROTOCOL_ICMP;
        answer[12..16].copy_from_slice(&source.octets());
        answer[16..20].copy_from_slice(&self.source().octets());
        let sum = checksum(&answer[..MIN_HEADER]);
        answer[10..12].copy_from_slice(&sum.to_be_bytes());
        // Type 3, "destination unreachable".
        answer[MIN_HEADER] = 3;
        answer[MIN_HEADER + 1] = code;
        answer[MIN_HEADER + 6..MIN_HEADER + 8].copy_from_slice(&parameter.to_be_bytes());
        answer[MIN_HEADER + ICMP_HEADER..].copy_from_slice(&self.bytes[..quoted]);
        let sum = checksum(&answer[MIN_HEADER..]);
        answer[MIN_HEADER + 2..MIN_HEADER + 4].copy_from_slice(&sum.to_be_bytes());
        Some(len)
    }
}

/// The checksum after one 16-bit word changed (RFC 1624, equation 3).
fn updated_checksum(checksum: u16, before: u16, after: u16) -> u16 {
    !fold(u32::from(!checksum) + u32::from(!before) + u32::from(after))
}

/// The Internet checksum (RFC 1071), for bytes whose checksum field is zero.
fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| match *pair {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    };
    !fold(bytes.chunks(2).map(word).sum())
}

#[expect(clippy::cast_possible_truncation, reason = "the carry is folded in: 16 bits are left")]
fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests;
