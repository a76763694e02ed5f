//! The expressions of an nftables rule, as conditions, work and a verdict. The numbers are those of
//! `linux/netfilter/nf_tables.h`.

use std::collections::HashMap;

use super::{
    condition::{Condition, NamePattern, Step, Verdict},
    xtables,
};
use crate::firewall::nfnetlink::{Attributes, Rule, protocol};

/// `NFT_META_*` that differ between the packets of a flow, by what nft calls them.
const CHANGING_META: [(u32, &str); 6] = [
    (0, "meta length"),
    (20, "meta cpu"),
    (24, "meta random"),
    (30, "meta time"),
    (31, "meta day"),
    (32, "meta hour"),
];

/// `NFT_CT_*` that do.
const CHANGING_CT: [(u32, &str); 4] =
    [(5, "ct expiration"), (14, "ct packets"), (15, "ct bytes"), (16, "ct avgpkt")];

/// TCP flags that do.
const CHANGING_FLAGS: u8 = 0xe8;

/// `NFT_PAYLOAD_*`.
const LINK: u32 = 0;
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;

const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;

/// What was loaded into a register.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Meta(u32),
    State,
    Payload { base: u32, offset: u32, length: u32 },
    Other,
}

#[derive(Clone, Debug)]
struct Register {
    source: Source,
    /// The bits that are looked at, if not all.
    mask: Option<Vec<u8>>,
}

struct Reader {
    step: Step,
    registers: HashMap<u32, Register>,
    /// Whether packets are IPv6, once known.
    v6: Option<bool>,
}

/// Reads a rule of a table of this family (`NFPROTO_*`).
pub fn read_rule(family: u8, rule: &Rule) -> Step {
    let v6 = match family {
        protocol::IPV4 => Some(false),
        protocol::IPV6 => Some(true),
        _ => None,
    };
    let mut reader = Reader { step: Step::default(), registers: HashMap::new(), v6 };
    for (name, data) in rule.expressions() {
        reader.read(&name, &data);
    }
    reader.step
}

impl Reader {
    fn read(&mut self, name: &str, data: &Attributes<'_>) {
        match name {
            "immediate" => self.immediate(data),
            "meta" => self.meta(data),
            "ct" => self.ct(data),
            "payload" => self.payload(data),
            "bitwise" => self.bitwise(data),
            "byteorder" => {
                let register = self.register(data.number(1));
                self.load(data.number(2), register);
            }
            "cmp" => self.compare(data),
            "range" => self.range(data),
            "lookup" => self.lookup(data),
            "reject" => self.step.verdict = Verdict::Drop,
            "match" => {
                let revision = data.number(2).and_then(|number| u8::try_from(number).ok());
                let info = data.get(3).unwrap_or_default();
                xtables::read_match(&mut self.step, &data.text(1), revision.unwrap_or(0), info);
            }
            "target" => xtables::read_target(&mut self.step, &data.text(1)),
            // Named counters; the others limit, or tell conntrack something.
            "objref" if data.number(1) == Some(1) => {}
            "counter" | "last" => {}
            "rt" | "fib" => self.load(data.number(1), other()),
            "socket" => self.load(data.number(2), other()),
            name => self.step.works(name),
        }
    }

    fn register(&self, number: Option<u32>) -> Register {
        number.and_then(|number| self.registers.get(&number)).cloned().unwrap_or_else(other)
    }

    fn load(&mut self, number: Option<u32>, register: Register) {
        if let Some(number) = number {
            self.registers.insert(number, register);
        }
    }

    fn immediate(&mut self, data: &Attributes<'_>) {
        let content = data.nested(2);
        let verdict = content.nested(2);
        let Some(code) = verdict.number(1) else {
            return self.load(data.number(1), other());
        };
        let chain = verdict.text(2);
        self.step.verdict = match code.cast_signed() {
            0 => Verdict::Drop,
            1 => Verdict::Accept,
            -1 => Verdict::Continue,
            -3 => Verdict::Jump(chain),
            -4 => Verdict::Goto(chain),
            -5 => Verdict::Return,
            _ => return self.step.works("queue"),
        };
    }

    fn meta(&mut self, data: &Attributes<'_>) {
        let key = data.number(2).unwrap_or(u32::MAX);
        if data.get(3).is_some() {
            let what = match key {
                1 => "meta priority set",
                3 => "meta mark set",
                _ => "meta set",
            };
            return self.step.works(what);
        }
        if let Some((_, what)) = CHANGING_META.iter().find(|(one, _)| *one == key) {
            self.step.works(*what);
        }
        self.load(data.number(1), Register { source: Source::Meta(key), mask: None });
    }

