//! The first bytes of a packet, read by 16-bit words.
//!
//! All fields of Ethernet, IP, UDP, TCP and VXLAN begin at even offsets, so a header stack that
//! begins with Ethernet can be read word by word, from the packet or from an aligned copy: cheap
//! in BPF, where unaligned loads are made of single bytes.

/// Bytes before the IP header: destination, source, type. A VLAN tag is never among them, the
/// kernel takes it out beforehand.
pub const ETHERNET_LEN: usize = 14;
/// An IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// The fixed IPv6 header.
pub const IPV6_LEN: usize = 40;
/// A UDP header.
pub const UDP_LEN: usize = 8;
/// A VXLAN header.
pub const VXLAN_LEN: usize = 8;

/// Ethernet type of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// Ethernet type of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// IP protocol ICMP.
pub const ICMP: u8 = 1;
/// IP protocol TCP.
pub const TCP: u8 = 6;
/// IP protocol UDP.
pub const UDP: u8 = 17;
/// IP protocol number of ICMP over IPv6.
pub const ICMPV6: u8 = 58;

/// The first bytes of a packet, wherever they are. All offsets are in bytes and even, and
/// constants at every call, so that few checks remain in BPF.
pub trait Header {
    /// The word at an offset, as it lies in memory; `None` beyond the end.
    fn word(&self, offset: usize) -> Option<u16>;

    /// The same, zero beyond the end.
    #[inline(always)]
    fn raw16(&self, offset: usize) -> u16 {
        self.word(offset).unwrap_or(0)
    }

    /// The word at an offset, in host order. Zero beyond the end.
    #[inline(always)]
    fn be16(&self, offset: usize) -> u16 {
        u16::from_be(self.raw16(offset))
    }

    /// Two words, in host order.
    #[inline(always)]
    fn be32(&self, offset: usize) -> u32 {
        u32::from(self.be16(offset)) << 16 | u32::from(self.be16(offset + 2))
    }

    /// The byte at an offset, odd ones too.
    #[inline(always)]
    fn byte(&self, offset: usize) -> u8 {
        let [high, low] = self.be16(offset & !1).to_be_bytes();
        if offset & 1 == 0 { high } else { low }
    }

    /// `2 * W` bytes.
    #[inline(always)]
    fn words<const W: usize>(&self, offset: usize) -> [u16; W] {
        core::array::from_fn(|at| self.raw16(offset + 2 * at))
    }

    /// The sum of `len` bytes, an even number, in one's complement but not folded. Memory order:
    /// right for both byte orders (RFC 1071 section 2).
    #[inline(always)]
    fn sum(&self, offset: usize, len: usize) -> u32 {
        let mut sum = 0;
        let mut at = 0;
        while at < len {
            sum += u32::from(self.raw16(offset + at));
            at += 2;
        }
        sum
    }
}

/// The whole packet.
impl Header for [u8] {
    fn word(&self, offset: usize) -> Option<u16> {
        self.get(offset..)?.first_chunk().copied().map(u16::from_ne_bytes)
    }
}

/// A copy of the first `N` words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words<const N: usize>(pub [u16; N]);

impl<const N: usize> Header for Words<N> {
    #[inline(always)]
    fn word(&self, offset: usize) -> Option<u16> {
        self.0.get(offset / 2).copied()
    }
}

impl<const N: usize> Words<N> {
    /// All zero.
    pub const ZERO: Self = Self([0; N]);

    /// Puts a word, given in host order.
    #[inline(always)]
    pub fn put16(&mut self, offset: usize, value: u16) {
        if let Some(word) = self.0.get_mut(offset / 2) {
            *word = value.to_be();
        }
    }

    /// Puts words as they lie in memory.
    #[inline(always)]
    pub fn put<const W: usize>(&mut self, offset: usize, words: &[u16; W]) {
        let mut at = 0;
        while at < W {
            if let Some(word) = self.0.get_mut(offset / 2 + at) {
                *word = words[at];
            }
            at += 1;
        }
    }
}

/// How many words so many bytes are.
pub const fn words_in(bytes: usize) -> usize {
    bytes / 2
}

/// Whether IPv4's flags and offset say that there are more fragments, or that this is a later one.
#[inline(always)]
pub const fn is_fragment(flags_offset: u16) -> bool {
    flags_offset << 2 != 0
}

/// Folds a sum of words to 16 bits.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "two folds leave 16 bits")]
pub const fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// A MAC as words.
#[inline(always)]
pub fn mac_words(mac: &[u8; 6]) -> [u16; 3] {
    bytemuck::cast(*mac)
}

/// Words as a MAC.
#[inline(always)]
pub fn mac_bytes(words: &[u16; 3]) -> [u8; 6] {
    bytemuck::cast(*words)
}

/// Two words as the bytes of an IPv4 address.
#[inline(always)]
pub fn v4_bytes(words: &[u16; 2]) -> [u8; 4] {
    bytemuck::cast(*words)
}

/// The bytes of an IPv4 address as words.
#[inline(always)]
pub fn v4_words(bytes: &[u8; 4]) -> [u16; 2] {
    bytemuck::cast(*bytes)
}

/// The bytes of an IPv6 address as the four numbers of a helper's argument, in network order.
#[inline(always)]
pub fn v6_quarters(bytes: &[u8; 16]) -> [u32; 4] {
    bytemuck::cast(*bytes)
}

/// Eight words as the bytes of an IPv6 address.
#[inline(always)]
pub fn v6_bytes(words: &[u16; 8]) -> [u8; 16] {
    bytemuck::cast(*words)
}

/// The bytes of an IPv6 address as words.
#[inline(always)]
pub fn v6_words(bytes: &[u8; 16]) -> [u16; 8] {
    bytemuck::cast(*bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_come_back(v6: [u8; 16], v4: [u8; 4], mac: [u8; 6]) {
            prop_assert_eq!(v6_bytes(&v6_words(&v6)), v6);
            prop_assert_eq!(v4_bytes(&v4_words(&v4)), v4);
            prop_assert_eq!(mac_bytes(&mac_words(&mac)), mac);
            let mut words = Words::<8>::ZERO;
            words.put(0, &v6_words(&v6));
            for (offset, byte) in v6.iter().enumerate() {
                prop_assert_eq!(words.byte(offset), *byte);
            }
            prop_assert_eq!(words.be32(4), u32::from_be_bytes([v6[4], v6[5], v6[6], v6[7]]));
            prop_assert_eq!(words.be16(20), 0, "beyond the end");
        }

        #[test]
        fn folding_is_a_sum_modulo_all_ones(words: [u16; 8]) {
            let sum = Words(words).sum(0, 16);
            prop_assert_eq!(u32::from(fold(sum)) % 0xffff, sum % 0xffff);
        }
    }
}
