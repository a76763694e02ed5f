//! The network configuration, as loose as real flannel takes it, and as strict as it has to be.

use flannel_lab::{agent::Agent, prelude::*};

const VXLAN: &str = r#""Backend":{"Type":"vxlan"}"#;

/// An agent that is given a configuration as its first.
fn started(lab: &Lab, name: &str, store: &LocalStore, config: &str) -> Result<(Node, Agent)> {
    store.put_config(config)?;
    let node = lab.node(name)?;
    let agent = node.agent(store.flags())?;
    Ok((node, agent))
}

/// One that has to become ready.
fn accepted(config: &str) -> Result<(Lab, Node, Agent, SubnetEnv)> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let (node, mut agent) = started(&lab, "alder", &store, config)?;
    let env = agent.wait_ready(READY_WITHIN).with_context(|| config.to_owned())?;
    Ok((lab, node, agent, env))
}

#[test]
fn letter_case_and_host_bits_do_not_matter() -> Result<()> {
    let (_lab, node, agent, env) = accepted(
        r#"{"network":"10.77.5.9/16","subnetlen":24,"backend":{"type":"vxlan","vni":7,"port":8500,"Directrouting":true}}"#,
    )?;
    ensure!(env.get("FLANNEL_NETWORK") == Some("10.77.0.0/16"), "{env:?}");
    let link = node.link("flannel.7")?.context("no flannel.7")?;
    let data = &link["linkinfo"]["info_data"];
    ensure!(data["id"] == 7 && data["port"] == 8500, "{link:#}");
    ensure!(agent.complaints(&[]).is_empty(), "{:?}", agent.complaints(&[]));
    Ok(())
}

#[test]
fn unknown_keys_are_named_in_one_warning() -> Result<()> {
    let (_lab, _node, agent, _) = accepted(
        r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan","Future":{"x":1}},"Comment":"ours"}"#,
    )?;
    let lines = agent.complaints(&["Future", "Comment"]);
    ensure!(lines.len() == 1 && agent.complaints(&[]).len() == 1, "{:?}", agent.complaints(&[]));
    Ok(())
}

#[test]
fn no_backend_is_udp_as_upstream_has_it_and_vxlan_is_recommended() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let (_node, mut agent) = started(&lab, "alder", &store, r#"{"Network":"10.77.0.0/16"}"#)?;
    agent.wait_complaint(&["Backend.Type", "udp", "vxlan"], Duration::from_secs(5))?;
    std::thread::sleep(Duration::from_secs(1));
    let lines = agent.complaints(&["Backend.Type", "missing"]);
    ensure!(lines.len() == 1, "{lines:?}");
    Ok(())
}

