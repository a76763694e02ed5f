//! Flows that bypass the host's stack: when they do, and that nobody is worse off for it.

use flannel_lab::{
    outcomes,
    prelude::*,
    promoted::{bypassed, flow, flows},
};

/// Short, so that stories are.
const INTERVAL: Duration = Duration::from_millis(400);

/// How long a promotion may take on a busy machine: conntrack trusts UDP after two seconds.
const PROMOTED_WITHIN: Duration = Duration::from_secs(10);

/// What kube-proxy has in FORWARD: ahead of all others, flannel's own accepting rules among them.
/// They would let everything pass before anybody asks whether it is valid.
const KUBE_RULES: &str = "
    iptables -P FORWARD DROP
    iptables -N KUBE-FORWARD
    iptables -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
    iptables -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
    iptables -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
    iptables -I FORWARD -j KUBE-FORWARD
    iptables -A FORWARD -s 10.77.0.0/16 -j ACCEPT
    iptables -A FORWARD -d 10.77.0.0/16 -j ACCEPT";

fn plan(pods: u8) -> Plan {
    Plan {
        agents: 2,
        dual_stack: true,
        pods,
        flags: vec![
            "--datapath=ebpf".to_owned(),
            "--fast-path=flows".to_owned(),
            format!("--flow-interval-ms={}", INTERVAL.as_millis()),
        ],
        ..Plan::default()
    }
}

fn rules(node: &Node, rules: &str) -> Result<()> {
    let output = node.shell(&format!("set -e; {rules}"))?;
    ensure!(output.status.success(), "{}: {output:?}", node.name());
    Ok(())
}

/// Keeps a conversation going until both nodes let it bypass the stack.
fn promote(cluster: &Cluster, conversation: &mut Conversation) -> Result<()> {
    let port = conversation.port()?;
    eventually("the flow is promoted on both nodes", PROMOTED_WITHIN, || {
        conversation.talk(Duration::from_millis(50))?;
        for member in &cluster.members {
            if flow(member.node(), port)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
    .with_context(|| status(cluster))
}

fn status(cluster: &Cluster) -> String {
    let one = |member: &flannel_lab::cluster::Member| {
        let status = member.agent().map(Agent::status);
        status.and_then(Result::ok).map_or_else(String::new, |status| {
            format!("{}: {:#}\n", member.node().name(), status["backend"]["datapath"])
        })
    };
    cluster.members.iter().map(one).collect()
}

fn start(lab: &Lab, pods: u8) -> Result<(LocalStore, Cluster)> {
    let store = LocalStore::new(lab)?;
    let cluster = Cluster::start(lab, &store, &plan(pods))?;
    Ok((store, cluster))
}

fn ends(cluster: &Cluster) -> (&Pod, &Pod) {
    (&cluster.members[0].pods()[0], &cluster.members[1].pods()[0])
}

fn all_rules(cluster: &Cluster, text: &str) -> Result<()> {
    cluster.members.iter().try_for_each(|member| rules(member.node(), text))
}

#[test]
fn a_long_tcp_flow_bypasses_the_stack_on_both_nodes_and_both_ways() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    for address in [to.v4()?, to.v6()?] {
        let mut conversation = Conversation::between(from.ns(), to.ns(), address)?;
        promote(&cluster, &mut conversation)?;
        let port = conversation.port()?;
        conversation.talk(INTERVAL * 4)?;
        for member in &cluster.members {
            let before = bypassed(member.node(), port)?;
            let words = conversation.talk(INTERVAL * 4)?;
            let after = bypassed(member.node(), port)?;
            let (out, inward) = (after.0 - before.0, after.1 - before.1);
            // All but those that prove the flow anew, two in an interval, and what is lost to a
            // busy machine's pauses.
            ensure!(
                out * 10 > words * 8 && inward * 10 > words * 8,
                "{}: of {words} words {out} out and {inward} in bypassed the stack",
                member.node().name()
            );
        }
    }
    Ok(())
}

#[test]
fn a_long_udp_flow_bypasses_the_stack_and_loses_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let mut datagrams = Datagrams::between(from.ns(), to.ns(), to.v4()?)?;
    let port = datagrams.port()?;
    let (mut sent, mut answered) = (0, 0);
    eventually("the flow is promoted on both nodes", PROMOTED_WITHIN, || {
        let (more, back) = datagrams.talk(Duration::from_millis(100))?;
        (sent, answered) = (sent + more, answered + back);
        let there =
            |at: usize| Ok::<_, anyhow::Error>(flow(cluster.members[at].node(), port)?.is_some());
        Ok((there(0)? && there(1)?).then_some(()))
    })?;
    let before = bypassed(cluster.members[0].node(), port)?;
    let (more, back) = datagrams.talk(INTERVAL * 5)?;
    let after = bypassed(cluster.members[0].node(), port)?;
    ensure!(sent == answered && more == back, "{answered} of {sent}, then {back} of {more}");
    ensure!(after.0 - before.0 > more / 2, "{before:?}, {after:?}, {more} sent");
    Ok(())
}

/// Sets a rule that forbids the conversation, waits until it is cut off, lifts the rule, and has
/// it go on.
fn forbid_and_allow(
    node: &Node,
    conversation: &mut Conversation,
    forbid: &str,
    allow: &str,
) -> Result<()> {
    rules(node, forbid)?;
    let set = std::time::Instant::now();
    // Patience for a busy machine; without the proof's expiry it would never end.
    while conversation.is_answered(INTERVAL / 2)? {
        ensure!(
            set.elapsed() < INTERVAL + Duration::from_secs(1),
            "{forbid}: still answered after {:?}",
            set.elapsed()
        );
    }
    ensure!(!conversation.is_answered(INTERVAL)?, "{forbid}: answered again");
    rules(node, allow)?;
    conversation.catch_up().with_context(|| allow.to_owned())?;
    conversation.talk(INTERVAL).with_context(|| allow.to_owned())?;
    Ok(())
}

#[test]
fn a_policy_takes_effect_within_the_interval_both_ways() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let (a, b) = (from.v4()?, to.v4()?);
    let mut conversation = Conversation::between(from.ns(), to.ns(), b)?;
    for member in &cluster.members {
        for (source, destination) in [(a, b), (b, a)] {
            promote(&cluster, &mut conversation)?;
            let rule = format!("FORWARD -s {source} -d {destination} -j DROP");
            forbid_and_allow(
                member.node(),
                &mut conversation,
                &format!("iptables -I {rule}"),
                &format!("iptables -D {rule}"),
            )?;
        }
    }
    promote(&cluster, &mut conversation)
}

