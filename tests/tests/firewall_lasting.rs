//! Masquerading does not depend on the agent being there.

use std::thread::sleep;

use flannel_lab::prelude::*;
use nix::sys::signal::Signal;

/// Ends the agent and starts it again, several times, while new flows leave for the outside.
fn no_flow_leaves_with_a_pods_address(renderer: Renderer, signal: Signal) -> Result<()> {
    let lab = Lab::new()?;
    let mut nat = NatLab::start(&lab, renderer, &[])?;
    let (pod, web) = (nat.duo.ours.ns().clone(), nat.web.ns().clone());
    let (host, host_v6) = (nat.duo.alder.v4().parse()?, nat.duo.alder.v6().parse()?);
    nat.check()?;
    let flows = NewFlows::start(&pod, &web, nat.web.v4().parse()?)?;
    let flows_v6 = NewFlows::start(&pod, &web, nat.web.v6().parse()?)?;
    let running = LossMeter::start(&pod, &web, nat.web.v4().parse()?)?;
    let rules = nat.rules()?;
    for _ in 0..3 {
        nat.duo.agent.process().stop(signal, Duration::from_secs(10))?;
        ensure!(nat.rules()? == rules, "the end of the agent changed the rules");
        nat.duo.start_agent_again()?;
        let status = nat.duo.agent.status()?;
        ensure!(status["firewall"]["changes"] == 0, "right rules were written: {status}");
    }
    nat.duo.agent.process().stop(signal, Duration::from_secs(10))?;
    sleep(Duration::from_secs(1));
    flows.ensure_all_from(host)?;
    flows_v6.ensure_all_from(host_v6)?;
    running.stop()?.ensure_none(host)?;
    nat.check().context("without an agent")?;
    Ok(())
}

#[test]
fn iptables_rules_outlive_an_agent_that_is_told_to_stop() -> Result<()> {
    no_flow_leaves_with_a_pods_address(Renderer::Iptables, Signal::SIGTERM)
}

#[test]
fn nftables_rules_outlive_an_agent_that_is_killed() -> Result<()> {
    no_flow_leaves_with_a_pods_address(Renderer::Nftables, Signal::SIGKILL)
}

#[test]
fn switching_between_the_renderers_leaves_one_set_of_rules_and_no_gap() -> Result<()> {
    let lab = Lab::new()?;
    let mut nat = NatLab::start(&lab, Renderer::Iptables, &[])?;
    nat.check()?;
    // What a flanneld before v0.27 and a half-done clean-up leave.
    nat.tamper("iptables-nft -t nat -N FLANNEL-FWD")?;
    let flows = NewFlows::start(nat.duo.ours.ns(), nat.web.ns(), nat.web.v4().parse()?)?;
    for renderer in [Renderer::Nftables, Renderer::Iptables] {
        nat.duo.agent.process().stop(Signal::SIGTERM, Duration::from_secs(10))?;
        nat.duo.store.put_config(&renderer.config())?;
        nat.duo.start_agent_again()?;
        let rules = nat.rules()?;
        ensure!(rules.contains("table ip flannel") == (renderer == Renderer::Nftables), "{rules}");
        ensure!(rules.contains("FLANNEL-") == (renderer == Renderer::Iptables), "{rules}");
        if renderer == Renderer::Nftables {
            let chains = nat.duo.alder.run("iptables-nft-save")?;
            ensure!(!chains.contains("FLANNEL"), "{chains}");
        }
        nat.check().with_context(|| format!("after switching to {renderer:?}"))?;
    }
    flows.ensure_all_from(nat.duo.alder.v4().parse()?)?;
    Ok(())
}
