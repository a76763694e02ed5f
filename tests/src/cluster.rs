//! A whole cluster: nodes with agents, on demand one kernel peer among them, and pods.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{
    agent::{Agent, READY_WITHIN, SubnetEnv},
    kernel_peer::{KernelPeer, PeerSpec, vteps_of},
    lab::Lab,
    lease_store::LeaseStore,
    node::Node,
    pod::Pod,
    traffic,
    vxlan_view::VxlanView,
    wait::eventually,
};

/// Names of nodes, in order; beyond them `node<n>`.
const NAMES: [&str; 6] = ["alder", "birch", "cedar", "dogwood", "elm", "fir"];

/// What a cluster is to look like.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Nodes with an agent.
    pub agents: usize,
    /// One more node, made by hand, which no agent runs on.
    pub kernel_peer: bool,
    /// Both families.
    pub dual_stack: bool,
    /// Pods per node.
    pub pods: u8,
    /// Flags for every agent, besides the store's.
    pub flags: Vec<String>,
    /// `Backend` of the network configuration, JSON.
    pub backend: String,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            agents: 3,
            kernel_peer: false,
            dual_stack: false,
            pods: 1,
            flags: Vec::new(),
            backend: r#"{"Type":"vxlan"}"#.to_owned(),
        }
    }
}

impl Plan {
    /// The network configuration of such a cluster.
    pub fn network_config(&self) -> String {
        let v6 =
            if self.dual_stack { r#""EnableIPv6":true,"IPv6Network":"fd77::/48","# } else { "" };
        format!(r#"{{"Network":"10.77.0.0/16",{v6}"Backend":{}}}"#, self.backend)
    }

    /// What the node made by hand is to be like.
    fn peer_spec(&self) -> PeerSpec {
        let spec = if self.dual_stack { PeerSpec::dual(200) } else { PeerSpec::v4(200) };
        PeerSpec { routed: self.backend.contains("host-gw"), ..spec }
    }
}

/// What makes a member part of the network.
#[derive(Debug)]
pub enum Role {
    /// An agent on a node.
    Agent(Node, Box<Agent>),
    /// Hand work.
    Kernel(KernelPeer),
}

/// One node of the cluster.
#[derive(Debug)]
pub struct Member {
    role: Role,
    env: SubnetEnv,
    pods: Vec<Pod>,
}

impl Member {
    /// The host.
    pub fn node(&self) -> &Node {
        match &self.role {
            Role::Agent(node, _) => node,
            Role::Kernel(peer) => peer.node(),
        }
    }

    /// The agent, if it has one.
    pub fn agent(&self) -> Option<&Agent> {
        match &self.role {
            Role::Agent(_, agent) => Some(agent),
            Role::Kernel(_) => None,
        }
    }

    /// Subnet and MTU.
    pub fn env(&self) -> &SubnetEnv {
        &self.env
    }

    /// Its pods.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The host and what runs there, pods left as they are.
    pub fn into_role(self) -> Role {
        self.role
    }

    /// Stops the agent by SIGTERM and starts another with the same flags; waits until it is
    /// ready.
    pub fn restart(&mut self, store: &dyn LeaseStore, plan: &Plan) -> Result<()> {
        self.restart_after(store, plan, || Ok(()))
    }

    /// The same with something done while no agent is running.
    pub fn restart_after(
        &mut self,
        store: &dyn LeaseStore,
        plan: &Plan,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Role::Agent(node, agent) = &mut self.role else { return Ok(()) };
        agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(10))?;
        meanwhile()?;
        **agent = node.agent(store.flags().iter().chain(&plan.flags))?;
        self.env = agent.wait_ready(READY_WITHIN)?;
        Ok(())
    }
}

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes, those with agents first.
    pub members: Vec<Member>,
}