#[test]
fn a_policy_in_nftables_takes_effect_within_the_interval() -> Result<()> {
    const RULES: &str = "nft -f - <<'END'
        table inet filter {
            chain rules { }
            chain forward {
                type filter hook forward priority filter; policy drop;
                ct state invalid drop
                jump rules
                ct state established,related accept
                ip saddr 10.77.0.0/16 accept
                ip6 saddr fd77::/48 accept
            }
        }
END
";
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, RULES)?;
    let (from, to) = ends(&cluster);
    for (address, match_) in [
        (to.v4()?, format!("ip daddr {}", to.v4()?)),
        (to.v6()?, format!("ip6 saddr {}", to.v6()?)),
    ] {
        let mut conversation = Conversation::between(from.ns(), to.ns(), address)?;
        promote(&cluster, &mut conversation)?;
        forbid_and_allow(
            cluster.members[0].node(),
            &mut conversation,
            &format!("nft add rule inet filter rules {match_} drop"),
            "nft flush chain inet filter rules",
        )?;
        promote(&cluster, &mut conversation)?;
    }
    Ok(())
}

#[test]
fn a_policy_cuts_a_transfer_that_comes_in_merged() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let bulk = Bulk::start(from.ns(), to.ns(), to.v4()?)?;
    let receiver = cluster.members[1].node();
    goes_on(&cluster, &bulk, "before the policy", || Ok(()))?;
    // The other way stays open, and proves nothing about this one.
    let rule = format!("FORWARD -s {} -d {} -j DROP", from.v4()?, to.v4()?);
    rules(receiver, &format!("iptables -I {rule}"))?;
    let set = std::time::Instant::now();
    loop {
        let before = bulk.received();
        std::thread::sleep(INTERVAL / 2);
        if bulk.received() == before {
            break;
        }
        ensure!(
            set.elapsed() < INTERVAL + Duration::from_secs(1),
            "data still arrives {:?} after it was forbidden",
            set.elapsed()
        );
    }
    rules(receiver, &format!("iptables -D {rule}"))?;
    let before = bulk.received();
    eventually("the transfer goes on", PROMOTED_WITHIN, || {
        Ok((bulk.received() > before).then_some(()))
    })
}

