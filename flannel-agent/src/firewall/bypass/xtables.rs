//! Matches and targets of xtables, the same in legacy tables and in nftables' compatibility
//! expressions: `linux/netfilter/xt_*.h`. Their numbers are in host byte order unless noted.

use super::condition::{Condition, NamePattern, Step, Verdict};
use crate::firewall::{
    legacy::{self, Rule},
    rules::Family,
};

/// Matches whose answer is the same for all packets of a flow, but which are not looked into.
const STEADY: [&str; 18] = [
    "comment", "nfacct", "set", "iprange", "mac", "pkttype", "socket", "connmark", "owner",
    "rpfilter", "physdev", "helper", "policy", "icmp", "icmp6", "sctp", "devgroup", "realm",
];

/// Those among them that every packet meets.
const ALWAYS: [&str; 2] = ["comment", "nfacct"];

/// TCP flags that change from packet to packet of a flow.
const CHANGING: u8 = 0xe8;

/// Header of a match within a rule: size, name, revision.
const MATCH_HEADER: usize = 32;

/// Adds what a match asks.
pub fn read_match(step: &mut Step, name: &str, revision: u8, info: &[u8]) {
    let read = match (name, revision) {
        ("tcp", _) => tcp(step, info),
        ("udp", _) => ports(step, info, *info.get(8).unwrap_or(&0)),
        ("multiport", 1) => multiport(step, info),
        ("conntrack", 1..) => conntrack(step, info),
        ("state", _) => half_or_word(info, 0, 4).map(|states| {
            step.ask(Condition::State(states), false);
        }),
        ("mark", 1) => mark(step, info),
        ("addrtype", 1) => addrtype(step, info),
        _ => None,
    };
    if read.is_some() || ALWAYS.contains(&name) {
        return;
    }
    if !STEADY.contains(&name) && !["tcp", "udp", "multiport", "mark", "addrtype"].contains(&name) {
        step.works(format!("match {name}"));
    }
    step.ask(Condition::Undecided, false);
}

/// Adds what a target other than a verdict does.
pub fn read_target(step: &mut Step, name: &str) {
    if name == "REJECT" {
        step.verdict = Verdict::Drop;
    } else {
        step.works(format!("target {name}"));
    }
}

/// A rule of a legacy table.
pub fn read_rule(family: Family, rule: &Rule) -> Step {
    let mut step = Step::default();
    head(&mut step, family, &rule.head);
    let mut matches = rule.matches.as_slice();
    while let Some(size) = half_or_word(matches, 0, 2).and_then(|size| usize::try_from(size).ok()) {
        let Some(one) = matches.get(..size).filter(|_| size >= MATCH_HEADER) else { break };
        let name = String::from_utf8_lossy(text(&one[2..MATCH_HEADER - 1])).into_owned();
        read_match(&mut step, &name, one[MATCH_HEADER - 1], &one[MATCH_HEADER..]);
        matches = &matches[size..];
    }
    match (&rule.jump, rule.verdict) {
        (Some(chain), _) if rule.goes => step.verdict = Verdict::Goto(chain.clone()),
        (Some(chain), _) => step.verdict = Verdict::Jump(chain.clone()),
        (None, Some(legacy::DROP)) => step.verdict = Verdict::Drop,
        (None, Some(legacy::ACCEPT)) => step.verdict = Verdict::Accept,
        (None, Some(legacy::RETURN)) => step.verdict = Verdict::Return,
        // A jump to the rule behind it: no target at all.
        (None, Some(0..)) => {}
        (None, Some(_)) => step.works("target QUEUE"),
        (None, None) => read_target(&mut step, &rule.target),
    }
    step
}

