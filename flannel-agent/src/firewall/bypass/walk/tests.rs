use proptest::prelude::*;

use super::*;
use crate::firewall::bypass::condition::{Asked, Condition, NamePattern};

fn surroundings() -> Surroundings {
    Surroundings {
        port: 8472,
        underlay: Some(("eth0".to_owned(), 2)),
        own: ["192.0.2.1".parse().unwrap()].into(),
        peers: ["192.0.2.2".parse().unwrap(), "192.0.2.3".parse().unwrap()].into(),
        networks: vec!["10.77.0.0/16".parse().unwrap()],
        inner: vec![("cni0".to_owned(), 4), ("flannel.1".to_owned(), 5)],
        pods: true,
    }
}

fn step(asked: &[Condition], verdict: Verdict) -> Step {
    let asked = asked.iter().cloned().map(|condition| Asked { condition, negated: false });
    Step { asked: asked.collect(), work: None, verdict }
}

fn work(asked: &[Condition]) -> Step {
    Step { work: Some("W".to_owned()), ..step(asked, Verdict::Continue) }
}

fn table(at: At, drops: bool, chains: &[(&str, Vec<Step>)]) -> Table {
    let hook = Hook { at, chain: chains[0].0.to_owned(), drops, devices: Vec::new() };
    Table {
        name: "table T".to_owned(),
        layer: Layer::Ip { v4: true, v6: false },
        hooks: vec![hook],
        chains: chains.iter().map(|(name, steps)| ((*name).to_owned(), steps.clone())).collect(),
    }
}

fn found(at: At, drops: bool, chains: &[(&str, Vec<Step>)]) -> Findings {
    find(&[table(at, drops, chains)], &surroundings())
}

fn tunnel() -> Condition {
    Condition::Port { source: false, ranges: vec![(8472, 8472)] }
}

fn from(address: [u8; 4]) -> Condition {
    Condition::Address { source: true, value: address.to_vec(), mask: vec![255; 4] }
}

#[test]
fn what_drops_the_rest_is_fine_after_an_accept() {
    let accept = step(&[Condition::Protocol(17), tunnel()], Verdict::Accept);
    let chains = |first: Step| vec![("IN", vec![first, step(&[], Verdict::Drop)])];
    assert_eq!(found(At::Input, true, &chains(accept)), Findings::default());
    let other = step(&[Condition::Protocol(6)], Verdict::Accept);
    let outer = found(At::Input, false, &chains(other.clone())).outer.unwrap();
    assert!(outer.starts_with("rule 2 of chain IN of table T drops all"), "{outer}");
    let outer = found(At::Input, true, &[("IN", vec![other])]).outer.unwrap();
    assert!(outer.starts_with("the policy of chain IN"), "{outer}");
}

#[test]
fn a_drop_matters_if_it_can_hit_a_peer() {
    let drop = |address| vec![("IN", vec![step(&[from(address)], Verdict::Drop)])];
    assert_eq!(found(At::Input, false, &drop([198, 51, 100, 7])), Findings::default());
    let outer = found(At::Input, false, &drop([192, 0, 2, 2])).outer.unwrap();
    assert!(outer.starts_with("rule 1 of chain IN of table T may drop"), "{outer}");
    // Of inner packets the flow's proof tells.
    assert_eq!(found(At::Forward, true, &drop([10, 77, 1, 1])), Findings::default());
}