/// Has a transfer bypass the stack, does something, and makes sure that the transfer goes on.
fn goes_on(
    cluster: &Cluster,
    bulk: &Bulk,
    what: &str,
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    // Far shorter than what TCP waits once it is in trouble, longer than a busy machine's pauses.
    const PAUSE: Duration = Duration::from_secs(2);
    eventually("the transfer is promoted", PROMOTED_WITHIN, || {
        Ok((!flows(cluster.members[0].node())?.is_empty()).then_some(()))
    })?;
    let before = bulk.received();
    act()?;
    let pause = bulk.longest_pause(Duration::from_secs(4));
    ensure!(pause < PAUSE, "{what}: the transfer stood still for {pause:?}");
    ensure!(bulk.received() > before + (8 << 20), "{what}: the transfer crawls");
    Ok(())
}

/// Packets that were dropped as invalid.
fn invalid(node: &Node) -> Result<u64> {
    let list = node.run("iptables -nvxL KUBE-FORWARD")?;
    let line = list.lines().find(|line| line.contains("INVALID")).context("no INVALID rule")?;
    Ok(line.split_whitespace().next().context("no count")?.parse()?)
}

#[test]
fn a_transfer_goes_on_by_the_stack_when_it_has_to() -> Result<()> {
    let lab = Lab::new()?;
    let (store, mut cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let bulk = Bulk::start(from.ns(), to.ns(), to.v4()?)?;
    goes_on(&cluster, &bulk, "probes untracked for a moment", || {
        rules(cluster.members[1].node(), "iptables -t raw -I PREROUTING -p tcp -j NOTRACK")?;
        rules(cluster.members[1].node(), "iptables -t raw -D PREROUTING -p tcp -j NOTRACK")
    })?;
    // A new agent begins a new epoch: every flow takes the stack and proves itself anew.
    let plan = plan(1);
    let before = bulk.received();
    cluster.members[0].restart(&store, &plan)?;
    ensure!(bulk.received() > before, "nothing arrived while the agent restarted");
    goes_on(&cluster, &bulk, "after the agent's restart", || Ok(()))?;
    goes_on(&cluster, &bulk, "programs detached from the pod", || {
        rules(cluster.members[1].node(), "rm /sys/fs/bpf/flannel/flannel:1/pod_*")
    })?;
    let members = cluster.members;
    for member in members {
        let name = member.node().name().to_owned();
        let flannel_lab::cluster::Role::Agent(node, mut agent) = member.into_role() else {
            bail!("no agent")
        };
        let before = bulk.received();
        agent.process().stop(nix::sys::signal::Signal::SIGKILL, Duration::from_secs(5))?;
        rules(&node, "rm -r /sys/fs/bpf/flannel/flannel:1")?;
        let pause = bulk.longest_pause(Duration::from_secs(4));
        ensure!(
            pause < Duration::from_secs(2),
            "{name}: without eBPF it stood still for {pause:?}"
        );
        ensure!(bulk.received() > before + (8 << 20), "{name}: the transfer crawls");
        let dropped = invalid(&node)?;
        ensure!(dropped == 0, "{name}: {dropped} packets were invalid");
        ensure!(!node.path("/sys/fs/bpf/flannel/flannel:1").exists(), "{name}: pins are back");
    }
    Ok(())
}

/// How many packets of all entries have bypassed the stack, whatever the agent's command thinks of
/// these entries.
fn bypassed_ever(node: &Node) -> Result<u64> {
    let text = node.shell(&format!("bpftool -j map dump pinned {}/v*/FLOWS4", outcomes::PINS))?;
    let entries: Value = serde_json::from_slice(&text.stdout)?;
    let entries = entries.as_array().context("no entries")?.iter();
    let counts = entries.map(|entry| &entry.get("formatted").unwrap_or(entry)["value"]["bypassed"]);
    let both = |counts: &Value| -> Option<u64> { Some(counts[0].as_u64()? + counts[1].as_u64()?) };
    counts.map(|counts| both(counts).context("no counts")).sum()
}

#[test]
fn an_agent_that_is_gone_lets_flows_age_out() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    promote(&cluster, &mut conversation)?;
    let port = conversation.port()?;
    let members = cluster.members;
    for member in members {
        let flannel_lab::cluster::Role::Agent(node, mut agent) = member.into_role() else {
            bail!("no agent")
        };
        agent.process().stop(nix::sys::signal::Signal::SIGKILL, Duration::from_secs(5))?;
        eventually("no flow bypasses the stack", Duration::from_secs(15), || {
            conversation.talk(Duration::from_millis(50))?;
            Ok(flow(&node, port)?.is_none().then_some(()))
        })?;
        let before = bypassed_ever(&node)?;
        conversation.talk(INTERVAL * 2)?;
        let after = bypassed_ever(&node)?;
        ensure!(after == before, "{}: {before} to {after} without an agent", node.name());
        ensure!(invalid(&node)? == 0, "{}: invalid packets", node.name());
    }
    Ok(())
}

