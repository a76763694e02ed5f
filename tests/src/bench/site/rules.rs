//! The rules that packets meet on a node: those of kube-proxy and those of flannel.

use std::{fmt::Write as _, io::Write as _, process::Stdio};

use anyhow::{Context, Result, ensure};

use crate::node::Node;

/// How many services the node proxies. Each new connection that is to none of them is compared
/// with all.
const SERVICES: u8 = 50;

/// The rule shapes of kube-proxy in iptables mode, its drop of invalid packets included, with
/// the FORWARD policy of a node that runs Docker. Every packet is tracked.
pub fn install_kube_proxy(node: &Node) -> Result<()> {
    restore(node, &kube_proxy())?;
    // A connection that is over is remembered for two minutes by default; the many connections
    // of a benchmark would fill the table of the whole machine.
    node.ns().sysctls(&[("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "5")])?;
    // Absent where br_netfilter is not in use.
    for family in ["iptables", "ip6tables"] {
        let key = format!("net/bridge/bridge-nf-call-{family}");
        if node.ns().sysctl(&key).is_ok() {
            node.ns().sysctls(&[(&key, "1")])?;
        }
    }
    Ok(())
}

/// The rules of a flannel that masquerades and accepts what it forwards, for nodes that no
/// flannel runs on. `network` is the cluster's, `subnet` the node's.
pub fn install_flannel(node: &Node, network: &str, subnet: &str) -> Result<()> {
    restore(node, &flannel(network, subnet))
}

/// Whether somebody has installed flannel's rules, in iptables or nftables.
pub fn has_flannel(node: &Node) -> Result<bool> {
    let output = node.shell("iptables-save -t filter; nft list tables")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.contains("FLANNEL-FWD") || text.contains("flannel-ipv4"))
}

fn restore(node: &Node, rules: &str) -> Result<()> {
    let mut command = node.command("iptables-restore");
    command.args(["--noflush", "--wait"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start iptables-restore")?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that fails at the first line does not read the rest; its status tells.
        let _ = stdin.write_all(rules.as_bytes());
    }
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "iptables-restore on {}: {}: {}",
        node.name(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

fn kube_proxy() -> String {
    let mut nat = String::from(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
         :KUBE-NODEPORTS - [0:0]\n",
    );
    let mut rules = String::from(
        "-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n\
         -A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -j MASQUERADE\n",
    );
    for n in 1..=SERVICES {
        // Writing to a string does not fail.
        let _ = write!(nat, ":KUBE-SVC-{n} - [0:0]\n:KUBE-SEP-{n} - [0:0]\n");
        let _ = write!(
            rules,
            "-A KUBE-SERVICES -d 10.96.0.{n}/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-{n}\n\
             -A KUBE-SVC-{n} ! -s 10.77.0.0/16 -d 10.96.0.{n}/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ\n\
             -A KUBE-SVC-{n} -j KUBE-SEP-{n}\n\
             -A KUBE-SEP-{n} -s 10.77.250.{n}/32 -j KUBE-MARK-MASQ\n\
             -A KUBE-SEP-{n} -p tcp -m tcp -j DNAT --to-destination 10.77.250.{n}:8080\n"
        );
    }
    rules.push_str("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\nCOMMIT\n");
    format!(
        "{nat}{rules}\
         *filter\n:FORWARD DROP [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-SERVICES - [0:0]\n\
         :KUBE-EXTERNAL-SERVICES - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-FIREWALL - [0:0]\n\
         -A INPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL\n\
         -A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES\n\
         -A INPUT -j KUBE-FIREWALL\n\
         -A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL\n\
         -A FORWARD -j KUBE-FORWARD\n\
         -A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         -A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES\n\
         -A OUTPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL\n\
         -A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES\n\
         -A OUTPUT -j KUBE-FIREWALL\n\
         -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
         COMMIT\n"
    )
}

fn flannel(network: &str, subnet: &str) -> String {
    format!(
        "*nat\n:FLANNEL-POSTRTG - [0:0]\n\
         -A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n\
         -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\" -j RETURN\n\
         -A FLANNEL-POSTRTG -s {subnet} -d {network} -m comment --comment \"flanneld masq\" -j RETURN\n\
         -A FLANNEL-POSTRTG -s {network} -d {subnet} -m comment --comment \"flanneld masq\" -j RETURN\n\
         -A FLANNEL-POSTRTG ! -s {network} -d {subnet} -m comment --comment \"flanneld masq\" -j RETURN\n\
         -A FLANNEL-POSTRTG -s {network} ! -d 224.0.0.0/4 -m comment --comment \"flanneld masq\" -j MASQUERADE --random-fully\n\
         -A FLANNEL-POSTRTG ! -s {network} -d {network} -m comment --comment \"flanneld masq\" -j MASQUERADE --random-fully\n\
         COMMIT\n\
         *filter\n:FLANNEL-FWD - [0:0]\n\
         -A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n\
         -A FLANNEL-FWD -s {network} -m comment --comment \"flanneld forward\" -j ACCEPT\n\
         -A FLANNEL-FWD -d {network} -m comment --comment \"flanneld forward\" -j ACCEPT\n\
         COMMIT\n"
    )
}
