//! Rules as the kernel codes them, written down after what `nft --debug=netlink` shows.

use proptest::prelude::*;

use super::*;
use crate::firewall::nfnetlink::attribute;

/// A field of an expression.
enum Field<'a> {
    Number(u16, u32),
    Bytes(u16, &'a [u8]),
}
use Field::{Bytes, Number};

/// Expressions by name, each with its fields; bytes are wrapped as `NFTA_DATA_VALUE`.
fn rule(expressions: &[(&str, &[Field<'_>])]) -> Rule {
    let mut coded = Vec::new();
    for (name, fields) in expressions {
        let mut data = Vec::new();
        for field in *fields {
            match field {
                Number(kind, number) => attribute(&mut data, *kind, &number.to_be_bytes()),
                Bytes(kind, bytes) => {
                    let mut value = Vec::new();
                    attribute(&mut value, 1, bytes);
                    attribute(&mut data, *kind, &value);
                }
            }
        }
        let mut element = Vec::new();
        attribute(&mut element, 1, format!("{name}\0").as_bytes());
        attribute(&mut element, 2, &data);
        attribute(&mut coded, 1, &element);
    }
    Rule { chain: "C".to_owned(), handle: [0; 8], expressions: coded }
}

fn conditions(step: &Step) -> Vec<(Condition, bool)> {
    step.asked.iter().map(|asked| (asked.condition.clone(), asked.negated)).collect()
}

fn meta(key: u32) -> [Field<'static>; 2] {
    [Number(2, key), Number(1, 1)]
}

fn payload(base: u32, offset: u32, length: u32) -> [Field<'static>; 4] {
    [Number(1, 1), Number(2, base), Number(3, offset), Number(4, length)]
}

fn cmp(operation: u32, value: &[u8]) -> [Field<'_>; 3] {
    [Number(1, 1), Number(2, operation), Bytes(3, value)]
}

fn mask<'a>(mask: &'a [u8], xor: &'a [u8]) -> [Field<'a>; 5] {
    let length = u32::try_from(mask.len()).expect("short");
    [Number(1, 1), Number(2, 1), Number(3, length), Bytes(4, mask), Bytes(5, xor)]
}

/// Reads a rule of a table for both families, and of one for IPv4.
fn read(expressions: &[(&str, &[Field<'_>])]) -> (Step, Step) {
    let rule = rule(expressions);
    (read_rule(protocol::INET, &rule), read_rule(protocol::IPV4, &rule))
}

#[test]
fn udp_to_a_port_from_a_network() {
    let (_, step) = read(&[
        ("payload", &payload(NETWORK, 12, 2)),
        ("cmp", &cmp(EQUAL, &[10, 77])),
        ("meta", &meta(16)),
        ("cmp", &cmp(EQUAL, &[17])),
        ("payload", &payload(TRANSPORT, 2, 2)),
        ("cmp", &cmp(EQUAL, &8472_u16.to_be_bytes())),
    ]);
    assert_eq!(
        conditions(&step),
        [
            (
                Condition::Address {
                    source: true,
                    value: vec![10, 77, 0, 0],
                    mask: vec![255, 255, 0, 0]
                },
                false
            ),
            (Condition::Protocol(17), false),
            (Condition::Port { source: false, ranges: vec![(8472, 8472)] }, false),
        ]
    );
    assert_eq!((step.work, step.verdict), (None, Verdict::Continue));
}

#[test]
fn states_marks_and_interfaces() {
    let zero = [0; 4];
    let (step, _) = read(&[
        ("ct", &[Number(2, 0), Number(1, 1)]),
        ("bitwise", &mask(&6_u32.to_ne_bytes(), &zero)),
        ("cmp", &cmp(NOT_EQUAL, &zero)),
        ("meta", &meta(3)),
        ("bitwise", &mask(&0x4000_u32.to_ne_bytes(), &zero)),
        ("cmp", &cmp(EQUAL, &0x4000_u32.to_ne_bytes())),
        ("meta", &meta(7)),
        ("cmp", &cmp(NOT_EQUAL, b"cali")),
        ("counter", &[]),
    ]);
    let name = NamePattern { bytes: b"cali".to_vec(), open: true };
    assert_eq!(
        conditions(&step),
        [
            (Condition::State(6), false),
            (Condition::Mark { value: 0x4000, mask: 0x4000 }, false),
            (Condition::Interface { out: true, name }, true),
        ]
    );
    assert_eq!(step.work, None);
}

#[test]
fn only_beginnings_of_connections() {
    // tcp flags syn; tcp flags & (fin|syn|rst|ack) == syn.
    let (step, _) = read(&[
        ("payload", &payload(TRANSPORT, 13, 1)),
        ("bitwise", &mask(&[2], &[0])),
        ("cmp", &cmp(NOT_EQUAL, &[0])),
    ]);
    assert_eq!(conditions(&step), [(Condition::TcpFlags { value: 0, mask: 2 }, true)]);
    let (step, _) = read(&[
        ("payload", &payload(TRANSPORT, 13, 1)),
        ("bitwise", &mask(&[0x17], &[0])),
        ("cmp", &cmp(EQUAL, &[2])),
    ]);
    assert_eq!(conditions(&step), [(Condition::TcpFlags { value: 2, mask: 0x17 }, false)]);
    assert_eq!(step.work, None);
}

#[test]
fn what_differs_between_packets_is_work() {
    let works = |expressions: &[(&str, &[Field<'_>])]| read(expressions).0.work;
    for (name, fields) in [
        ("limit", &[][..]),
        ("quota", &[]),
        ("queue", &[]),
        ("log", &[]),
        ("notrack", &[]),
        ("dynset", &[]),
        ("flow_offload", &[]),
        ("tproxy", &[]),
        ("numgen", &[]),
        ("objref", &[Number(1, 2)]),
        ("meta", &[Number(2, 3), Number(3, 1)]),
        ("meta", &[Number(2, 0), Number(1, 1)]),
        ("ct", &[Number(2, 3), Number(4, 1)]),
        ("ct", &[Number(2, 15), Number(1, 1)]),
        ("payload", &[Number(2, 1), Number(3, 8), Number(4, 1), Number(5, 1)]),
        ("payload", &payload(NETWORK, 8, 1)),
        ("payload", &payload(NETWORK, 1, 1)),
        ("payload", &payload(TRANSPORT, 4, 2)),
        ("something new", &[]),
    ] {
        assert!(works(&[(name, fields)]).is_some(), "{name}");
    }
    for (name, fields) in [
        ("counter", &[][..]),
        ("fib", &[]),
        ("reject", &[]),
        ("objref", &[Number(1, 1)]),
        ("lookup", &[Number(2, 1)]),
        ("payload", &payload(NETWORK, 12, 8)),
    ] {
        assert_eq!(works(&[(name, fields)]), None, "{name}");
    }
}

#[test]
fn a_verdict_map_is_one() {
    let (step, _) = read(&[("lookup", &[Number(2, 1), Number(3, 0)])]);
    assert_eq!(step.verdict, Verdict::Mapped);
    let (step, _) = read(&[("lookup", &[Number(2, 1)])]);
    assert_eq!((conditions(&step).len(), step.verdict), (1, Verdict::Continue));
}

proptest! {
    #[test]
    fn any_rule_is_survived(
        name in prop::sample::select(vec![
            "immediate", "meta", "ct", "payload", "bitwise", "cmp", "range", "lookup", "match",
        ]),
        fields in prop::collection::vec((1..9_u16, prop::collection::vec(any::<u8>(), 0..20)), 0..6),
        family in prop::sample::select(vec![1_u8, 2, 5, 7, 10]),
        raw: Vec<u8>,
    ) {
        let fields: Vec<_> = fields.iter().map(|(kind, bytes)| Bytes(*kind, bytes)).collect();
        let load = payload(NETWORK, 12, 4);
        let _ = read_rule(family, &rule(&[("payload", &load), (name, &fields)]));
        let cut = Rule { chain: String::new(), handle: [0; 8], expressions: raw };
        let _ = read_rule(family, &cut);
    }
}
