//! The udp backend: packets in UDP, carried by the agent itself, understood by any other node that
//! speaks flannel's format.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use flannel_lab::{craft, prelude::*, traffic::MIB_16, udp_proxy};
use nix::sys::socket::{setsockopt, sockopt};

/// How soon a change has to work, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

fn plan(agents: usize) -> Plan {
    Plan { agents, backend: r#"{"Type":"udp"}"#.to_owned(), ..Plan::default() }
}

/// A node that a plain proxy runs on, its lease in the store, its pod, all agents' leases known.
fn stranger(lab: &Lab, store: &dyn LeaseStore) -> Result<(Node, UdpProxy, Pod)> {
    let node = lab.node("byhand")?;
    let proxy = UdpProxy::start(&node, "10.77.200.0/24")?;
    for (key, lease) in store.leases()? {
        proxy.learn(&key, &lease)?;
    }
    let (key, lease) = proxy.lease();
    store.put_lease(&key, &lease)?;
    let pod = node.pod(&proxy.env()?)?;
    Ok((node, proxy, pod))
}

#[test]
fn everybody_reaches_everybody_and_a_plain_proxy() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan(3))?;
    let (_node, _proxy, pod) = stranger(&lab, &etcd)?;
    cluster.wait_peers(3, READY_WITHIN)?;
    cluster.assert_full_mesh()?;
    for member in &cluster.members {
        let lease = etcd.leases()?[&member.env().key()?].clone();
        let wanted = json!({"PublicIP": member.node().v4(), "PublicIPv6": null});
        ensure!(lease == wanted, "published {lease}");
        ensure!(member.env().mtu()? == 1472, "{:?}", member.env());
        let link = member.node().link("flannel0")?.context("no flannel0")?;
        ensure!(link["mtu"] == 1472, "{link:#}");
        let routes = member.node().run("ip route show dev flannel0")?;
        ensure!(routes.starts_with("10.77.0.0/16"), "{routes}");
        traffic::wait_reaches(member.pods()[0].ns(), pod.v4()?, SOON)?;
        traffic::assert_reaches(&pod, &member.pods()[0])?;
    }
    for to in [&cluster.members[1].pods()[0], &pod] {
        let from = &cluster.members[0].pods()[0];
        let transfer = traffic::tcp_transfer(from, to, to.v4()?, MIB_16 / 4)?;
        ensure!(transfer.intact, "{transfer:?}");
        let back = traffic::tcp_transfer(to, from, from.v4()?, MIB_16 / 4)?;
        ensure!(back.intact, "{back:?}");
    }
    Ok(())
}

/// The payload of a UDP datagram to flannel's port, its frame's Ethernet header included.
fn payload(frame: &[u8]) -> Option<&[u8]> {
    let packet = frame.get(14..)?;
    let udp =
        (packet.first()? >> 4 == 4 && packet.get(9) == Some(&17)).then(|| packet.get(20..))??;
    (udp.get(2..4)? == udp_proxy::PORT.to_be_bytes()).then(|| udp.get(8..))?
}

#[test]
fn a_datagram_holds_the_bare_packet_a_hop_older() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan(1))?;
    let (node, _proxy, pod) = stranger(&lab, &etcd)?;
    let ours = &cluster.members[0].pods()[0];
    traffic::wait_reaches(ours.ns(), pod.v4()?, SOON)?;
    let hops = |packet: &[u8], count: usize| {
        (0..count).try_fold(packet.to_vec(), |packet, _| craft::routed(&packet))
    };
    for (from, to, end) in [(ours, &pod, node.ns()), (&pod, ours, cluster.members[0].node().ns())] {
        let before = Capture::start(from.ns(), "eth0")?;
        let wire = Capture::start(end, "eth0")?;
        let after = Capture::start(to.ns(), "eth0")?;
        ensure!(traffic::ping(from.ns(), to.v4()?, 1)? == 1, "no answer");
        // Echo requests: the capture of the sender has the answer as well.
        let request = |packet: &[u8]| {
            (packet.get(9) == Some(&1) && packet.get(20) == Some(&8)).then(|| packet.to_vec())
        };
        let sent = before.wait_for("the request", SOON, |frame| request(frame.bytes.get(14..)?))?;
        let carried = wire.wait_for("the datagram", SOON, |f| request(payload(&f.bytes)?))?;
        let got = after.wait_for("the request", SOON, |frame| request(frame.bytes.get(14..)?))?;
        // One hop is the node's, one the forwarder's; then the same again.
        ensure!(carried == hops(&sent, 2)?, "{sent:02x?} became {carried:02x?}");
        ensure!(got == hops(&sent, 4)?, "{carried:02x?} became {got:02x?}");
    }
    Ok(())
}

