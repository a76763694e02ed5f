//! The env file: what the CNI plugin and Docker read of us.

use std::{fs, os::unix::fs::PermissionsExt};

use flannel_lab::{agent, prelude::*};

const DUAL: &str = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;
const PLAIN: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// A store with this configuration and a lease for `alder`, so that every line is known.
fn store_with(lab: &Lab, config: &str, key: &str) -> Result<LocalStore> {
    let store = LocalStore::new(lab)?;
    store.put_config(config)?;
    store.put_lease(key, &json!({"PublicIP": "192.0.2.11", "PublicIPv6": "2001:db8:a::11"}))?;
    Ok(store)
}

#[test]
fn its_text_and_mode_are_flannels_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let store = store_with(&lab, DUAL, "10.77.7.0-24&fd77:0:0:7::-64")?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let text = fs::read_to_string(agent.subnet_file())?;
    let expected = "FLANNEL_NETWORK=10.77.0.0/16\n\
                    FLANNEL_SUBNET=10.77.7.1/24\n\
                    FLANNEL_IPV6_NETWORK=fd77::/48\n\
                    FLANNEL_IPV6_SUBNET=fd77:0:0:7::1/64\n\
                    FLANNEL_MTU=1430\n\
                    FLANNEL_IPMASQ=false\n";
    ensure!(text == expected, "{text}instead of\n{expected}");
    let mode = fs::metadata(agent.subnet_file())?.permissions().mode() & 0o777;
    ensure!(mode == 0o644, "mode {mode:o}");
    Ok(())
}

#[test]
fn another_place_is_used_and_its_directories_are_made() -> Result<()> {
    let lab = Lab::new()?;
    let store = store_with(&lab, PLAIN, "10.77.7.0-24")?;
    let node = lab.node("alder")?;
    let mut flags = store.flags();
    flags.push("--subnet-file=/run/deep/er/net.env".to_owned());
    let mut agent = node.agent(flags)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.get("FLANNEL_SUBNET") == Some("10.77.7.1/24"), "{env:?}");
    ensure!(!node.path(agent::SUBNET_FILE).exists(), "also at the default place");
    let beside: Vec<_> = fs::read_dir(node.path("/run/deep/er"))?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<_>>()?;
    // The lock by which a second agent is told stays; no temporary file does.
    let strays: Vec<_> =
        beside.iter().filter(|name| *name != "net.env" && *name != ".net.env.lock").collect();
    ensure!(strays.is_empty(), "left beside it: {strays:?}");
    Ok(())
}

#[test]
fn a_stale_file_is_gone_until_the_right_one_can_be_written() -> Result<()> {
    let lab = Lab::new()?;
    // No configuration yet: the agent waits.
    let store = LocalStore::new(&lab)?;
    let node = lab.node("alder")?;
    let file = node.path(agent::SUBNET_FILE);
    fs::create_dir_all(file.parent().context("no parent")?)?;
    fs::write(
        &file,
        "FLANNEL_NETWORK=10.77.0.0/16\nFLANNEL_SUBNET=10.77.44.1/24\nFLANNEL_MTU=1400\nFLANNEL_IPMASQ=true\n",
    )?;
    let mut agent = node.agent(store.flags())?;
    eventually("the stale file is gone", Duration::from_secs(2), || {
        Ok((!file.exists()).then_some(()))
    })?;
    store.put_config(PLAIN)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    // It was read before it went: the subnet of before is asked for again.
    ensure!(env.get("FLANNEL_SUBNET") == Some("10.77.44.1/24"), "{env:?}");
    ensure!(env.mtu()? == 1450, "{env:?}");
    Ok(())
}

#[test]
fn a_file_that_makes_no_sense_is_warned_of_and_replaced() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(PLAIN)?;
    let node = lab.node("alder")?;
    let file = node.path(agent::SUBNET_FILE);
    fs::create_dir_all(file.parent().context("no parent")?)?;
    fs::write(&file, "FLANNEL_SUBNET=fd77::1/64\nrubbish\u{0}")?;
    let mut agent = node.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()?.starts_with("10.77."), "{env:?}");
    ensure!(!agent.complaints(&["subnet.env"]).is_empty(), "no warning:\n{}", agent.log());
    Ok(())
}

#[test]
fn a_stop_leaves_it_and_a_start_without_it_gets_the_same_subnet() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(PLAIN)?;
    let node = lab.node("alder")?;
    let mut agent = node.agent(store.flags())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(5))?;
    ensure!(agent.subnet_env()? == env, "a stop took the file away: pods could not start");
    fs::remove_file(agent.subnet_file())?;
    let mut again = node.agent(store.flags())?;
    ensure!(again.wait_ready(READY_WITHIN)? == env, "another subnet");
    Ok(())
}

#[test]
fn docker_gets_its_options_from_it() -> Result<()> {
    let lab = Lab::new()?;
    let store = store_with(&lab, PLAIN, "10.77.7.0-24")?;
    let node = lab.node("alder")?;
    node.agent(store.flags())?.wait_ready(READY_WITHIN)?;
    let output = agent::subcommand(&node, &["mk-docker-opts", "-d", "/run/docker.env"])?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {told}", output.status);
    let text = fs::read_to_string(node.path("/run/docker.env"))?;
    let expected = "DOCKER_OPT_BIP=\"--bip=10.77.7.1/24\"\n\
                    DOCKER_OPT_IPMASQ=\"--ip-masq=true\"\n\
                    DOCKER_OPT_MTU=\"--mtu=1450\"\n\
                    DOCKER_OPTS=\" --bip=10.77.7.1/24 --ip-masq=true --mtu=1450\"\n";
    ensure!(text == expected, "{text}instead of\n{expected}");
    Ok(())
}
