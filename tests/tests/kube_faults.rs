//! The Kubernetes API server in trouble: what agents say of it, and that they find back.

use flannel_lab::{
    kube_stub::{annotate, flannel_annotations, plain_node},
    prelude::*,
    traffic,
};

/// Adds a node and waits until the agent has it as a peer.
fn a_new_peer_is_learnt(
    duo: &Duo<KubeStub>,
    number: u8,
    peers: u64,
    within: Duration,
) -> Result<()> {
    a_peer_is_put(duo, number)?;
    wait_peers(duo, peers, within)
}

/// What `flannel-agent peers` prints.
fn peers(duo: &Duo<KubeStub>) -> Result<String> {
    let output = flannel_lab::agent::subcommand(&duo.alder, &["peers"])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn wait_peers(duo: &Duo<KubeStub>, peers: u64, within: Duration) -> Result<()> {
    eventually(&format!("{peers} peers"), within, || {
        Ok((duo.agent.status()?["peers_applied"] == peers).then_some(()))
    })
    .with_context(|| duo.agent.log())
}

fn connected(duo: &Duo<KubeStub>, wanted: bool, within: Duration) -> Result<()> {
    eventually(&format!("connected: {wanted}"), within, || {
        Ok((duo.agent.status()?["store"]["connected"] == wanted).then_some(()))
    })
    .with_context(|| duo.agent.log())
}

fn start(lab: &Lab) -> Result<Duo<KubeStub>> {
    let duo = Duo::plain(lab, KubeStub::new(lab)?)?;
    connected(&duo, true, Duration::from_secs(5))?;
    Ok(duo)
}

#[test]
fn a_dropped_watch_is_resumed_without_a_list() -> Result<()> {
    let lab = Lab::new()?;
    let duo = start(&lab)?;
    let lists = || duo.store.requests().iter().filter(|r| r.contains("limit=")).count();
    let before = lists();
    for round in 0..3_u8 {
        duo.store.drop_watches();
        a_new_peer_is_learnt(&duo, 100 + round, 2 + u64::from(round), Duration::from_secs(4))?;
    }
    ensure!(lists() == before, "listed again: {:#?}", duo.store.requests());
    ensure!(duo.agent.readiness()?.0, "no longer ready");
    Ok(())
}

#[test]
fn history_that_is_gone_is_listed_again() -> Result<()> {
    let lab = Lab::new()?;
    let duo = start(&lab)?;
    a_new_peer_is_learnt(&duo, 100, 2, Duration::from_secs(4))?;
    // Nobody hears of this: the watch is broken and what came after is forgotten.
    duo.store.set_fault(Some(Fault::Hang));
    duo.store.delete("extra100")?;
    a_peer_is_put(&duo, 101)?;
    duo.store.compact();
    duo.store.set_fault(None);
    eventually("extra101 instead of extra100", Duration::from_secs(8), || {
        let peers = peers(&duo)?;
        Ok((peers.contains("10.77.101.0/24") && !peers.contains("10.77.100.0/24")).then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    ensure!(!duo.agent.log_lines("listing all nodes again").is_empty(), "{}", duo.agent.log());
    Ok(())
}

fn a_peer_is_put(duo: &Duo<KubeStub>, number: u8) -> Result<()> {
    let mut node = plain_node(&format!("extra{number}"), &[&format!("10.77.{number}.0/24")]);
    let mac = format!("02:fa:00:00:01:{number:02x}");
    annotate(&mut node, &flannel_annotations(&format!("192.0.2.{number}"), &mac));
    duo.store.put(node)
}

#[test]
fn duplicates_and_events_out_of_order_change_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let duo = start(&lab)?;
    for number in 100..110 {
        a_peer_is_put(&duo, number)?;
    }
    duo.store.delete("extra100")?;
    for round in 0..5 {
        duo.store.edit("extra101", |node| {
            let ip = format!("192.0.2.{}", 150 + round);
            annotate(node, &json!({"flannel.alpha.coreos.com/public-ip": ip}));
        })?;
    }
    wait_peers(&duo, 10, Duration::from_secs(5))?;
    duo.store.replay(16);
    a_new_peer_is_learnt(&duo, 120, 11, Duration::from_secs(5))?;
    let peers = peers(&duo)?;
    ensure!(peers.contains("192.0.2.154"), "{peers}");
    ensure!(!peers.contains("10.77.100.0/24"), "a deleted node is back: {peers}");
    Ok(())
}

#[test]
fn statuses_of_every_kind_are_said_once_and_outlived() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = start(&lab)?;
    for (round, status) in [500_u16, 503, 429, 401, 403, 404].into_iter().enumerate() {
        duo.store.set_fault(Some(Fault::Status(status)));
        duo.store.drop_watches();
        duo.agent.wait_complaint(
            &["kube store does not answer", &format!("with {status}")],
            Duration::from_secs(8),
        )?;
        std::thread::sleep(Duration::from_secs(2));
        let said = duo.agent.complaints(&[&format!("with {status}")]);
        ensure!(said.len() == 1, "said {} times: {said:#?}", said.len());
        ensure!(duo.agent.readiness()?.0, "no longer ready after {status}");
        duo.store.set_fault(None);
        connected(&duo, true, Duration::from_secs(4))?;
        let number = u8::try_from(100 + round)?;
        a_new_peer_is_learnt(&duo, number, 2 + u64::try_from(round)?, Duration::from_secs(4))?;
    }
    Ok(())
}

#[test]
fn an_expired_token_is_read_again_from_its_file() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = start(&lab)?;
    // Rotated in time: nothing is heard of it.
    duo.store.rotate_token(true)?;
    duo.store.drop_watches();
    a_new_peer_is_learnt(&duo, 100, 2, Duration::from_secs(5))?;
    // Expired before the new one is there.
    let late = duo.store.rotate_token(false)?;
    duo.store.drop_watches();
    duo.agent.wait_complaint(&["401", "token"], Duration::from_secs(5))?;
    duo.store.deliver_token(&late)?;
    connected(&duo, true, Duration::from_secs(4))?;
    a_new_peer_is_learnt(&duo, 101, 3, Duration::from_secs(4))?;
    ensure!(!duo.agent.log().contains("token-of-the-lab"), "a token is in the log");
    Ok(())
}

#[test]
fn a_denied_verb_is_named_with_its_resource_and_how_to_allow_it() -> Result<()> {
    for (verb, resource) in
        [("get", "nodes"), ("patch", "nodes/status"), ("list", "nodes"), ("watch", "nodes")]
    {
        let lab = Lab::new()?;
        let stub = KubeStub::new(&lab)?;
        stub.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
        let node = lab.node("alder")?;
        stub.register(&node)?;
        stub.deny(verb, resource, true);
        let mut agent = node.agent(stub.flags())?;
        let rule = format!("resources: [\"{resource}\"], verbs: [\"{verb}\"]");
        agent.wait_complaint(&["403", verb, resource, &rule], READY_WITHIN)?;
        stub.deny(verb, resource, false);
        agent.wait_ready(READY_WITHIN).with_context(|| format!("{verb} {resource}"))?;
        eventually("connected", Duration::from_secs(5), || {
            Ok((agent.status()?["store"]["connected"] == true).then_some(()))
        })?;
    }
    Ok(())
}

#[test]
fn slow_and_expired_pages_still_make_a_list() -> Result<()> {
    for fault in [Fault::SlowPages(Duration::from_millis(800)), Fault::ExpiredPages] {
        let lab = Lab::new()?;
        let stub = KubeStub::new(&lab)?;
        stub.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
        stub.put_all((0..600_u16).map(|n| {
            let (high, low) = (100 + n / 256, n % 256);
            let mut node = plain_node(&format!("n{n}"), &[&format!("10.77.{high}.{low}/32")]);
            annotate(
                &mut node,
                &flannel_annotations(
                    &format!("198.18.{high}.{low}"),
                    &format!("02:fa:00:00:{high:02x}:{low:02x}"),
                ),
            );
            node
        }))?;
        let node = lab.node("alder")?;
        stub.register(&node)?;
        stub.set_fault(Some(fault.clone()));
        let mut agent = node.agent(stub.flags())?;
        agent.wait_ready(READY_WITHIN).with_context(|| format!("{fault:?}"))?;
        let wanted = agent.status()?["peers_wanted"].clone();
        ensure!(wanted == 600, "{fault:?}: {wanted} peers");
    }
    Ok(())
}

#[test]
fn a_server_that_is_away_leaves_the_data_path_and_readiness_alone() -> Result<()> {
    let lab = Lab::new()?;
    let duo = start(&lab)?;
    let meter = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;
    duo.store.stop()?;
    connected(&duo, false, Duration::from_secs(6))?;
    holds_for("ready all the while", Duration::from_secs(5), || Ok(duo.agent.readiness()?.0))?;
    let complaints = duo.agent.complaints(&["kube store does not answer"]);
    ensure!(complaints.len() == 1, "{complaints:#?}");
    duo.store.start()?;
    connected(&duo, true, Duration::from_secs(4))?;
    a_new_peer_is_learnt(&duo, 100, 2, Duration::from_secs(4))?;
    meter.stop()?.ensure_none(duo.ours.v4()?)
}

#[test]
fn a_connection_that_dies_in_silence_is_noticed() -> Result<()> {
    let lab = Lab::new()?;
    let duo = start(&lab)?;
    // No reset, no end: packets just do not arrive any more.
    duo.store.host().ns().ip(&["link set eth0 down"])?;
    connected(&duo, false, Duration::from_secs(25))?;
    ensure!(duo.agent.readiness()?.0, "no longer ready");
    traffic::assert_reaches(&duo.ours, &duo.theirs)?;
    duo.store.host().ns().ip(&["link set eth0 up"])?;
    connected(&duo, true, Duration::from_secs(6))?;
    a_new_peer_is_learnt(&duo, 100, 2, Duration::from_secs(5))
}

#[test]
fn a_start_waits_for_server_pod_cidr_and_config_in_turn() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.stop()?;
    let mut agent = lab.node("alder")?.agent(stub.flags())?;
    agent.wait_complaint(&["failed to read net conf"], READY_WITHIN)?;
    stub.put_config("{\"Network\":\"10.77.0.0/16\",")?;
    agent.wait_complaint(&["error parsing subnet config"], READY_WITHIN)?;
    stub.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    agent.wait_complaint(&["192.0.2.6:6443", "get nodes alder"], READY_WITHIN)?;
    stub.start()?;
    agent.wait_complaint(&["no such node"], READY_WITHIN)?;
    stub.put(plain_node("alder", &[]))?;
    agent.wait_complaint(&["pod cidr not assigned"], READY_WITHIN)?;
    let (ready, why) = agent.readiness()?;
    ensure!(!ready && why.contains("alder") && why.contains("pod cidr"), "/readyz: {why}");
    for (cidrs, word) in [
        (&["10.77.1.0/24", "10.77.2.0/24", "10.77.3.0/24"][..], "3 entries"),
        (&["10.177.1.0/24"], "not inside Network 10.77.0.0/16"),
        (&["10.77.0.0/16"], "all of Network 10.77.0.0/16"),
    ] {
        stub.put(plain_node("alder", cidrs))?;
        agent.wait_complaint(&[word, "alder"], READY_WITHIN)?;
    }
    ensure!(stub.patches().is_empty(), "{:?}", stub.patches());
    stub.put(plain_node("alder", &["10.77.5.0/24"]))?;
    let env = agent.wait_ready(Duration::from_secs(4))?;
    ensure!(env.subnet_v4()? == "10.77.5.0/24", "{env:?}");
    Ok(())
}

