//! MAC addresses as text: read the way Go reads them, written in lower case with colons.

use std::fmt;

/// An Ethernet address, bytes in wire order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// A random unicast address from the locally administered range.
    pub fn random() -> Self {
        let mut bytes = [0; 6];
        fastrand::fill(&mut bytes);
        bytes[0] = (bytes[0] & !0x01) | 0x02;
        Self(bytes)
    }

    /// Whether a station can have this address: not a group address, not all zero.
    pub fn is_station(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    /// Reads six bytes as `aa:bb:…`, `aa-bb-…` or `aabb.ccdd.eeff`, in any case.
    pub fn parse(text: &str) -> Option<Self> {
        let (separator, width) = match text.as_bytes().get(2)? {
            b':' => (':', 2),
            b'-' => ('-', 2),
            _ => ('.', 4),
        };
        let mut bytes = Vec::with_capacity(6);
        for group in text.split(separator) {
            if group.len() != width || !group.bytes().all(|b| b.is_ascii_hexdigit()) {
                return None;
            }
            for pair in 0..width / 2 {
                bytes.push(u8::from_str_radix(&group[2 * pair..2 * pair + 2], 16).ok()?);
            }
        }
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn forms_of_go_are_read_and_others_are_not() {
        let mac = MacAddr([0x02, 0xfa, 0, 0, 0, 0x1b]);
        for text in ["02:fa:00:00:00:1b", "02-FA-00-00-00-1B", "02fa.0000.001B"] {
            assert_eq!(MacAddr::parse(text), Some(mac), "{text}");
        }
        for text in [
            "",
            "02:fa:00:00:00",
            "02:fa:00:00:00:1b:00",
            "02:fa-00:00:00:1b",
            "2:fa:0:0:0:1b",
            "02:fa:00:00:00:1g",
            "ä2:fa:00:00:00:1b",
        ] {
            assert_eq!(MacAddr::parse(text), None, "{text}");
        }
    }

    #[test]
    fn random_addresses_are_local_unicast() {
        for _ in 0..1000 {
            let mac = MacAddr::random();
            assert!(mac.is_station() && mac.0[0] & 2 == 2, "{mac}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(bytes: [u8; 6]) {
            prop_assert_eq!(MacAddr::parse(&MacAddr(bytes).to_string()), Some(MacAddr(bytes)));
        }

        #[test]
        fn any_text_is_survived(text in ".{0,40}") {
            let _ = MacAddr::parse(&text);
        }
    }
}
