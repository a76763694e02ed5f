//! What differs between two network configurations, setting by setting, and how part of one is
//! taken over into another.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::NetworkConfig;
use crate::lease::RawJson;

/// Options of `Backend` that are secrets, by a part of their names.
const SECRETS: [&str; 2] = ["psk", "accesskey"];

impl NetworkConfig {
    /// What has another meaning in `new`, one `NAME: OLD is now NEW` per setting, in the order of
    /// the names. Empty where only the way of writing differs, or keys that mean nothing. Secrets
    /// are named without their values.
    pub fn differences(&self, new: &Self) -> Vec<String> {
        let (old_keys, new_keys) = (settings(self), settings(new));
        let names: BTreeSet<&String> = old_keys.keys().chain(new_keys.keys()).collect();
        let text = |value: Option<&Value>| value.map_or("unset".to_owned(), Value::to_string);
        names
            .into_iter()
            .filter(|name| old_keys.get(*name) != new_keys.get(*name))
            .map(|name| {
                if SECRETS.iter().any(|word| name.to_lowercase().contains(word)) {
                    return format!("{name} changed");
                }
                format!("{name}: {} is now {}", text(old_keys.get(name)), text(new_keys.get(name)))
            })
            .collect()
    }

    /// This configuration with these options of `Backend` as `new` has them.
    #[must_use]
    pub fn with_backend_options(&self, new: &Self, names: &[&str]) -> Self {
        let named = |key: &str| names.iter().any(|name| name.eq_ignore_ascii_case(key));
        let mut backend = options(self);
        backend.retain(|key, _| !named(key));
        backend.extend(options(new).into_iter().filter(|(key, _)| named(key)));
        let backend = RawJson::from_compact(Value::Object(backend).to_string());
        Self { backend, ..self.clone() }
    }
}

/// The options of `Backend`.
fn options(config: &NetworkConfig) -> Map<String, Value> {
    match serde_json::from_str(config.backend.as_str()) {
        Ok(Value::Object(options)) => options,
        _ => Map::new(),
    }
}

/// The settings that have a meaning, by their names.
fn settings(config: &NetworkConfig) -> Map<String, Value> {
    let mut settings = Map::new();
    settings.insert("Network".into(), config.ipv4.map(|v4| v4.network.to_string()).into());
    settings.insert("IPv6Network".into(), config.ipv6.map(|v6| v6.network.to_string()).into());
    settings.insert("EnableNFTables".into(), config.enable_nftables.into());
    settings.insert("Backend.Type".into(), config.backend_type.clone().into());
    let options = options(config).into_iter();
    settings.extend(
        options
            .filter(|(name, _)| !name.eq_ignore_ascii_case("type"))
            .map(|(name, value)| (format!("Backend.{name}"), value)),
    );
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(backend: &str) -> NetworkConfig {
        let text = format!(r#"{{"Network":"10.77.0.0/16","Backend":{backend}}}"#);
        NetworkConfig::parse_for_kube(&text).expect("good")
    }

    #[test]
    fn each_setting_is_named_with_both_values_but_for_secrets() {
        let old = config(r#"{"Type":"vxlan","VNI":1,"Port":8472}"#);
        let new = config(r#"{"Type":"vxlan","VNI":2,"MTU":1400}"#);
        assert_eq!(
            old.differences(&new),
            [
                "Backend.MTU: unset is now 1400",
                "Backend.Port: 8472 is now unset",
                "Backend.VNI: 1 is now 2"
            ]
        );
        let old = config(r#"{"Type":"wireguard","PSK":"old secret"}"#);
        let new = config(r#"{"Type":"wireguard","PSK":"new secret"}"#);
        assert_eq!(old.differences(&new), ["Backend.PSK changed"]);
        assert!(old.differences(&config(r#"{ "type":"WireGuard","PSK":"old secret"}"#)).is_empty());
    }

    #[test]
    fn some_options_are_taken_over_in_any_case() {
        let old = config(r#"{"Type":"vxlan","VNI":1,"MTU":1500,"Learning":true}"#);
        let new = config(r#"{"Type":"vxlan","VNI":2,"mtu":1400,"DirectRouting":true}"#);
        let mixed = old.with_backend_options(&new, &["MTU", "Learning", "DirectRouting"]);
        assert_eq!(mixed.differences(&new), ["Backend.VNI: 1 is now 2"]);
    }
}
