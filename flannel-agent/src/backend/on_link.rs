//! Which peers can be reached without a gateway: the question that host-gw and vxlan's
//! `DirectRouting` share. The kernel answers it, and its answer holds until routing changes.

use std::{collections::HashMap, net::IpAddr};

use tracing::debug;

use crate::{
    lease::LeaseAttributes,
    netlink::{mirror::Mirror, route},
    peer_table::PeerTable,
};

/// The kernel's answers to "is this address on one of our links".
#[derive(Debug, Default)]
pub struct OnLink(HashMap<IpAddr, Option<u32>>);

impl OnLink {
    /// Forgets all answers: an address, a link or a route changed.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Asks about every peer's public addresses that no answer is known of, and forgets those of
    /// peers that are no more. An address behind one of `devices` (names) counts as not on a
    /// link: a route to the tunnel's far end through the tunnel would be a loop.
    pub fn ask(&mut self, mirror: &mut Mirror, peers: &PeerTable, devices: &[String]) {
        let mut known = std::mem::take(&mut self.0);
        for (_, attributes) in peers.peers() {
            let v4 = attributes.public_ip.map(IpAddr::from);
            for ip in v4.into_iter().chain(attributes.public_ipv6.map(IpAddr::from)) {
                let link = known.remove(&ip).unwrap_or_else(|| look_up(mirror, ip, devices));
                self.0.insert(ip, link);
            }
        }
    }

    /// Asks about one peer's public addresses, as [`ask`](Self::ask) does about all.
    pub fn ask_of(
        &mut self,
        mirror: &mut Mirror,
        attributes: &LeaseAttributes,
        devices: &[String],
    ) {
        let v4 = attributes.public_ip.map(IpAddr::from);
        for ip in v4.into_iter().chain(attributes.public_ipv6.map(IpAddr::from)) {
            self.0.entry(ip).or_insert_with(|| look_up(mirror, ip, devices));
        }
    }

    /// Index of the link that `ip` is on; `None` if a gateway or nothing leads there.
    pub fn link(&self, ip: IpAddr) -> Option<u32> {
        self.0.get(&ip).copied().flatten()
    }
}

fn look_up(mirror: &mut Mirror, ip: IpAddr, devices: &[String]) -> Option<u32> {
    match route::on_link(mirror.requests(), ip) {
        Ok(link) => link.filter(|link| {
            let link = mirror.tables().links.get(link);
            !link.is_some_and(|link| devices.contains(&link.name))
        }),
        Err(err) => {
            debug!("route look-up for {ip}: {err}");
            None
        }
    }
}
