//! Rules of others that a shorter way would bypass: `--fast-path auto` takes the longer one while
//! they are there, says why, and comes back.

use flannel_lab::{agent::subcommand, prelude::*};

/// Short, so that stories are.
const INTERVAL: Duration = Duration::from_millis(400);

/// How soon a rule has to have its effect.
const SOON: Duration = Duration::from_secs(2);

/// What a host of a cluster has anyway: kube-proxy's rules, a policy engine that accepts and
/// drops, a firewall that lets the tunnel in.
const USUAL: &str = "
    iptables -P FORWARD DROP
    iptables -N KUBE-FORWARD
    iptables -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
    iptables -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
    iptables -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
    iptables -N KUBE-SERVICES
    iptables -A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j REJECT
    iptables -N KUBE-FIREWALL
    iptables -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
    iptables -A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES
    iptables -A FORWARD -j KUBE-FORWARD
    iptables -A FORWARD -s 10.77.0.0/16 -j ACCEPT
    iptables -A FORWARD -d 10.77.0.0/16 -j ACCEPT
    iptables -A FORWARD -m limit --limit 3/min -j LOG
    iptables -t mangle -N KUBE-KUBELET-CANARY
    iptables -t mangle -A POSTROUTING -o virbr0 -p udp -m udp --dport 68 -j CHECKSUM --checksum-fill
    iptables -t mangle -A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
    iptables -t nat -N KUBE-MARK-MASQ
    iptables -t nat -A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
    iptables -t nat -A PREROUTING -d 10.96.0.11/32 -j KUBE-MARK-MASQ
    iptables -t nat -N KUBE-POSTROUTING
    iptables -t nat -A POSTROUTING -j KUBE-POSTROUTING
    iptables -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
    iptables -t nat -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
    iptables -t nat -A KUBE-POSTROUTING -j MASQUERADE
    iptables -A INPUT -i lo -j ACCEPT
    iptables -A INPUT -j KUBE-FIREWALL
    iptables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
    iptables -A INPUT -m conntrack --ctstate INVALID -j DROP
    iptables -A INPUT -s 198.51.100.7 -j DROP
    iptables -A INPUT -p tcp -m multiport --dports 22,10250 -m limit --limit 1/sec -j ACCEPT
    iptables -A INPUT -p icmp -j ACCEPT
    iptables -A INPUT -s 192.0.2.0/24 -p udp -m udp --dport 8472 -j ACCEPT
    iptables -A INPUT -m limit --limit 3/min -j LOG
    iptables -P INPUT DROP";

fn plan() -> Plan {
    Plan {
        agents: 2,
        flags: vec![
            "--datapath=ebpf".to_owned(),
            format!("--flow-interval-ms={}", INTERVAL.as_millis()),
        ],
        ..Plan::default()
    }
}

fn run(node: &Node, script: &str) -> Result<()> {
    let output = node.shell(&format!("set -e; {script}"))?;
    ensure!(output.status.success(), "{script}: {output:?}");
    Ok(())
}

/// Mode and reason, from the status.
fn mode(member: &flannel_lab::cluster::Member) -> Result<(String, String)> {
    let status = member.agent().context("no agent")?.status()?;
    let datapath = &status["backend"]["datapath"];
    let text = |name: &str| datapath[name].as_str().unwrap_or_default().to_owned();
    Ok((text("fast_path"), text("reason")))
}

fn wait_mode(member: &flannel_lab::cluster::Member, wanted: &str, named: &str) -> Result<()> {
    let mut last = (String::new(), String::new());
    eventually(&format!("mode {wanted}, naming {named:?}"), SOON, || {
        last = mode(member)?;
        Ok((last.0 == wanted && last.1.contains(named)).then_some(()))
    })
    .with_context(|| format!("{last:?}"))
}

/// Adds a rule, expects a mode with a reason that names it, removes it, expects flows.
fn story(rules: &[(&str, &str, &str, &str)]) -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan())?;
    let alder = &cluster.members[0];
    wait_mode(alder, "flows", "")?;
    for (add, remove, wanted, named) in rules {
        run(alder.node(), add)?;
        wait_mode(alder, wanted, named).with_context(|| (*add).to_owned())?;
        run(alder.node(), remove)?;
        wait_mode(alder, "flows", "").with_context(|| (*remove).to_owned())?;
        ensure!(mode(alder)?.1.is_empty(), "{:?}", mode(alder)?);
    }
    Ok(())
}

