//! A peer changes its address, its MAC, both, or leaves: nothing of the old stays behind.

use std::collections::BTreeSet;

use flannel_lab::{
    agent::Agent, craft, kernel_peer::RemoteVtep, prelude::*, vxlan_view::VxlanView,
};

const WITHIN: Duration = Duration::from_secs(2);

fn lease(public_ip: &str, mac: &str) -> Value {
    json!({"PublicIP": public_ip, "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": mac}})
}

fn vtep(subnet: &str, public_ip: &str, mac: &str) -> RemoteVtep {
    RemoteVtep { subnet: subnet.into(), public_ip: public_ip.into(), mac: mac.into() }
}

const S3: &str = "10.77.3.0/24";
const S4: &str = "10.77.4.0/24";
const M13: &str = "02:fa:00:00:00:13";
const M14: &str = "02:fa:00:00:00:14";
const M33: &str = "02:fa:00:00:00:33";

struct Story {
    etcd: Etcd,
    node: Node,
    agent: Agent,
    own: String,
}

impl Story {
    fn begin(lab: &Lab) -> Result<Self> {
        let etcd = Etcd::new(lab)?;
        etcd.put_config(
            r#"{"Network":"10.77.0.0/16","SubnetMin":"10.77.100.0","Backend":{"Type":"vxlan"}}"#,
        )?;
        let node = lab.node("alder")?;
        let mut agent = node.agent(etcd.flags())?;
        let subnet = agent.wait_ready(READY_WITHIN)?.subnet_v4()?;
        let own = subnet.replace("/24", "/32");
        Ok(Self { etcd, node, agent, own })
    }

    fn becomes(&self, peers: &[RemoteVtep]) -> Result<()> {
        let wanted = VxlanView::wanted(&self.own, peers)?;
        eventually("the kernel has the peers", WITHIN, || {
            let view = VxlanView::read(self.node.ns(), "flannel.1")?;
            ensure!(view == wanted, "{view:#?}, not {wanted:#?}");
            Ok(Some(()))
        })
        .with_context(|| self.agent.log())
    }
}

#[test]
fn exactly_the_new_entries_are_there_after_each_change() -> Result<()> {
    let lab = Lab::new()?;
    let story = Story::begin(&lab)?;
    let four = vtep(S4, "192.0.2.14", M14);
    story.etcd.put_lease("10.77.4.0-24", &lease("192.0.2.14", M14))?;
    for (address, mac) in [
        ("192.0.2.13", M13),
        ("192.0.2.33", M13),
        ("192.0.2.33", M33),
        ("192.0.2.13", M13),
        ("192.0.2.33", M33),
        ("192.0.2.33", M13),
    ] {
        story.etcd.put_lease("10.77.3.0-24", &lease(address, mac))?;
        story
            .becomes(&[vtep(S3, address, mac), four.clone()])
            .with_context(|| format!("{address} {mac}"))?;
    }
    story.etcd.delete_lease("10.77.3.0-24")?;
    story.becomes(&[four])?;
    story.etcd.delete_lease("10.77.4.0-24")?;
    story.becomes(&[])
}

#[test]
fn two_peers_that_swap_never_point_at_a_third() -> Result<()> {
    let lab = Lab::new()?;
    let story = Story::begin(&lab)?;
    story.etcd.put_lease("10.77.3.0-24", &lease("192.0.2.13", M13))?;
    story.etcd.put_lease("10.77.4.0-24", &lease("192.0.2.14", M14))?;
    story.becomes(&[vtep(S3, "192.0.2.13", M13), vtep(S4, "192.0.2.14", M14)])?;

    // Both addresses answer ARP on a host that only listens, and traffic goes to both subnets.
    let listener = lab.node_at("listener", flannel_lab::lab::Segment::A, 13)?;
    listener.ns().ip(&["addr add 192.0.2.14/24 dev eth0"])?;
    let wire = Capture::start(listener.ns(), "eth0")?;
    let ns = story.node.ns().clone();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let traffic = ns.spawn(move || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            // A refusal is nothing on the wire, which the story allows.
            let _ = socket.send_to(b"x", "10.77.3.9:9");
            let _ = socket.send_to(b"x", "10.77.4.9:9");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    })?;
    std::thread::sleep(Duration::from_millis(200));
    story.etcd.put_all(&[
        (format!("{SUBNETS_PREFIX}10.77.3.0-24"), lease("192.0.2.14", M14).to_string()),
        (format!("{SUBNETS_PREFIX}10.77.4.0-24"), lease("192.0.2.13", M13).to_string()),
    ])?;
    story.becomes(&[vtep(S3, "192.0.2.14", M14), vtep(S4, "192.0.2.13", M13)])?;
    std::thread::sleep(Duration::from_millis(200));
    stop.send(())?;
    traffic.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;

    let mut seen = BTreeSet::new();
    for frame in wire.stop()? {
        if let Some(vxlan) = craft::parse(&frame.bytes, 8472)? {
            seen.insert((vxlan.outer.destination.to_string(), vxlan.inner_destination().to_vec()));
        }
    }
    let pairs = BTreeSet::from([
        ("192.0.2.13".to_owned(), craft::mac(M13)?.to_vec()),
        ("192.0.2.14".to_owned(), craft::mac(M14)?.to_vec()),
    ]);
    ensure!(seen == pairs, "pairs of VTEP and MAC on the wire: {seen:02x?}");
    Ok(())
}

