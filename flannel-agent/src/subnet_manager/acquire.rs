//! Which subnet to lease: specification §4.5 and §4.6, without any store.
//!
//! A store lists its leases, asks for a [`Plan`] and carries it out; when somebody else was
//! faster it lists again and asks again.

use std::fmt;

use crate::{
    config::NetworkConfig,
    lease::{Lease, LeaseAttributes, Subnets},
};

/// So many free subnets are looked at; one of them is drawn. Nodes that start together thus
/// rarely want the same one.
const POOL: usize = 100;

/// A lease found in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownLease {
    /// The lease.
    pub lease: Lease,
    /// It never expires: a reservation.
    pub permanent: bool,
}

/// What to do to get a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Overwrite a lease that is ours already.
    TakeOver {
        /// The lease's subnets.
        subnets: Subnets,
        /// It is a reservation and has to stay one.
        permanent: bool,
    },
    /// Create this lease, which nobody holds.
    Create(Subnets),
}

/// The way to a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Leases of ours that do not fit the configuration any more and are to be deleted.
    /// Reservations are never among them: an operator made those.
    pub discard: Vec<Subnets>,
    /// The lease to get.
    pub choice: Choice,
    /// The previous subnet would do, but this lease of somebody else's is in its place. Worth
    /// one error that names the subnet and both owners.
    pub previous_held_by: Option<Lease>,
}

/// Every subnet that the configuration allows is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfSubnets {
    /// `IPv4` or `IPv6`.
    family: &'static str,
    /// How many subnets there are.
    count: u128,
    len: u8,
    min: String,
    max: String,
    /// Holder and subnet, in the order of the subnets.
    holders: Vec<String>,
}

impl std::error::Error for OutOfSubnets {}

impl fmt::Display for OutOfSubnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 20;
        let Self { family, count, len, min, max, holders } = self;
        write!(
            f,
            "out of subnets: all {count} {family} subnets of length /{len} from {min} to {max} are taken: "
        )?;
        for (i, holder) in holders.iter().take(SHOWN).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{holder}")?;
        }
        match holders.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Decides which subnet to lease.
///
/// In this order: a lease that bears our public address, the previous subnet if it is free, a
/// free subnet drawn at random. The public address is the IPv4 one, or the IPv6 one where the
/// configuration has no IPv4.
pub fn plan(
    config: &NetworkConfig,
    own: &LeaseAttributes,
    previous: Subnets,
    known: &[KnownLease],
) -> Result<Plan, OutOfSubnets> {
    plan_with(&mut fastrand::Rng::new(), config, own, previous, known)
}