    fn ct(&mut self, data: &Attributes<'_>) {
        let key = data.number(2).unwrap_or(u32::MAX);
        if data.get(4).is_some() {
            return self.step.works("ct set");
        }
        if let Some((_, what)) = CHANGING_CT.iter().find(|(one, _)| *one == key) {
            self.step.works(*what);
        }
        let source = if key == 0 { Source::State } else { Source::Other };
        self.load(data.number(1), Register { source, mask: None });
    }

    fn payload(&mut self, data: &Attributes<'_>) {
        if data.get(5).is_some() {
            return self.step.works("payload set");
        }
        let field = |number| data.number(number).unwrap_or(u32::MAX);
        let (base, offset, length) = (field(2), field(3), field(4));
        if !self.is_steady(base, offset, length) {
            self.step.works(format!("payload at {offset}"));
        }
        let source = Source::Payload { base, offset, length };
        self.load(data.number(1), Register { source, mask: None });
    }

    /// Whether these bytes are the same in all packets of a flow.
    fn is_steady(&self, base: u32, offset: u32, length: u32) -> bool {
        let within = |from, to| offset >= from && offset.saturating_add(length) <= to;
        // Protocol and addresses; of fragments there are none.
        let v4 = within(12, 20) || within(9, 10) || (offset, length) == (6, 2);
        let v6 = within(8, 40) || within(6, 7);
        match base {
            LINK => true,
            NETWORK => match self.v6 {
                Some(false) => v4,
                Some(true) => v6,
                // In doubt the hop limit of one is the address of the other.
                None => v4 && offset != 6 || v6 && length > 2,
            },
            // Ports; flags are looked at where they are compared.
            TRANSPORT => within(0, 4) || (offset, length) == (13, 1),
            _ => false,
        }
    }

    fn bitwise(&mut self, data: &Attributes<'_>) {
        let mut register = self.register(data.number(1));
        let mask = data.nested(4).get(1);
        let untouched = data.nested(5).get(1).is_some_and(|xor| xor.iter().all(|b| *b == 0));
        register = match mask {
            Some(mask) if untouched && data.number(6).unwrap_or(0) == 0 => {
                Register { mask: Some(mask.to_vec()), ..register }
            }
            _ => other(),
        };
        self.load(data.number(2), register);
    }

    fn compare(&mut self, data: &Attributes<'_>) {
        let register = self.register(data.number(1));
        let operation = data.number(2).unwrap_or(u32::MAX);
        let value = data.nested(3).get(1).unwrap_or_default();
        let negated = operation == NOT_EQUAL;
        let exact = matches!(operation, EQUAL | NOT_EQUAL);
        let condition = self.condition(&register, value, operation);
        match condition {
            Some((condition, flipped)) if exact || matches!(condition, Condition::Port { .. }) => {
                if let Condition::Ipv6(v6) = condition
                    && !negated
                {
                    self.v6 = Some(v6);
                }
                self.step.ask(condition, negated != flipped);
            }
            _ => self.step.ask(Condition::Undecided, false),
        }
    }