#[test]
fn conntrack_entries_outlive_their_timeout_while_the_flow_bypasses() -> Result<()> {
    // Far less than the story lasts. A connection that conntrack forgot would be a new one in the
    // middle, which the rule counts.
    const TIMERS: &str = "
        sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_established=2
        sysctl -qw net.netfilter.nf_conntrack_udp_timeout_stream=2
        sysctl -qw net.netfilter.nf_conntrack_udp_timeout=2
        iptables -t mangle -N MIDDLE
        iptables -t mangle -A MIDDLE -p tcp ! --syn -m conntrack --ctstate NEW -m comment --comment middle";
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    promote(&cluster, &mut conversation)?;
    all_rules(&cluster, TIMERS)?;
    // In FORWARD, in front of all others; before the connection is old enough to lapse.
    all_rules(&cluster, "iptables -t mangle -I FORWARD -j MIDDLE")?;
    conversation.talk(Duration::from_secs(7))?;
    promote(&cluster, &mut conversation)?;
    for member in &cluster.members {
        let list = member.node().run("iptables -t mangle -nvxL MIDDLE")?;
        let line = list.lines().find(|line| line.contains("middle")).context("no rule")?;
        ensure!(line.split_whitespace().next() == Some("0"), "{}: {list}", member.node().name());
    }
    Ok(())
}

/// kube-proxy's chains for one service with one backend, its cluster address and its node port.
fn service(
    node: &Node,
    cluster_ip: &str,
    node_port: u16,
    backend: std::net::SocketAddr,
) -> Result<()> {
    let name = format!("{node_port}");
    rules(
        node,
        &format!(
            "
        if ! iptables -t nat -N KUBE-SERVICES 2>/dev/null; then true; else
            iptables -t nat -A PREROUTING -j KUBE-SERVICES
            iptables -t nat -A OUTPUT -j KUBE-SERVICES
            iptables -t nat -N KUBE-MARK-MASQ
            iptables -t nat -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
            iptables -t nat -N KUBE-POSTROUTING
            iptables -t nat -A POSTROUTING -j KUBE-POSTROUTING
            iptables -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
            iptables -t nat -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
            iptables -t nat -A KUBE-POSTROUTING -j MASQUERADE
        fi
        iptables -t nat -N KUBE-SEP-{name}
        iptables -t nat -A KUBE-SEP-{name} -s {ip}/32 -j KUBE-MARK-MASQ
        iptables -t nat -A KUBE-SEP-{name} -p tcp -j DNAT --to-destination {backend}
        iptables -t nat -N KUBE-EXT-{name}
        iptables -t nat -A KUBE-EXT-{name} -j KUBE-MARK-MASQ
        iptables -t nat -A KUBE-EXT-{name} -j KUBE-SEP-{name}
        iptables -t nat -A KUBE-SERVICES -d {cluster_ip}/32 -p tcp --dport 80 -j KUBE-SEP-{name}
        iptables -t nat -A KUBE-SERVICES -p tcp --dport {node_port} -d {own} -j KUBE-EXT-{name}",
            ip = backend.ip(),
            own = node.v4()
        ),
    )
}

