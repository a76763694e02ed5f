//! Settings of the host that pods need and that are not ours to make: the kubelet, the CNI plugins
//! and the administrator set them. What is missing is said once, with what comes of it.

use std::{fs, io, path::Path};

use crate::config::NetworkConfig;

/// One sentence for each setting that is missing. `sysctls` is `/proc/sys`.
pub fn warnings(sysctls: &Path, config: &NetworkConfig) -> Vec<String> {
    let families = [
        (config.ipv4.is_some(), "net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"),
        (
            config.ipv6.is_some(),
            "net/ipv6/conf/all/forwarding",
            "net/bridge/bridge-nf-call-ip6tables",
        ),
    ];
    let mut warnings = Vec::new();
    for (_, forwarding, bridge) in families.into_iter().filter(|(enabled, ..)| *enabled) {
        if fs::read_to_string(sysctls.join(forwarding)).is_ok_and(|value| value.trim() == "0") {
            warnings.push(format!(
                "{} is 0: no packet gets from a pod to another node until somebody sets it to 1, \
                 as many CNI plugins do with their first pod",
                name(forwarding)
            ));
        }
        if let Err(err) = fs::metadata(sysctls.join(bridge))
            && err.kind() == io::ErrorKind::NotFound
        {
            warnings.push(format!(
                "{} is not there, as the module br_netfilter is not loaded: pods on a bridge do \
                 not reach a service address behind which a pod of their own node answers \
                 (`modprobe br_netfilter`)",
                name(bridge)
            ));
        }
    }
    warnings
}

/// The name of a setting as `sysctl` has it.
fn name(path: &str) -> String {
    path.replace('/', ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_for_the_families_in_use() {
        let dir = tempfile::tempdir().expect("a directory");
        let set = |key: &str, value: &str| {
            let path = dir.path().join(key);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, value).expect("writable");
        };
        let v4 = r#"{"Network":"10.77.0.0/16"}"#;
        let dual = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48"}"#;
        let warnings = |config: &str| {
            warnings(dir.path(), &NetworkConfig::parse(config).expect("a configuration"))
        };
        set("net/ipv4/ip_forward", "0\n");
        set("net/ipv6/conf/all/forwarding", "1\n");
        let (four, both) = (warnings(v4), warnings(dual));
        assert_eq!((four.len(), both.len()), (2, 3), "{both:#?}");
        assert!(four[0].contains("net.ipv4.ip_forward is 0"), "{four:?}");
        assert!(both[2].contains("net.bridge.bridge-nf-call-ip6tables"), "{both:?}");
        set("net/ipv4/ip_forward", "1\n");
        set("net/bridge/bridge-nf-call-iptables", "1\n");
        assert_eq!(warnings(v4), [""; 0]);
    }
}
