//! The image that `cargo xtask image` makes, unpacked and run: a read-only root, the capabilities of
//! `deploy/unprivileged.yaml`, and the mounts of the `DaemonSet`.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use flannel_lab::{
    container::{Container, Grants},
    prelude::*,
    process::{self, Process},
};

#[test]
fn the_image_runs_the_agent_and_installs_the_plugin() -> Result<()> {
    let lab = Lab::new()?;
    let node = lab.node("alder")?;
    for name in ["bin", "net.d", "kube-flannel", "lib"] {
        fs::create_dir(node.dir().join(name))?;
    }
    let conflist = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}"#;
    fs::write(node.dir().join("kube-flannel/cni-conf.json"), conflist)?;
    let grants = Grants {
        // What `deploy/unprivileged.yaml` grants.
        capabilities: &["net_admin", "net_raw", "bpf", "perfmon"],
        mounts: &[
            (Path::new("/run/flannel"), "/run/flannel"),
            (Path::new("/run/xtables.lock"), "/run/xtables.lock"),
            (Path::new("/sys/fs/bpf"), "/sys/fs/bpf"),
            (&node.dir().join("lib"), "/var/lib/flannel"),
            (&node.dir().join("bin"), "/opt/cni/bin"),
            (&node.dir().join("net.d"), "/etc/cni/net.d"),
            (&node.dir().join("kube-flannel"), "/etc/kube-flannel"),
        ],
        read_only: true,
    };
    let container = Container::create(&node, &grants)?;
    let config = &container.config;
    ensure!(config["config"]["Entrypoint"] == json!(["/opt/bin/flanneld"]), "{config:#}");
    let run = |words: &[&str]| container.run(words);

    // The init containers: ours, and the two of flannel's own DaemonSet.
    let said = run(&["/opt/bin/flannel-agent", "install-cni"])?;
    ensure!(said.matches(": written").count() == 2, "{said}");
    let plugin = node.dir().join("bin/flannel");
    ensure!(fs::metadata(&plugin)?.permissions().mode() & 0o777 == 0o755);
    let about = process::status_and_output(&mut Command::new(&plugin))?;
    ensure!(String::from_utf8_lossy(&about.stderr).starts_with("CNI Plugin flannel"), "{about:?}");
    run(&["cp", "-f", "/flannel", "/opt/cni/bin/flannel"])?;
    let target = "/etc/cni/net.d/10-flannel.conflist";
    run(&["/opt/bin/install-conf", "/etc/kube-flannel/cni-conf.json", target])?;
    ensure!(fs::read_to_string(node.dir().join("net.d/10-flannel.conflist"))? == conflist);

    // The agent, with leases in a directory beside the env file.
    let store = node.path("/run/flannel/leases");
    fs::create_dir_all(store.join("subnets"))?;
    fs::write(
        store.join("config.json"),
        r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#,
    )?;
    let flags = [
        "/opt/bin/flanneld",
        "--local-subnet-mgr=/run/flannel/leases",
        "--iface=eth0",
        "--healthz-ip=127.0.0.1",
        "--healthz-port=8081",
        "--datapath=ebpf",
    ];
    let log = node.dir().join("container.log");
    let agent = Process::spawn(container.command(&flags), &log, false)?;
    eventually("the agent in the container is ready", READY_WITHIN, || {
        let answer = node.http_get(8081, "/readyz")?;
        ensure!(answer.status == 200, "{}", answer.body);
        Ok(Some(()))
    })
    .with_context(|| agent.log())?;
    let env = fs::read_to_string(node.path("/run/flannel/subnet.env"))?;
    ensure!(env.contains("FLANNEL_MTU=1450"), "{env}");
    let status = run(&["flannel-agent", "status", "--output=json"])?;
    ensure!(serde_json::from_str::<Value>(&status)?["ready"] == true, "{status}");
    let kernel = node.link("flannel.1")?.context("no device")?;
    ensure!(kernel["linkinfo"]["info_kind"] == "vxlan", "{kernel:#}");

    // The firewall's programs work with these capabilities.
    run(&["nft", "add table ip probe"])?;
    ensure!(run(&["nft", "list ruleset"])?.contains("table ip probe"));
    for program in ["iptables", "ip6tables", "iptables-legacy", "ip6tables-nft"] {
        let masquerade = format!(
            "{program} -w -t nat -A POSTROUTING -m comment --comment x -m mark --mark 0x4000/0x4000 \
             -j MASQUERADE --random-fully"
        );
        run(&masquerade.split_whitespace().collect::<Vec<_>>())?;
        let rules = run(&[&format!("{program}-save"), "-t", "nat"])?;
        ensure!(rules.contains("-j MASQUERADE --random-fully"), "{program}: {rules}");
    }
    // Nothing else can be written.
    let refused = container.command(&["sh", "-c", "echo x > /opt/bin/x"]).output()?;
    ensure!(!refused.status.success(), "the root is writable");
    Ok(())
}