/// As [`plan`], with a given source of randomness.
pub fn plan_with(
    rng: &mut fastrand::Rng,
    config: &NetworkConfig,
    own: &LeaseAttributes,
    previous: Subnets,
    known: &[KnownLease],
) -> Result<Plan, OutOfSubnets> {
    let (ours, others): (Vec<_>, Vec<_>) =
        known.iter().partition(|k| is_ours(config, own, &k.lease.attributes));
    let (fitting, misfits): (Vec<_>, Vec<_>) =
        ours.into_iter().partition(|k| fits(config, k.lease.subnets));
    let discard = misfits.iter().filter(|k| !k.permanent).map(|k| k.lease.subnets).collect();

    let first = fitting.iter().find(|k| k.lease.subnets == previous).or(fitting.first());
    if let Some(KnownLease { lease, permanent }) = first {
        let choice = Choice::TakeOver { subnets: lease.subnets, permanent: *permanent };
        return Ok(Plan { discard, choice, previous_held_by: None });
    }

    let mut previous_held_by = None;
    if fits(config, previous) {
        let in_the_way = |k: &&&KnownLease| k.lease.subnets.overlaps(&previous);
        if let Some(k) = others.iter().find(in_the_way) {
            previous_held_by = Some(k.lease.clone());
        } else if !misfits.iter().any(|k| k.lease.subnets.overlaps(&previous)) {
            return Ok(Plan { discard, choice: Choice::Create(previous), previous_held_by });
        }
    }

    let v4 = config
        .ipv4
        .map(|c| {
            let range = Range {
                family: "IPv4",
                len: c.subnet_len,
                step: 1 << (32 - c.subnet_len.min(32)),
                min: c.subnet_min.to_bits().into(),
                max: c.subnet_max.to_bits().into(),
                show: |bits| {
                    u32::try_from(bits)
                        .map(std::net::Ipv4Addr::from)
                        .map_or_else(|_| String::new(), |a| a.to_string())
                },
            };
            let taken = known.iter().filter_map(|k| {
                let net = k.lease.subnets.v4?;
                Some((net.network().to_bits().into(), net.broadcast().to_bits().into(), &k.lease))
            });
            range.draw(rng, taken.collect())
        })
        .transpose()?;
    let v6 = config
        .ipv6
        .map(|c| {
            let range = Range {
                family: "IPv6",
                len: c.subnet_len,
                step: 1 << (128 - c.subnet_len.clamp(1, 128)),
                min: c.subnet_min.to_bits(),
                max: c.subnet_max.to_bits(),
                show: |bits| std::net::Ipv6Addr::from(bits).to_string(),
            };
            let taken = known.iter().filter_map(|k| {
                let net = k.lease.subnets.v6?;
                Some((net.network().to_bits(), net.broadcast().to_bits(), &k.lease))
            });
            range.draw(rng, taken.collect())
        })
        .transpose()?;
    let subnets = Subnets {
        v4: v4.zip(config.ipv4).and_then(|(bits, c)| {
            ipnet::Ipv4Net::new(u32::try_from(bits).ok()?.into(), c.subnet_len).ok()
        }),
        v6: v6
            .zip(config.ipv6)
            .and_then(|(bits, c)| ipnet::Ipv6Net::new(bits.into(), c.subnet_len).ok()),
    };
    Ok(Plan { discard, choice: Choice::Create(subnets), previous_held_by })
}

/// Whether a lease bears the public address by which a node is known.
pub fn is_ours(config: &NetworkConfig, own: &LeaseAttributes, lease: &LeaseAttributes) -> bool {
    if config.ipv4.is_some() {
        own.public_ip.is_some() && own.public_ip == lease.public_ip
    } else {
        own.public_ipv6.is_some() && own.public_ipv6 == lease.public_ipv6
    }
}

/// Whether the configuration would let these subnets be leased.
pub fn fits(config: &NetworkConfig, subnets: Subnets) -> bool {
    let v4 = match (config.ipv4, subnets.v4) {
        (Some(c), Some(net)) => {
            net.prefix_len() == c.subnet_len
                && (c.subnet_min..=c.subnet_max).contains(&net.network())
        }
        (None, None) => true,
        _ => false,
    };
    let v6 = match (config.ipv6, subnets.v6) {
        (Some(c), Some(net)) => {
            net.prefix_len() == c.subnet_len
                && (c.subnet_min..=c.subnet_max).contains(&net.network())
        }
        (None, None) => true,
        _ => false,
    };
    v4 && v6
}

/// The subnets of one address family, addresses as numbers.
struct Range {
    family: &'static str,
    len: u8,
    /// Addresses in one subnet.
    step: u128,
    /// First address of the first and of the last subnet.
    min: u128,
    max: u128,
    show: fn(u128) -> String,
}

