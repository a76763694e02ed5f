//! Our plugin in flannel's conflist: `flannel`, then `portmap`, with every version of CNI that
//! Debian's real plugins speak.

use std::{net::SocketAddr, path::Path};

use flannel_lab::{
    cni::{Container, PLUGINS, Runtime},
    conversation::{Conversation, listen},
    netns::Netns,
    prelude::*,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// The entry of `portmap` as the runtime fills it in.
fn portmap(version: &str, host_port: u16, port: u16, result: &Value) -> Value {
    json!({
        "cniVersion": version, "name": "cbr0", "type": "portmap",
        "capabilities": {"portMappings": true},
        "runtimeConfig": {"portMappings": [
            {"hostPort": host_port, "containerPort": port, "protocol": "tcp"},
        ]},
        "prevResult": result,
    })
}

/// A container that is called so.
fn container(node: &Node, name: &str) -> Result<Container> {
    Ok(Container { id: name.to_owned(), ns: Netns::new(node.ns().run(), name)? })
}

fn done(answer: Result<Value, flannel_lab::cni::Refused>) -> Result<Value> {
    answer.map_err(|refused| anyhow::anyhow!("{refused:?}"))
}

#[test]
fn a_port_of_the_host_leads_into_a_container() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    let mut flags = store.flags();
    flags.push("--ip-masq".into());
    let mut agent = alder.agent(flags)?;
    agent.wait_ready(READY_WITHIN)?;
    let moth = lab.node("moth")?;
    for version in ["0.3.1", "1.0.0"] {
        let runtime = Runtime::new(&alder, version);
        let container = container(&alder, version)?;
        let (addresses, result) = runtime.add(&container)?;
        let plugin = Path::new(PLUGINS).join("portmap");
        let listener = listen(&container.ns, SocketAddr::new(addresses[0], 0))?;
        let port = listener.local_addr()?.port();
        let config = portmap(version, 8080, port, &result);
        let chained = done(runtime.call_plugin(&plugin, "ADD", Some(&container), &config)?)?;
        ensure!(chained["ips"] == result["ips"], "{chained:#}");

        let target: SocketAddr = format!("{}:8080", alder.v4()).parse()?;
        let mut talk = Conversation::open(moth.ns(), listener, Some(target))
            .with_context(|| format!("{version}: through the host's port"))?;
        talk.word()?;

        done(runtime.call_plugin(&plugin, "DEL", Some(&container), &config)?)?;
        runtime.del(&container)?;
        ensure!(runtime.addresses_given()?.is_empty(), "{:?}", runtime.addresses_given()?);
    }
    Ok(())
}

#[test]
fn every_version_that_bridge_speaks_connects_checks_and_disconnects() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    let mut agent = alder.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let neighbour = container(&alder, "neighbour")?;
    let (there, _) = Runtime::new(&alder, "1.0.0").add(&neighbour)?;
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0"] {
        let runtime = Runtime::new(&alder, version);
        let container = container(&alder, version)?;
        let (addresses, result) = runtime.add(&container)?;
        ensure!(result["cniVersion"] == version, "{result:#}");
        traffic::wait_reaches(&container.ns, there[0], Duration::from_secs(5)).context(version)?;
        if version >= "0.4.0" {
            let mut config = runtime.config();
            config["prevResult"] = result;
            done(runtime.call_with("CHECK", Some(&container), &config)?)?;
        }
        runtime.del(&container)?;
        let given = runtime.addresses_given()?;
        ensure!(!given.contains(&addresses[0].to_string()), "{version}: {given:?}");
    }
    Ok(())
}
