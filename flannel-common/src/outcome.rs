//! What became of a packet that the BPF programs looked at.

/// The fate of a packet from the underlay that was sent to the tunnel's port.
///
/// The number is the index in the map `OUTCOMES`, the word is a label of the metric and what
/// the command line shows. Both are part of the contract: new outcomes go to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Outcome {
    /// A well-formed packet of the tunnel, sent by a known peer.
    FromPeer = 0,
    /// A well-formed packet of the tunnel whose sender is no peer.
    UnknownSource = 1,
    /// A VXLAN packet of another network.
    WrongVni = 2,
    /// The flag that says that there is a VNI is not set (RFC 7348 section 5).
    NoVni = 3,
    /// The packet ends before, or its lengths contradict, what it says it carries.
    Malformed = 4,
    /// The first fragment: the kernel puts the packet together later, out of our sight.
    Fragment = 5,
}

impl Outcome {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::FromPeer,
        Self::UnknownSource,
        Self::WrongVni,
        Self::NoVni,
        Self::Malformed,
        Self::Fragment,
    ];

    /// How many there are: the number of entries of the map `OUTCOMES`.
    pub const COUNT: usize = Self::ALL.len();

    /// The index in the map `OUTCOMES`.
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// The word for it in metrics and on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::FromPeer => "from-peer",
            Self::UnknownSource => "unknown-source",
            Self::WrongVni => "wrong-vni",
            Self::NoVni => "no-vni",
            Self::Malformed => "malformed",
            Self::Fragment => "fragment",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_list_and_words_differ() {
        for (position, outcome) in (0_u32..).zip(Outcome::ALL) {
            assert_eq!(outcome.index(), position);
            let same = Outcome::ALL.iter().filter(|other| other.word() == outcome.word());
            assert_eq!(same.count(), 1, "{outcome:?}");
        }
    }
}
