//! Rules in terms common to nftables and xtables, and whether traffic meets their conditions.

use std::net::IpAddr;

use ipnet::IpNet;

/// Connection states, by the bits of both nftables and xtables.
pub mod state {
    /// `ESTABLISHED`.
    pub const ESTABLISHED: u32 = 2;
    /// `NEW`.
    pub const NEW: u32 = 8;
}

/// Flags of a TCP header that a flow has always set, and never.
const ACK: u8 = 0x10;
const FIN_SYN_RST: u8 = 0x07;

/// What a rule asks of a packet, as far as it stays the same for all packets of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The interface that it comes in by, or goes out by.
    Interface { out: bool, name: NamePattern },
    /// The same by index.
    Index { out: bool, index: u32 },
    /// These bits of the address, in network order.
    Address { source: bool, value: Vec<u8>, mask: Vec<u8> },
    /// The transport protocol.
    Protocol(u8),
    /// IPv6 rather than IPv4.
    Ipv6(bool),
    /// One of these ranges, both ends included.
    Port { source: bool, ranges: Vec<(u16, u16)> },
    /// One of these connection states.
    State(u32),
    /// These bits of the firewall mark.
    Mark { value: u32, mask: u32 },
    /// These bits of the flags.
    TcpFlags { value: u8, mask: u8 },
    /// It is a fragment but the first.
    Fragment,
    /// Its destination is the host's.
    LocalDestination,
    /// Something that is not looked into.
    Undecided,
}

/// The name of an interface, or how it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether more may follow.
    pub open: bool,
}

impl NamePattern {
    fn fits(&self, name: &str) -> bool {
        let name = name.as_bytes();
        if self.open { name.starts_with(&self.bytes) } else { name == self.bytes }
    }
}

/// A condition, and whether it is its opposite that is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub condition: Condition,
    pub negated: bool,
}

/// What becomes of a packet that meets a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// The next rule.
    #[default]
    Continue,
    Accept,
    Drop,
    Return,
    Jump(String),
    Goto(String),
    /// What a verdict map says: any chain of the table, any verdict.
    Mapped,
}

/// A rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub asked: Vec<Asked>,
    /// What it does to, or learns from, each single packet.
    pub work: Option<String>,
    pub verdict: Verdict,
}

impl Step {
    /// Adds a condition.
    pub fn ask(&mut self, condition: Condition, negated: bool) {
        self.asked.push(Asked { condition, negated });
    }

    /// Notes that single packets matter; the first thing noted is told.
    pub fn works(&mut self, what: impl Into<String>) {
        self.work.get_or_insert_with(|| what.into());
    }
}

/// Whether packets meet a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    None,
    Some,
    All,
}

/// Packets that have much in common.
#[derive(Clone, Debug)]
pub struct Traffic {
    /// Names and indexes of the devices that they come in by.
    pub comes_by: Vec<(String, u32)>,
    /// The same for where they go out.
    pub goes_by: Vec<(String, u32)>,
    /// Where they come from.
    pub sources: Vec<IpNet>,
    /// Where they go.
    pub destinations: Vec<IpNet>,
    /// The transport protocols.
    pub protocols: &'static [u8],
    /// The destination port, if it is the same for all.
    pub port: Option<u16>,
    /// The connection states that they may be in.
    pub states: u32,
    /// Whether they end at this host.
    pub local: bool,
}

impl Traffic {
    /// Whether there is any of a family.
    pub fn has(&self, v6: bool) -> bool {
        let either = |nets: &[IpNet]| nets.iter().any(|net| matches!(net, IpNet::V6(_)) == v6);
        either(&self.sources) || either(&self.destinations)
    }

    /// Whether these packets meet all conditions of a rule.
    pub fn meets_all(&self, asked: &[Asked]) -> Answer {
        asked.iter().map(|asked| self.meets(asked)).min().unwrap_or(Answer::All)
    }

