//! The rules as a model, apart from any tool: one source for both renderers.
//!
//! Specification §8.1 and §8.2. The order of the masquerade rules is the truth table: the first
//! that matches decides.

use std::fmt;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{config::NetworkConfig, lease::Subnets};

/// The bit by which kube-proxy marks what it masquerades itself. Other bits are others' business.
pub const KUBE_PROXY_BIT: u32 = 0x4000;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// `ip` or `ip6`, as nftables names families and headers.
    pub const fn nft(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// What multicast goes to.
    fn multicast(self) -> IpNet {
        match self {
            Self::V4 => Ipv4Net::new_assert([224, 0, 0, 0].into(), 4).into(),
            Self::V6 => Ipv6Net::new_assert([0xff00, 0, 0, 0, 0, 0, 0, 0].into(), 8).into(),
        }
    }

    /// The family of a network.
    pub const fn of(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::V4,
            IpNet::V6(_) => Self::V6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One condition on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// This bit of the packet's mark is set, whatever the others are.
    MarkBit(u32),
    /// The source is inside.
    Source(IpNet),
    /// The source is outside.
    SourceNot(IpNet),
    /// The destination is inside.
    Destination(IpNet),
    /// The destination is outside.
    DestinationNot(IpNet),
    /// UDP to this port.
    UdpPort(u16),
    /// The source is an address of this host.
    LocalSource,
}

/// What happens to a packet that meets all conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// None of the rules below sees it.
    Return,
    /// It may pass.
    Accept,
    /// Its source becomes this host's address on the way out.
    Masquerade {
        /// Ports are chosen at random, which spares concurrent flows a clash.
        fully_random: bool,
    },
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// All of them have to hold.
    pub matches: Vec<Match>,
    /// What happens then.
    pub verdict: Verdict,
}

/// Where our accept rules stand among those of others in iptables' FORWARD chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ForwardPosition {
    /// Before all others.
    First,
    /// After what is there, as flanneld has it: policy engines decide before us.
    #[default]
    Last,
    /// Not at all.
    None,
}

/// One family's part of what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyWanted {
    /// The cluster's network.
    pub network: IpNet,
    /// This node's subnet of it.
    pub subnet: IpNet,
}

/// What the firewall is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirewallWanted {
    /// Whether to masquerade.
    pub masquerade: bool,
    /// Whether masquerading chooses ports fully at random, where the host can.
    pub fully_random: bool,
    /// Whether and where to accept forwarded packets.
    pub forward: ForwardPosition,
    /// Destinations that are reached with the pod's own address.
    pub exclude: Vec<IpNet>,
    /// UDP port of the tunnel's outer packets, if the backend has such.
    pub tunnel_port: Option<u16>,
    /// The families in use, each once.
    pub families: Vec<FamilyWanted>,
}

/// The part of what is wanted that the command line decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirewallPolicy {
    /// Whether to masquerade.
    pub masquerade: bool,
    /// Whether masquerading chooses ports fully at random, where the host can.
    pub fully_random: bool,
    /// Whether and where to accept forwarded packets.
    pub forward: ForwardPosition,
    /// Destinations that are reached with the pod's own address.
    pub exclude: Vec<IpNet>,
}

impl FirewallPolicy {
    /// What is wanted with these subnets leased.
    pub fn wanted(
        &self,
        config: &NetworkConfig,
        own: Subnets,
        tunnel_port: Option<u16>,
    ) -> FirewallWanted {
        let v4 = config.ipv4.zip(own.v4).map(|(settings, subnet)| FamilyWanted {
            network: settings.network.into(),
            subnet: subnet.into(),
        });
        let v6 = config.ipv6.zip(own.v6).map(|(settings, subnet)| FamilyWanted {
            network: settings.network.into(),
            subnet: subnet.into(),
        });
        FirewallWanted {
            masquerade: self.masquerade,
            fully_random: self.fully_random,
            forward: self.forward,
            exclude: self.exclude.clone(),
            tunnel_port,
            families: v4.into_iter().chain(v6).collect(),
        }
    }
}

impl FirewallWanted {
    /// Whether no rule is wanted.
    pub fn is_empty(&self) -> bool {
        !self.masquerade && self.forward == ForwardPosition::None
    }
}

/// What this host's tools and kernel turned out to lack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacks {
    /// Fully random ports.
    pub fully_random: bool,
    /// A match on "an address of this host".
    pub local_source: bool,
}

/// A family's rules, in order. An empty chain is not to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet {
    /// Whose rules.
    pub family: Family,
    /// What leaves the host.
    pub masquerade: Vec<Rule>,
    /// What passes through the host.
    pub forward: Vec<Rule>,
}

impl FirewallWanted {
    /// Both families' rules; a family that is not in use has none.
    pub fn rule_sets(&self, lacks: Lacks) -> Vec<RuleSet> {
        let of = |family| {
            let wanted = self.families.iter().find(|wanted| Family::of(&wanted.network) == family);
            RuleSet {
                family,
                masquerade: wanted
                    .filter(|_| self.masquerade)
                    .map_or_else(Vec::new, |wanted| self.masquerade_rules(wanted, lacks)),
                forward: wanted
                    .filter(|_| self.forward != ForwardPosition::None)
                    .map_or_else(Vec::new, forward_rules),
            }
        };
        Family::ALL.map(of).into()
    }

    fn masquerade_rules(&self, wanted: &FamilyWanted, lacks: Lacks) -> Vec<Rule> {
        use Match::{
            Destination, DestinationNot, LocalSource, MarkBit, Source, SourceNot, UdpPort,
        };
        let FamilyWanted { network, subnet } = *wanted;
        let family = Family::of(&network);
        let masquerade =
            Verdict::Masquerade { fully_random: self.fully_random && !lacks.fully_random };
        let pass = |matches: &[Match]| Rule { matches: matches.to_vec(), verdict: Verdict::Return };
        let mut rules = vec![pass(&[MarkBit(KUBE_PROXY_BIT)])];
        // Peers know us by our outer address, wherever in the address plan it is.
        let tunnel = self.tunnel_port.filter(|_| !lacks.local_source);
        rules.extend(tunnel.map(|port| pass(&[UdpPort(port), LocalSource])));
        let excluded = self.exclude.iter().filter(|net| Family::of(net) == family);
        rules.extend(excluded.map(|net| pass(&[Destination(*net)])));
        rules.extend([
            pass(&[Source(subnet), Destination(network)]),
            pass(&[Source(network), Destination(subnet)]),
            // From outside to our pods: they see who it was.
            pass(&[SourceNot(network), Destination(subnet)]),
            Rule {
                matches: vec![Source(network), DestinationNot(family.multicast())],
                verdict: masquerade,
            },
            // The host itself and strangers, to pods elsewhere: the answer has to come back here.
            Rule { matches: vec![SourceNot(network), Destination(network)], verdict: masquerade },
        ]);
        rules
    }
}

fn forward_rules(wanted: &FamilyWanted) -> Vec<Rule> {
    let accept = |matched| Rule { matches: vec![matched], verdict: Verdict::Accept };
    vec![accept(Match::Source(wanted.network)), accept(Match::Destination(wanted.network))]
}

#[cfg(test)]
mod tests;
