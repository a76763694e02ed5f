use super::*;
use crate::{
    lease::{Lease, RawJson},
    peer_table::PeerUpdate,
};

fn subnets(n: u8) -> Subnets {
    Subnets { v4: format!("10.5.{n}.0/24").parse().ok(), v6: None }
}

fn attributes(data: &str) -> LeaseAttributes {
    LeaseAttributes {
        backend_type: "extension".to_owned(),
        backend_data: Some(RawJson::from_compact(format!("\"{data}\""))),
        ..LeaseAttributes::default()
    }
}

fn peers(list: &[(u8, &str)]) -> PeerTable {
    let mut table = PeerTable::new();
    let lease =
        |(n, data): &(u8, &str)| Lease { subnets: subnets(*n), attributes: attributes(data) };
    table.apply(PeerUpdate::Snapshot(list.iter().map(lease).collect()));
    table
}

/// Tells all that can be told, everything working.
fn settle(plan: &mut Plan, now: Instant) -> Vec<Task> {
    let mut tasks = Vec::new();
    while let Some(task) = plan.next(now) {
        plan.done(task.clone(), Ok(()), now);
        tasks.push(task);
    }
    tasks
}

#[tokio::test]
async fn our_own_lease_comes_first_and_each_peer_once() {
    let (mut plan, now) = (Plan::default(), Instant::now());
    assert_eq!(plan.next(now), None);
    plan.want(subnets(1), &peers(&[(2, "a"), (3, "b")]), "extension");
    let added = |n, data| Task::Add(subnets(n), attributes(data));
    assert!(plan.own_problem().is_some());
    assert_eq!(settle(&mut plan, now), [Task::Own(subnets(1)), added(2, "a"), added(3, "b")]);
    assert_eq!((plan.served(), plan.own_problem()), (2, None));

    plan.want(subnets(1), &peers(&[(2, "c"), (4, "d")]), "extension");
    let removed = |n, data| Task::Remove(subnets(n), attributes(data));
    let told = settle(&mut plan, now);
    assert_eq!(told, [removed(2, "a"), removed(3, "b"), added(2, "c"), added(4, "d")]);
    // Another lease of our own is told as well.
    plan.want(subnets(9), &peers(&[(2, "c"), (4, "d")]), "extension");
    assert_eq!(settle(&mut plan, now), [Task::Own(subnets(9))]);
}

#[tokio::test]
async fn nothing_is_removed_before_all_peers_are_known() {
    let (mut plan, now) = (Plan::default(), Instant::now());
    plan.want(subnets(1), &peers(&[(2, "a")]), "extension");
    settle(&mut plan, now);
    plan.want(subnets(1), &PeerTable::new(), "extension");
    assert_eq!(plan.next(now), None);
    plan.want(subnets(1), &peers(&[]), "extension");
    assert_eq!(plan.next(now), Some(Task::Remove(subnets(2), attributes("a"))));
}

#[tokio::test]
async fn a_failure_is_told_and_tried_again_later_and_holds_nobody_up() {
    let (mut plan, now) = (Plan::default(), Instant::now());
    plan.want(subnets(1), &peers(&[(2, "a"), (3, "b")]), "extension");
    plan.done(Task::Own(subnets(1)), Ok(()), now);
    let failing = Task::Add(subnets(2), attributes("a"));
    let mut pauses = Vec::new();
    let mut at = now;
    for _ in 0..8 {
        assert_eq!(plan.next(at), Some(failing.clone()));
        plan.done(failing.clone(), Err("failed".to_owned()), at);
        if at == now {
            assert_eq!(plan.next(at), Some(Task::Add(subnets(3), attributes("b"))));
            plan.done(Task::Add(subnets(3), attributes("b")), Ok(()), at);
        }
        assert_eq!((plan.next(at), plan.served()), (None, 1));
        let again = plan.next_try().expect("another try");
        pauses.push((again - at).as_secs());
        at = again;
    }
    assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60, 60]);
    assert!(plan.problems()[0].contains("10.5.2.0/24"), "{:?}", plan.problems());
    // It leaves: its removal is told, whatever became of its coming.
    plan.want(subnets(1), &peers(&[(3, "b")]), "extension");
    assert_eq!(settle(&mut plan, at), [Task::Remove(subnets(2), attributes("a"))]);
    assert_eq!((plan.problems(), plan.next_try()), (vec![], None));
}
