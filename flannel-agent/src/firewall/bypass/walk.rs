//! What the packets that take a shorter way would have met on the long one.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{
    condition::{Answer, Step, Traffic, Verdict, state},
    ruleset::{At, Hook, Layer, Table},
};

/// `IPPROTO_TCP`, `IPPROTO_UDP`.
const TCP: u8 = 6;
const UDP: u8 = 17;

/// What is known of the packets in question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// UDP port of the tunnel.
    pub port: u16,
    /// Name and index of the underlay's device.
    pub underlay: Option<(String, u32)>,
    /// This node's addresses there.
    pub own: BTreeSet<IpAddr>,
    /// The peers' addresses.
    pub peers: BTreeSet<IpAddr>,
    /// Where pods' addresses are from.
    pub networks: Vec<IpNet>,
    /// The devices that inner packets cross: the tunnels', the pods', their bridge.
    pub inner: Vec<(String, u32)>,
    /// Whether there are any pods.
    pub pods: bool,
}

/// Where rules of others work on packets that would bypass them, a sentence each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// On outer packets: only the kernel's device can carry them.
    pub outer: Option<String>,
    /// On inner packets: no flow may bypass the stack.
    pub inner: Option<String>,
}

/// Looks through all tables.
pub fn find(tables: &[Table], surroundings: &Surroundings) -> Findings {
    let (inner, outer) = (inner(surroundings), [arriving(surroundings), leaving(surroundings)]);
    let mut findings = Findings::default();
    for table in tables {
        for hook in &table.hooks {
            if findings.inner.is_none() && sees_inner(table.layer, hook, surroundings) {
                findings.inner = look(table, hook, &inner).and_then(|walk| walk.work);
            }
            for (at, traffic) in outer.iter().enumerate() {
                if findings.outer.is_none() && sees_outer(table.layer, hook, surroundings, at == 0)
                {
                    findings.outer = look(table, hook, traffic).and_then(Walk::problem);
                }
            }
        }
    }
    findings
}

fn look<'a>(table: &'a Table, hook: &Hook, traffic: &'a Traffic) -> Option<Walk<'a>> {
    match table.layer {
        Layer::Ip { v4, v6 } if !(v4 && traffic.has(false) || v6 && traffic.has(true)) => None,
        _ => Some(Walk::through(table, hook, traffic)),
    }
}

fn sees_inner(layer: Layer, hook: &Hook, surroundings: &Surroundings) -> bool {
    match hook.at {
        _ if layer == Layer::Bridge => true,
        At::Ingress | At::Egress => is_at(hook, surroundings.inner.iter().map(|(name, _)| name)),
        at => matches!(at, At::Prerouting | At::Forward | At::Postrouting),
    }
}

/// The programs hand outer packets to the underlay's device as the stack does, so its egress hook
/// sees them.
fn sees_outer(layer: Layer, hook: &Hook, surroundings: &Surroundings, arrive: bool) -> bool {
    match hook.at {
        _ if layer == Layer::Bridge => false,
        At::Prerouting | At::Input => arrive,
        At::Output | At::Postrouting => !arrive,
        At::Ingress => arrive && is_at(hook, surroundings.underlay.iter().map(|(name, _)| name)),
        At::Forward | At::Egress => false,
    }
}

fn is_at<'a>(hook: &Hook, mut devices: impl Iterator<Item = &'a String>) -> bool {
    hook.devices.is_empty() || devices.any(|device| hook.devices.contains(device))
}

fn hosts(addresses: &BTreeSet<IpAddr>) -> Vec<IpNet> {
    addresses.iter().copied().map(IpNet::from).collect()
}

/// Packets of flows that are settled.
fn inner(surroundings: &Surroundings) -> Traffic {
    Traffic {
        comes_by: surroundings.inner.clone(),
        goes_by: surroundings.inner.clone(),
        sources: surroundings.networks.clone(),
        destinations: surroundings.networks.clone(),
        protocols: &[TCP, UDP],
        port: None,
        // Whoever tells conntrack not to track works on packets.
        states: state::ESTABLISHED,
        local: false,
    }
}

/// Tunnel packets from peers. Each is the first of a connection for ever: what comes back comes
/// from another port.
fn arriving(surroundings: &Surroundings) -> Traffic {
    Traffic {
        comes_by: surroundings.underlay.iter().cloned().collect(),
        goes_by: Vec::new(),
        sources: hosts(&surroundings.peers),
        destinations: hosts(&surroundings.own),
        protocols: &[UDP],
        port: Some(surroundings.port),
        states: state::NEW,
        local: true,
    }
}

