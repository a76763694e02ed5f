//! The network configuration as an operator writes it: whatever it is, it is read or refused, and
//! what is read keeps its bounds.

#![no_main]

use flannel_agent::config::NetworkConfig;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = NetworkConfig::parse_for_kube(text);
    let Ok(config) = NetworkConfig::parse(text) else { return };
    assert!(config.ipv4.is_some() || config.ipv6.is_some(), "a configuration without a network");
    if let Some(v4) = &config.ipv4 {
        assert!(v4.subnet_len > v4.network.prefix_len() && v4.subnet_len <= 30, "{v4:?}");
        assert!(
            v4.network.contains(&v4.subnet_min) && v4.network.contains(&v4.subnet_max),
            "{v4:?}"
        );
        assert!(v4.subnet_min <= v4.subnet_max, "{v4:?}");
    }
    if let Some(v6) = &config.ipv6 {
        assert!(v6.subnet_len > v6.network.prefix_len() && v6.subnet_len <= 126, "{v6:?}");
        assert!(
            v6.network.contains(&v6.subnet_min) && v6.network.contains(&v6.subnet_max),
            "{v6:?}"
        );
        assert!(v6.subnet_min <= v6.subnet_max, "{v6:?}");
    }
});