#[test]
fn services_keep_their_translation() -> Result<()> {
    const PORT: u16 = 8080;
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    all_rules(&cluster, KUBE_RULES)?;
    let (from, to) = ends(&cluster);
    let [alder, birch] = [cluster.members[0].node(), cluster.members[1].node()];
    let backend = |pod: &Pod| Ok::<_, anyhow::Error>(std::net::SocketAddr::new(pod.v4()?, PORT));
    service(alder, "10.96.0.10", 30080, backend(to)?)?;
    service(alder, "10.96.0.11", 30081, backend(from)?)?;
    rules(alder, "bridge link set dev veth0 hairpin on")?;
    let open = |pod: &Pod, target: String| -> Result<Conversation> {
        let listener = flannel_lab::conversation::listen(pod.ns(), backend(pod)?)?;
        Conversation::open(from.ns(), listener, Some(target.parse()?))
    };
    for (pod, target) in [
        (to, "10.96.0.10:80".to_owned()),
        (to, format!("{}:30080", alder.v4())),
        (from, "10.96.0.11:80".to_owned()),
    ] {
        let mut conversation = open(pod, target.clone())?;
        conversation.talk(INTERVAL * 6).with_context(|| target.clone())?;
        let translated = flows(alder)?;
        ensure!(translated.is_empty(), "{target}: {translated:#?} bypass the translation");
        // At the backend's node the stack changes nothing, so the flow may bypass it there.
        let at_backend = flow(birch, PORT)?.is_some();
        ensure!(at_backend == (pod.name() == to.name()), "{target}: {at_backend}");
        ensure!(invalid(alder)? + invalid(birch)? == 0, "{target}: invalid packets");
    }
    Ok(())
}

/// How many pod programs are attached on a node.
fn pod_programs(node: &Node) -> Result<usize> {
    let pins = node.shell("ls /sys/fs/bpf/flannel/flannel:1")?;
    let at_pods = |pin: &&str| pin.starts_with("pod_ingress") || pin.starts_with("pod_egress");
    Ok(String::from_utf8(pins.stdout)?.lines().filter(at_pods).count())
}

#[test]
fn pods_are_found_and_forgotten_by_themselves() -> Result<()> {
    let within = Duration::from_secs(5);
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    let member = &cluster.members[0];
    let wait = |count: usize| {
        eventually(&format!("{count} programs at pods"), within, || {
            Ok((pod_programs(member.node())? == count).then_some(()))
        })
    };
    wait(2)?;
    let late = member.node().add_pods(member.env(), 1)?;
    wait(4)?;
    let to = &cluster.members[1].pods()[0];
    let mut conversation = Conversation::between(late[0].ns(), to.ns(), to.v4()?)?;
    promote(&cluster, &mut conversation)?;
    let port = conversation.port()?;
    member.node().run("ip link del veth1")?;
    wait(2)?;
    eventually("the pod's flow is forgotten", within, || {
        Ok(flow(member.node(), port)?.is_none().then_some(()))
    })
}

#[test]
fn pods_that_somebody_else_works_on_are_left_alone() -> Result<()> {
    let lab = Lab::new()?;
    let (_store, cluster) = start(&lab, 1)?;
    let (from, to) = ends(&cluster);
    let alder = cluster.members[0].node();
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    let port = conversation.port()?;
    for (add, remove) in [
        (
            "tc qdisc add dev veth0 root tbf rate 10gbit burst 10mb latency 50ms",
            "tc qdisc del dev veth0 root",
        ),
        (
            "tc qdisc add dev veth0 clsact; tc filter add dev veth0 ingress prio 1 protocol ip u32 match ip dst 203.0.113.1/32 classid 1:1",
            "tc qdisc del dev veth0 clsact",
        ),
    ] {
        promote(&cluster, &mut conversation)?;
        rules(alder, add)?;
        eventually("the stack has the flow", Duration::from_secs(10), || {
            conversation.talk(Duration::from_millis(50))?;
            Ok(flow(alder, port)?.is_none().then_some(()))
        })
        .with_context(|| add.to_owned())?;
        conversation.talk(INTERVAL * 4)?;
        ensure!(flow(alder, port)?.is_none(), "{add}: promoted again");
        rules(alder, remove)?;
    }
    Ok(())
}
