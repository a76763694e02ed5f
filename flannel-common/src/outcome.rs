//! What became of a packet that the BPF programs looked at.

/// Declares the outcomes once: number, name, word, meaning.
macro_rules! outcomes {
    ($($(#[$meaning:meta])+ $name:ident = $number:literal $word:literal,)+) => {
        /// The fate of a packet of the tunnel.
        ///
        /// The number is the index in the map `OUTCOMES`, the word is a label of the metric and
        /// what the command line shows. Both are part of the contract: new outcomes go to the end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Outcome {
            $($(#[$meaning])+ $name = $number,)+
        }

        impl Outcome {
            /// All of them, in the order of their numbers.
            pub const ALL: [Self; [$($number),+].len()] = [$(Self::$name),+];

            /// The word for it in metrics and on the command line. What begins with `drop-` was
            /// dropped; what begins with `kernel-` was left to the kernel's device, unchanged.
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)+
                }
            }
        }
    };
}

outcomes! {
    /// A well-formed packet of the tunnel, sent by a known peer, while nothing is decapsulated.
    FromPeer = 0 "from-peer",
    /// A well-formed packet of the tunnel whose sender is no peer.
    UnknownSource = 1 "unknown-source",
    /// A VXLAN packet of another network.
    WrongVni = 2 "wrong-vni",
    /// The flag that says that there is a VNI is not set (RFC 7348 section 5).
    NoVni = 3 "no-vni",
    /// The packet ends before, or its lengths contradict, what it says it carries.
    Malformed = 4 "malformed",
    /// The first fragment: the kernel puts the packet together later, out of our sight.
    Fragment = 5 "fragment",
    /// Sent into the tunnel.
    Encapsulated = 6 "encapsulated",
    /// Taken out of the tunnel.
    Decapsulated = 7 "decapsulated",
    /// To the tunnel, while nothing is encapsulated.
    EncapOff = 8 "kernel-encap-off",
    /// To the tunnel, but neither IPv4 nor IPv6.
    NotIp = 9 "kernel-not-ip",
    /// To the tunnel, to a MAC that has no forwarding entry.
    NoVtep = 10 "kernel-no-vtep",
    /// To the tunnel, with a firewall mark or a VLAN tag: routing may depend on it.
    Marked = 11 "kernel-marked",
    /// To the tunnel, without a flow hash to make the source port of.
    NoHash = 12 "kernel-no-hash",
    /// To the tunnel: the one packet in a while that keeps the neighbour's entry fresh.
    Refresh = 13 "kernel-refresh",
    /// To the tunnel, but no plain route to the peer.
    NoRoute = 14 "kernel-no-route",
    /// To the tunnel, but the next hop's MAC is not known.
    NoNeighbour = 15 "kernel-no-neighbour",
    /// To the tunnel, but bigger than the way to the peer allows.
    TooBig = 16 "kernel-too-big",
    /// To the tunnel over IPv6, with a checksum that only the kernel can promise.
    NeedsChecksum = 17 "kernel-needs-checksum",
    /// To the tunnel, in a tunnel already.
    Nested = 18 "kernel-nested",
    /// To the tunnel, merged in a way that the kernel lets no program encapsulate.
    GsoKind = 19 "kernel-gso-kind",
    /// To the tunnel, but the kernel had no room for the headers.
    NoRoom = 20 "kernel-no-room",
    /// From the tunnel, merged from several packets: only the kernel can undo that.
    Merged = 21 "kernel-merged",
    /// From the tunnel, in the middle of a burst: the kernel's device merges it with its like.
    Burst = 22 "kernel-burst",
    /// From the tunnel, close behind a burst of its flow: it must not overtake.
    BehindBurst = 23 "kernel-behind-burst",
    /// From the tunnel, with IP options, padding, or other things that nobody sends usually.
    Unusual = 24 "kernel-unusual",
    /// From the tunnel, with a checksum that has to be verified over all of it.
    VerifyChecksum = 25 "kernel-verify-checksum",
    /// From the tunnel, to another MAC than our device's, or from our own.
    InnerMac = 26 "kernel-inner-mac",
    /// From the tunnel, while the kernel's device is not there.
    NoDevice = 27 "kernel-no-device",
    /// Refused: see `Malformed`.
    DropMalformed = 28 "drop-malformed",
    /// Refused: see `NoVni`.
    DropNoVni = 29 "drop-no-vni",
    /// Refused: see `WrongVni`.
    DropWrongVni = 30 "drop-wrong-vni",
    /// Refused: see `UnknownSource`.
    DropUnknownSource = 31 "drop-unknown-source",
    /// Refused: a broadcast or multicast frame inside.
    DropBroadcast = 32 "drop-broadcast",
    /// Refused: not the tunnel's IP inside, ARP for example.
    DropNotIp = 33 "drop-not-ip",
    /// Refused: to an address outside of our own subnet.
    DropDestination = 34 "drop-destination",
    /// Refused: from an address inside our own subnet.
    DropOwnSource = 35 "drop-own-source",
    /// Refused: from an address inside the subnet of a peer that did not send it.
    DropOtherSource = 36 "drop-other-source",
    /// Refused by the strict filter: from an address outside of the sender's subnet.
    DropForeignSource = 37 "drop-foreign-source",
    /// Refused: it met congestion outside and cannot tell inside (RFC 6040).
    DropCongested = 38 "drop-congested",
    /// Refused: a tunnel packet made by a local pod.
    DropLocalPod = 39 "drop-local-pod",
    /// Lost: the kernel had no memory in the middle of a change.
    DropNoMemory = 40 "drop-no-memory",
    /// Taken out of the tunnel in XDP already, sent on by the program at TC.
    FromXdp = 41 "from-xdp",
    /// In XDP: the program at TC, which would send it on, has not been seen at work lately.
    Unattended = 42 "kernel-unattended",
    /// In XDP: the driver keeps no metadata, by which the program at TC would know it.
    NoMetadata = 43 "kernel-no-metadata",
    /// Refused: taken out of the tunnel in XDP, where a VLAN tag that the NIC took off cannot be seen.
    DropTagged = 44 "drop-tagged",
}

impl Outcome {
    /// How many there are: the number of entries of the map `OUTCOMES`.
    pub const COUNT: usize = Self::ALL.len();

    /// The index in the map `OUTCOMES`.
    pub const fn index(self) -> u32 {
        self as u32
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
