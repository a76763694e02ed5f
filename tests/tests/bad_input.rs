//! What can be wrong gives one clear message, and an exit or a wait, as it should be; never a
//! half-made state.

use std::collections::BTreeSet;

use flannel_lab::{etcd::ClientCertificates, prelude::*};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// Runs the agent to its own end and returns exit status and log.
fn ends(node: &Node, flags: &[String]) -> Result<(i32, String)> {
    let (status, log) = node.agent(flags)?.wait_exit(Duration::from_secs(10))?;
    Ok((status.code().context("ended by a signal")?, log))
}

fn configured(lab: &Lab) -> Result<LocalStore> {
    let store = LocalStore::new(lab)?;
    store.put_config(CONFIG)?;
    Ok(store)
}

#[test]
fn flags_that_are_none_end_it_with_the_reason() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    for (flag, code, word) in [
        ("--no-such-flag", 2, "no-such-flag"),
        ("--healthz-port=many", 2, "healthz-port"),
        ("--datapath=warp", 2, "warp"),
        ("--subnet-lease-renew-margin=0", 1, "subnet-lease-renew-margin"),
        ("--iface=eth7", 1, "eth7"),
        ("--iface-regex=[", 1, "["),
        ("--public-ip=192.0.2", 1, "192.0.2"),
    ] {
        let mut flags = store.flags();
        flags.push(flag.into());
        let (got, log) = ends(&node, &flags).with_context(|| flag)?;
        ensure!(got == code && log.contains(word), "{flag}: exit {got}:\n{log}");
        ensure!(!log.contains("panicked"), "{flag}:\n{log}");
    }
    ensure!(node.link("flannel.1")?.is_none(), "a half-made state");
    ensure!(store.leases()?.is_empty(), "a lease of an agent that never ran");
    Ok(())
}

#[test]
fn a_wrong_interface_names_the_candidates() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    let mut flags = store.flags();
    flags.push("--iface=eth7".into());
    let (code, log) = ends(&node, &flags)?;
    ensure!(code == 1 && log.contains("eth0") && log.contains("192.0.2.11"), "{code}:\n{log}");
    Ok(())
}

#[test]
fn an_interface_without_an_address_is_said_and_waited_for() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    node.ns().ip(&["addr flush dev eth0", "link set eth0 down"])?;
    // By its name, by its address, by where it leads, and by the default route.
    for flag in ["--iface=eth0", "--iface=192.0.2.11", "--iface-can-reach=192.0.2.1", "--iface="] {
        let mut flags = store.flags();
        flags.push(flag.into());
        let mut agent = node.agent(&flags)?;
        agent.wait_complaint(&["eth0", "waiting for an address"], Duration::from_secs(6))?;
        let (ready, why) = agent.readiness()?;
        ensure!(!ready && why.contains("device: no interface"), "{flag}: {why}");
        ensure!(agent.get("/healthz")?.status == 200, "{flag}: waiting is no illness");
        ensure!(node.link("flannel.1")?.is_none(), "{flag}: a half-made state");
        std::thread::sleep(Duration::from_secs(1));
        let lines = agent.complaints(&[]);
        ensure!(lines.len() == 1, "{flag}: a line per try: {lines:#?}");
        node.ns().ip(&[
            "link set eth0 up",
            "addr add 192.0.2.11/24 dev eth0",
            "route add default via 192.0.2.1",
        ])?;
        agent.wait_ready(Duration::from_secs(3)).with_context(|| flag)?;
        agent.stop()?;
        node.ns().ip(&["link del flannel.1", "addr flush dev eth0", "link set eth0 down"])?;
    }
    Ok(())
}

#[test]
fn a_vni_that_makes_too_long_a_device_name_is_refused_with_the_limit() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    let node = lab.node("alder")?;
    for (families, vni, limit) in [
        ("", 10_000_000, "9999999"),
        (r#""EnableIPv6":true,"IPv6Network":"fd77::/48","#, 10_000, "9999"),
    ] {
        store.put_config(&format!(
            r#"{{"Network":"10.77.0.0/16",{families}"Backend":{{"Type":"vxlan","VNI":{vni}}}}}"#
        ))?;
        let (code, log) = ends(&node, &store.flags())?;
        ensure!(code == 1 && log.contains(&format!("VNI {vni}")), "{code}:\n{log}");
        ensure!(log.contains(&format!("VNI of {limit} at most")), "{log}");
        ensure!(node.link(&format!("flannel.{vni}"))?.is_none(), "a half-made state");
    }
    Ok(())
}

#[test]
fn a_subnet_file_without_an_end_is_read_no_further_than_is_sensible() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    node.run("mkdir -p /run/flannel")?;
    node.run("ln -s /dev/zero /run/flannel/subnet.env")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(!agent.subnet_file().is_symlink(), "still the link");
    Ok(())
}

