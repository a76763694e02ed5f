//! Explicit congestion notification through a tunnel (RFC 6040), by the kernel's rules.

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

#[cfg(test)]
mod tests {
    use super::*;

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
