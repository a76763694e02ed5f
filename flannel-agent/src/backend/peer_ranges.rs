//! Which peer has which addresses: no two of them the same.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

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