#[test]
fn settings_of_the_host_that_pods_need_are_missed_in_one_line_each() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    node.run("sysctl -qw net.ipv4.ip_forward=0")?;
    // As if the module was not loaded.
    node.run("mount -t tmpfs none /proc/sys/net/bridge")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    for words in [["ip_forward", "is 0"], ["bridge-nf-call-iptables", "br_netfilter"]] {
        let lines = agent.complaints(&words);
        ensure!(lines.len() == 1, "{words:?}: {lines:?}\n{}", agent.log());
    }
    ensure!(node.run("sysctl -n net.ipv4.ip_forward")?.trim() == "0", "set by us");
    Ok(())
}

#[test]
fn a_read_only_state_directory_does_not_keep_pods_apart() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    let state = node.state_dir().display().to_string();
    node.run(&format!("mount -t tmpfs -o ro none {state}"))?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let lines = agent.complaints(&[&state]);
    ensure!(lines.len() == 1, "{:?}", agent.complaints(&[]));
    Ok(())
}

#[test]
fn a_subnet_file_that_cannot_be_written_is_said_and_it_is_not_ready() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    node.run("mkdir -p /run/full")?;
    node.run("mount -t tmpfs -o ro none /run/full")?;
    let mut flags = store.flags();
    flags.push("--subnet-file=/run/full/subnet.env".into());
    let mut agent = node.agent(&flags)?;
    // Refused at once, or waited for: in either case with the file's name.
    agent.wait_complaint_or_exit(&["/run/full/subnet.env"], Duration::from_secs(5))?;
    if agent.process().exited()?.is_none() {
        ensure!(!agent.readiness()?.0, "ready without an env file");
    }
    Ok(())
}

#[test]
fn without_capabilities_it_says_which_and_makes_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    let binary = flannel_lab::agent::binary()?;
    let mut command = node.command("setpriv");
    command
        .args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"])
        .arg(binary)
        .args(store.flags())
        .args(["--iface=eth0", &format!("--state-dir={}", node.state_dir().display())])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut child = command.spawn()?;
    std::thread::sleep(Duration::from_secs(3));
    // Waiting for somebody to grant it would be as good as ending.
    child.kill()?;
    let output = child.wait_with_output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(log.contains("NET_ADMIN"), "{log}");
    let lines = log.lines().filter(|line| line.contains("NET_ADMIN")).count();
    ensure!(lines == 1, "one clear message:\n{log}");
    ensure!(node.link("flannel.1")?.is_none(), "a half-made state");
    ensure!(!node.path("/run/flannel/subnet.env").exists(), "an env file without a network");
    Ok(())
}

#[test]
fn without_bpffs_the_kernel_path_carries_on_with_one_reason() -> Result<()> {
    let lab = Lab::new()?;
    let store = configured(&lab)?;
    let node = lab.node("alder")?;
    node.run("umount /sys/fs/bpf")?;
    let mut agent = node.agent(store.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    let lines = agent.complaints(&[]);
    ensure!(lines.len() <= 1, "{lines:#?}");
    Ok(())
}

#[test]
fn certificates_that_do_not_fit_are_said() -> Result<()> {
    let lab = Lab::new()?;
    let options = EtcdOptions { tls: Some(ClientCertificates::Required), ..EtcdOptions::default() };
    let etcd = Etcd::with(&lab, options)?;
    etcd.put_config(CONFIG)?;
    let node = lab.node("alder")?;
    let file = |name: &str| -> Result<String> {
        Ok(etcd.certificates()?.file(name).display().to_string())
    };
    // No client certificate: the server refuses; an unknown authority: we do.
    let no_client = vec![format!("--etcd-cafile={}", file("ca.pem")?)];
    let wrong_authority = vec![
        format!("--etcd-cafile={}", file("client.pem")?),
        format!("--etcd-certfile={}", file("client.pem")?),
        format!("--etcd-keyfile={}", file("client.key")?),
    ];
    for extra in [no_client, wrong_authority] {
        let mut flags = etcd.flags();
        flags.extend(extra.clone());
        let mut agent = node.agent(&flags)?;
        agent
            .wait_complaint_or_exit(&["certificate"], Duration::from_secs(10))
            .with_context(|| format!("{extra:?}"))?;
        std::thread::sleep(Duration::from_secs(2));
        // A refusal shows as an alert or as a closed connection, as the race has it.
        let lines = agent.complaints(&["192.0.2.5"]);
        let texts: BTreeSet<_> =
            lines.iter().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
        ensure!(texts.len() == lines.len() && lines.len() <= 2, "a line per try: {lines:#?}");
        agent.kill()?;
    }
    // A file that is none ends it.
    let mut flags = etcd.flags();
    flags.push("--etcd-cafile=/no/such/file".into());
    let (code, log) = ends(&node, &flags)?;
    ensure!(code == 1 && log.contains("/no/such/file"), "{code}:\n{log}");
    ensure!(node.link("flannel.1")?.is_none(), "a half-made state");
    Ok(())
}