#[test]
fn a_restart_costs_the_time_without_an_agent_and_no_more() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let mut cluster = Cluster::start(&lab, &etcd, &plan(3))?;
    let pods: Vec<Pod> = cluster.members.iter().map(|member| member.pods()[0].clone()).collect();
    let hit = LossMeter::start(pods[0].ns(), pods[1].ns(), pods[1].v4()?)?;
    let other = LossMeter::start(pods[1].ns(), pods[2].ns(), pods[2].v4()?)?;
    let env = cluster.members[0].env().clone();
    cluster.members[0].restart(&etcd, &plan(3))?;
    ensure!(*cluster.members[0].env() == env, "{env:?} became {:?}", cluster.members[0].env());
    for to in &pods[1..] {
        traffic::wait_reaches(pods[0].ns(), to.v4()?, SOON)?;
    }
    std::thread::sleep(Duration::from_millis(300));
    let loss = hit.stop()?;
    println!("restart: {} of {} packets lost, gap {:?}", loss.lost, loss.sent, loss.longest_gap);
    ensure!(loss.lost < loss.sent, "{loss:?}");
    other.stop()?.ensure_none(pods[1].v4()?)?;
    cluster.assert_full_mesh()
}

#[test]
fn a_peer_that_moves_is_followed_and_one_that_goes_is_unreachable() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan(2))?;
    let (node, proxy, pod) = stranger(&lab, &etcd)?;
    let (alder, ours) = (&cluster.members[0], &cluster.members[0].pods()[0]);
    traffic::wait_reaches(ours.ns(), pod.v4()?, SOON)?;
    // The whole host moves: address, proxy, lease.
    drop(proxy);
    node.ns().ip(&["addr del 192.0.2.14/24 dev eth0"]).ok();
    let moved = lab.node("moved")?;
    let proxy = UdpProxy::start(&moved, "10.77.200.0/24")?;
    for (key, lease) in etcd.leases()?.iter().filter(|(key, _)| *key != "10.77.200.0-24") {
        proxy.learn(key, lease)?;
    }
    let (key, lease) = proxy.lease();
    etcd.put_lease(&key, &lease)?;
    let there = moved.pod(&proxy.env()?)?;
    traffic::wait_reaches(ours.ns(), there.v4()?, SOON)?;

    etcd.delete_lease(&key)?;
    let target = SocketAddr::new(there.v4()?, 9);
    eventually("\"network unreachable\" for the pod", SOON, || {
        ours.ns().within(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(Duration::from_millis(200)))?;
            // Else the kernel keeps "unreachable" to itself, as it may pass.
            setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
            socket.connect(target)?;
            socket.send(b"anybody there?")?;
            let error = socket.recv(&mut [0; 10]).err().and_then(|error| error.raw_os_error());
            ensure!(error == Some(libc::ENETUNREACH), "{error:?}");
            Ok(Some(()))
        })
    })?;
    cluster.wait_peers(1, SOON)?;
    traffic::assert_reaches(ours, &cluster.members[1].pods()[0])?;
    let agent = alder.agent().context("an agent")?;
    eventually("its count", SOON, || {
        let dropped = agent.status()?["backend"]["packets"]["dropped"]["no_peer"].as_u64();
        ensure!(dropped.is_some_and(|count| count > 0), "{dropped:?}");
        Ok(Some(()))
    })?;
    Ok(())
}

