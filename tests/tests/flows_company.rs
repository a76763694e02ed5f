//! Flows beside what others do to their packets: marks, masquerading, services in nftables, a rule
//! against one way only. What the stack changes, or no longer lets pass, never goes past it.

use std::net::{SocketAddr, UdpSocket};

use flannel_lab::{
    cluster::Member,
    prelude::*,
    promoted::{bypassed, flow, flows},
};

/// Short, so that stories are.
const INTERVAL: Duration = Duration::from_millis(400);

fn start(lab: &Lab) -> Result<(LocalStore, Cluster)> {
    let plan = Plan {
        agents: 2,
        pods: 1,
        flags: vec![
            "--datapath=ebpf".to_owned(),
            "--fast-path=flows".to_owned(),
            format!("--flow-interval-ms={}", INTERVAL.as_millis()),
        ],
        ..Plan::default()
    };
    let store = LocalStore::new(lab)?;
    let cluster = Cluster::start(lab, &store, &plan)?;
    Ok((store, cluster))
}

fn rules(node: &Node, rules: &str) -> Result<()> {
    let output = node.shell(&format!("set -e; {rules}"))?;
    ensure!(output.status.success(), "{}: {output:?}", node.name());
    Ok(())
}

fn ends(cluster: &Cluster) -> (&Pod, &Pod) {
    (&cluster.members[0].pods()[0], &cluster.members[1].pods()[0])
}

/// Keeps a conversation going until a node lets it bypass the stack.
fn promote(node: &Node, conversation: &mut Conversation) -> Result<()> {
    let port = conversation.port()?;
    eventually("the flow is promoted", Duration::from_secs(10), || {
        conversation.talk(Duration::from_millis(50))?;
        Ok(flow(node, port)?.is_some().then_some(()))
    })
}

/// Packets that the first rule with this word has seen.
fn seen(node: &Node, table: &str, chain: &str, word: &str) -> Result<u64> {
    let list = node.run(&format!("iptables -t {table} -nvxL {chain}"))?;
    let line = list.lines().find(|line| line.contains(word)).context("no such rule")?;
    Ok(line.split_whitespace().next().context("no count")?.parse()?)
}

#[test]
fn a_flow_that_somebody_marks_stays_in_the_stack() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab)?;
    let (from, to) = ends(&cluster);
    let alder = cluster.members[0].node();
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    let port = conversation.port()?;
    for way in [format!("-s {}", from.v4()?), format!("-d {}", from.v4()?)] {
        promote(alder, &mut conversation)?;
        // Of every packet of this way, and shaping or routing may depend on it.
        let rule = format!("FORWARD {way} -p tcp -j MARK --set-mark 0x20");
        rules(alder, &format!("iptables -t mangle -I {rule}"))?;
        eventually("the flow takes the stack", INTERVAL + Duration::from_secs(1), || {
            conversation.talk(Duration::from_millis(20))?;
            Ok(flow(alder, port)?.is_none().then_some(()))
        })
        .with_context(|| way.clone())?;
        let before = seen(alder, "mangle", "FORWARD", "MARK")?;
        let words = conversation.talk(INTERVAL * 5)?;
        let marked = seen(alder, "mangle", "FORWARD", "MARK")? - before;
        ensure!(marked >= words, "{way}: {marked} packets of {words} words were marked");
        ensure!(flow(alder, port)?.is_none(), "{way}: promoted again");
        rules(alder, &format!("iptables -t mangle -D {rule}"))?;
    }
    promote(alder, &mut conversation)
}

#[test]
fn a_flow_that_somebody_masquerades_stays_in_the_stack() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab)?;
    let (from, to) = ends(&cluster);
    let [alder, birch] = [cluster.members[0].node(), cluster.members[1].node()];
    rules(
        alder,
        &format!("iptables -t nat -I POSTROUTING -s {} -o flannel.1 -j MASQUERADE", from.v4()?),
    )?;
    let at_pod = Capture::start(to.ns(), "eth0")?;
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    conversation.talk(INTERVAL * 8)?;
    let promoted = flows(alder)?;
    ensure!(promoted.is_empty(), "{promoted:#?} go past the masquerading");
    let own = match from.v4()? {
        std::net::IpAddr::V4(v4) => v4.octets(),
        std::net::IpAddr::V6(_) => bail!("IPv6"),
    };
    let bare = at_pod.stop()?.into_iter().find(|frame| frame.bytes.get(26..30) == Some(&own[..]));
    ensure!(bare.is_none(), "the pod saw the sender's own address: {bare:?}");
    // Behind the translation it is a flow like any other.
    ensure!(!flows(birch)?.is_empty(), "not promoted at the other node");
    Ok(())
}

