//! Which peer has which addresses: no two of them the same.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::IpNet;

/// Whether packets to `subnet` can be brought to `public`, sent from our address `local`.
///
/// A route to a subnet that holds an address which outer packets go to or come from would cut this
/// node off from its peers and its store, for as long as the lease stands.
///
/// # Errors
/// Why not, to follow "peer … is left out: ".
pub fn reachable(subnet: IpNet, public: IpAddr, local: Option<IpAddr>) -> Result<(), String> {
    let broadcast = IpAddr::V4(Ipv4Addr::BROADCAST);
    if public.is_unspecified()
        || public.is_loopback()
        || public.is_multicast()
        || public == broadcast
    {
        return Err(format!("its address {public} is not that of a node"));
    }
    if local == Some(public) {
        return Err(format!("its address {public} is our own"));
    }
    if subnet.addr().is_loopback() || subnet.addr().is_multicast() {
        return Err("no route can lead there".to_owned());
    }
    if let Some(address) = [Some(public), local].into_iter().flatten().find(|a| subnet.contains(a))
    {
        return Err(format!("it holds {address}, an address of the network below the tunnel"));
    }
    Ok(())
}

/// Subnets that peers were given, none overlapping another, with their public addresses.
#[derive(Debug, Default)]
pub struct PeerRanges(BTreeMap<IpNet, IpAddr>);

impl PeerRanges {
    /// Whether `subnet` can be `public`'s beside our `own` and what others have.
    ///
    /// # Errors
    /// A sentence that names both sides of the conflict.
    pub fn check(&self, subnet: IpNet, public: IpAddr, own: IpNet) -> Result<(), String> {
        if overlap(&subnet, &own) {
            return Err(format!(
                "peer {subnet} ({public}) overlaps our own subnet {own}: it is left out"
            ));
        }
        if let Some((other, owner)) = self.overlapping(&subnet) {
            return Err(format!(
                "peers {other} ({owner}) and {subnet} ({public}) overlap: the latter is left out"
            ));
        }
        Ok(())
    }

    /// Gives `subnet` to `public`.
    pub fn insert(&mut self, subnet: IpNet, public: IpAddr) {
        self.0.insert(subnet, public);
    }

    /// Takes `subnet` back from whoever has it.
    pub fn remove(&mut self, subnet: &IpNet) {
        self.0.remove(subnet);
    }

    /// The range that overlaps `subnet`. None of them overlap each other, so only the neighbours
    /// in order can.
    fn overlapping(&self, subnet: &IpNet) -> Option<(IpNet, IpAddr)> {
        let before = self.0.range(..=*subnet).next_back();
        let after = self.0.range(*subnet..).next();
        let mut neighbours = before.into_iter().chain(after);
        neighbours.find(|(net, _)| overlap(net, subnet)).map(|(net, owner)| (*net, *owner))
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_cut_us_off_is_refused_and_neighbours_of_it_are_not() {
        let check = |subnet: &str, public: &str| {
            let local = if public.contains(':') { "2001:db8:a::11" } else { "192.0.2.11" };
            let parsed = (subnet.parse().expect(subnet), public.parse().expect(public));
            reachable(parsed.0, parsed.1, local.parse().ok())
        };
        for (subnet, public) in [
            ("10.77.2.0/24", "192.0.2.12"),
            ("192.0.3.0/24", "192.0.2.12"),
            ("192.0.2.16/28", "192.0.2.12"),
            ("fd77:0:0:2::/64", "2001:db8:a::12"),
        ] {
            assert_eq!(check(subnet, public), Ok(()), "{subnet} {public}");
        }
        for (subnet, public, why) in [
            ("192.0.2.0/24", "198.51.100.13", "192.0.2.11"),
            ("198.51.100.0/24", "198.51.100.13", "198.51.100.13"),
            ("128.0.0.0/1", "10.0.0.1", "192.0.2.11"),
            ("2001:db8:a::/64", "2001:db8:b::13", "2001:db8:a::11"),
            ("10.77.2.0/24", "192.0.2.11", "our own"),
            ("10.77.2.0/24", "127.0.0.1", "127.0.0.1"),
            ("10.77.2.0/24", "224.0.0.5", "224.0.0.5"),
            ("10.77.2.0/24", "255.255.255.255", "255.255.255.255"),
            ("fd77:0:0:2::/64", "ff02::1", "ff02::1"),
            ("127.0.0.0/8", "192.0.2.12", "route"),
            ("224.0.0.0/4", "192.0.2.12", "route"),
        ] {
            let refused = check(subnet, public).expect_err(subnet);
            assert!(refused.contains(why), "{subnet} {public}: {refused}");
        }
    }
}