#[test]
fn two_peers_with_one_mac_are_told_of_in_one_line() -> Result<()> {
    let lab = Lab::new()?;
    let story = Story::begin(&lab)?;
    story.etcd.put_lease("10.77.3.0-24", &lease("192.0.2.13", M13))?;
    story.becomes(&[vtep(S3, "192.0.2.13", M13)])?;
    story.etcd.put_lease("10.77.4.0-24", &lease("192.0.2.14", M13))?;
    let mut agent = story.agent;
    agent.wait_complaint(&["10.77.3.0", "10.77.4.0", M13], WITHIN)?;
    std::thread::sleep(Duration::from_millis(1500));
    let lines = agent.complaints(&["10.77.3.0", "10.77.4.0"]);
    ensure!(lines.len() == 1, "{lines:#?}");
    Ok(())
}

#[test]
fn a_useless_lease_costs_a_warning_and_no_peer() -> Result<()> {
    let lab = Lab::new()?;
    let story = Story::begin(&lab)?;
    for (key, value) in [
        ("10.77.5.0-24", "not json"),
        ("10.77.6.0-24", r#"{"PublicIP":"not an address"}"#),
        ("10.77.7.0-99", r#"{"PublicIP":"192.0.2.17"}"#),
        ("nonsense", "{}"),
    ] {
        story.etcd.put(&format!("{SUBNETS_PREFIX}{key}"), value)?;
    }
    story.etcd.put_lease("10.77.3.0-24", &lease("192.0.2.13", M13))?;
    story.becomes(&[vtep(S3, "192.0.2.13", M13)])?;
    for key in ["10.77.5.0-24", "10.77.6.0-24", "10.77.7.0-99", "nonsense"] {
        let lines = story.agent.complaints(&[key]);
        ensure!(lines.len() == 1, "{key}: {lines:#?}\n{}", story.agent.log());
    }
    ensure!(story.agent.readiness()?.0, "not ready for somebody else's mistake");
    ensure!(story.agent.metric("flannel_store_bad_entries_total")? >= 4.0, "not counted");
    Ok(())
}

#[test]
fn a_compacted_history_is_caught_up_with_by_reading_all() -> Result<()> {
    let lab = Lab::new()?;
    let story = Story::begin(&lab)?;
    story.etcd.put_lease("10.77.3.0-24", &lease("192.0.2.13", M13))?;
    story.becomes(&[vtep(S3, "192.0.2.13", M13)])?;
    // While the agent cannot hear: a peer changes, one comes, and the history is forgotten.
    story.node.ns().ip(&["route add prohibit 192.0.2.5"])?;
    story.node.run("ss -K dst 192.0.2.5").ok();
    story.etcd.put_lease("10.77.3.0-24", &lease("192.0.2.33", M33))?;
    story.etcd.put_lease("10.77.4.0-24", &lease("192.0.2.14", M14))?;
    story.etcd.compact()?;
    story.etcd.stop()?;
    story.etcd.start()?;
    story.node.ns().ip(&["route del prohibit 192.0.2.5"])?;
    let wanted =
        VxlanView::wanted(&story.own, &[vtep(S3, "192.0.2.33", M33), vtep(S4, "192.0.2.14", M14)])?;
    eventually("the changes are caught up with", Duration::from_secs(10), || {
        let view = VxlanView::read(story.node.ns(), "flannel.1")?;
        ensure!(view == wanted, "{view:#?}");
        Ok(Some(()))
    })
    .with_context(|| story.agent.log())
}
