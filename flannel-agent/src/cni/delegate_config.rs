//! The delegate's configuration (specification §9.3), byte for byte as flannel's plugin writes it:
//! the scratch file with it is read by whichever of the two plugins does the DEL.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::{
    config::NetworkConfig,
    error::{CniError, code},
    go_encoding,
    subnet_file::SubnetFile,
};

/// The delegate if the configuration names none.
const DEFAULT_DELEGATE: &str = "bridge";

/// The configuration's text.
pub fn render(delegate: Map<String, Value>) -> String {
    // Routes are a type of their own in Go, so their fields keep its order.
    go_encoding::encode(&Value::Object(delegate), &["ipam", "routes"])
}

/// Builds the delegate's configuration.
pub fn build(config: &NetworkConfig, subnet: &SubnetFile) -> Result<Map<String, Value>, CniError> {
    let mut delegate = config.delegate.clone();
    if let Some(runtime_config) = &config.runtime_config {
        delegate.insert("runtimeConfig".into(), runtime_config.clone().into());
    }
    delegate.insert("name".into(), config.name.as_str().into());
    let kind = delegate.entry("type").or_insert_with(|| DEFAULT_DELEGATE.into()).clone();
    delegate.entry("ipMasq").or_insert_with(|| (!subnet.ip_masq).into());
    delegate.entry("mtu").or_insert_with(|| subnet.mtu.into());
    if kind == DEFAULT_DELEGATE {
        delegate.entry("isGateway").or_insert(true.into());
    }
    if !config.cni_version.is_empty() {
        delegate.insert("cniVersion".into(), config.cni_version.as_str().into());
    }
    delegate.insert("ipam".into(), ipam(&config.ipam, subnet)?.into());
    Ok(delegate)
}

fn ipam(given: &Map<String, Value>, subnet: &SubnetFile) -> Result<Map<String, Value>, CniError> {
    let mut ipam = given.clone();
    ipam.entry("type").or_insert_with(|| "host-local".into());
    let v4 = subnet.subnet_v4.map(|net| json!([{"subnet": net.to_string()}]));
    let v6 = subnet.subnet_v6.map(|net| json!([{"subnet": net.to_string()}]));
    ipam.insert("ranges".into(), v4.into_iter().chain(v6).collect());
    let mut routes = match given.get("routes") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(routes)) => routes.iter().map(route).collect::<Result<_, _>>()?,
        Some(other) => return Err(bad_route(other, "is not a list")),
    };
    routes.extend(subnet.networks.iter().map(|network| json!({"dst": network.to_string()})));
    ipam.insert("routes".into(), routes.into());
    Ok(ipam)
}

/// A route of the user's with the fields that CNI knows, in the order of Go's type; others are
/// dropped, as there.
fn route(given: &Value) -> Result<Value, CniError> {
    let Value::Object(fields) = given else { return Err(bad_route(given, "is not an object")) };
    let mut route = Map::new();
    for name in ["dst", "gw", "mtu", "advmss", "priority", "table", "scope"] {
        let Some((_, value)) = fields.iter().rfind(|(key, _)| key.eq_ignore_ascii_case(name))
        else {
            continue;
        };
        let text = value.as_str();
        let kept = match name {
            "dst" => {
                let net = text.and_then(|text| text.parse::<IpNet>().ok());
                net.ok_or_else(|| bad_route(value, "is not a network"))?.to_string().into()
            }
            "gw" => match text.and_then(|text| text.parse::<IpAddr>().ok()) {
                Some(address) => address.to_string().into(),
                None if value.is_null() || text == Some("") => continue,
                None => return Err(bad_route(value, "is not an address")),
            },
            _ => match value.as_i64() {
                // Go leaves these out when zero, but a table or a scope may be zero.
                Some(0) if !matches!(name, "table" | "scope") => continue,
                Some(number) => number.into(),
                None if value.is_null() => continue,
                None => return Err(bad_route(value, "is not a whole number")),
            },
        };
        route.insert(name.to_owned(), kept);
    }
    if !route.contains_key("dst") {
        return Err(bad_route(given, "has no dst"));
    }
    Ok(Value::Object(route))
}

