//! Stories of single flows, and random histories against what must never happen.

extern crate std;

use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::flow::FrameAddresses;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// The pod's MAC and the gateway's, as the stack writes them to the pod.
const TO_POD: FrameAddresses = [2, 0, 1, 2, 0, 9];
const FROM_POD: FrameAddresses = [2, 0, 9, 2, 0, 1];
const TO_TUNNEL: FrameAddresses = [2, 1, 1, 2, 1, 9];
const POD: u32 = 7;
const TUNNEL: u32 = 3;

fn rules() -> FlowRules {
    FlowRules { alive_until: u64::MAX, interval: SECOND, epoch: 5, ..FlowRules::default() }
}

/// Where a packet of this direction is seen before the stack.
fn going_in(direction: Direction, now: u64) -> Seen {
    match direction {
        Direction::Out => Seen { ifindex: POD, frame: FROM_POD, now },
        Direction::In => Seen { ifindex: TUNNEL, frame: TO_TUNNEL, now },
    }
}

fn coming_out(direction: Direction, now: u64) -> Seen {
    match direction {
        Direction::Out => Seen { ifindex: TUNNEL, frame: TO_TUNNEL, now },
        Direction::In => Seen { ifindex: POD, frame: TO_POD, now },
    }
}

fn before(flow: &mut Flow, direction: Direction, now: u64, rules: &FlowRules) -> Verdict {
    flow.before(direction, &going_in(direction, now), Segment::Plain, rules)
}

fn after(flow: &mut Flow, direction: Direction, now: u64, rules: &FlowRules) -> bool {
    flow.after(direction, &coming_out(direction, now), Segment::Plain, rules)
}

/// A packet through a stack that lets it pass. Returns whether the flow was offered.
fn through(flow: &mut Flow, direction: Direction, now: u64, rules: &FlowRules) -> bool {
    assert_eq!(before(flow, direction, now, rules), Verdict::Stack);
    after(flow, direction, now, rules)
}

/// A flow that was offered at about 1 s.
fn offered(rules: &FlowRules) -> Flow {
    let mut flow = Flow::begin(SECOND, rules);
    for packet in 0..WORTH_PACKETS {
        let direction = if packet % 2 == 0 { Direction::Out } else { Direction::In };
        let last = packet == WORTH_PACKETS - 1;
        assert_eq!(through(&mut flow, direction, SECOND + u64::from(packet), rules), last);
    }
    flow
}

fn promoted(rules: &FlowRules) -> Flow {
    let flow = offered(rules);
    assert!(flow.is_proved(SECOND + 20, rules));
    flow.promoted()
}

const BOTH: [Direction; 2] = [Direction::Out, Direction::In];

#[test]
fn a_promoted_flow_bypasses_both_ways() {
    let rules = rules();
    let mut flow = promoted(&rules);
    for direction in BOTH {
        assert_eq!(before(&mut flow, direction, SECOND + MS, &rules), Verdict::Bypass);
    }
}

#[test]
fn an_offer_alone_bypasses_nothing() {
    let rules = rules();
    let mut flow = offered(&rules);
    for direction in BOTH {
        assert_eq!(before(&mut flow, direction, SECOND + MS, &rules), Verdict::Stack);
    }
}

#[test]
fn one_direction_is_no_proof() {
    let rules = rules();
    for direction in BOTH {
        let mut flow = Flow::begin(SECOND, &rules);
        for packet in 0..100 {
            assert!(!through(&mut flow, direction, SECOND + packet, &rules));
        }
        assert!(!flow.is_proved(SECOND + 100, &rules));
    }
}

#[test]
fn what_comes_out_of_the_stack_without_having_gone_in_is_no_proof() {
    let rules = rules();
    let mut flow = Flow::begin(SECOND, &rules);
    for packet in 0..100 {
        for direction in BOTH {
            assert!(!after(&mut flow, direction, SECOND + packet, &rules));
        }
    }
    assert_eq!(flow.confirmed, [0; 2]);
}

#[test]
fn one_packet_asks_and_its_answer_renews_the_proof() {
    let rules = rules();
    let mut flow = promoted(&rules);
    let mut asked = 0;
    for now in (SECOND + 16..11 * SECOND).step_by(10_000_000) {
        for direction in BOTH {
            if before(&mut flow, direction, now, &rules) == Verdict::Stack {
                asked += 1;
                // Those behind it do not wait.
                assert_eq!(before(&mut flow, direction, now + 10, &rules), Verdict::Bypass);
                assert!(!after(&mut flow, direction, now + 20, &rules));
            }
        }
    }
    assert!((38..=42).contains(&asked), "two a second and direction, not {asked} in 10 s");
}