    /// What is asked by comparing with a value, and whether it is the opposite of it.
    fn condition(
        &mut self,
        register: &Register,
        value: &[u8],
        operation: u32,
    ) -> Option<(Condition, bool)> {
        let mask = register.mask.as_deref();
        let plain = |condition| Some((condition, false));
        match register.source {
            Source::Meta(key) => {
                // NFT_META_PROTOCOL, _MARK, _IIF, _OIF, _IIFNAME, _OIFNAME, _NFPROTO, _L4PROTO.
                match (key, mask) {
                    (1, None) => match value {
                        [0x08, 0x00] => plain(Condition::Ipv6(false)),
                        [0x86, 0xdd] => plain(Condition::Ipv6(true)),
                        _ => None,
                    },
                    (3, mask) => {
                        let mask = mask.map_or(Some(u32::MAX), word)?;
                        plain(Condition::Mark { value: word(value)?, mask })
                    }
                    (4 | 5, None) => plain(Condition::Index { out: key == 5, index: word(value)? }),
                    (6 | 7, None) => {
                        let end = value.iter().position(|byte| *byte == 0);
                        let bytes = value[..end.unwrap_or(value.len())].to_vec();
                        let name = NamePattern { bytes, open: end.is_none() };
                        plain(Condition::Interface { out: key == 7, name })
                    }
                    (15, None) => match value {
                        [protocol::IPV4] => plain(Condition::Ipv6(false)),
                        [protocol::IPV6] => plain(Condition::Ipv6(true)),
                        _ => None,
                    },
                    (16, None) => plain(Condition::Protocol(*value.first()?)),
                    _ => None,
                }
            }
            Source::State => match (mask, word(value)?) {
                // Of these states one, or none.
                (Some(mask), 0) => Some((Condition::State(word(mask)?), true)),
                (None, state) => plain(Condition::State(state)),
                _ => None,
            },
            Source::Payload { base: NETWORK, offset, length } => {
                self.network(offset, length, value, mask)
            }
            Source::Payload { base: TRANSPORT, offset: 13, length: 1 } => {
                let (value, mask) =
                    (*value.first()?, mask.map_or(Some(0xff), |m| m.first().copied())?);
                if mask & CHANGING_FLAGS != 0 {
                    self.step.works("TCP flags");
                }
                if value == 0 {
                    // nft asks for any of several flags by "not none".
                    return (mask & !0x07 == 0)
                        .then_some((Condition::TcpFlags { value: 0, mask }, false));
                }
                plain(Condition::TcpFlags { value, mask })
            }
            Source::Payload { base: TRANSPORT, offset: offset @ (0 | 2), length: 2 }
                if mask.is_none() =>
            {
                let port = u16::from_be_bytes(value.try_into().ok()?);
                let range = match operation {
                    EQUAL | NOT_EQUAL => (port, port),
                    2 => (0, port.checked_sub(1)?),
                    3 => (0, port),
                    4 => (port.checked_add(1)?, u16::MAX),
                    5 => (port, u16::MAX),
                    _ => return None,
                };
                plain(Condition::Port { source: offset == 0, ranges: vec![range] })
            }
            _ => None,
        }
    }

    fn network(
        &self,
        offset: u32,
        length: u32,
        value: &[u8],
        mask: Option<&[u8]>,
    ) -> Option<(Condition, bool)> {
        let plain = |condition| Some((condition, false));
        let v6 = self.v6?;
        let (size, source_at, destination_at, protocol_at) =
            if v6 { (16, 8, 24, 6) } else { (4, 12, 16, 9) };
        if offset == protocol_at && length == 1 && mask.is_none() {
            return plain(Condition::Protocol(*value.first()?));
        }
        if !v6 && (offset, length) == (6, 2) && value == [0, 0] && mask == Some(&[0x1f, 0xff]) {
            return Some((Condition::Fragment, true));
        }
        let source = offset < destination_at;
        let begin = if source { source_at } else { destination_at };
        let at = usize::try_from(offset.checked_sub(begin)?).ok()?;
        let end = at + usize::try_from(length).ok()?;
        if end > size || value.len() < end - at {
            return None;
        }
        let (mut all_value, mut all_mask) = (vec![0; size], vec![0; size]);
        all_value[at..end].copy_from_slice(&value[..end - at]);
        match mask {
            Some(mask) => all_mask[at..end].copy_from_slice(mask.get(..end - at)?),
            None => all_mask[at..end].fill(0xff),
        }
        plain(Condition::Address { source, value: all_value, mask: all_mask })
    }

    fn range(&mut self, data: &Attributes<'_>) {
        let register = self.register(data.number(1));
        let negated = data.number(2) == Some(NOT_EQUAL);
        let end = |number| -> Option<u16> {
            Some(u16::from_be_bytes(data.nested(number).get(1)?.try_into().ok()?))
        };
        match (register.source, end(3), end(4)) {
            (
                Source::Payload { base: TRANSPORT, offset: offset @ (0 | 2), length: 2 },
                Some(from),
                Some(to),
            ) if register.mask.is_none() => {
                let ranges = vec![(from, to)];
                self.step.ask(Condition::Port { source: offset == 0, ranges }, negated);
            }
            _ => self.step.ask(Condition::Undecided, false),
        }
    }

    fn lookup(&mut self, data: &Attributes<'_>) {
        self.step.ask(Condition::Undecided, false);
        match data.number(3) {
            // The register of verdicts.
            Some(0) => self.step.verdict = Verdict::Mapped,
            register => self.load(register, other()),
        }
    }
}

fn other() -> Register {
    Register { source: Source::Other, mask: None }
}

/// A number in host byte order.
fn word(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests;
