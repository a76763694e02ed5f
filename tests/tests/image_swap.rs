//! What the migration guide begins with: flannel's own `DaemonSet` with nothing changed but the
//! image. Its commands, its variables, its mounts, its capabilities (`NET_ADMIN`, `NET_RAW`, and
//! those that every container has), no bpffs.

use std::{fs, path::Path};

use flannel_lab::{
    container::{Container, Grants},
    prelude::*,
    process::Process,
};

const NET_CONF: &str =
    r#"{"Network":"10.77.0.0/16","EnableNFTables":false,"Backend":{"Type":"vxlan"}}"#;
const CONFLIST: &str = r#"{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{"hairpinMode":true,"isDefaultGateway":true}},{"type":"portmap","capabilities":{"portMappings":true}}]}"#;

/// What container runtimes grant without being asked.
const USUAL: [&str; 12] = [
    "chown",
    "dac_override",
    "fowner",
    "fsetid",
    "kill",
    "mknod",
    "net_bind_service",
    "net_raw",
    "setfcap",
    "setgid",
    "setpcap",
    "setuid",
];

#[test]
fn flannels_daemonset_runs_with_our_image() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let alder = lab.node("alder")?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = birch.lease();
    stub.put_lease(&key, &lease)?;
    stub.register(&alder)?;
    stub.put_pod("kube-flannel", "kube-flannel-ds-x7k2p", "alder");

    let dir = |name: &str| alder.dir().join(name);
    for name in ["bin", "net.d", "config", "account"] {
        fs::create_dir(dir(name))?;
    }
    for (path, text) in [
        ("config/net-conf.json", NET_CONF),
        ("config/cni-conf.json", CONFLIST),
        ("account/token", &stub.token()),
        ("account/ca.crt", stub.authority()),
        ("account/namespace", "kube-flannel"),
    ] {
        fs::write(dir(path), text)?;
    }
    let mut capabilities = USUAL.to_vec();
    capabilities.push("net_admin");
    let grants = Grants {
        capabilities: &capabilities,
        mounts: &[
            (Path::new("/run/flannel"), "/run/flannel"),
            (Path::new("/run/xtables.lock"), "/run/xtables.lock"),
            (&dir("config"), "/etc/kube-flannel"),
            (&dir("account"), "/var/run/secrets/kubernetes.io/serviceaccount"),
            (&dir("bin"), "/opt/cni/bin"),
            (&dir("net.d"), "/etc/cni/net.d"),
        ],
        read_only: false,
    };
    let container = Container::create(&alder, &grants)?;
    container.run(&["cp", "-f", "/flannel", "/opt/cni/bin/flannel"])?;
    let target = "/etc/cni/net.d/10-flannel.conflist";
    container.run(&["/opt/bin/install-conf", "/etc/kube-flannel/cni-conf.json", target])?;
    ensure!(fs::read_to_string(dir("net.d/10-flannel.conflist"))? == CONFLIST);
    ensure!(fs::metadata(dir("bin/flannel"))?.len() > 0);

    // In a DaemonSet the interface is that of the default route.
    let words = ["/opt/bin/flanneld", "--ip-masq", "--kube-subnet-mgr", "--healthz-port=8081"];
    let mut command = container.command(&words);
    command.envs([
        ("KUBERNETES_SERVICE_HOST", "192.0.2.6"),
        ("KUBERNETES_SERVICE_PORT", "6443"),
        ("POD_NAME", "kube-flannel-ds-x7k2p"),
        ("POD_NAMESPACE", "kube-flannel"),
        ("EVENT_QUEUE_DEPTH", "5000"),
        ("CONT_WHEN_CACHE_NOT_READY", "false"),
    ]);
    let agent = Process::spawn(command, &dir("container.log"), false)?;
    eventually("the agent in the container is ready", READY_WITHIN, || {
        let answer = alder.http_get(8081, "/readyz")?;
        ensure!(answer.status == 200, "{}", answer.body);
        Ok(Some(()))
    })
    .with_context(|| agent.log())?;
    let env: SubnetEnv = fs::read_to_string(alder.path("/run/flannel/subnet.env"))?.parse()?;
    ensure!(env.subnet_v4()? == "10.77.1.0/24" && env.mtu()? == 1450, "{env:?}");
    let rules = alder.run("iptables -w -t nat -S")?;
    ensure!(rules.contains("-A POSTROUTING") && rules.contains("FLANNEL-POSTRTG"), "{rules}");

    let leases = stub.leases()?;
    birch.learn("10.77.1.0-24", leases.get("10.77.1.0-24").context("no annotations")?)?;
    let (ours, theirs) = (alder.pod(&env)?, birch.node().pod(&birch.env()?)?);
    traffic::wait_reaches(ours.ns(), theirs.v4()?, Duration::from_secs(5))
        .with_context(|| agent.log())?;
    traffic::assert_reaches(&theirs, &ours)?;

    // Without CAP_BPF the kernel's path it is, and that is said once.
    let log = agent.log();
    let complaints: Vec<_> =
        log.lines().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).collect();
    ensure!(complaints.len() == 1 && complaints[0].contains("eBPF"), "{complaints:#?}");
    Ok(())
}