impl Range {
    /// Draws a subnet that overlaps none of `taken` (first address, last address, lease).
    ///
    /// Goes through the leases once, in the order of their addresses, so the cost is that of
    /// sorting them, however large the network is.
    fn draw(
        &self,
        rng: &mut fastrand::Rng,
        mut taken: Vec<(u128, u128, &Lease)>,
    ) -> Result<u128, OutOfSubnets> {
        taken.sort_unstable_by_key(|(first, last, _)| (*first, *last));
        let mut free = Vec::new();
        let mut candidate = Some(self.min);
        for (first, last, _) in &taken {
            self.collect(&mut free, &mut candidate, Some(*first));
            // The first subnet that starts behind this lease.
            candidate = candidate.and_then(|c| {
                if c > *last {
                    return Some(c);
                }
                (last - c)
                    .checked_div(self.step)?
                    .checked_add(1)?
                    .checked_mul(self.step)?
                    .checked_add(c)
            });
        }
        self.collect(&mut free, &mut candidate, None);
        rng.choice(free).ok_or_else(|| self.out_of_subnets(&taken))
    }

    /// Adds the candidates that end before `limit` to the pool.
    fn collect(&self, free: &mut Vec<u128>, candidate: &mut Option<u128>, limit: Option<u128>) {
        while free.len() < POOL
            && let Some(c) = candidate.filter(|c| *c <= self.max)
            && limit.is_none_or(|limit| limit.checked_sub(c).is_some_and(|room| room >= self.step))
        {
            free.push(c);
            *candidate = c.checked_add(self.step);
        }
    }

    fn out_of_subnets(&self, taken: &[(u128, u128, &Lease)]) -> OutOfSubnets {
        let end = self.max.saturating_add(self.step - 1);
        OutOfSubnets {
            family: self.family,
            count: self.max.saturating_sub(self.min) / self.step + 1,
            len: self.len,
            min: (self.show)(self.min),
            max: (self.show)(self.max),
            holders: taken
                .iter()
                .filter(|(first, last, _)| *first <= end && *last >= self.min)
                .map(|(.., lease)| format!("{} by {}", lease.subnets, holder(&lease.attributes)))
                .collect(),
        }
    }
}

