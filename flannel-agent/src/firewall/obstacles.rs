//! Rules of others that drop what we forward: found by reading, named in the status, never
//! touched. An accept of ours ends only the chain it is in; a drop anywhere is final.

use std::io;

use super::{
    iptables, legacy,
    nfnetlink::{HOOK_FORWARD, NfTables, POLICY_DROP, Rule, protocol},
    nftables,
    rules::Family,
};

/// The verdict codes of `linux/netfilter.h`.
const NF_DROP: i32 = 0;
const NF_ACCEPT: i32 = 1;

/// What drops everything that reaches it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Obstacles {
    /// One sentence each.
    pub found: Vec<String>,
    /// The base chains of others that were looked at: family, table, chain.
    pub watched: Vec<(u8, String, String)>,
}

/// Looks through the forward chains of `nf_tables`.
pub fn find(nf: &mut NfTables, families: &[Family]) -> io::Result<Obstacles> {
    let mut obstacles = Obstacles::default();
    for chain in nf.chains()? {
        let Some(base) = chain.base.filter(|base| base.hook == HOOK_FORWARD) else { continue };
        let in_use = match chain.family {
            protocol::INET => true,
            protocol::IPV4 => families.contains(&Family::V4),
            protocol::IPV6 => families.contains(&Family::V6),
            _ => false,
        };
        let ours = Family::ALL.iter().any(|family| nftables::table(*family) == chain.table);
        if !in_use || ours {
            continue;
        }
        let rules = nf.rules(chain.family, &chain.table, Some(&chain.name))?;
        let family = match chain.family {
            protocol::INET => "inet",
            protocol::IPV4 => "ip",
            _ => "ip6",
        };
        let place = format!("chain {} of table {family} {}", chain.name, chain.table);
        let steps = rules.iter().map(|rule| Step {
            ours: rule.jump().as_deref() == Some(iptables::FORWARD.chain),
            verdict: unconditional(rule),
        });
        obstacles.found.extend(judge(steps, base.policy == POLICY_DROP).told(&place));
        obstacles.watched.push((chain.family, chain.table, chain.name));
    }
    Ok(obstacles)
}

/// The same for the legacy tables, without the list of what was looked at: nobody tells of their
/// changes.
pub fn find_legacy(families: &[Family]) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for family in families {
        if !legacy::tables(*family).iter().any(|table| table == "filter") {
            continue;
        }
        let chains = legacy::read(*family, "filter")?;
        let Some((policy, rules)) = chains.get("FORWARD").and_then(|rules| rules.split_last())
        else {
            continue;
        };
        let steps = rules.iter().map(|rule| Step {
            ours: rule.jump.as_deref() == Some(iptables::FORWARD.chain),
            verdict: match (rule.unconditional, rule.verdict, rule.target.as_str()) {
                (true, Some(legacy::DROP), _) | (true, _, "REJECT") => Some(NF_DROP),
                (true, Some(legacy::ACCEPT), _) => Some(NF_ACCEPT),
                _ => None,
            },
        });
        let place = format!("chain FORWARD of the legacy {family} table filter");
        found.extend(judge(steps, policy.verdict == Some(legacy::DROP)).told(&place));
    }
    Ok(found)
}

/// A rule as far as it matters here.
struct Step {
    /// Whether it leads to our own rules.
    ours: bool,
    /// What it does with every packet, if it does the same with every packet.
    verdict: Option<i32>,
}

enum Judgement {
    /// Our packets pass, or what happens to them depends.
    Passes,
    /// This rule, counted from 1, drops all that reaches it.
    Rule(usize),
    /// The policy does.
    Policy,
}

impl Judgement {
    fn told(&self, place: &str) -> Option<String> {
        match self {
            Self::Passes => None,
            Self::Rule(number) => Some(format!(
                "rule {number} of {place} drops every forwarded packet that no rule before it \
                 accepts; no rule of ours can overrule it"
            )),
            Self::Policy => Some(format!(
                "the policy of {place} drops every forwarded packet that its rules do not accept; \
                 no rule of ours can overrule it"
            )),
        }
    }
}

fn judge(steps: impl Iterator<Item = Step>, policy_drops: bool) -> Judgement {
    for (at, step) in steps.enumerate() {
        // Our own jump accepts what is ours.
        if step.ours {
            return Judgement::Passes;
        }
        match step.verdict {
            Some(NF_ACCEPT) => return Judgement::Passes,
            Some(NF_DROP) => return Judgement::Rule(at + 1),
            _ => {}
        }
    }
    if policy_drops { Judgement::Policy } else { Judgement::Passes }
}

/// The verdict of a rule that every packet meets.
fn unconditional(rule: &Rule) -> Option<i32> {
    let mut verdict = None;
    for (name, data) in rule.expressions() {
        match name.as_str() {
            "counter" | "log" => {}
            "match" if data.text(1) == "comment" => {}
            "immediate" => verdict = rule.verdict().map(|(code, _)| code),
            "reject" => verdict = Some(NF_DROP),
            "target" if data.text(1) == "REJECT" => verdict = Some(NF_DROP),
            _ => return None,
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_first_decides() {
        let step = |ours, verdict| Step { ours, verdict };
        let told = |steps: Vec<Step>, policy| judge(steps.into_iter(), policy).told("chain C");
        assert_eq!(told(vec![step(true, None), step(false, Some(NF_DROP))], true), None);
        assert_eq!(told(vec![step(false, Some(NF_ACCEPT))], true), None);
        assert_eq!(told(vec![step(false, None)], false), None);
        let policy = told(vec![step(false, None)], true).unwrap();
        assert!(policy.contains("policy of chain C"), "{policy}");
        let rule =
            told(vec![step(false, None), step(false, Some(NF_DROP)), step(true, None)], false);
        assert!(rule.unwrap().contains("rule 2 of chain C"));
    }
}