/// Both directions of a flow go past the stack, or neither: conntrack would see half a connection.
#[test]
fn what_asks_in_vain_one_way_takes_the_other_way_along() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab)?;
    let (from, to) = ends(&cluster);
    let alder = cluster.members[0].node();
    let bind = |pod: &Pod| -> Result<UdpSocket> {
        let address = pod.v4()?;
        let socket = pod.ns().within(move || Ok(UdpSocket::bind(SocketAddr::new(address, 0))?))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        Ok(socket)
    };
    let (ours, theirs) = (bind(from)?, bind(to)?);
    ours.connect(theirs.local_addr()?)?;
    theirs.connect(ours.local_addr()?)?;
    let port = ours.local_addr()?.port();
    let mut buffer = [0; 16];
    eventually("the flow is promoted", Duration::from_secs(10), || {
        ours.send(b"ping")?;
        theirs.recv(&mut buffer)?;
        theirs.send(b"pong")?;
        ours.recv(&mut buffer)?;
        Ok(flow(alder, port)?.is_some().then_some(()))
    })?;
    rules(alder, &format!("iptables -I FORWARD -s {} -p udp -j DROP", from.v4()?))?;
    // The next one out has to ask, and gets no answer. After it nothing is sent that way.
    std::thread::sleep(INTERVAL * 6 / 10);
    ours.send(b"ask")?;
    let start = std::time::Instant::now();
    let mut last = (start, bypassed(alder, port)?.1);
    let mut received = 0;
    while start.elapsed() < INTERVAL * 5 {
        theirs.send(b"pong")?;
        received += u32::from(ours.recv(&mut buffer).is_ok());
        let inward = bypassed(alder, port)?.1;
        if inward > last.1 {
            last = (std::time::Instant::now(), inward);
        }
    }
    ensure!(received > 20, "only {received} came by the stack");
    let went_on = last.0 - start;
    ensure!(
        went_on < INTERVAL + Duration::from_millis(300),
        "for {went_on:?} packets came past a stack that has not answered the other way"
    );
    Ok(())
}

/// kube-proxy's nftables mode, cut to one service per backend: its cluster address, its node port.
fn nft_services(node: &Node, services: &[(&str, u16, SocketAddr)]) -> Result<()> {
    let (mut dispatch, mut chains) = (String::new(), String::new());
    for (cluster_ip, node_port, backend) in services {
        let own = node.v4();
        dispatch.extend([format!(
            "ip daddr {cluster_ip} tcp dport 80 goto endpoint-{node_port}
             ip daddr {own} tcp dport {node_port} goto external-{node_port}\n"
        )]);
        chains.extend([format!(
            "chain endpoint-{node_port} {{
                 ip saddr {ip} jump mark-for-masquerade
                 meta l4proto tcp dnat to {backend}
             }}
             chain external-{node_port} {{ jump mark-for-masquerade; goto endpoint-{node_port}; }}\n",
            ip = backend.ip()
        )]);
    }
    rules(
        node,
        &format!(
            "nft -f - <<'END'
            table ip kube-proxy {{
                chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}
                chain masquerading {{
                    meta mark and 0x4000 == 0 return
                    meta mark set meta mark xor 0x4000
                    masquerade fully-random
                }}
                {chains}
                chain services {{
                    {dispatch}
                }}
                chain nat-prerouting {{
                    type nat hook prerouting priority dstnat; jump services;
                }}
                chain nat-output {{ type nat hook output priority -100; jump services; }}
                chain nat-postrouting {{
                    type nat hook postrouting priority srcnat; jump masquerading;
                }}
            }}
END
"
        ),
    )
}

const NFT_FORWARD: &str = "nft -f - <<'END'
    table inet filter {
        chain forward {
            type filter hook forward priority filter; policy drop;
            ct state invalid counter drop
            ct state established,related accept
            ip saddr 10.77.0.0/16 accept
            ip daddr 10.77.0.0/16 accept
        }
    }
END
";

/// Packets that the rule against invalid ones has dropped.
fn nft_invalid(member: &Member) -> Result<u64> {
    let list = member.node().run("nft list chain inet filter forward")?;
    let line = list.lines().find(|line| line.contains("invalid")).context("no rule")?;
    let mut words = line.split_whitespace().skip_while(|word| *word != "packets");
    Ok(words.nth(1).context("no count")?.parse()?)
}

#[test]
fn services_in_nftables_keep_their_translation() -> Result<()> {
    const PORT: u16 = 8080;
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab)?;
    let (from, to) = ends(&cluster);
    let [alder, birch] = [cluster.members[0].node(), cluster.members[1].node()];
    for member in &cluster.members {
        rules(member.node(), NFT_FORWARD)?;
    }
    let backend = |pod: &Pod| Ok::<_, anyhow::Error>(SocketAddr::new(pod.v4()?, PORT));
    let services = [("10.96.0.10", 30080, backend(to)?), ("10.96.0.11", 30081, backend(from)?)];
    nft_services(alder, &services)?;
    rules(alder, "bridge link set dev veth0 hairpin on")?;
    for (pod, target) in [
        (to, "10.96.0.10:80".to_owned()),
        (to, format!("{}:30080", alder.v4())),
        (from, "10.96.0.11:80".to_owned()),
    ] {
        let listener = flannel_lab::conversation::listen(pod.ns(), backend(pod)?)?;
        let mut conversation = Conversation::open(from.ns(), listener, Some(target.parse()?))
            .with_context(|| target.clone())?;
        conversation.talk(INTERVAL * 6).with_context(|| target.clone())?;
        let translated = flows(alder)?;
        ensure!(translated.is_empty(), "{target}: {translated:#?} go past the translation");
        // At the backend's node the stack changes nothing, so the flow may bypass it there.
        let at_backend = flow(birch, PORT)?.is_some();
        ensure!(at_backend == (pod.name() == to.name()), "{target}: {at_backend}");
        for member in &cluster.members {
            ensure!(nft_invalid(member)? == 0, "{target}: {} dropped", member.node().name());
        }
    }
    Ok(())
}