/// A rule of iptables, or of another program like it, as [`story`] wants it.
fn iptables(program: &str, rules: &[(&str, &str, &str)]) -> Result<()> {
    let lines: Vec<_> = rules
        .iter()
        .map(|(rule, wanted, named)| {
            let (table, rest) = match rule.strip_prefix("-t ").and_then(|r| r.split_once(' ')) {
                Some((table, rest)) => (table, rest),
                None => ("filter", *rule),
            };
            (
                format!("{program} -t {table} -I {rest}"),
                format!("{program} -t {table} -D {rest}"),
                *wanted,
                *named,
            )
        })
        .collect();
    let lines: Vec<_> =
        lines.iter().map(|(add, del, wanted, named)| (&**add, &**del, *wanted, *named)).collect();
    story(&lines)
}

/// What xtables can do to single packets.
const INNER: [(&str, &str, &str); 9] = [
    ("-t mangle PREROUTING -s 10.77.0.0/16 -p tcp -j MARK --set-mark 7", "stack", "MARK"),
    ("-t mangle FORWARD -p tcp -j DSCP --set-dscp 10", "stack", "DSCP"),
    ("-t mangle POSTROUTING -d 10.77.0.0/16 -j TTL --ttl-set 9", "stack", "chain POSTROUTING"),
    ("-t raw PREROUTING -s 10.77.0.0/16 -j CT --notrack", "stack", "raw"),
    ("FORWARD -p tcp -j NFQUEUE --queue-num 3 --queue-bypass", "stack", "rule 1 of chain FORWARD"),
    ("FORWARD -m limit --limit 10/s -j ACCEPT", "stack", "limit"),
    (
        "FORWARD -m connbytes --connbytes 9999999: --connbytes-dir both --connbytes-mode bytes -j DROP",
        "stack",
        "connbytes",
    ),
    ("FORWARD -m length --length 1400: -j ACCEPT", "stack", "length"),
    ("FORWARD -m conntrack --ctstate ESTABLISHED -j LOG", "stack", "filter"),
];

/// What concerns outer packets, which come without a proof.
const OUTER: [(&str, &str, &str); 4] = [
    ("INPUT -s 192.0.2.12 -p udp -j DROP", "off", "rule 1 of chain INPUT"),
    ("OUTPUT -o eth0 -p udp --dport 8472 -j REJECT", "off", "chain OUTPUT"),
    ("-t mangle OUTPUT -p udp --dport 8472 -j DSCP --set-dscp 46", "off", "DSCP"),
    ("-t raw PREROUTING -i eth0 -p udp -j CT --notrack", "off", "raw"),
];

#[test]
fn what_iptables_does_to_single_packets_keeps_flows_on_the_stack() -> Result<()> {
    iptables("iptables-nft", &INNER)
}

#[test]
fn what_iptables_does_to_outer_packets_leaves_them_to_the_device() -> Result<()> {
    iptables("iptables-nft", &OUTER)
}

#[test]
fn rules_of_legacy_iptables_count_as_well() -> Result<()> {
    let rules: Vec<_> = INNER.iter().chain(&OUTER).step_by(2).copied().collect();
    iptables("iptables-legacy", &rules)
}

#[test]
fn what_nftables_does_to_single_packets_keeps_flows_on_the_stack() -> Result<()> {
    let table = |family: &str, hook: &str, rule: &str| {
        format!(
            "nft 'add table {family} foreign; add chain {family} foreign work; \
             add chain {family} foreign base {{ type filter hook {hook}; }}; \
             add rule {family} foreign base jump work; add rule {family} foreign work {rule}'"
        )
    };
    let forward = "forward priority 5";
    let lines = [
        ("inet", forward, "meta mark set 7", "meta mark set"),
        ("inet", forward, "tcp flags & psh == psh accept", "TCP flags"),
        ("ip", forward, "limit rate over 10/second drop", "rule 1 of chain work of table ip"),
        ("ip", forward, "quota over 10 mbytes drop", "quota"),
        ("ip", forward, "ip ttl set 9", "payload"),
        ("ip", forward, "ip dscp ef accept", "payload"),
        ("inet", forward, "ct state established log", "log"),
        ("inet", "prerouting priority -300", "ip saddr 10.77.0.0/16 notrack", "notrack"),
        ("bridge", "input priority 0", "ether type ip meta mark set 7", "table bridge foreign"),
        ("netdev", "ingress device cni0 priority 0", "ip ttl set 9", "table netdev foreign"),
    ];
    let lines: Vec<_> = lines
        .iter()
        .map(|(family, hook, rule, named)| {
            (table(family, hook, rule), format!("nft delete table {family} foreign"), *named)
        })
        .collect();
    let lines: Vec<_> = lines.iter().map(|(a, d, named)| (&**a, &**d, "stack", *named)).collect();
    story(&lines)
}

