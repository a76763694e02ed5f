//! The smallest network with a stranger in it: one node of ours and one kernel peer.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    agent::{Agent, READY_WITHIN, SubnetEnv},
    kernel_peer::{KernelPeer, PeerSpec, RemoteVtep, vteps_of},
    lab::Lab,
    lease_store::LeaseStore,
    node::Node,
    pod::Pod,
    traffic,
    vxlan_view::VxlanView,
    wait::eventually,
};

/// `alder` (192.0.2.11) runs our agent, `birch` (192.0.2.12, 10.77.200.0/24) is a kernel peer;
/// a pod on each.
#[derive(Debug)]
pub struct Duo<S> {
    /// The store.
    pub store: S,
    /// The running agent.
    pub agent: Agent,
    /// Our node.
    pub alder: Node,
    /// The kernel peer.
    pub birch: KernelPeer,
    /// The agent's flags besides the lab's usual ones.
    pub flags: Vec<String>,
    /// What the agent wrote.
    pub env: SubnetEnv,
    /// Our pod.
    pub ours: Pod,
    /// The kernel peer's pod.
    pub theirs: Pod,
    /// The lab, which outlives what stands in it.
    pub lab: Lab,
}

impl<S: LeaseStore> Duo<S> {
    /// Both nodes up, leases exchanged, pods reaching each other.
    pub fn start(lab: &Lab, store: S, config: &str, dual: bool, flags: &[&str]) -> Result<Self> {
        Self::start_after(lab, store, config, dual, flags, |_| Ok(()))
    }

    /// The same, with something done to our node before the agent comes.
    pub fn start_after(
        lab: &Lab,
        store: S,
        config: &str,
        dual: bool,
        flags: &[&str],
        before: impl FnOnce(&Node) -> Result<()>,
    ) -> Result<Self> {
        store.put_config(config)?;
        let alder = lab.node("alder")?;
        before(&alder)?;
        let spec = if dual { PeerSpec::dual(200) } else { PeerSpec::v4(200) };
        let birch = KernelPeer::new(lab.node("birch")?, spec)?;
        let (key, lease) = birch.lease();
        store.put_lease(&key, &lease)?;
        store.register(&alder)?;
        let mut all = store.flags();
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let mut agent = alder.agent(&all)?;
        let env = agent.wait_ready(READY_WITHIN)?;
        birch.learn(&env.key()?, &own_lease(&store, &env)?)?;
        let ours = alder.pod(&env)?;
        let theirs = birch.node().pod(&birch.env()?)?;
        for address in theirs.addresses() {
            traffic::wait_reaches(ours.ns(), address, Duration::from_secs(5))
                .with_context(|| agent.log())?;
        }
        Ok(Self { store, agent, alder, birch, flags: all, env, ours, theirs, lab: lab.clone() })
    }

    /// IPv4 only, the plainest configuration.
    pub fn plain(lab: &Lab, store: S) -> Result<Self> {
        Self::start(
            lab,
            store,
            r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#,
            false,
            &[],
        )
    }

    /// Both families.
    pub fn dual(lab: &Lab, store: S) -> Result<Self> {
        Self::start(
            lab,
            store,
            r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#,
            true,
            &[],
        )
    }

    /// Both families, and always the same subnets, so that every run's packets are the same. On
    /// both nodes the devices complete checksums and cut segments as told, and merge nothing: what
    /// they merge depends on the moment.
    pub fn repeatable(lab: &Lab, store: S, flags: &[&str], offload: bool) -> Result<Self> {
        const CONFIG: &str = r#"{"Network":"10.77.0.0/16","SubnetMin":"10.77.50.0",
            "SubnetMax":"10.77.50.0","EnableIPv6":true,"IPv6Network":"fd77::/48",
            "IPv6SubnetMin":"fd77:0:0:50::","IPv6SubnetMax":"fd77:0:0:50::",
            "Backend":{"Type":"vxlan"}}"#;
        let duo = Self::start(lab, store, CONFIG, true, flags)?;
        let state = if offload { "on" } else { "off" };
        for node in [&duo.alder, duo.birch.node()] {
            node.run(&format!("ethtool -K eth0 tx {state}"))?;
            // A veth device with XDP merges, too.
            for device in ["eth0", "flannel.1", "flannel-v6.1"] {
                node.run(&format!("ethtool -K {device} gro off"))?;
            }
        }
        Ok(duo)
    }

    /// Our lease as the store has it.
    pub fn own_lease(&self) -> Result<Value> {
        own_lease(&self.store, &self.env)
    }

    /// The kernel peer as our kernel has to know it, by family.
    pub fn birch_vteps(&self) -> Result<(RemoteVtep, Option<RemoteVtep>)> {
        let (key, lease) = self.birch.lease();
        let (v4, v6) = vteps_of(&key, &lease)?;
        Ok((v4.context("the peer has no IPv4 half")?, v6))
    }

    /// Starts another agent with the same flags in place of the one there is, which must have
    /// ended.
    pub fn start_agent_again(&mut self) -> Result<()> {
        ensure!(self.agent.process().exited()?.is_some(), "the agent is still running");
        self.agent = self.alder.agent(&self.flags)?;
        self.env = self.agent.wait_ready(READY_WITHIN)?;
        Ok(())
    }

    /// Waits until `flannel.1` holds exactly this.
    pub fn wait_view(&self, wanted: &VxlanView, within: Duration) -> Result<()> {
        wait_view(&self.alder, "flannel.1", wanted, within)
            .with_context(|| format!("log:\n{}", self.agent.log()))
    }

    /// What `flannel.1` has to hold with these peers.
    pub fn wanted(&self, peers: &[RemoteVtep]) -> Result<VxlanView> {
        let base = self.env.subnet_v4()?;
        let base = base.split_once('/').context("no length")?.0;
        VxlanView::wanted(&format!("{base}/32"), peers)
    }
}

/// Waits until a VXLAN device holds exactly this.
pub fn wait_view(node: &Node, device: &str, wanted: &VxlanView, within: Duration) -> Result<()> {
    eventually(&format!("{device} as wanted"), within, || {
        let view = VxlanView::read(node.ns(), device)?;
        ensure!(view == *wanted, "wanted {wanted:#?}, there is {view:#?}");
        Ok(Some(()))
    })
}

fn own_lease(store: &dyn LeaseStore, env: &SubnetEnv) -> Result<Value> {
    let key = env.key()?;
    store.leases()?.remove(&key).with_context(|| format!("no lease {key} in the store"))
}