#[test]
fn a_stack_that_no_longer_lets_it_pass_is_obeyed_within_the_interval() {
    let rules = rules();
    for blocked in BOTH {
        let mut flow = promoted(&rules);
        let last = SECOND + u64::from(WORTH_PACKETS);
        for now in (SECOND + 16..10 * SECOND).step_by(1_000_000) {
            for direction in BOTH {
                let verdict = before(&mut flow, direction, now, &rules);
                if verdict == Verdict::Stack && direction != blocked {
                    after(&mut flow, direction, now, &rules);
                }
                // Neither direction goes on alone.
                if now >= last + SECOND {
                    assert_eq!(verdict, Verdict::Stack, "{direction:?} at {now}");
                }
            }
        }
        assert_eq!(flow.state & PROMOTED, 0);
    }
}

#[test]
fn the_ends_of_a_connection_take_the_entry_away() {
    let rules = rules();
    for segment in [Segment::Opening, Segment::Closing] {
        for direction in BOTH {
            for mut flow in [offered(&rules), promoted(&rules)] {
                let seen = going_in(direction, SECOND + MS);
                assert_eq!(flow.before(direction, &seen, segment, &rules), Verdict::Forget);
            }
        }
    }
}

#[test]
fn a_short_connection_is_closed_in_place_and_its_tuple_is_used_again() {
    let rules = rules();
    let mut flow = Flow::begin(SECOND, &rules);
    through(&mut flow, Direction::Out, SECOND, &rules);
    let seen = going_in(Direction::Out, SECOND + 1);
    assert_eq!(flow.before(Direction::Out, &seen, Segment::Closing, &rules), Verdict::Stack);
    for packet in 0..100 {
        for direction in BOTH {
            assert!(!through(&mut flow, direction, SECOND + packet, &rules));
        }
    }
    let seen = going_in(Direction::Out, 2 * SECOND);
    assert_eq!(flow.before(Direction::Out, &seen, Segment::Opening, &rules), Verdict::Stack);
    assert_eq!(flow, Flow::begin(2 * SECOND, &rules));
}

#[test]
fn odd_segments_neither_bypass_nor_prove() {
    let rules = rules();
    let mut flow = promoted(&rules);
    let was = flow;
    for direction in BOTH {
        let (seen, out) = (going_in(direction, SECOND + MS), coming_out(direction, SECOND + MS));
        assert_eq!(flow.before(direction, &seen, Segment::Odd, &rules), Verdict::Stack);
        assert!(!flow.after(direction, &out, Segment::Odd, &rules));
    }
    assert_eq!(flow, was);
}

#[test]
fn frames_from_elsewhere_do_not_bypass() {
    let rules = rules();
    let mut flow = promoted(&rules);
    let good = going_in(Direction::Out, SECOND + MS);
    let mut to_another_gateway = good;
    to_another_gateway.frame[2] ^= 1;
    let mut from_another_mac = good;
    from_another_mac.frame[5] ^= 1;
    for seen in [Seen { ifindex: POD + 1, ..good }, to_another_gateway, from_another_mac] {
        assert_eq!(flow.before(Direction::Out, &seen, Segment::Plain, &rules), Verdict::Stack);
    }
    assert_eq!(flow.before(Direction::Out, &good, Segment::Plain, &rules), Verdict::Bypass);
}

#[test]
fn a_changed_way_has_to_be_proved_anew() {
    let rules = rules();
    for direction in BOTH {
        let mut flow = promoted(&rules);
        let now = SECOND + SECOND / 2 + MS;
        assert_eq!(before(&mut flow, direction, now, &rules), Verdict::Stack);
        let mut moved = coming_out(direction, now);
        moved.frame[0] ^= 4;
        assert!(!flow.after(direction, &moved, Segment::Plain, &rules));
        assert!(!flow.is_promoted(&rules));
        assert_eq!(before(&mut flow, direction, now + 1, &rules), Verdict::Stack);
    }
}

#[test]
fn a_new_epoch_begins_anew() {
    let rules = rules();
    let next = FlowRules { epoch: 6, ..rules };
    let mut flow = promoted(&rules);
    assert!(!flow.is_promoted(&next));
    assert_eq!(before(&mut flow, Direction::Out, SECOND + MS, &next), Verdict::Stack);
    assert!(!flow.is_proved(SECOND + MS, &next));
    assert_eq!(flow.state & PROMOTED, 0);
}