/// `struct ipt_ip`, `struct ip6t_ip6`.
fn head(step: &mut Step, family: Family, head: &[u8]) {
    let (length, interfaces, protocol, flags, inverted) = match family {
        Family::V4 => (4, 16, 80, 82, 83),
        Family::V6 => (16, 64, 128, 131, 132),
    };
    let Some(inverted) = head.get(inverted).copied() else { return };
    let is = |bit: u8| inverted & bit != 0;
    for (source, bit, at) in [(true, 0x08, 0), (false, 0x10, length)] {
        let value = head[at..at + length].to_vec();
        let mask = head[at + 2 * length..at + 3 * length].to_vec();
        if mask.iter().any(|byte| *byte != 0) || is(bit) {
            step.ask(Condition::Address { source, value, mask }, is(bit));
        }
    }
    for (out, bit, at) in [(false, 0x01, interfaces), (true, 0x02, interfaces + 16)] {
        let mask = &head[at + 32..at + 48];
        let asked = mask.iter().take_while(|byte| **byte != 0).count();
        if asked == 0 {
            continue;
        }
        let bytes = &head[at..at + asked.min(16)];
        // The mask of a whole name covers its final zero.
        let open = bytes.last() != Some(&0);
        let name = NamePattern { bytes: text(bytes).to_vec(), open };
        step.ask(Condition::Interface { out, name }, is(bit));
    }
    // IPv6 says by a flag whether it asks; 0 is any in both.
    let number = half_or_word(head, protocol, 2).and_then(|number| u8::try_from(number).ok());
    if let Some(number) = number.filter(|number| *number != 0) {
        step.ask(Condition::Protocol(number), is(0x40));
    }
    match family {
        Family::V4 if head[flags] & 1 != 0 || is(0x20) => step.ask(Condition::Fragment, is(0x20)),
        Family::V6 if head[flags] & 2 != 0 => step.works("traffic class"),
        _ => {}
    }
}

/// `struct xt_tcp`.
fn tcp(step: &mut Step, info: &[u8]) -> Option<()> {
    let [option, mask, value, inverted] = *info.get(8..12)?.first_chunk()?;
    ports(step, info, inverted)?;
    step.ask(Condition::Protocol(6), false);
    if mask != 0 {
        if mask & CHANGING != 0 {
            step.works("TCP flags");
        }
        step.ask(Condition::TcpFlags { value, mask }, inverted & 4 != 0);
    }
    if option != 0 {
        step.works("a TCP option");
        step.ask(Condition::Undecided, false);
    }
    Some(())
}

/// The ranges of ports that `xt_tcp` and `xt_udp` begin with.
fn ports(step: &mut Step, info: &[u8], inverted: u8) -> Option<()> {
    let port = |at| half_or_word(info, at, 2).and_then(|port| u16::try_from(port).ok());
    for (source, at) in [(true, 0), (false, 4)] {
        let range = (port(at)?, port(at + 2)?);
        let negated = inverted & if source { 1 } else { 2 } != 0;
        if range != (0, u16::MAX) || negated {
            step.ask(Condition::Port { source, ranges: vec![range] }, negated);
        }
    }
    Some(())
}

/// `struct xt_multiport_v1`.
fn multiport(step: &mut Step, info: &[u8]) -> Option<()> {
    let (side, count) = (*info.first()?, usize::from(*info.get(1)?));
    let inverted = *info.get(47)? != 0;
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < count.min(15) {
        let port =
            |at: usize| half_or_word(info, 2 + 2 * at, 2).and_then(|port| u16::try_from(port).ok());
        let from = port(at)?;
        let open = *info.get(32 + at)? != 0;
        at += usize::from(open);
        ranges.push((from, if open { port(at)? } else { from }));
        at += 1;
    }
    match side {
        0 | 1 => step.ask(Condition::Port { source: side == 0, ranges }, inverted),
        _ => step.ask(Condition::Undecided, false),
    }
    Some(())
}

/// `struct xt_conntrack_mtinfo2`, of which the first is a narrower and the third a longer one.
fn conntrack(step: &mut Step, info: &[u8]) -> Option<()> {
    const STATE: u32 = 1;
    const EXPIRES: u32 = 1 << 7;
    let (asked, inverted) = (half_or_word(info, 148, 2)?, half_or_word(info, 150, 2)?);
    if asked & STATE != 0 {
        step.ask(Condition::State(half_or_word(info, 152, 2)?), inverted & STATE != 0);
    }
    if asked & EXPIRES != 0 {
        step.works("match conntrack --ctexpire");
    }
    if asked & !STATE != 0 {
        step.ask(Condition::Undecided, false);
    }
    Some(())
}

