//! The image that `cargo xtask image` makes, unpacked and run: a read-only root, the capabilities of
//! `deploy/unprivileged.yaml`, and the mounts of the `DaemonSet`.

use std::{env, fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use flannel_lab::{
    prelude::*,
    process::{self, Process},
};

/// What `deploy/unprivileged.yaml` grants, and the right to call chroot, by which we come in.
const CAPABILITIES: &str =
    "--bounding-set=-all,+net_admin,+net_raw,+bpf,+perfmon,+sys_chroot --inh-caps=-all";

fn sha256(path: &Path) -> Result<String> {
    let line = process::output(Command::new("sha256sum").arg(path))?;
    Ok(line.split_whitespace().next().context("no digest")?.to_owned())
}

fn json_file(path: &Path) -> Result<Value> {
    Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
}

/// Unpacks an OCI archive as a runtime does, every digest checked. Returns the image's
/// configuration.
fn unpack(archive: &Path, layout: &Path, root: &Path) -> Result<Value> {
    fs::create_dir_all(layout)?;
    fs::create_dir_all(root)?;
    process::output(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(layout))?;
    let version = json_file(&layout.join("oci-layout"))?;
    ensure!(version["imageLayoutVersion"] == "1.0.0", "{version}");
    let blob = |descriptor: &Value| -> Result<std::path::PathBuf> {
        let digest = descriptor["digest"].as_str().context("no digest")?;
        let path = layout.join("blobs").join(digest.replace(':', "/"));
        ensure!(digest == format!("sha256:{}", sha256(&path)?), "{digest} is another's");
        ensure!(descriptor["size"] == fs::metadata(&path)?.len(), "{digest}: its size");
        Ok(path)
    };
    let index = json_file(&layout.join("index.json"))?;
    let manifest = json_file(&blob(&index["manifests"][0])?)?;
    let config = json_file(&blob(&manifest["config"])?)?;
    let layers = manifest["layers"].as_array().context("no layers")?;
    let contents = config["rootfs"]["diff_ids"].as_array().context("no diff_ids")?;
    ensure!(layers.len() == contents.len(), "{manifest:#} {config:#}");
    for (layer, content) in layers.iter().zip(contents) {
        let tar = layout.join("layer.tar");
        let mut unzip = Command::new("gzip");
        unzip.arg("-dc").arg(blob(layer)?).stdout(fs::File::create(&tar)?);
        ensure!(unzip.status()?.success(), "a layer is no gzip file");
        ensure!(*content == format!("sha256:{}", sha256(&tar)?), "another content: {content}");
        process::output(Command::new("tar").arg("-xpf").arg(&tar).arg("-C").arg(root))?;
    }
    Ok(config)
}

/// Makes the unpacked tree, in the node's mount namespace, what a container sees: nothing to be
/// written but what is mounted.
fn mount(node: &Node, root: &Path) -> Result<()> {
    let root = root.display();
    let output = node.shell(&format!(
        "set -e
         mkdir -p /run/flannel /run/state
         touch /run/xtables.lock
         mount --bind {root} {root}
         mount -o remount,bind,ro {root}
         mount --rbind /proc {root}/proc
         mount --rbind /sys {root}/sys
         mount --bind /run/flannel {root}/run/flannel
         mount --bind /run/xtables.lock {root}/run/xtables.lock
         mount --bind /run/state {root}/var/lib/flannel
         mount -o bind {} {root}/opt/cni/bin
         mount -o bind {} {root}/etc/cni/net.d
         mount -o bind {} {root}/etc/kube-flannel",
        node.dir().join("bin").display(),
        node.dir().join("net.d").display(),
        node.dir().join("kube-flannel").display(),
    ))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A program of the image as the container runs it.
fn inside(node: &Node, root: &Path, words: &[&str]) -> Command {
    let mut command = node.command("setpriv");
    command.args(CAPABILITIES.split(' ')).arg("chroot").arg(root).args(words);
    command.env_clear().env("PATH", "/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

#[test]
fn the_image_runs_the_agent_and_installs_the_plugin() -> Result<()> {
    let Some(archive) = env::var_os("FLANNEL_IMAGE") else {
        bail!("FLANNEL_IMAGE names no image: run `cargo xtask test lab`")
    };
    let lab = Lab::new()?;
    let node = lab.node("alder")?;
    let root = node.dir().join("root");
    let config = unpack(archive.as_ref(), &node.dir().join("oci"), &root)?;
    ensure!(config["config"]["Entrypoint"] == json!(["/opt/bin/flanneld"]), "{config:#}");
    for name in ["bin", "net.d", "kube-flannel"] {
        fs::create_dir(node.dir().join(name))?;
    }
    let conflist = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel"}]}"#;
    fs::write(node.dir().join("kube-flannel/cni-conf.json"), conflist)?;
    mount(&node, &root)?;
    let run = |words: &[&str]| process::output(&mut inside(&node, &root, words));

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
    let agent = Process::spawn(inside(&node, &root, &flags), &log, false)?;
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
    let refused = inside(&node, &root, &["sh", "-c", "echo x > /opt/bin/x"]).output()?;
    ensure!(!refused.status.success(), "the root is writable");
    Ok(())
}