/// A UDP packet from `from` to `to` that is not to be fragmented, `length` bytes long.
fn long_packet(from: IpAddr, to: IpAddr, length: u16) -> Result<Vec<u8>> {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (from, to) else { bail!("IPv4 only") };
    let mut packet = vec![0_u8; usize::from(length)];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet[6] = 0x40;
    (packet[8], packet[9]) = (64, 17);
    packet[12..16].copy_from_slice(&from.octets());
    packet[16..20].copy_from_slice(&to.octets());
    packet[24..26].copy_from_slice(&(length - 20).to_be_bytes());
    let sum = craft::checksum(&[&packet[..20]]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    Ok(packet)
}

#[test]
fn what_is_too_long_for_the_device_is_answered_and_not_delivered() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan(2))?;
    let (node, _proxy, pod) = stranger(&lab, &etcd)?;
    let (alder, ours) = (&cluster.members[0], &cluster.members[0].pods()[0]);
    traffic::wait_reaches(ours.ns(), pod.v4()?, SOON)?;
    let at_sender = Capture::start(pod.ns(), "eth0")?;
    let at_ours = Capture::start(ours.ns(), "eth0")?;
    let long = long_packet(pod.v4()?, ours.v4()?, 1473)?;
    let fits = long_packet(pod.v4()?, ours.v4()?, 1472)?;
    let target = format!("{}:{}", alder.node().v4(), udp_proxy::PORT);
    node.ns().within(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.send_to(&long, &target)?;
        socket.send_to(&fits, &target)?;
        Ok(())
    })?;
    let answer = at_sender.wait_for("\"fragmentation needed\"", SOON, |frame| {
        let packet = frame.bytes.get(14..)?;
        (packet.get(9) == Some(&1) && packet.get(20) == Some(&3)).then(|| packet.to_vec())
    })?;
    ensure!((answer[21], &answer[26..28]) == (4, &1472_u16.to_be_bytes()[..]), "{answer:02x?}");
    ensure!(answer[28..48] == long[..20], "quotes {:02x?}", &answer[28..]);
    at_ours.wait_for("the packet that fits", SOON, |frame| {
        (frame.bytes.len() == 14 + 1472).then_some(())
    })?;
    let delivered = at_ours.frames().iter().any(|frame| frame.bytes.len() > 14 + 1472);
    ensure!(!delivered, "the long one came too");
    let agent = alder.agent().context("an agent")?;
    eventually("its count", SOON, || {
        let status = agent.status()?;
        let count = &status["backend"]["packets"]["dropped"]["too_long"];
        ensure!(*count == 1, "{count}");
        Ok(Some(()))
    })?;
    Ok(())
}

#[test]
fn a_removed_device_is_made_anew_and_forwards_at_once() -> Result<()> {
    let lab = Lab::new()?;
    let etcd = Etcd::new(&lab)?;
    let cluster = Cluster::start(&lab, &etcd, &plan(3))?;
    let alder = &cluster.members[0];
    let (from, to) = (&alder.pods()[0], &cluster.members[1].pods()[0]);
    for way in [
        "ip link del flannel0",
        "ip route del 10.77.0.0/16 dev flannel0",
        "ip link set flannel0 down",
    ] {
        alder.node().run(way)?;
        let took = traffic::wait_reaches(from.ns(), to.v4()?, SOON).with_context(|| way)?;
        println!("{way}: reached again after {took:?}");
        traffic::assert_reaches(to, from)?;
    }
    let status = alder.agent().context("an agent")?.status()?;
    ensure!(status["backend"]["devices"][0]["forwarding"] == true, "{status:#}");
    Ok(())
}