    fn meets(&self, asked: &Asked) -> Answer {
        let answer = match &asked.condition {
            Condition::Interface { out, name } => {
                among(self.devices(*out).iter().map(|(device, _)| name.fits(device)))
            }
            Condition::Index { out, index } => {
                among(self.devices(*out).iter().map(|(_, device)| device == index))
            }
            Condition::Address { source, value, mask } => {
                let nets = if *source { &self.sources } else { &self.destinations };
                match address(nets, value, mask) {
                    Some(answer) => answer,
                    // Nothing of this family: neither the condition nor its opposite.
                    None => return Answer::None,
                }
            }
            Condition::Protocol(number) => among(self.protocols.iter().map(|one| one == number)),
            Condition::Ipv6(v6) => match (self.has(*v6), self.has(!*v6)) {
                (false, _) => Answer::None,
                (true, false) => Answer::All,
                (true, true) => Answer::Some,
            },
            Condition::Port { source, ranges } => match self.port.filter(|_| !source) {
                Some(port) => {
                    let inside = ranges.iter().any(|(from, to)| (*from..=*to).contains(&port));
                    if inside { Answer::All } else { Answer::None }
                }
                None => Answer::Some,
            },
            Condition::State(states) if self.states & states == 0 => Answer::None,
            Condition::State(states) if self.states & !states == 0 => Answer::All,
            // Somebody who sets marks on them is found anyway.
            Condition::Mark { value, .. } => {
                if *value == 0 {
                    Answer::All
                } else {
                    Answer::None
                }
            }
            Condition::TcpFlags { value, mask } => self.tcp_flags(*value, *mask),
            Condition::LocalDestination if self.local => Answer::All,
            Condition::Fragment | Condition::LocalDestination => Answer::None,
            Condition::State(_) | Condition::Undecided => Answer::Some,
        };
        match (answer, asked.negated) {
            (Answer::None, true) => Answer::All,
            (Answer::All, true) => Answer::None,
            (answer, _) => answer,
        }
    }

    fn devices(&self, out: bool) -> &[(String, u32)] {
        if out { &self.goes_by } else { &self.comes_by }
    }

    /// Packets that begin or end a connection take the stack in any case; all others acknowledge.
    fn tcp_flags(&self, value: u8, mask: u8) -> Answer {
        const KNOWN: u8 = FIN_SYN_RST | ACK;
        if !self.protocols.contains(&6) || value & mask & KNOWN != ACK & mask {
            Answer::None
        } else if mask & !KNOWN == 0 && self.protocols == [6] {
            Answer::All
        } else {
            Answer::Some
        }
    }
}

/// How many of several are so. Of nothing none is.
fn among(each: impl Iterator<Item = bool>) -> Answer {
    let (mut some, mut all) = (false, true);
    for one in each {
        some |= one;
        all &= one;
    }
    match (some, all) {
        (false, _) => Answer::None,
        (true, true) => Answer::All,
        (true, false) => Answer::Some,
    }
}

/// Whether addresses inside of networks have these bits; `None` without a network of the family.
fn address(nets: &[IpNet], value: &[u8], mask: &[u8]) -> Option<Answer> {
    let answers: Vec<Answer> = nets.iter().filter_map(|net| inside(net, value, mask)).collect();
    let (least, most) = (answers.iter().min()?, answers.iter().max()?);
    Some(if least == most { *least } else { Answer::Some })
}