#[test]
fn without_an_agent_the_stack_has_it_all() {
    let rules = FlowRules { alive_until: SECOND + 2 * MS, ..rules() };
    let mut flow = promoted(&rules);
    assert_eq!(before(&mut flow, Direction::Out, SECOND + MS, &rules), Verdict::Bypass);
    assert_eq!(before(&mut flow, Direction::Out, SECOND + 2 * MS, &rules), Verdict::Stack);
}

#[test]
fn offers_become_rarer() {
    let rules = rules();
    let mut flow = offered(&rules);
    let mut times = Vec::new();
    for now in (SECOND..600 * SECOND).step_by(100_000_000) {
        for direction in BOTH {
            if through(&mut flow, direction, now, &rules) {
                times.push(now / SECOND);
            }
        }
    }
    assert!((8..=18).contains(&times.len()), "{times:?}");
}

/// What the world does to a flow.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A packet goes in; the stack lets it pass or not.
    Packet {
        inward: bool,
        passes: bool,
        segment: Segment,
    },
    /// The agent looks at the flow.
    Agent,
    Wait(u64),
    Epoch,
}

fn step() -> impl Strategy<Value = Step> {
    let segment = prop_oneof![
        40 => Just(Segment::Plain),
        1 => Just(Segment::Opening),
        1 => Just(Segment::Closing),
        1 => Just(Segment::Odd),
    ];
    let packet = (any::<bool>(), prop::bool::weighted(0.9), segment)
        .prop_map(|(inward, passes, segment)| Step::Packet { inward, passes, segment });
    prop_oneof![
        60 => packet,
        3 => Just(Step::Agent),
        6 => (0..700 * MS).prop_map(Step::Wait),
        1 => Just(Step::Epoch),
    ]
}

proptest! {
    /// A packet bypasses only if, since the connection began and in this epoch, packets of both
    /// directions went in and came out, the last of its own direction less than an interval ago,
    /// and the agent has looked at the flow after that.
    #[test]
    fn nothing_bypasses_without_a_proof(steps in prop::collection::vec(step(), 1..400)) {
        let mut rules = rules();
        let mut entry: Option<Flow> = None;
        let mut now = SECOND;
        // What the judge of this test knows by itself.
        let mut passed: [Option<u64>; 2] = [None; 2];
        let mut agreed = false;
        for step in steps {
            now += 1000;
            match step {
                Step::Wait(time) => now += time,
                Step::Epoch => {
                    rules.epoch += 1;
                    (passed, agreed) = ([None; 2], false);
                }
                Step::Agent => {
                    if let Some(flow) = entry.as_mut().filter(|flow| flow.is_proved(now, &rules)) {
                        prop_assert!(passed.iter().all(Option::is_some));
                        *flow = flow.promoted();
                        agreed = true;
                    }
                }
                Step::Packet { inward, passes, segment } => {
                    let direction = if inward { Direction::In } else { Direction::Out };
                    if entry.is_none() && !inward && segment == Segment::Plain {
                        entry = Some(Flow::begin(now, &rules));
                    }
                    if matches!(segment, Segment::Opening | Segment::Closing) {
                        (passed, agreed) = ([None; 2], false);
                    }
                    let Some(flow) = &mut entry else { continue };
                    let seen = going_in(direction, now);
                    match flow.before(direction, &seen, segment, &rules) {
                        Verdict::Bypass => {
                            prop_assert!(agreed && segment == Segment::Plain);
                            prop_assert!(passed.iter().all(Option::is_some));
                            let last = passed[direction as usize].unwrap_or_default();
                            prop_assert!(now - last < rules.interval);
                        }
                        Verdict::Forget => entry = None,
                        Verdict::Stack if passes => {
                            let out = coming_out(direction, now);
                            if segment == Segment::Plain {
                                passed[direction as usize] = Some(now);
                            }
                            let _ = flow.after(direction, &out, segment, &rules);
                        }
                        Verdict::Stack => (),
                    }
                }
            }
        }
    }

    /// No bit pattern that the other side may have written is a danger to the arithmetic.
    #[test]
    fn any_entry_is_survived(bytes: [[u8; 32]; 4], now: u64, interval: u64, epoch: u32) {
        let bytes: [u8; 128] = bytes.concat().try_into().expect("128 bytes");
        let mut flow: Flow = bytemuck::pod_read_unaligned(&bytes);
        let rules = FlowRules { alive_until: now / 2, interval, epoch, ..FlowRules::default() };
        for direction in BOTH {
            let _ = before(&mut flow, direction, now, &rules);
            let _ = after(&mut flow, direction, now, &rules);
        }
    }
}
