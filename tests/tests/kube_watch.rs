//! Watches as the API documents them: they end in peace, resume from bookmarks, and ask for no more
//! than is needed.

use flannel_lab::{
    kube_stub::{annotate, flannel_annotations, plain_node},
    prelude::*,
};

const WITHIN: Duration = Duration::from_secs(5);

fn lists(stub: &KubeStub) -> usize {
    stub.requests().iter().filter(|request| request.contains("limit=")).count()
}

fn watch_requests(stub: &KubeStub) -> Vec<String> {
    stub.requests().into_iter().filter(|request| request.contains("watch=true")).collect()
}

#[test]
fn a_watch_that_ends_in_peace_goes_on_from_there_without_a_word() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, KubeStub::new(&lab)?)?;
    let stub = &duo.store;
    eventually("the watch is open", WITHIN, || Ok((stub.watches() == 1).then_some(())))?;
    let (listed, said) = (lists(stub), duo.agent.log().lines().count());
    for number in 100..103_u8 {
        let before = watch_requests(stub).len();
        stub.finish_watches();
        let mut node = plain_node(&format!("extra{number}"), &[&format!("10.77.{number}.0/24")]);
        let mac = format!("02:fa:00:00:01:{number:02x}");
        annotate(&mut node, &flannel_annotations(&format!("192.0.2.{number}"), &mac));
        // Between the watches: nobody is listening.
        stub.put(node)?;
        let peers = u64::from(number) - 98;
        eventually("the peer is learnt", WITHIN, || {
            Ok((duo.agent.status()?["peers_applied"] == peers).then_some(()))
        })
        .with_context(|| duo.agent.log())?;
        ensure!(watch_requests(stub).len() == before + 1, "{:#?}", watch_requests(stub));
    }
    ensure!(lists(stub) == listed, "listed again: {:#?}", stub.requests());
    let log = duo.agent.log();
    ensure!(log.lines().count() == said, "{log}");
    for request in watch_requests(stub) {
        for part in ["allowWatchBookmarks=true", "timeoutSeconds=", "resourceVersion=1"] {
            ensure!(request.contains(part), "no {part} in {request}");
        }
    }
    Ok(())
}

#[test]
fn a_watch_resumes_from_the_bookmark_when_nothing_of_ours_has_happened_for_long() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.set_bookmarks(Duration::from_millis(300));
    // With this backend only our own node is watched, so other nodes' changes are not told.
    stub.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"alloc"}}"#)?;
    let alder = lab.node("alder")?;
    stub.register(&alder)?;
    let mut agent = alder.agent(stub.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    eventually("the watch is open", WITHIN, || Ok((stub.watches() == 1).then_some(())))?;
    for number in 0..20 {
        stub.put(plain_node(&format!("other{number}"), &[]))?;
    }
    // Longer than a bookmark takes.
    std::thread::sleep(Duration::from_secs(1));
    let (listed, watched) = (lists(&stub), watch_requests(&stub).len());
    // The history up to here is forgotten: a watch from where ours began would be told 410.
    stub.compact();
    eventually("another watch is open", WITHIN, || {
        Ok((watch_requests(&stub).len() > watched && stub.watches() == 1).then_some(()))
    })
    .with_context(|| format!("{:#?}", stub.requests()))?;
    ensure!(lists(&stub) == listed, "listed again: {:#?}", stub.requests());
    ensure!(agent.log_lines("410").is_empty(), "{}", agent.log());
    let all = stub.requests();
    let unselected = all.iter().filter(|r| r.contains("/nodes?") && !r.contains("fieldSelector"));
    ensure!(unselected.count() == 0, "{all:#?}");
    Ok(())
}

#[test]
fn a_server_restored_from_a_backup_is_noticed_by_its_bookmarks() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.set_bookmarks(Duration::from_millis(300));
    let duo = Duo::plain(&lab, stub)?;
    let stub = &duo.store;
    eventually("the watch is open", WITHIN, || Ok((stub.watches() == 1).then_some(())))?;
    let backup = stub.back_up();
    let peer = |number: u8| {
        let mut node = plain_node(&format!("extra{number}"), &[&format!("10.77.{number}.0/24")]);
        let mac = format!("02:fa:00:00:01:{number:02x}");
        annotate(&mut node, &flannel_annotations(&format!("192.0.2.{number}"), &mac));
        node
    };
    let has = |count: u64| {
        eventually(&format!("{count} peers"), WITHIN, || {
            Ok((duo.agent.status()?["peers_applied"] == count).then_some(()))
        })
        .with_context(|| duo.agent.log())
    };
    for number in 100..110 {
        stub.put(peer(number))?;
    }
    has(11)?;
    // What came since the backup is gone, and versions that we have seen are given out again.
    stub.restore(&backup);
    has(1)?;
    stub.put(peer(120))?;
    has(2)?;
    ensure!(!duo.agent.log_lines("restored from a backup").is_empty(), "{}", duo.agent.log());
    traffic::assert_reaches(&duo.ours, &duo.theirs)
}
