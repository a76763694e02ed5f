//! A candidate set up: two nodes joined by a cable, and the two ends of its path.

mod paths;
mod rules;
mod underlay;

use std::{
    net::IpAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use self::paths::Path as Way;
use super::{
    candidate::Candidate,
    generators::{Ends, udp_flood::Flow},
};
use crate::{
    agent::{Agent, SubnetEnv},
    etcd::Etcd,
    lab::Lab,
    netns::Netns,
    node::Node,
    process::Process,
    traffic,
};

/// How old an agent's word on its counters can be, and something on top.
const COUNTED_WITHIN: Duration = Duration::from_secs(5);

/// What an underlay carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// Segments of up to 64 KB cross it whole, as between virtual machines of one host
    Virtual,
    /// Frames of the MTU's size cross it, as between physical NICs without tunnel offloads
    Wire,
}

impl Profile {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtual => "virtual",
            Self::Wire => "wire",
        }
    }
}

/// What became of an attempt to set a candidate up.
#[derive(Debug)]
pub enum Outcome {
    /// It carries packets.
    Ready(Box<Site>),
    /// It cannot be had here, and why not.
    Skipped(String),
}

/// A candidate that carries packets. Dropping it removes all of it.
#[derive(Debug)]
pub struct Site {
    candidate: Candidate,
    way: Way,
    flow: Flow,
    client: Netns,
    server: Netns,
    address: IpAddr,
    lab: Lab,
}

impl Site {
    /// Sets a candidate up.
    pub fn build(
        candidate: Candidate,
        profile: Profile,
        flanneld: Option<&Path>,
    ) -> Result<Outcome> {
        if candidate == Candidate::KernelFlowtable && !paths::has_flowtables()? {
            let text = "this kernel has no nftables flowtables (CONFIG_NF_FLOW_TABLE)";
            return Ok(Outcome::Skipped(text.to_owned()));
        }
        let lab = Lab::new()?;
        let nodes = [lab.node("client")?, lab.node("server")?];
        underlay::join(&nodes, profile)?;
        if candidate != Candidate::Host {
            for node in &nodes {
                rules::install_kube_proxy(node)?;
            }
        }
        let way = match (candidate, flanneld) {
            (Candidate::Host, _) => paths::host(nodes),
            (Candidate::HostGw, _) => paths::host_gw(nodes)?,
            (Candidate::KernelVxlan, _) => paths::kernel_vxlan(nodes)?,
            (Candidate::KernelFlowtable, _) => paths::kernel_flowtable(nodes)?,
            (Candidate::PlainUdp, _) => paths::plain_udp(nodes)?,
            (Candidate::Flanneld, Some(binary)) => paths::flanneld(&lab, nodes, binary)?,
            (Candidate::Flanneld, None) => {
                return Ok(Outcome::Skipped("no --flanneld PATH was given".to_owned()));
            }
            _ => {
                let flags = candidate.agent_flags();
                let flags = flags.with_context(|| format!("{candidate} is not ours"))?;
                let udp = candidate == Candidate::OursUdp;
                let config = if udp { paths::UDP_CONFIG } else { paths::CONFIG };
                paths::ours(&lab, nodes, flags, config)?
            }
        };
        let site = Self::with(candidate, lab, way)?;
        Ok(match site.why_not_in_use()? {
            Some(reason) => Outcome::Skipped(reason),
            None => Outcome::Ready(Box::new(site)),
        })
    }

    /// Our agent with these flags, whatever it makes of them.
    pub fn of_agents(flags: &[&str], profile: Profile) -> Result<Self> {
        let lab = Lab::new()?;
        let nodes = [lab.node("client")?, lab.node("server")?];
        underlay::join(&nodes, profile)?;
        for node in &nodes {
            rules::install_kube_proxy(node)?;
        }
        let way = paths::ours(&lab, nodes, flags, paths::CONFIG)?;
        Self::with(Candidate::OursFlows, lab, way)
    }

    /// Adds the ends to what carries packets, and waits until it does.
    fn with(candidate: Candidate, lab: Lab, way: Way) -> Result<Self> {
        let [client, server] = &way.nodes;
        let (client, server, address) = if let Some([near, far]) = &way.envs {
            let (near, far) = (client.pod(near)?, server.pod(far)?);
            // The connections of a benchmark may need every port there is.
            near.ns().sysctls(&[("net/ipv4/ip_local_port_range", "1024 65535")])?;
            (near.ns().clone(), far.ns().clone(), far.v4()?)
        } else {
            let address = server.v4().parse().context("a node's address")?;
            (client.ns().clone(), server.ns().clone(), address)
        };
        traffic::wait_reaches(&client, address, Duration::from_secs(10))
            .with_context(|| way.last_words())?;
        let ends = Ends { client: &client, server: &server, address, cpus: [0, 0] };
        let flow = Flow::open(&ends).with_context(|| way.last_words())?;
        Ok(Self { candidate, way, flow, client, server, address, lab })
    }

    /// Asks the agents whether they do what the candidate stands for; the reason if not.
    pub fn why_not_in_use(&self) -> Result<Option<String>> {
        for agent in &self.way.agents {
            if let Err(reason) = self.candidate.is_in_use(&agent.status()?) {
                return Ok(Some(reason));
            }
        }
        Ok(None)
    }

    /// Asks the agents whether packets went the way that the candidate stands for; the reason if
    /// not. They count up to now within some seconds.
    pub fn why_not_used(&self) -> Result<Option<String>> {
        for agent in &self.way.agents {
            let start = Instant::now();
            while let Err(reason) = self.candidate.has_carried(&agent.status()?) {
                if start.elapsed() > COUNTED_WITHIN {
                    return Ok(Some(reason));
                }
                thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(None)
    }

    /// The ends of its path.
    pub fn ends(&self, cpus: [usize; 2]) -> Ends<'_> {
        Ends { client: &self.client, server: &self.server, address: self.address, cpus }
    }

    /// A UDP flow from end to end.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// What all its namespaces' names begin with.
    pub fn prefix(&self) -> &str {
        self.lab.run().prefix()
    }

    /// Its nodes, the client's first.
    pub fn nodes(&self) -> &[Node; 2] {
        &self.way.nodes
    }

    /// The agents on them, if it is one of ours.
    pub fn agents(&self) -> &[Agent] {
        &self.way.agents
    }
}