/// Tunnel packets to peers.
fn leaving(surroundings: &Surroundings) -> Traffic {
    Traffic {
        comes_by: Vec::new(),
        goes_by: surroundings.underlay.iter().cloned().collect(),
        sources: hosts(&surroundings.own),
        destinations: hosts(&surroundings.peers),
        local: false,
        ..arriving(surroundings)
    }
}

/// One way through a base chain and all that it leads to.
struct Walk<'a> {
    table: &'a Table,
    traffic: &'a Traffic,
    /// The first rule that works on packets.
    work: Option<String>,
    /// The first rule that drops some packets rather than what is left.
    drop: Option<String>,
    /// What drops all packets that get there.
    rest: Option<String>,
    /// Whether some may be accepted.
    accepts: bool,
    /// Chains that were walked through, whether surely, and whether all packets end there.
    done: HashMap<(String, bool), bool>,
    /// Chains that we are in.
    within: HashSet<String>,
}

impl<'a> Walk<'a> {
    fn through(table: &'a Table, hook: &Hook, traffic: &'a Traffic) -> Self {
        let mut walk = Self {
            table,
            traffic,
            work: None,
            drop: None,
            rest: None,
            accepts: false,
            done: HashMap::new(),
            within: HashSet::new(),
        };
        let ended = walk.chain(&hook.chain, true);
        if !ended {
            if hook.drops {
                let place = format!("the policy of chain {} of {}", hook.chain, table.name);
                walk.rest.get_or_insert(place);
            } else {
                walk.accepts = true;
            }
        }
        walk
    }

    /// What is wrong with it if nothing proves that packets pass.
    fn problem(self) -> Option<String> {
        let drops = |place: String| format!("{place} may drop tunnel packets");
        let rest = self
            .rest
            .filter(|_| !self.accepts)
            .map(|place| format!("{place} drops all tunnel packets"));
        self.work.or(self.drop.map(drops)).or(rest)
    }

    /// Walks a chain. `surely` says that all packets come here that are not yet decided. Returns
    /// whether they all are decided here.
    fn chain(&mut self, name: &str, surely: bool) -> bool {
        let key = (name.to_owned(), surely);
        if let Some(ended) = self.done.get(&key) {
            return *ended;
        }
        // The kernel refuses loops; a reading that is torn may show one.
        if !self.within.insert(name.to_owned()) {
            return false;
        }
        let ended = self.steps(name, surely);
        self.within.remove(name);
        self.done.insert(key, ended);
        ended
    }

    fn steps(&mut self, chain: &str, surely: bool) -> bool {
        let table = self.table;
        for (at, step) in table.chains.get(chain).into_iter().flatten().enumerate() {
            let answer = self.traffic.meets_all(&step.asked);
            if answer == Answer::None {
                continue;
            }
            let all = answer == Answer::All;
            let place = || format!("rule {} of chain {chain} of {}", at + 1, table.name);
            if let Some(what) = &step.work {
                self.work
                    .get_or_insert_with(|| format!("{} works on single packets ({what})", place()));
            }
            if let Some(ended) = self.verdict(step, all, surely && all, place) {
                return ended;
            }
        }
        false
    }

    /// What a verdict means; `None`: on with the next rule.
    fn verdict(
        &mut self,
        step: &Step,
        all: bool,
        surely: bool,
        place: impl Fn() -> String,
    ) -> Option<bool> {
        match &step.verdict {
            Verdict::Continue => None,
            Verdict::Accept => {
                self.accepts = true;
                all.then_some(true)
            }
            Verdict::Drop => {
                let found = if surely { &mut self.rest } else { &mut self.drop };
                found.get_or_insert_with(place);
                all.then_some(true)
            }
            Verdict::Return => all.then_some(false),
            Verdict::Jump(chain) => (self.chain(chain, surely) && all).then_some(true),
            Verdict::Goto(chain) => {
                let ended = self.chain(chain, surely);
                all.then_some(ended)
            }
            Verdict::Mapped => {
                self.accepts = true;
                let table = self.table;
                for chain in table.chains.keys() {
                    if !table.hooks.iter().any(|hook| hook.chain == *chain) {
                        self.chain(chain, false);
                    }
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
