//! The firewall among others: their rules stay, what they drop is named, and a lock they hold
//! keeps nobody from the network.

use flannel_lab::{prelude::*, process::Process};

/// How soon news has to show.
const SOON: Duration = Duration::from_secs(3);

fn warnings(nat: &NatLab) -> Result<String> {
    Ok(nat.duo.agent.status()?["firewall"]["warnings"].to_string())
}

#[test]
fn rules_of_others_stay_and_those_that_drop_our_packets_are_named() -> Result<()> {
    let lab = Lab::new()?;
    let nat = NatLab::start(&lab, Renderer::Nftables, &[])?;
    ensure!(warnings(&nat)? == "[]", "{}", warnings(&nat)?);
    nat.tamper(
        "nft 'add table inet site; \
         add chain inet site gate { type filter hook forward priority 5; policy drop; }; \
         add rule inet site gate ct state established accept'",
    )?;
    let named = |text: &'static str| {
        eventually(&format!("a warning with `{text}`"), SOON, || {
            Ok(warnings(&nat)?.contains(text).then_some(()))
        })
    };
    named("chain gate of table inet site")?;
    ensure!(nat.duo.agent.readiness()?.0, "a warning is no reason not to be ready");
    nat.tamper("nft flush chain ip flannel-ipv4 postrtg")?;
    eventually("our rules are back", SOON, || {
        Ok(nat.rules()?.contains("masquerade").then_some(()))
    })?;
    let theirs = nat.duo.alder.run("nft list table inet site")?;
    ensure!(theirs.contains("policy drop") && theirs.contains("established"), "{theirs}");
    nat.tamper("nft delete table inet site")?;
    eventually("no warning any more", SOON, || Ok((warnings(&nat)? == "[]").then_some(())))?;
    Ok(())
}

#[test]
fn a_reject_rule_ahead_of_ours_is_named_and_first_goes_before_it() -> Result<()> {
    let reject = |node: &Node| node.run("iptables-nft -A FORWARD -j REJECT").map(drop);
    let lab = Lab::new()?;
    let nat = NatLab::start_after(&lab, Renderer::Iptables, &["--forward-position=first"], reject)?;
    nat.check()?;
    ensure!(warnings(&nat)? == "[]", "{}", warnings(&nat)?);
    // Whoever moves ahead of us is moved behind us.
    nat.tamper("iptables-nft -I FORWARD -j REJECT")?;
    eventually("ours is the first again", SOON, || {
        let rules = nat.duo.alder.run("iptables-nft -S FORWARD")?;
        Ok(rules.lines().nth(1).filter(|rule| rule.contains("FLANNEL-FWD")).map(drop))
    })?;
    let mut nat = nat;
    nat.duo.agent.process().stop(nix::sys::signal::Signal::SIGTERM, SOON)?;
    nat.tamper("iptables-nft -F FORWARD && iptables-nft -A FORWARD -j REJECT")?;
    nat.duo.flags.retain(|flag| !flag.starts_with("--forward-position"));
    nat.duo.start_agent_again()?;
    eventually("a warning about the rule", SOON, || {
        let warnings = warnings(&nat)?;
        Ok((warnings.contains("REJECT") && warnings.contains("--forward-position=first"))
            .then_some(()))
    })
}

#[test]
fn nothing_is_installed_where_nothing_is_asked_for() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let config = Renderer::Nftables.config();
    let duo = Duo::start(&lab, store, &config, true, &["--iptables-forward-rules=false"])?;
    let ruleset = duo.alder.run("nft list ruleset")?;
    ensure!(ruleset.trim().is_empty(), "{ruleset}");
    Ok(())
}

#[test]
fn a_held_xtables_lock_delays_the_rules_and_no_peer() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(&Renderer::Iptables.config())?;
    let alder = lab.node("alder")?;
    // What makes this a host of the legacy tables, the only ones with a lock.
    alder.run("iptables-legacy -t nat -A POSTROUTING -s 172.31.0.0/16 -j MASQUERADE")?;
    let mut command = alder.command("flock");
    command.args(["--no-fork", "/run/xtables.lock", "sh", "-c", "echo held; exec sleep 600"]);
    let mut holder = Process::spawn(command, &alder.dir().join("lock.log"), false)?;
    eventually("the lock is held", SOON, || Ok(holder.log().contains("held").then_some(())))?;
    let peer = KernelPeer::new(lab.node("birch")?, PeerSpec::dual(200))?;
    let (key, lease) = peer.lease();
    store.put_lease(&key, &lease)?;
    let mut flags = store.flags();
    flags.push("--ip-masq".to_owned());
    let mut agent = alder.agent(&flags)?;
    eventually("the peer is served", SOON, || {
        Ok((agent.status()?["peers_applied"] == 1).then_some(()))
    })?;
    let (ready, reasons) = agent.readiness()?;
    ensure!(!ready && reasons.contains("firewall"), "{reasons}");
    agent.wait_complaint(&["firewall", "xtables lock"], Duration::from_secs(15))?;
    // A peer that comes meanwhile does not wait either.
    let another = PeerSpec::dual(201);
    store.put_lease(
        &another.subnet.replace('/', "-"),
        &json!({"PublicIP": "192.0.2.77", "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": "02:fa:00:00:00:77"}}),
    )?;
    eventually("the second peer is served", SOON, || {
        Ok((agent.status()?["peers_applied"] == 2).then_some(()))
    })?;
    holder.kill()?;
    agent.wait_ready(READY_WITHIN)?;
    Ok(())
}

/// Minor page faults of all children that a process has waited for: more with each of them.
fn faults_of_children(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no name in stat")?;
    Ok(fields.split_whitespace().nth(8).context("a short stat")?.parse()?)
}

#[test]
fn no_program_is_started_while_our_rules_stand_whatever_others_do_with_theirs() -> Result<()> {
    for renderer in [Renderer::Iptables, Renderer::Nftables] {
        let lab = Lab::new()?;
        let nat = NatLab::start(&lab, renderer, &["--iptables-resync=1"])?;
        let started = || faults_of_children(nat.duo.agent.pid());
        // A repair shows that the figure tells.
        let before = started()?;
        let changes =
            || -> Result<Value> { Ok(nat.duo.agent.status()?["firewall"]["changes"].clone()) };
        let written = changes()?;
        nat.tamper("nft flush ruleset")?;
        eventually("a repair is told", SOON, || Ok((changes()? != written).then_some(())))?;
        ensure!(started()? > before, "a repair without a program");
        let settled = started()?;
        for round in 0..20 {
            // As kube-proxy does: chains and rules of its own come and go.
            nat.tamper(&format!(
                "iptables-nft -t nat -N KUBE-{round} && iptables-nft -t nat -A KUBE-{round} -j RETURN && \
                 iptables-nft -t nat -I POSTROUTING -s 172.31.0.{round} -j KUBE-{round} && \
                 nft add table ip site{round}"
            ))?;
            std::thread::sleep(Duration::from_millis(150));
        }
        ensure!(started()? == settled, "{renderer:?}: programs were started");
        nat.check()?;
    }
    Ok(())
}