fn bad_route(value: &Value, reason: &str) -> CniError {
    CniError::new(
        code::INVALID_NETWORK_CONFIG,
        format!("failed to parse ipam.routes: {value} {reason}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::environment::Command;

    const V4: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\n\
                      FLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\n";
    const DUAL: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\n\
                        FLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00::1/64\n\
                        FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";

    fn delegate(config: &str, env: &str) -> Result<String, CniError> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("subnet.env");
        std::fs::write(&path, env).expect("written");
        let subnet = SubnetFile::read(&path)?;
        build(&NetworkConfig::parse(config, Command::Add)?, &subnet).map(render)
    }

    #[test]
    fn the_reference_configuration() {
        assert_eq!(
            delegate(r#"{"name":"cni-flannel","type":"flannel"}"#, V4).as_deref(),
            Ok(concat!(
                r#"{"ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"#,
                r#""routes":[{"dst":"10.1.0.0/16"}],"type":"host-local"},"isGateway":true,"#,
                r#""mtu":1472,"name":"cni-flannel","type":"bridge"}"#
            ))
        );
    }

    #[test]
    fn the_standard_conflist_on_a_dual_stack_node() {
        let config = r#"{"cniVersion":"0.3.1","name":"cbr0","type":"flannel",
            "delegate":{"hairpinMode":true,"isDefaultGateway":true},
            "runtimeConfig":{"mac":"02:00:00:00:00:01"}}"#;
        assert_eq!(
            delegate(config, DUAL).as_deref(),
            Ok(concat!(
                r#"{"cniVersion":"0.3.1","hairpinMode":true,"ipMasq":true,"ipam":{"ranges":"#,
                r#"[[{"subnet":"10.1.17.0/24"}],[{"subnet":"fc00::/64"}]],"routes":"#,
                r#"[{"dst":"10.1.0.0/16"},{"dst":"fc00::/48"}],"type":"host-local"},"#,
                r#""isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"cbr0","#,
                r#""runtimeConfig":{"mac":"02:00:00:00:00:01"},"type":"bridge"}"#
            ))
        );
    }

    #[test]
    fn what_the_user_sets_wins() {
        let config = r#"{"name":"n","ipam":{"type":"x","ranges":[1],"dataDir":"/d",
            "routes":[{"gw":"10.0.0.1","scope":0,"dst":"10.9.1.1/8","mtu":0,"advmss":9,"x":1}]},
            "delegate":{"type":"macvlan","mtu":9000,"ipMasq":false,"master":"eth1"}}"#;
        assert_eq!(
            delegate(config, DUAL).as_deref(),
            Ok(concat!(
                r#"{"ipMasq":false,"ipam":{"dataDir":"/d","ranges":"#,
                r#"[[{"subnet":"10.1.17.0/24"}],[{"subnet":"fc00::/64"}]],"routes":"#,
                r#"[{"dst":"10.9.1.1/8","gw":"10.0.0.1","advmss":9,"scope":0},"#,
                r#"{"dst":"10.1.0.0/16"},{"dst":"fc00::/48"}],"type":"x"},"#,
                r#""master":"eth1","mtu":9000,"name":"n","type":"macvlan"}"#
            ))
        );
    }

    #[test]
    fn malformed_routes_are_refused() {
        for routes in [
            r#""x""#,
            "[1]",
            "[{}]",
            r#"[{"dst":"10.0.0.0"}]"#,
            r#"[{"dst":"10.0.0.0/8","gw":"x"}]"#,
            r#"[{"dst":"10.0.0.0/8","mtu":1.5}]"#,
        ] {
            let config = format!(r#"{{"name":"n","ipam":{{"routes":{routes}}}}}"#);
            let error = delegate(&config, V4).expect_err(routes);
            assert_eq!(error.code, code::INVALID_NETWORK_CONFIG, "{routes}");
            assert!(error.msg.contains("ipam.routes"), "{error}");
        }
    }
}