/// Each with the subnet's length and the first and last subnet that may be leased.
#[test]
fn bounds_that_fit_are_accepted() -> Result<()> {
    for (config, len, first, last) in [
        (r#""Network":"10.77.8.0/22""#, 24, "10.77.9.0", "10.77.11.0"),
        (r#""Network":"10.77.8.0/24""#, 26, "10.77.8.64", "10.77.8.192"),
        (r#""Network":"10.77.8.0/28""#, 30, "10.77.8.4", "10.77.8.12"),
        (
            r#""Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.8.64","SubnetMax":"10.77.8.192""#,
            26,
            "10.77.8.64",
            "10.77.8.192",
        ),
    ] {
        let (_lab, _node, _agent, env) = accepted(&format!("{{{config},{VXLAN}}}"))?;
        let (gateway, got) = env.gateway_v4()?.context("no subnet")?;
        let base = gateway.to_bits() - 1;
        let bits = |text: &str| -> Result<u32> {
            Ok(text.parse::<std::net::Ipv4Addr>().context("an address")?.to_bits())
        };
        ensure!(
            got == len && (bits(first)?..=bits(last)?).contains(&base),
            "{config}: {gateway}/{got}"
        );
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_rejected_by_field_and_value() -> Result<()> {
    let lab = Lab::new()?;
    for (index, (config, words)) in [
        (r#""Network":"10.77.8.0/29""#, ["Network", "10.77.8.0/29"]),
        (r#""Network":"10.77.8.0/32""#, ["Network", "10.77.8.0/32"]),
        (r#""Network":"10.77.8.0/22","SubnetLen":31"#, ["SubnetLen", "31"]),
        (r#""Network":"10.77.8.0/22","SubnetLen":23"#, ["SubnetLen", "23"]),
        (
            r#""Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.8.70""#,
            ["SubnetMin", "10.77.8.70"],
        ),
        (
            r#""Network":"10.77.8.0/22","SubnetLen":26,"SubnetMax":"10.78.0.0""#,
            ["SubnetMax", "10.78.0.0"],
        ),
        (
            r#""Network":"10.77.8.0/22","SubnetLen":26,"SubnetMin":"10.77.9.0","SubnetMax":"10.77.8.64""#,
            ["SubnetM", "10.77.9.0"],
        ),
        (r#""SubnetLen":24"#, ["Network", "missing"]),
        (r#""Network":"10.77.0.0/33""#, ["Network", "10.77.0.0/33"]),
        (r#""Network":"fd77::/48""#, ["Network", "fd77::/48"]),
        (
            r#""EnableIPv6":true,"Network":"10.77.0.0/16","IPv6Network":"fd77::/126""#,
            ["IPv6Network", "fd77::/126"],
        ),
        (r#""EnableIPv6":true,"Network":"10.77.0.0/16""#, ["IPv6Network", "missing"]),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = lab.run().dir().join(format!("config{index}"));
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join("config.json"), format!("{{{config},{VXLAN}}}"))?;
        let node = lab.node(&format!("n{index}"))?;
        let mut agent = node.agent([format!("--local-subnet-mgr={}", dir.display())])?;
        agent
            .wait_complaint(&words, Duration::from_secs(5))
            .with_context(|| config.to_owned())?;
        ensure!(!agent.subnet_file().exists(), "{config}: an env file");
        ensure!(node.link("flannel.1")?.is_none(), "{config}: a half-made state");
        let lines = agent.complaints(&[]);
        ensure!(lines.len() == 1, "{config}: {lines:?}");
    }
    Ok(())
}

#[test]
fn a_corrected_configuration_is_taken_without_a_restart() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let (_node, mut agent) = started(&lab, "alder", &store, "{\"Network\":")?;
    agent.wait_complaint(&["config.json"], Duration::from_secs(5))?;
    ensure!(!agent.readiness()?.0, "ready without a configuration");
    store.put_config(&format!(r#"{{"Network":"10.77.0.0/16",{VXLAN}}}"#))?;
    agent.wait_ready(Duration::from_secs(5))?;
    Ok(())
}

#[test]
fn the_first_subnet_is_never_leased_and_a_full_network_names_its_holders() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    for n in 9..=11 {
        store.put_lease(
            &format!("10.77.{n}.0-24"),
            &json!({"PublicIP": format!("192.0.2.{}", 80 + n), "BackendType": "vxlan",
                "BackendData": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:00:{n:02x}")}}),
        )?;
    }
    let config = format!(r#"{{"Network":"10.77.8.0/22",{VXLAN}}}"#);
    let (_node, mut agent) = started(&lab, "alder", &store, &config)?;
    agent
        .wait_complaint(&["3", "192.0.2.89", "192.0.2.90", "192.0.2.91"], Duration::from_secs(5))?;
    ensure!(store.leases()?.len() == 3, "{:?}", store.leases()?);
    store.delete_lease("10.77.10.0-24")?;
    let env = agent.wait_ready(Duration::from_secs(10))?;
    ensure!(env.subnet_v4()? == "10.77.10.0/24", "{env:?}");
    Ok(())
}

#[test]
fn ipv6_alone_needs_no_ipv4() -> Result<()> {
    let (_lab, node, _agent, env) = accepted(&format!(
        r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd77::/48",{VXLAN}}}"#
    ))?;
    ensure!(env.get("FLANNEL_SUBNET").is_none(), "{env:?}");
    ensure!(env.get("FLANNEL_IPV6_NETWORK") == Some("fd77::/48"), "{env:?}");
    ensure!(env.subnet_v6()?.ends_with("/64"), "{env:?}");
    ensure!(node.link("flannel-v6.1")?.is_some(), "no flannel-v6.1");
    ensure!(node.link("flannel.1")?.is_none(), "an IPv4 device");
    Ok(())
}