fn inside(net: &IpNet, value: &[u8], mask: &[u8]) -> Option<Answer> {
    let (base, known) = match (net.network(), net.netmask()) {
        (IpAddr::V4(base), IpAddr::V4(known)) => (base.octets().to_vec(), known.octets().to_vec()),
        (IpAddr::V6(base), IpAddr::V6(known)) => (base.octets().to_vec(), known.octets().to_vec()),
        _ => return None,
    };
    if base.len() != value.len() || base.len() != mask.len() {
        return None;
    }
    let bytes = || base.iter().zip(&known).zip(value.iter().zip(mask));
    let differs = bytes().any(|((base, known), (value, mask))| (base ^ value) & known & mask != 0);
    let all_known = bytes().all(|((_, known), (_, mask))| mask & !known == 0);
    Some(match (differs, all_known) {
        (true, _) => Answer::None,
        (false, true) => Answer::All,
        (false, false) => Answer::Some,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic() -> Traffic {
        Traffic {
            comes_by: vec![("cni0".to_owned(), 4), ("flannel.1".to_owned(), 5)],
            goes_by: vec![("eth0".to_owned(), 2)],
            sources: vec!["10.77.0.0/16".parse().unwrap()],
            destinations: vec!["192.0.2.1/32".parse().unwrap()],
            protocols: &[6],
            port: Some(8472),
            states: state::ESTABLISHED,
            local: false,
        }
    }

    fn meets(condition: Condition, negated: bool) -> Answer {
        traffic().meets_all(&[Asked { condition, negated }])
    }

    fn source(value: [u8; 4], mask: [u8; 4]) -> Condition {
        Condition::Address { source: true, value: value.to_vec(), mask: mask.to_vec() }
    }

    #[test]
    fn addresses_are_inside_outside_or_partly() {
        let all = [255; 4];
        assert_eq!(meets(source([10, 0, 0, 0], [255, 0, 0, 0]), false), Answer::All);
        assert_eq!(meets(source([10, 0, 0, 0], [255, 0, 0, 0]), true), Answer::None);
        assert_eq!(meets(source([10, 77, 3, 4], all), false), Answer::Some);
        assert_eq!(meets(source([10, 78, 3, 4], all), false), Answer::None);
        assert_eq!(meets(source([10, 78, 3, 4], all), true), Answer::All);
        let v6 = Condition::Address { source: true, value: vec![0; 16], mask: vec![0; 16] };
        assert_eq!(meets(v6.clone(), false), Answer::None);
        assert_eq!(meets(v6, true), Answer::None);
        assert_eq!(meets(source([0; 4], [0; 4]), false), Answer::All);
    }

    #[test]
    fn devices_are_known_by_name_beginning_and_index() {
        let name = |bytes: &[u8], open| Condition::Interface {
            out: false,
            name: NamePattern { bytes: bytes.to_vec(), open },
        };
        assert_eq!(meets(name(b"cni0", false), false), Answer::Some);
        assert_eq!(meets(name(b"cni", false), false), Answer::None);
        assert_eq!(meets(name(b"flannel", true), false), Answer::Some);
        assert_eq!(meets(name(b"", true), false), Answer::All);
        assert_eq!(meets(Condition::Index { out: true, index: 2 }, false), Answer::All);
        assert_eq!(meets(Condition::Index { out: true, index: 3 }, true), Answer::All);
    }

    #[test]
    fn what_a_settled_flow_looks_like() {
        assert_eq!(meets(Condition::State(6), false), Answer::All);
        assert_eq!(meets(Condition::State(1), false), Answer::None);
        assert_eq!(meets(Condition::State(state::NEW), true), Answer::All);
        assert_eq!(meets(Condition::Mark { value: 0x4000, mask: 0x4000 }, false), Answer::None);
        assert_eq!(meets(Condition::Mark { value: 0, mask: 0x4000 }, false), Answer::All);
        // --syn, and what is no SYN.
        assert_eq!(meets(Condition::TcpFlags { value: 2, mask: 0x17 }, false), Answer::None);
        assert_eq!(meets(Condition::TcpFlags { value: 2, mask: 0x17 }, true), Answer::All);
        assert_eq!(meets(Condition::TcpFlags { value: 8, mask: 8 }, false), Answer::Some);
        assert_eq!(meets(Condition::Protocol(17), false), Answer::None);
        let port = |from, to| Condition::Port { source: false, ranges: vec![(from, to)] };
        assert_eq!(meets(port(8000, 9000), false), Answer::All);
        assert_eq!(meets(port(1, 8471), false), Answer::None);
        assert_eq!(meets(Condition::Ipv6(true), false), Answer::None);
        assert_eq!(traffic().meets_all(&[]), Answer::All);
    }
}