#[test]
fn what_nftables_does_to_outer_packets_leaves_them_to_the_device() -> Result<()> {
    let delete = "nft delete table inet foreign";
    story(&[
        (
            "nft 'add table inet foreign; add chain inet foreign in { type filter hook input priority 0; policy drop; }; \
             add rule inet foreign in iif lo accept; add rule inet foreign in tcp dport 22 accept; add rule inet foreign in ct state established,related accept'",
            delete,
            "off",
            "the policy of chain in of table inet foreign drops all tunnel packets",
        ),
        (
            "nft 'add table inet foreign; add chain inet foreign out { type filter hook output priority 0; }; \
             add rule inet foreign out ip daddr 192.0.2.12 udp dport 8000-9000 drop'",
            delete,
            "off",
            "rule 1 of chain out",
        ),
        (
            "nft 'add table netdev foreign; add chain netdev foreign in { type filter hook ingress device eth0 priority 0; }; \
             add rule netdev foreign in udp dport 8472 limit rate over 1000000/second drop'",
            "nft delete table netdev foreign",
            "off",
            "limit",
        ),
    ])
}

#[test]
fn what_others_do_by_tc_to_all_pods_counts_as_well() -> Result<()> {
    let patience = Duration::from_secs(10);
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan())?;
    let alder = &cluster.members[0];
    let shaped = "root tbf rate 10gbit burst 10mb latency 50ms";
    let filter = "prio 1 protocol ip u32 match ip dst 203.0.113.1/32 classid 1:1";
    for (add, remove, wanted, named) in [
        (
            format!("tc qdisc add dev cni0 {shaped}"),
            "tc qdisc del dev cni0 root",
            "stack",
            "device cni0",
        ),
        (
            format!("tc qdisc add dev flannel.1 {shaped}"),
            "tc qdisc del dev flannel.1 root",
            "off",
            "device flannel.1",
        ),
        (
            format!(
                "tc qdisc add dev flannel.1 clsact; tc filter add dev flannel.1 ingress {filter}"
            ),
            "tc qdisc del dev flannel.1 clsact",
            "stack",
            "device flannel.1",
        ),
    ] {
        let wait = |wanted: &str, named: &str| {
            eventually(&format!("mode {wanted}, naming {named:?}"), patience, || {
                let (mode, reason) = mode(alder)?;
                Ok((mode == wanted && reason.contains(named)).then_some(()))
            })
        };
        wait("flows", "")?;
        run(alder.node(), &add)?;
        wait(wanted, named).with_context(|| add.clone())?;
        run(alder.node(), remove)?;
        wait("flows", "").with_context(|| remove.to_owned())?;
    }
    Ok(())
}

fn promoted(node: &Node) -> Result<bool> {
    let output = subcommand(node, &["flows", "--output=json"])?;
    let flows: Value = serde_json::from_slice(&output.stdout)?;
    Ok(flows.as_array().is_some_and(|flows| !flows.is_empty()))
}

#[test]
fn usual_rules_are_no_obstacle_and_running_flows_follow_the_mode() -> Result<()> {
    let patience = Duration::from_secs(10);
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let cluster = Cluster::start(&lab, &store, &plan())?;
    for member in &cluster.members {
        run(member.node(), USUAL)?;
    }
    let alder = &cluster.members[0];
    let (from, to) = (&alder.pods()[0], &cluster.members[1].pods()[0]);
    let mut conversation = Conversation::between(from.ns(), to.ns(), to.v4()?)?;
    let mut wait = |wanted: bool| {
        eventually(&format!("promoted: {wanted}"), patience, || {
            conversation.talk(Duration::from_millis(50))?;
            Ok((promoted(alder.node())? == wanted).then_some(()))
        })
    };
    wait(true).with_context(|| format!("{:?}", mode(alder)))?;
    run(alder.node(), "iptables -t mangle -A PREROUTING -s 10.77.0.0/16 -j MARK --set-mark 7")?;
    wait_mode(alder, "stack", "MARK")?;
    wait(false)?;
    let metrics = alder.agent().context("no agent")?.get("/metrics")?.body;
    let line = metrics.lines().find(|line| line.starts_with("flannel_fast_path_info"));
    let line = line.context("no such metric")?;
    ensure!(line.contains(r#"mode="stack""#) && line.contains("MARK"), "{line}");
    run(alder.node(), "iptables -t mangle -F PREROUTING")?;
    wait_mode(alder, "flows", "")?;
    wait(true)
}