#[test]
fn a_rule_matters_only_if_packets_get_there() {
    let established = step(&[Condition::State(6)], Verdict::Accept);
    let behind = |first: Step| found(At::Forward, false, &[("F", vec![first, work(&[])])]).inner;
    assert_eq!(behind(established), None);
    assert!(behind(step(&[Condition::State(8)], Verdict::Accept)).is_some());
    assert!(behind(step(&[Condition::Undecided], Verdict::Accept)).is_some());
    let jump = |condition| {
        let jump = step(&[condition], Verdict::Jump("SUB".to_owned()));
        found(At::Forward, false, &[("F", vec![jump]), ("SUB", vec![work(&[])])]).inner
    };
    let inner = jump(Condition::Protocol(6)).unwrap();
    assert!(inner.starts_with("rule 1 of chain SUB of table T works on"), "{inner}");
    assert_eq!(jump(Condition::State(8)), None);
    let device = |name: &str| Condition::Interface {
        out: true,
        name: NamePattern { bytes: name.into(), open: false },
    };
    assert_eq!(jump(device("virbr0")), None);
    assert!(jump(device("cni0")).is_some());
    // The end of a chain that is jumped to is not the end of the one before.
    let sub = vec![step(&[], Verdict::Return), step(&[], Verdict::Accept)];
    let first = step(&[], Verdict::Jump("SUB".to_owned()));
    let chains = [("F", vec![first, work(&[])]), ("SUB", sub)];
    assert!(found(At::Forward, false, &chains).inner.is_some());
    let first = step(&[], Verdict::Goto("SUB".to_owned()));
    let chains = [("F", vec![first, work(&[])]), ("SUB", vec![step(&[], Verdict::Return)])];
    assert_eq!(found(At::Forward, false, &chains).inner, None);
}

#[test]
fn a_verdict_map_may_lead_anywhere() {
    let chains =
        [("F", vec![step(&[Condition::Undecided], Verdict::Mapped)]), ("X", vec![work(&[])])];
    assert!(found(At::Forward, false, &chains).inner.is_some());
}

#[test]
fn each_hook_sees_its_packets() {
    let at = |at| found(at, false, &[("C", vec![work(&[])])]);
    let seen = |at_: At| {
        let findings = at(at_);
        (findings.inner.is_some(), findings.outer.is_some())
    };
    assert_eq!(seen(At::Prerouting), (true, true));
    assert_eq!(seen(At::Input), (false, true));
    assert_eq!(seen(At::Forward), (true, false));
    assert_eq!(seen(At::Output), (false, true));
    assert_eq!(seen(At::Postrouting), (true, true));
    let mut device = table(At::Ingress, false, &[("C", vec![work(&[])])]);
    device.layer = Layer::Device;
    device.hooks[0].devices = vec!["eth0".to_owned()];
    let findings = find(&[device.clone()], &surroundings());
    assert!(findings.outer.is_some() && findings.inner.is_none());
    device.hooks[0].devices = vec!["cni0".to_owned()];
    let findings = find(&[device.clone()], &surroundings());
    assert!(findings.outer.is_none() && findings.inner.is_some());
    device.hooks[0].devices = vec!["eth1".to_owned()];
    assert_eq!(find(&[device], &surroundings()), Findings::default());
    let mut v6 = table(At::Forward, false, &[("C", vec![work(&[])])]);
    v6.layer = Layer::Ip { v4: false, v6: true };
    assert_eq!(find(&[v6], &surroundings()), Findings::default());
}

/// Rules of chains `0` to `3` that jump around, loops included.
fn any_chains() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let condition = prop_oneof![
        Just(Condition::Undecided),
        Just(Condition::State(2)),
        Just(Condition::State(8)),
        Just(Condition::Protocol(6)),
        Just(tunnel()),
    ];
    let verdict = prop_oneof![
        Just(Verdict::Continue),
        Just(Verdict::Accept),
        Just(Verdict::Drop),
        Just(Verdict::Return),
        Just(Verdict::Mapped),
        (0..4_u8).prop_map(|to| Verdict::Jump(to.to_string())),
        (0..4_u8).prop_map(|to| Verdict::Goto(to.to_string())),
    ];
    let steps = (prop::collection::vec(condition, 0..2), verdict)
        .prop_map(|(asked, verdict)| step(&asked, verdict));
    prop::collection::vec(prop::collection::vec(steps, 0..6), 4)
}

proptest! {
    /// Work in the first rule is found whatever is behind it, and none is found where none is.
    #[test]
    fn any_rules_are_walked_through(chains in any_chains(), drops: bool) {
        let named: Vec<_> = ["0", "1", "2", "3"].into_iter().zip(chains).collect();
        prop_assert_eq!(found(At::Forward, drops, &named), Findings::default());
        let mut worked = named;
        worked[0].1.insert(0, work(&[]));
        prop_assert!(found(At::Forward, drops, &worked).inner.is_some());
    }
}
