//! The extension backend: the user's commands move the packets and are told of every peer.

use std::fs;

use flannel_lab::{cluster::Role, prelude::*};

/// How soon a change has to be told, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// host-gw, made of commands; everything said to them is kept in a file of the node.
fn plan() -> Plan {
    let backend = json!({
        "Type": "extension",
        "PreStartupCommand": ["sh", "-c", "read nothing; echo \"made by $0\"; echo to stderr >&2", "a script"],
        "PostStartupCommand":
            ["sh", "-c", "echo post $NETWORK $SUBNET $IPV6SUBNET $PUBLIC_IP $PUBLIC_IPV6 >> /run/told"],
        "SubnetAddCommand":
            ["sh", "-c", "read line; echo \"add $SUBNET $PUBLIC_IP $line\" >> /run/told; ip route replace $SUBNET via $PUBLIC_IP && echo routed"],
        // As a string, as flannel takes it: split at blanks, no shell.
        "SubnetRemoveCommand": "ip route del $SUBNET via ${PUBLIC_IP}",
        "ShutdownCommand": ["sh", "-c", "echo shutdown $SUBNET >> /run/told"],
    });
    Plan { backend: backend.to_string(), ..Plan::default() }
}

fn told(node: &Node) -> Vec<String> {
    let text = fs::read_to_string(node.path("/run/told")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn commands_are_told_everything_and_carry_the_pods() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let plan = plan();
    let mut cluster = Cluster::start(&lab, &etcd, &plan)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    cluster.assert_full_mesh()?;
    let (alder, birch, cedar) = (&cluster.members[0], &cluster.members[1], &cluster.members[2]);
    ensure!(alder.env().mtu()? == 1500, "{:?}", alder.env());
    let lease = etcd.leases()?[&birch.env().key()?].clone();
    ensure!(
        lease["BackendType"] == "extension"
            && lease["BackendData"] == "made by a script\nto stderr",
        "published {lease}"
    );
    let own = alder.env().subnet_v4()?;
    let all = told(alder.node());
    ensure!(
        all[0] == format!("post 10.77.0.0/16 {own} ::/0 {} <nil>", alder.node().v4()),
        "{all:?}"
    );
    for peer in [birch, cedar] {
        let (subnet, ip) = (peer.env().subnet_v4()?, peer.node().v4());
        let line = format!("add {subnet} {ip} made by a script");
        ensure!(all.iter().filter(|told| **told == line).count() == 1, "{line:?} in {all:?}");
    }
    ensure!(all.len() == 3, "{all:?}");
    let log = alder.agent().context("an agent")?.log();
    ensure!(log.contains("SubnetAddCommand for") && log.contains(": routed"), "{log}");

    // A restart tells all again; routes are replaced by the same ones, and nothing is lost.
    let (from, to) = (alder.pods()[0].clone(), birch.pods()[0].clone());
    let meters = [
        (from.v4()?, LossMeter::start(from.ns(), to.ns(), to.v4()?)?),
        (to.v4()?, LossMeter::start(to.ns(), from.ns(), from.v4()?)?),
    ];
    cluster.members[0].restart(&etcd, &plan)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    for (source, meter) in meters {
        let loss = meter.stop()?;
        loss.ensure_none(source)?;
        println!("restart: {} packets, none lost", loss.sent);
    }
    let all = told(cluster.members[0].node());
    ensure!(all.len() == 7 && all[3] == format!("shutdown {own}"), "{all:?}");
    Ok(())
}

#[test]
fn a_peer_that_changes_is_told_as_gone_and_come_and_one_that_goes_as_gone() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let mut cluster = Cluster::start(&lab, &etcd, &plan())?;
    cluster.wait_peers(2, READY_WITHIN)?;
    // Its agent is gone, so that nobody puts its lease right.
    let cedar = cluster.members.pop().context("cedar")?;
    let (key, subnet, pod) =
        (cedar.env().key()?, cedar.env().subnet_v4()?, cedar.pods()[0].clone());
    let Role::Agent(node, agent) = cedar.into_role() else { bail!("no agent") };
    agent.stop()?;
    node.ns().ip(&["addr add 192.0.2.99/24 dev eth0"])?;
    let mut lease = etcd.leases()?[&key].clone();
    lease["PublicIP"] = json!("192.0.2.99");
    lease["BackendData"] = json!("another word");
    etcd.put_lease(&key, &lease)?;
    let alder = &cluster.members[0];
    let route = || alder.node().run(&format!("ip route show {subnet}"));
    eventually("the new way", SOON, || Ok(route()?.contains("192.0.2.99").then_some(())))?;
    let all = told(alder.node());
    let last = all.last().context("nothing told")?;
    ensure!(*last == format!("add {subnet} 192.0.2.99 another word"), "{all:?}");
    traffic::assert_reaches(&alder.pods()[0], &pod)?;
    etcd.delete_lease(&key)?;
    eventually("no way", SOON, || Ok(route()?.is_empty().then_some(())))?;
    cluster.wait_peers(1, SOON)?;
    traffic::assert_reaches(&alder.pods()[0], &cluster.members[1].pods()[0])
}

#[test]
fn a_command_that_hangs_is_killed_and_one_that_fails_is_tried_again() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let script = r"case $PUBLIC_IP in
        192.0.2.66) sleep 1000;;
        192.0.2.67) test -e /run/mended || { echo broken; exit 7; };;
        esac; ip route replace $SUBNET via $PUBLIC_IP";
    let backend = json!({"Type": "extension", "CommandTimeout": 1,
        "SubnetAddCommand": ["sh", "-c", script]});
    let plan = Plan { backend: backend.to_string(), ..Plan::default() };
    for (key, ip) in [("10.77.0.0-24", "192.0.2.66"), ("10.77.255.0-24", "192.0.2.67")] {
        etcd.put_lease(key, &json!({"PublicIP": ip, "BackendType": "extension"}))?;
    }
    let cluster = Cluster::start(&lab, &etcd, &plan)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    let alder = &cluster.members[0];
    let agent = alder.agent().context("an agent")?;
    for words in [
        ["10.77.0.0/24", "more than 1 s", "killed"],
        ["10.77.255.0/24", "exit status: 7", "broken"],
    ] {
        eventually(&format!("{words:?} is told"), SOON, || {
            Ok((!agent.complaints(&words).is_empty()).then_some(()))
        })?;
    }
    // The loop turns meanwhile.
    holds_for("alive and ready", Duration::from_secs(3), || {
        Ok(agent.get("/healthz")?.status == 200 && agent.readiness()?.0)
    })?;
    fs::write(alder.node().path("/run/mended"), "")?;
    eventually("the mended command's work", Duration::from_secs(40), || {
        let route = alder.node().run("ip route show 10.77.255.0/24")?;
        Ok(route.contains("192.0.2.67").then_some(()))
    })?;
    cluster.assert_full_mesh()
}

#[test]
fn a_first_command_that_fails_ends_the_agent_with_its_words() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let backend = json!({"Type": "extension",
        "PreStartupCommand": ["sh", "-c", "echo no such tunnel; exit 4"]});
    store.put_config(&Plan { backend: backend.to_string(), ..Plan::default() }.network_config())?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_complaint_or_exit(&["PreStartupCommand", "no such tunnel"], SOON)?;
    let status = agent.process().wait(SOON)?;
    ensure!(status.code() == Some(1), "{status}");
    Ok(())
}
