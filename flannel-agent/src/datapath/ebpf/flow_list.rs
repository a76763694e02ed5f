//! Listing flows from the pinned maps, whether an agent is running or not.

use std::{fs, path::Path};

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use flannel_common::flow::{Flow, FlowRules};
use serde_json::{Value, json};

use super::{EbpfError, flows::now, pin, promoter::FlowKey};

/// The promoted flows in the pinned maps, as JSON rows: `device`, `protocol`, `pod`, `remote`,
/// `interface`, `packets_out`, `packets_in`, `confirmed_ms_ago`.
pub fn read_pinned_flows(pin_dir: &Path) -> Result<Value, EbpfError> {
    let mut rows = Vec::new();
    let mut found = false;
    let mut devices: Vec<_> =
        fs::read_dir(pin_dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    devices.sort();
    for device in devices {
        let maps = pin::maps_in(&device);
        let open = |shape: &pin::MapShape| shape.open(&maps);
        let maps = open(&pin::FLOW_RULES).zip(open(&pin::FLOWS4)).zip(open(&pin::FLOWS6));
        let Some(((rules, v4), v6)) = maps else { continue };
        found = true;
        let name = pin::device_of(&device);
        let failed = |error: MapError| EbpfError::map(&error);
        let rules = rules_of(rules).map_err(failed)?;
        rows.extend(rows_of::<flannel_common::flow::Flow4Key>(&name, v4, &rules).map_err(failed)?);
        rows.extend(rows_of::<flannel_common::flow::Flow6Key>(&name, v6, &rules).map_err(failed)?);
    }
    if found { Ok(Value::Array(rows)) } else { Err(EbpfError::NoPinnedMaps(pin_dir.to_owned())) }
}

fn rules_of(map: MapData) -> Result<FlowRules, MapError> {
    let rules: Array<MapData, FlowRules> = Map::from_map_data(map)?.try_into()?;
    rules.get(&0, 0)
}

fn rows_of<K: FlowKey>(
    device: &str,
    map: MapData,
    rules: &FlowRules,
) -> Result<Vec<Value>, MapError> {
    let flows: HashMap<MapData, K, Flow> = Map::from_map_data(map)?.try_into()?;
    let now = now();
    // Flows come and go while we read; one that is missed is in the next list.
    let promoted = flows
        .iter()
        .filter_map(Result::ok)
        .filter(|(_, flow)| flow.is_promoted(rules) && now < rules.alive_until);
    Ok(promoted.map(|(key, flow)| row(device, &key, &flow, now)).collect())
}

fn row<K: FlowKey>(device: &str, key: &K, flow: &Flow, now: u64) -> Value {
    let connection = key.connection();
    let [out, inward] = flow.bypassed;
    let confirmed = flow.confirmed.iter().min().copied().unwrap_or_default();
    json!({
        "device": device,
        "protocol": if connection.tcp { "tcp" } else { "udp" },
        "pod": connection.from.to_string(),
        "remote": connection.to.to_string(),
        "interface": flow.pod_ifindex,
        "packets_out": out,
        "packets_in": inward,
        "confirmed_ms_ago": now.saturating_sub(confirmed) / 1_000_000,
    })
}