#[test]
fn rubbish_on_other_nodes_is_said_once_and_hurts_nobody_else() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = start(&lab)?;
    let prefix = "flannel.alpha.coreos.com/";
    for (name, suffix, value) in [
        ("r1", "public-ip", "999.1.1.1"),
        ("r2", "public-ip", ""),
        ("r3", "backend-data", "{\"VNI\":1,"),
        ("r4", "backend-data", "not JSON"),
        ("r5", "kube-subnet-manager", "yes"),
        ("r6", "backend-type", "\u{0}vxlan"),
    ] {
        let mut node = plain_node(name, &["10.77.66.0/24"]);
        annotate(&mut node, &flannel_annotations("192.0.2.66", "02:fa:00:00:00:66"));
        annotate(&mut node, &json!({format!("{prefix}{suffix}"): value}));
        duo.store.put(node)?;
    }
    duo.agent.wait_complaint(&["r1", "999.1.1.1"], Duration::from_secs(5))?;
    duo.agent.wait_complaint(&["r4", "not JSON"], Duration::from_secs(5))?;
    for _ in 0..3 {
        duo.store.edit("r1", |node| {
            let beat = node["status"]["beat"].as_u64().unwrap_or(0) + 1;
            node["status"]["beat"] = json!(beat);
        })?;
    }
    a_peer_is_put(&duo, 100)?;
    eventually("the good one is learnt", Duration::from_secs(5), || {
        Ok(peers(&duo)?.contains("10.77.100.0/24").then_some(()))
    })?;
    let said = duo.agent.complaints(&["r1"]);
    ensure!(said.len() == 1, "{said:#?}");
    traffic::assert_reaches(&duo.ours, &duo.theirs)
}
