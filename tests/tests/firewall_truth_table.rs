//! Who is seen under which address is the same with iptables and nftables, in both families,
//! before somebody tampers with the rules and after.

use flannel_lab::prelude::*;

/// How soon rules that were tampered with are back.
const REPAIRED_WITHIN: Duration = Duration::from_secs(2);

fn holds_through(renderer: Renderer, tampering: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let nat = NatLab::start(&lab, renderer, &[])?;
    let rows = nat.check()?;
    ensure!(rows >= 34, "only {rows} rows");
    let rules = nat.rules()?;
    ensure!(rules.contains("FLANNEL") != (renderer == Renderer::Nftables), "{rules}");
    for line in tampering {
        nat.tamper(line)?;
        eventually(&format!("the rules are back after `{line}`"), REPAIRED_WITHIN, || {
            let now = nat.rules()?;
            ensure!(now == rules, "there are\n{now}\ninstead of\n{rules}");
            Ok(Some(()))
        })
        .with_context(|| nat.duo.agent.log())?;
        nat.check().with_context(|| format!("after `{line}`"))?;
    }
    ensure!(nat.duo.agent.readiness()?.0, "{:?}", nat.duo.agent.readiness()?);
    ensure!(nat.duo.agent.metric("flannel_repairs_total")? >= 1.0, "no repair was counted");
    Ok(())
}

#[test]
fn with_iptables() -> Result<()> {
    holds_through(
        Renderer::Iptables,
        &[
            "iptables-nft -t nat -D FLANNEL-POSTRTG 3 && \
             iptables-nft -t nat -A FLANNEL-POSTRTG -d 10.77.0.0/16 -j RETURN",
            "ip6tables-nft -t nat -I FLANNEL-POSTRTG -s fd77::/48 -j MASQUERADE",
            "iptables-nft -t nat -F && ip6tables-nft -t nat -F",
            "iptables-nft -t nat -A POSTROUTING -m comment --comment 'flanneld masq' -j FLANNEL-POSTRTG",
            "nft flush ruleset",
        ],
    )
}

#[test]
fn with_nftables() -> Result<()> {
    holds_through(
        Renderer::Nftables,
        &[
            "nft insert rule ip flannel-ipv4 postrtg ip saddr 10.77.0.0/16 masquerade",
            "nft add rule ip6 flannel-ipv6 postrtg ip6 saddr fd77::/48 masquerade",
            "nft flush chain ip flannel-ipv4 postrtg",
            "nft add chain ip flannel-ipv4 forward '{ policy drop; }'",
            "nft delete table ip6 flannel-ipv6",
            "nft flush ruleset",
        ],
    )
}

#[test]
fn with_the_legacy_tables_where_the_host_uses_them() -> Result<()> {
    let lab = Lab::new()?;
    // Without the resync, which would hide what is noticed by looking.
    let nat = NatLab::start_after(&lab, Renderer::Iptables, &["--iptables-resync=60"], |node| {
        node.run("iptables-legacy -t nat -A POSTROUTING -s 172.31.0.0/16 -j MASQUERADE").map(drop)
    })?;
    nat.check()?;
    let rules = nat.rules()?;
    for line in [
        "iptables-legacy -t nat -F FLANNEL-POSTRTG",
        "ip6tables-legacy -t nat -D POSTROUTING 1",
        "iptables-legacy -F FORWARD && iptables-legacy -P FORWARD DROP",
        // Neither the number of rules nor their size tells.
        "rule=$(iptables-legacy -t nat -S FLANNEL-POSTRTG 3) && \
         iptables-legacy -t nat -D FLANNEL-POSTRTG 3 && eval iptables-legacy -t nat $rule",
    ] {
        nat.tamper(line)?;
        eventually(&format!("the rules are back after `{line}`"), REPAIRED_WITHIN, || {
            Ok((nat.rules()? == rules).then_some(()))
        })
        .with_context(|| nat.duo.agent.log())?;
    }
    nat.check()?;
    let all = nat.duo.alder.run("iptables-legacy -t nat -S POSTROUTING")?;
    ensure!(all.contains("172.31.0.0/16"), "somebody's rule is gone:\n{all}");
    let status = nat.duo.agent.status()?;
    ensure!(status["firewall"]["renderer"] == "iptables (legacy)", "{}", status["firewall"]);
    Ok(())
}
