//! Reading what the program has counted, from our own maps or from the pinned ones.

use std::{borrow::Borrow, fs, path::Path};

use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray};
use flannel_common::{
    map::{Counters, NO_SUBNET, OuterAddress, Peer},
    outcome::Outcome,
};
use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::{Value, json};

use super::{EbpfError, PeerCounters, pin, wanted::address};
use crate::lease::Subnets;

/// The maps as the agent uses them.
pub(super) type Peers = HashMap<MapData, OuterAddress, Peer>;
/// Counters, for reading or writing.
pub(super) type CounterArray = PerCpuArray<MapData, Counters>;

/// One slot, summed over the CPUs.
pub(super) fn total<T: Borrow<MapData>>(
    map: &PerCpuArray<T, Counters>,
    index: u32,
) -> Result<Counters, MapError> {
    let values = map.get(&index, 0)?;
    Ok(values.iter().fold(Counters::default(), |sum, cpu| sum.plus(*cpu)))
}

/// All outcomes by their words.
pub(super) fn outcomes(map: &CounterArray) -> Result<Value, MapError> {
    let mut object = serde_json::Map::new();
    for outcome in Outcome::ALL {
        let Counters { packets, bytes } = total(map, outcome.index())?;
        let value = json!({"packets": packets, "bytes": bytes});
        object.insert(outcome.word().to_owned(), value);
    }
    Ok(Value::Object(object))
}

/// A peer and what came from it.
pub(super) fn peer_counters<T: Borrow<MapData>>(
    map: &PerCpuArray<T, Counters>,
    outer: &OuterAddress,
    peer: &Peer,
) -> Result<PeerCounters, MapError> {
    let Counters { packets, bytes } = total(map, peer.index)?;
    Ok(PeerCounters { outer: address(outer), subnets: subnets(peer), packets, bytes })
}

/// Reads the peers that stand in the kernel without the agent: an array of objects with the
/// tunnel's `device`, the peer's `subnet`, `outer` address, `packets` and `bytes`.
pub fn read_pinned_peers(pin_dir: &Path) -> Result<Value, EbpfError> {
    pin::check_bpffs(pin_dir)?;
    let mut rows = Vec::new();
    let mut found = false;
    let mut devices: Vec<_> =
        fs::read_dir(pin_dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    devices.sort();
    for device in devices {
        let maps = pin::maps_in(&device);
        let pair = pin::PEERS.open(&maps).zip(pin::PEER_COUNTERS.open(&maps));
        let Some((peers, counters)) = pair else { continue };
        found = true;
        rows.extend(
            rows_of(&pin::device_of(&device), peers, counters)
                .map_err(|error| EbpfError::map(&error))?,
        );
    }
    if found { Ok(Value::Array(rows)) } else { Err(EbpfError::NoPinnedMaps(pin_dir.to_owned())) }
}

fn rows_of(device: &str, peers: MapData, counters: MapData) -> Result<Vec<Value>, MapError> {
    let peers = Map::from_map_data(peers)?;
    let peers: Peers = peers.try_into()?;
    let counters: CounterArray = Map::from_map_data(counters)?.try_into()?;
    let mut rows = Vec::new();
    for entry in &peers {
        let (outer, peer) = entry?;
        rows.push(peer_counters(&counters, &outer, &peer)?);
    }
    rows.sort_by_key(|row| (row.subnets, row.outer));
    Ok(rows.iter().map(|row| row.to_json(device)).collect())
}

impl PeerCounters {
    fn to_json(&self, device: &str) -> Value {
        json!({
            "device": device,
            "subnet": self.subnets.to_string(),
            "outer": self.outer.to_string(),
            "packets": self.packets,
            "bytes": self.bytes,
        })
    }
}

/// The map's form of a peer.
pub(super) fn peer(index: u32, subnets: &Subnets) -> Peer {
    Peer {
        index,
        subnet_v4: subnets.v4.map_or([0; 4], |net| net.network().octets()),
        subnet_v6: subnets.v6.map_or([0; 16], |net| net.network().octets()),
        prefix_len_v4: subnets.v4.map_or(NO_SUBNET, |net| net.prefix_len()),
        prefix_len_v6: subnets.v6.map_or(NO_SUBNET, |net| net.prefix_len()),
        reserved: 0,
    }
}

fn subnets(peer: &Peer) -> Subnets {
    // NO_SUBNET is no prefix length, nor is any nonsense that a foreign hand wrote.
    Subnets {
        v4: Ipv4Net::new(peer.subnet_v4.into(), peer.prefix_len_v4).ok(),
        v6: Ipv6Net::new(peer.subnet_v6.into(), peer.prefix_len_v6).ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use proptest::prelude::*;

    use super::{super::wanted::outer_address, *};

    proptest! {
        #[test]
        fn subnets_come_back(v4: Option<(u32, u8)>, v6: Option<(u128, u8)>, index: u32) {
            let wanted = Subnets {
                v4: v4.and_then(|(a, l)| Ipv4Net::new(a.into(), l % 33).ok()).map(|n| n.trunc()),
                v6: v6.and_then(|(a, l)| Ipv6Net::new(a.into(), l % 129).ok()).map(|n| n.trunc()),
            };
            prop_assert_eq!(subnets(&peer(index, &wanted)), wanted);
            prop_assert_eq!(peer(index, &wanted).index, index);
        }

        #[test]
        fn outer_addresses_come_back(v4: u32, v6: u128) {
            let v4 = IpAddr::V4(v4.into());
            prop_assert_eq!(address(&outer_address(v4)), v4);
            let v6 = Ipv6Addr::from(v6);
            if v6.to_ipv4_mapped().is_none() {
                prop_assert_eq!(address(&outer_address(v6.into())), IpAddr::V6(v6));
            }
        }
    }
}