impl Cluster {
    /// Starts everything and waits until all agents are ready.
    pub fn start(lab: &Lab, store: &dyn LeaseStore, plan: &Plan) -> Result<Self> {
        store.put_config(&plan.network_config())?;
        let peer = plan
            .kernel_peer
            .then(|| -> Result<KernelPeer> {
                let peer = KernelPeer::new(lab.node("byhand")?, plan.peer_spec())?;
                let (key, lease) = peer.lease();
                store.put_lease(&key, &lease)?;
                Ok(peer)
            })
            .transpose()?;
        let flags: Vec<String> = store.flags().into_iter().chain(plan.flags.clone()).collect();
        let started: Vec<(Node, Agent)> = (0..plan.agents)
            .map(|index| {
                let name = NAMES
                    .get(index)
                    .map_or_else(|| format!("node{index}"), |name| (*name).to_owned());
                let node = lab.node(&name)?;
                store.register(&node)?;
                let agent = node.agent(&flags)?;
                Ok((node, agent))
            })
            .collect::<Result<_>>()?;
        let mut members = Vec::new();
        for (node, mut agent) in started {
            let env = agent
                .wait_ready(READY_WITHIN)
                .with_context(|| format!("on node {}", node.name()))?;
            let pods = node.add_pods(&env, plan.pods)?;
            members.push(Member { role: Role::Agent(node, Box::new(agent)), env, pods });
        }
        if let Some(peer) = peer {
            let (own, _) = peer.lease();
            for (key, lease) in store.leases()?.iter().filter(|(key, _)| **key != own) {
                peer.learn(key, lease)?;
            }
            let env = peer.env()?;
            let pods = peer.node().add_pods(&env, plan.pods)?;
            members.push(Member { role: Role::Kernel(peer), env, pods });
        }
        let cluster = Self { members };
        cluster.wait_joined()?;
        Ok(cluster)
    }

    /// Waits until the first pod of every node gets an answer from the first pod of every other.
    fn wait_joined(&self) -> Result<()> {
        for (from, to) in self.node_pairs() {
            if let (Some(from), Some(to)) = (from.pods.first(), to.pods.first()) {
                for address in to.addresses() {
                    traffic::wait_reaches(from.ns(), address, Duration::from_secs(5))
                        .with_context(|| format!("{} to {}", from.name(), to.name()))?;
                }
            }
        }
        Ok(())
    }

    /// Every ordered pair of different nodes.
    pub fn node_pairs(&self) -> impl Iterator<Item = (&Member, &Member)> {
        let all = self.members.iter().enumerate();
        all.flat_map(move |(i, from)| {
            let others = self.members.iter().enumerate().filter(move |(j, _)| *j != i);
            others.map(move |(_, to)| (from, to))
        })
    }

    /// Every ordered pair of pods on different nodes.
    pub fn pod_pairs(&self) -> impl Iterator<Item = (&Pod, &Pod)> {
        self.node_pairs().flat_map(|(from, to)| {
            from.pods.iter().flat_map(|f| to.pods.iter().map(move |t| (f, t)))
        })
    }

    /// Makes sure that every pod reaches every pod of every other node, without loss.
    pub fn assert_full_mesh(&self) -> Result<()> {
        self.pod_pairs().try_for_each(|(from, to)| traffic::assert_reaches(from, to))
    }

    /// Makes sure that the VXLAN devices of every agent's node hold the entries of the other
    /// members' leases, each once, and nothing else.
    pub fn assert_entries(&self, store: &dyn LeaseStore) -> Result<()> {
        let leases = store.leases()?;
        for member in self.members.iter().filter(|member| member.agent().is_some()) {
            let own = member.env().key()?;
            let (mut v4, mut v6) = (Vec::new(), Vec::new());
            for (key, lease) in leases.iter().filter(|(key, _)| **key != own) {
                let (a, b) = vteps_of(key, lease)?;
                v4.extend(a);
                v6.extend(b);
            }
            let base = |subnet: String, len| {
                let base = subnet.split('/').next().unwrap_or_default().to_owned();
                format!("{base}/{len}")
            };
            let ns = member.node().ns();
            let wanted = VxlanView::wanted(&base(member.env().subnet_v4()?, 32), &v4)?;
            let held = VxlanView::read(ns, "flannel.1")?;
            ensure!(held == wanted, "{}: {held:#?}, not {wanted:#?}", member.node().name());
            if let Ok(subnet) = member.env().subnet_v6() {
                let wanted = VxlanView::wanted(&base(subnet, 128), &v6)?;
                let held = VxlanView::read(ns, "flannel-v6.1")?;
                ensure!(held == wanted, "{}: {held:#?}, not {wanted:#?}", member.node().name());
            }
        }
        Ok(())
    }

    /// Waits until every agent sees this many peers applied.
    pub fn wait_peers(&self, count: u64, within: Duration) -> Result<()> {
        for agent in self.members.iter().filter_map(Member::agent) {
            eventually(&format!("{count} peers applied"), within, || {
                Ok((agent.status()?["peers_applied"] == count).then_some(()))
            })?;
        }
        Ok(())
    }
}