/// How a lease's owner is named in messages: by its public address.
pub fn holder(attributes: &LeaseAttributes) -> String {
    match (attributes.public_ip, attributes.public_ipv6) {
        (Some(v4), _) => v4.to_string(),
        (None, Some(v6)) => v6.to_string(),
        (None, None) => "an unknown node".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use ipnet::Ipv4Net;
    use proptest::prelude::*;

    use super::*;

    fn config(text: &str) -> NetworkConfig {
        NetworkConfig::parse(text).expect(text)
    }

    fn slash16() -> NetworkConfig {
        config(r#"{"Network":"10.3.0.0/16"}"#)
    }

    fn node(ip: &str) -> LeaseAttributes {
        LeaseAttributes { public_ip: ip.parse().ok(), ..LeaseAttributes::default() }
    }

    fn v4(net: &str) -> Subnets {
        Subnets { v4: Some(net.parse().expect(net)), v6: None }
    }

    fn lease(key: &str, ip: &str) -> KnownLease {
        let subnets = Subnets::parse_key(key).expect(key);
        KnownLease { lease: Lease { subnets, attributes: node(ip) }, permanent: false }
    }

    fn choice(config: &NetworkConfig, ip: &str, previous: Subnets, known: &[KnownLease]) -> Choice {
        plan(config, &node(ip), previous, known).expect("a plan").choice
    }

    #[test]
    fn our_own_lease_is_taken_over_and_a_reservation_stays_one() {
        let mut known = vec![lease("10.3.7.0-24", "1.1.1.1"), lease("10.3.9.0-24", "1.1.1.2")];
        assert_eq!(
            choice(&slash16(), "1.1.1.2", v4("10.3.20.0/24"), &known),
            Choice::TakeOver { subnets: v4("10.3.9.0/24"), permanent: false }
        );
        known[1].permanent = true;
        assert_eq!(
            choice(&slash16(), "1.1.1.2", Subnets::default(), &known),
            Choice::TakeOver { subnets: v4("10.3.9.0/24"), permanent: true }
        );
    }

    #[test]
    fn of_two_leases_of_ours_the_previous_one_is_kept() {
        let known = [lease("10.3.7.0-24", "1.1.1.1"), lease("10.3.9.0-24", "1.1.1.1")];
        assert_eq!(
            choice(&slash16(), "1.1.1.1", v4("10.3.9.0/24"), &known),
            Choice::TakeOver { subnets: v4("10.3.9.0/24"), permanent: false }
        );
    }

    #[test]
    fn nobody_owns_a_lease_without_an_address() {
        let known = [lease("10.3.7.0-24", "none")];
        let plan = plan(&slash16(), &LeaseAttributes::default(), Subnets::default(), &known);
        assert!(matches!(plan, Ok(Plan { choice: Choice::Create(_), .. })), "{plan:?}");
    }

    #[test]
    fn the_previous_subnet_is_used_if_free() {
        let known = [lease("10.3.7.0-24", "1.1.1.1")];
        assert_eq!(
            choice(&slash16(), "1.1.1.9", v4("10.3.20.0/24"), &known),
            Choice::Create(v4("10.3.20.0/24"))
        );
    }

    #[test]
    fn a_previous_subnet_held_by_another_is_reported_and_left_alone() {
        let known = [lease("10.3.20.0-24", "1.1.1.1"), lease("10.3.30.0-23", "1.1.1.3")];
        for (previous, who) in [("10.3.20.0/24", 0), ("10.3.31.0/24", 1)] {
            let plan = plan(&slash16(), &node("1.1.1.9"), v4(previous), &known).expect("a plan");
            assert_eq!(plan.previous_held_by.as_ref(), Some(&known[who].lease));
            let Choice::Create(new) = plan.choice else { panic!("{plan:?}") };
            assert!(known.iter().all(|k| !k.lease.subnets.overlaps(&new)), "{new}");
        }
    }

    #[test]
    fn an_unfit_previous_subnet_is_ignored() {
        for previous in ["10.4.1.0/24", "10.3.1.0/25", "10.3.0.0/24"] {
            let plan = plan(&slash16(), &node("1.1.1.9"), v4(previous), &[]).expect("a plan");
            assert_ne!(plan.choice, Choice::Create(v4(previous)));
            assert_eq!(plan.previous_held_by, None);
        }
    }

    #[test]
    fn after_a_config_change_our_old_lease_is_discarded() {
        let mut old = lease("10.4.7.0-24", "1.1.1.1");
        let plan_for = |old: &KnownLease| {
            plan(&slash16(), &node("1.1.1.1"), v4("10.4.7.0/24"), std::slice::from_ref(old))
        };
        let plan = plan_for(&old).expect("a plan");
        assert_eq!(plan.discard, [v4("10.4.7.0/24")]);
        let Choice::Create(new) = plan.choice else { panic!("{plan:?}") };
        assert!(fits(&slash16(), new));
        old.permanent = true;
        assert_eq!(plan_for(&old).expect("a plan").discard, []);
    }

    #[test]
    fn dual_stack_needs_both_halves() {
        let dual =
            config(r#"{"Network":"10.3.0.0/16","EnableIPv6":true,"IPv6Network":"fc00::/48"}"#);
        let good = lease("10.3.7.0-24&fc00:0:0:5::-64", "1.1.1.1");
        assert_eq!(
            choice(&dual, "1.1.1.1", Subnets::default(), std::slice::from_ref(&good)),
            Choice::TakeOver { subnets: good.lease.subnets, permanent: false }
        );
        let half = lease("10.3.7.0-24", "1.1.1.1");
        let plan = plan(&dual, &node("1.1.1.1"), Subnets::default(), &[half]).expect("a plan");
        assert_eq!(plan.discard, [v4("10.3.7.0/24")]);
        let Choice::Create(new) = plan.choice else { panic!("{plan:?}") };
        assert!(fits(&dual, new), "{new}");
        assert!(!fits(&slash16(), good.lease.subnets), "IPv4 only wants no IPv6 half");
    }

    #[test]
    fn ipv6_only_goes_by_the_ipv6_address() {
        let v6 = config(
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/120","IPv6SubnetLen":122}"#,
        );
        let own = LeaseAttributes { public_ipv6: "fd99::1".parse().ok(), ..node("none") };
        let Ok(Plan { choice: Choice::Create(subnets), .. }) =
            plan(&v6, &own, Subnets::default(), &[])
        else {
            panic!("nothing chosen")
        };
        assert!(fits(&v6, subnets), "{subnets}");
        let known =
            [KnownLease { lease: Lease { subnets, attributes: own.clone() }, permanent: false }];
        assert_eq!(
            plan(&v6, &own, Subnets::default(), &known).map(|p| p.choice),
            Ok(Choice::TakeOver { subnets, permanent: false })
        );
    }

    #[test]
    fn exhaustion_names_the_count_and_every_holder() {
        let config = config(r#"{"Network":"10.77.8.0/22"}"#);
        let known: Vec<_> = (9..12)
            .map(|i| lease(&format!("10.77.{i}.0-24"), &format!("192.0.2.{}", 81 + i)))
            .collect();
        let error = plan(&config, &node("192.0.2.80"), Subnets::default(), &known)
            .expect_err("all taken")
            .to_string();
        for want in ["all 3 IPv4 subnets", "10.77.9.0/24 by 192.0.2.90", "192.0.2.91", "192.0.2.92"]
        {
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn long_lists_of_holders_are_cut() {
        let config = config(r#"{"Network":"10.77.0.0/16","SubnetMax":"10.77.30.0"}"#);
        let known: Vec<_> =
            (1..=30).map(|i| lease(&format!("10.77.{i}.0-24"), &format!("192.0.2.{i}"))).collect();
        let error = plan(&config, &node("192.0.2.80"), Subnets::default(), &known)
            .expect_err("all taken")
            .to_string();
        assert!(error.ends_with("10.77.20.0/24 by 192.0.2.20 and 10 more"), "{error}");
    }

    #[test]
    fn the_top_of_the_address_space_does_not_overflow() {
        let top = config(r#"{"Network":"255.255.255.0/24"}"#);
        let known: Vec<_> =
            ["255.255.255.64-26", "255.255.255.128-25"].map(|k| lease(k, "1.1.1.1")).into();
        assert!(plan(&top, &node("1.1.1.9"), Subnets::default(), &known).is_err());
        let top = config(
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"8000::/1","IPv6SubnetLen":3}"#,
        );
        let own = LeaseAttributes { public_ipv6: "fd99::1".parse().ok(), ..node("none") };
        let taken = KnownLease {
            lease: Lease {
                subnets: Subnets { v4: None, v6: "8000::/1".parse().ok() },
                attributes: node("1.1.1.1"),
            },
            permanent: false,
        };
        assert!(plan(&top, &own, Subnets::default(), &[taken]).is_err());
        assert!(plan(&top, &own, Subnets::default(), &[]).is_ok());
    }

    #[test]
    fn a_huge_network_with_thousands_of_leases_is_no_burden() {
        let config = config(r#"{"Network":"10.0.0.0/8","SubnetLen":30}"#);
        let base = config.ipv4.expect("IPv4").subnet_min.to_bits();
        let known: Vec<_> = (0..10_000u32)
            .map(|i| KnownLease {
                lease: Lease {
                    subnets: Subnets { v4: Ipv4Net::new((base + i * 4).into(), 30).ok(), v6: None },
                    attributes: LeaseAttributes {
                        public_ip: Some((0xac10_0000 + i).into()),
                        ..LeaseAttributes::default()
                    },
                },
                permanent: false,
            })
            .rev()
            .collect();
        let start = std::time::Instant::now();
        let chosen = choice(&config, "1.1.1.9", Subnets::default(), &known);
        assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
        let Choice::Create(Subnets { v4: Some(net), .. }) = chosen else { panic!("{chosen:?}") };
        let offset = (net.network().to_bits() - base) / 4;
        assert!((10_000..10_100).contains(&offset), "{net}");
    }

    fn any_config() -> impl Strategy<Value = NetworkConfig> {
        (any::<u32>(), 8..26u8, 2..5u8).prop_map(|(addr, prefix, more)| {
            let net = Ipv4Net::new(addr.into(), prefix).expect("short enough");
            config(&format!(r#"{{"Network":"{net}","SubnetLen":{}}}"#, prefix + more))
        })
    }

    proptest! {
        #[test]
        fn a_chosen_subnet_is_free_aligned_and_in_range(
            config in any_config(),
            leases in proptest::collection::vec((any::<u32>(), 1..5u8, 0..6u8, 0..9u32), 0..40),
            previous in proptest::option::of(any::<u32>()),
            seed in any::<u64>(),
        ) {
            let c = config.ipv4.expect("IPv4");
            // Leases in and around the network, of all sorts of lengths.
            let inside = |addr: u32, len: u8| {
                let host = addr.checked_shr((c.network.prefix_len() - 1).into()).unwrap_or(0);
                Ipv4Net::new((c.network.network().to_bits() ^ host).into(), len)
                    .expect("short enough")
                    .trunc()
            };
            let known: Vec<_> = leases
                .iter()
                .map(|(addr, shorter, longer, owner)| KnownLease {
                    lease: Lease {
                        subnets: Subnets {
                            v4: Some(inside(*addr, (c.subnet_len + longer - shorter).min(31))),
                            v6: None,
                        },
                        attributes: node(&format!("1.1.1.{owner}")),
                    },
                    permanent: false,
                })
                .collect();
            let previous =
                Subnets { v4: previous.map(|addr| inside(addr, c.subnet_len)), v6: None };
            let own = node("1.1.1.1");
            let mut rng = fastrand::Rng::with_seed(seed);
            let free = |subnets: &Subnets| known.iter().all(|k| !k.lease.subnets.overlaps(subnets));
            let ours = known.iter().any(|k| {
                k.lease.attributes == own && fits(&config, k.lease.subnets)
            });
            match plan_with(&mut rng, &config, &own, previous, &known) {
                Ok(Plan { choice: Choice::TakeOver { subnets, .. }, .. }) => {
                    prop_assert!(ours);
                    prop_assert!(fits(&config, subnets));
                }
                Ok(Plan { choice: Choice::Create(subnets), previous_held_by, discard }) => {
                    prop_assert!(!ours);
                    prop_assert!(free(&subnets), "{subnets}");
                    prop_assert!(fits(&config, subnets), "{subnets}");
                    prop_assert_eq!(subnets.v4.map(|net| net.trunc()), subnets.v4);
                    if fits(&config, previous) && free(&previous) {
                        prop_assert_eq!(subnets, previous);
                        prop_assert_eq!(previous_held_by, None);
                    }
                    prop_assert!(discard.iter().all(|d| !fits(&config, *d)));
                    // Once created, it is taken over and never moves again.
                    let mut known = known.clone();
                    known.retain(|k| !discard.contains(&k.lease.subnets));
                    known.push(KnownLease {
                        lease: Lease { subnets, attributes: own.clone() },
                        permanent: false,
                    });
                    prop_assert_eq!(
                        plan_with(&mut rng, &config, &own, subnets, &known).map(|p| p.choice),
                        Ok(Choice::TakeOver { subnets, permanent: false })
                    );
                }
                Err(_) => {
                    let step = 1u32 << (32 - c.subnet_len);
                    let mut at = c.subnet_min.to_bits();
                    while at <= c.subnet_max.to_bits() {
                        let net = Ipv4Net::new(at.into(), c.subnet_len).expect("short enough");
                        prop_assert!(!free(&Subnets { v4: Some(net), v6: None }), "{net} is free");
                        let Some(next) = at.checked_add(step) else { break };
                        at = next;
                    }
                }
            }
        }
    }
}
