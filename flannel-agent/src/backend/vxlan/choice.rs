//! How much of the host's stack the programs may skip on this host, and why not more.

use std::collections::BTreeSet;

use super::{
    VxlanOptions,
    fast_path::{self, FastPathConfig},
    peers::Tunnel,
};
use crate::{
    cli::flags::FastPath,
    firewall::bypass::{Findings, Surroundings},
    netlink::{link::Link, mirror::Tables},
    peer_table::PeerTable,
};

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Never `Auto`.
    pub mode: FastPath,
    /// What stands in the way of more; empty if nothing does or more was not asked for.
    pub reason: String,
}

impl Choice {
    /// Chooses. `findings` are the rules of others that matter, if it is for us to look at them.
    pub fn make(
        options: &VxlanOptions,
        asked: FastPath,
        ipsec: bool,
        findings: Option<&Findings>,
    ) -> Self {
        let outer = findings.and_then(|findings| findings.outer.as_deref());
        let inner = findings.and_then(|findings| findings.inner.as_deref());
        let kernel = "the kernel's device carries all packets";
        let off = |reason: String| Self { mode: FastPath::Off, reason };
        // The program takes no part in what the first two add to the header or to the forwarding
        // entries, and no packet of ours passes an IPsec policy.
        if options.gbp {
            return off(format!("Backend.GBP: {kernel}"));
        }
        if options.learning {
            return off(format!("Backend.Learning: {kernel}"));
        }
        if asked == FastPath::Off {
            return off(format!("--fast-path off: {kernel}"));
        }
        if ipsec {
            let reason = "the host has IPsec policies, which only the kernel's device follows";
            return off(reason.to_owned());
        }
        match (asked, outer, inner) {
            (FastPath::Auto, Some(outer), _) => off(format!("{kernel}: {outer}")),
            (FastPath::Auto, None, Some(inner)) => Self {
                mode: FastPath::Stack,
                reason: format!("no flow bypasses the stack: {inner}"),
            },
            (FastPath::Auto | FastPath::Flows, ..) => {
                Self { mode: FastPath::Flows, reason: String::new() }
            }
            (mode, ..) => Self { mode, reason: String::new() },
        }
    }
}

/// Whether it is for us to look at the rules of others. Who forces a mode knows them.
pub fn depends_on_rules(config: &FastPathConfig) -> bool {
    config.enabled && config.mode == FastPath::Auto
}

/// What the rules of others are judged by.
pub fn surroundings(
    options: &VxlanOptions,
    tables: &Tables,
    underlay: Option<&Link>,
    tunnels: &[Tunnel],
    peers: &PeerTable,
) -> Surroundings {
    let mut inner: BTreeSet<u32> = fast_path::pods(tables, tunnels);
    let pods = !inner.is_empty();
    inner.extend(fast_path::pod_devices(tables, tunnels));
    inner.extend(tunnels.iter().map(|tunnel| tunnel.link));
    let named = |index: u32| Some((tables.links.get(&index)?.name.clone(), index));
    let local = |tunnel: &Tunnel| tables.links.get(&tunnel.link)?.vxlan.as_ref()?.local;
    Surroundings {
        port: options.port,
        underlay: underlay.map(|link| (link.name.clone(), link.index)),
        own: tunnels.iter().filter_map(local).collect(),
        peers: peers
            .peers()
            .flat_map(|(_, attributes)| {
                let v4 = attributes.public_ip.map(Into::into);
                v4.into_iter().chain(attributes.public_ipv6.map(Into::into))
            })
            .collect(),
        networks: tunnels.iter().map(|tunnel| tunnel.network).collect(),
        inner: inner.into_iter().filter_map(named).collect(),
        pods,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::RawJson;

    fn choose(asked: FastPath, ipsec: bool, outer: bool, inner: bool) -> (FastPath, String) {
        let found = |found: bool, what: &str| found.then(|| what.to_owned());
        let findings = Findings { outer: found(outer, "OUT"), inner: found(inner, "IN") };
        let options = VxlanOptions::parse(&RawJson::parse("{}").unwrap()).unwrap();
        let choice = Choice::make(&options, asked, ipsec, Some(&findings));
        (choice.mode, choice.reason)
    }

    #[test]
    fn auto_takes_the_best_that_the_rules_allow() {
        assert_eq!(choose(FastPath::Auto, false, false, false), (FastPath::Flows, String::new()));
        let (mode, reason) = choose(FastPath::Auto, false, false, true);
        assert_eq!(mode, FastPath::Stack);
        assert!(reason.ends_with("IN"), "{reason}");
        let (mode, reason) = choose(FastPath::Auto, false, true, true);
        assert_eq!(mode, FastPath::Off);
        assert!(reason.ends_with("OUT"), "{reason}");
        assert_eq!(choose(FastPath::Auto, true, false, false).0, FastPath::Off);
    }

    #[test]
    fn what_is_forced_is_not_argued_with() {
        for mode in [FastPath::Flows, FastPath::Stack] {
            assert_eq!(choose(mode, false, true, true), (mode, String::new()));
        }
        assert_eq!(choose(FastPath::Flows, true, false, false).0, FastPath::Off);
        assert_eq!(choose(FastPath::Off, false, false, false).0, FastPath::Off);
    }
}