/// `struct xt_mark_mtinfo1`.
fn mark(step: &mut Step, info: &[u8]) -> Option<()> {
    let (value, mask) = (half_or_word(info, 0, 4)?, half_or_word(info, 4, 4)?);
    step.ask(Condition::Mark { value, mask }, *info.get(8)? != 0);
    Some(())
}

/// `struct xt_addrtype_info_v1`.
fn addrtype(step: &mut Step, info: &[u8]) -> Option<()> {
    const LOCAL: u32 = 1 << 2;
    let (source, destination) = (half_or_word(info, 0, 2)?, half_or_word(info, 2, 2)?);
    let flags = half_or_word(info, 4, 4)?;
    if source == 0 && destination == LOCAL && flags & !2 == 0 {
        step.ask(Condition::LocalDestination, flags & 2 != 0);
    } else {
        step.ask(Condition::Undecided, false);
    }
    Some(())
}

fn half_or_word(bytes: &[u8], at: usize, size: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + size)?;
    match size {
        2 => Some(u16::from_ne_bytes(bytes.try_into().ok()?).into()),
        _ => Some(u32::from_ne_bytes(bytes.try_into().ok()?)),
    }
}

/// What is in front of the first zero.
fn text(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(name: &str, revision: u8, info: &[u8]) -> Step {
        let mut step = Step::default();
        read_match(&mut step, name, revision, info);
        step
    }

    #[test]
    fn what_is_not_known_works_on_packets() {
        for name in ["limit", "hashlimit", "statistic", "length", "ttl", "tos", "quota", "bpf"] {
            assert_eq!(read(name, 0, &[0; 64]).work, Some(format!("match {name}")));
        }
        assert_eq!(read("comment", 0, &[0; 256]), Step::default());
        assert_eq!(read("set", 4, &[0; 64]).work, None);
        let mut step = Step::default();
        read_target(&mut step, "NFQUEUE");
        assert_eq!(step.work.as_deref(), Some("target NFQUEUE"));
        let mut step = Step::default();
        read_target(&mut step, "REJECT");
        assert_eq!((step.work, step.verdict), (None, Verdict::Drop));
    }

    #[test]
    fn ports_and_flags_of_tcp_are_read() {
        let mut info = vec![0, 0, 255, 255];
        info.extend(80_u16.to_ne_bytes());
        info.extend(81_u16.to_ne_bytes());
        info.extend([0, 0x17, 0x02, 0]);
        let step = read("tcp", 0, &info);
        let conditions: Vec<_> = step.asked.iter().map(|asked| asked.condition.clone()).collect();
        assert!(conditions.contains(&Condition::Port { source: false, ranges: vec![(80, 81)] }));
        assert!(conditions.contains(&Condition::TcpFlags { value: 2, mask: 0x17 }));
        assert_eq!(step.work, None);
        info[9] = 0x3f;
        assert_eq!(read("tcp", 0, &info).work.as_deref(), Some("TCP flags"));
    }

    proptest! {
        #[test]
        fn any_match_and_rule_is_survived(
            name in prop::sample::select(vec![
                "tcp", "udp", "multiport", "conntrack", "state", "mark", "addrtype", "x",
            ]),
            revision: u8,
            info: Vec<u8>,
            v6: bool,
        ) {
            let step = read(name, revision, &info);
            // Nothing that could not be read is taken for a rule without conditions.
            prop_assert!(name != "x" || step.work.is_some());
            let (family, length) = if v6 { (Family::V6, 136) } else { (Family::V4, 84) };
            let mut head = info.clone();
            head.resize(length, 0);
            let rule = Rule { head, matches: info, ..Rule::default() };
            let _ = read_rule(family, &rule);
        }
    }
}
