//! Explicit congestion notification through a tunnel (RFC 6040), by the kernel's rules.

use crate::wire::fold;

/// Not capable.
pub const NOT_ECT: u8 = 0;
/// Capable, codepoint ECT(1).
pub const ECT_1: u8 = 1;
/// Capable, codepoint ECT(0).
pub const ECT_0: u8 = 2;
/// Congestion was met.
pub const CE: u8 = 3;

/// The two bits of a DS field.
#[inline(always)]
pub const fn of(ds_field: u8) -> u8 {
    ds_field & 3
}

/// The outer packet's DS field: the inner DSCP stays inside, as with flannel's device; congestion
/// met before the tunnel stays inside too, the tunnel's own is told apart.
#[inline(always)]
pub const fn encapsulate(inner_ds_field: u8) -> u8 {
    match of(inner_ds_field) {
        CE => ECT_0,
        ecn => ecn,
    }
}

/// What to do with the inner packet when it leaves the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decapsulate {
    /// Nothing.
    Keep,
    /// Set CE.
    SetCe,
    /// Set ECT(1).
    SetEct1,
    /// Congestion was met by a packet that cannot tell: drop it.
    Drop,
}

/// By the DS fields of the outer and the inner header.
#[inline(always)]
pub const fn decapsulate(outer_ds_field: u8, inner_ds_field: u8) -> Decapsulate {
    match (of(outer_ds_field), of(inner_ds_field)) {
        (CE, NOT_ECT) => Decapsulate::Drop,
        (CE, ECT_0 | ECT_1) => Decapsulate::SetCe,
        (ECT_1, ECT_0) => Decapsulate::SetEct1,
        _ => Decapsulate::Keep,
    }
}

/// Sets CE in an IPv4 header: its first word (version, header length, DS field) and its checksum,
/// both in host order, before and after (RFC 1624 section 3).
#[inline(always)]
pub const fn set_ce_v4(first: u16, checksum: u16) -> (u16, u16) {
    let marked = first | CE as u16;
    let sum = !checksum as u32 + !first as u32 + marked as u32;
    (marked, !fold(sum))
}

/// Sets CE in the first word of an IPv6 header (version, traffic class, start of the flow label), in
/// host order.
#[inline(always)]
pub const fn set_ce_v6(first: u16) -> u16 {
    first | (CE as u16) << 4
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{Header, Words};

    proptest! {
        #[test]
        fn a_marked_header_has_the_right_checksum(mut header: [u16; 10]) {
            // Version and header length never leave a header all zero.
            header[0] |= 0x4500_u16.to_be();
            header[5] = 0;
            header[5] = !fold(Words(header).sum(0, 20));
            let mut marked = Words(header);
            let (first, checksum) = set_ce_v4(marked.be16(0), marked.be16(10));
            marked.put16(0, first);
            marked.put16(10, checksum);
            prop_assert_eq!(first & 3, 3);
            prop_assert_eq!(first | 3, marked.be16(0) | 3);
            let mut fresh = marked;
            fresh.put16(10, 0);
            prop_assert_eq!(checksum, u16::from_be(!fold(fresh.sum(0, 20))));
        }
    }

    #[test]
    fn ce_stands_between_version_and_flow_label() {
        assert_eq!(set_ce_v6(0x6ab5), 0x6ab5 | 0x30);
        assert_eq!(set_ce_v6(0x6000), 0x6030);
    }

    #[test]
    fn all_sixteen_pairs() {
        let inner = |outer: u8, inner: u8| match decapsulate(outer, inner) {
            Decapsulate::Keep => Some(inner),
            Decapsulate::SetCe => Some(CE),
            Decapsulate::SetEct1 => Some(ECT_1),
            Decapsulate::Drop => None,
        };
        // RFC 6040 figure 4, but ECT(1) outside and Not-ECT inside is delivered, as by Linux.
        let expected = [
            (NOT_ECT, [Some(NOT_ECT), Some(ECT_1), Some(ECT_0), Some(CE)]),
            (ECT_1, [Some(NOT_ECT), Some(ECT_1), Some(ECT_1), Some(CE)]),
            (ECT_0, [Some(NOT_ECT), Some(ECT_1), Some(ECT_0), Some(CE)]),
            (CE, [None, Some(CE), Some(CE), Some(CE)]),
        ];
        for (outer, row) in expected {
            for (inner_ecn, expected) in (0..4).zip(row) {
                assert_eq!(inner(outer, inner_ecn), expected, "{outer} {inner_ecn}");
            }
        }
        assert_eq!([0, 1, 2, 3].map(encapsulate), [NOT_ECT, ECT_1, ECT_0, ECT_0]);
        assert_eq!(encapsulate(0xb8), 0, "the DSCP stays inside");
    }
}
