//! Ways to the Kubernetes API: a pod's service account, kubeconfig files of all kinds, another URL;
//! and what is said when they do not work.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use flannel_lab::{
    base64,
    kube_stub::{annotate, flannel_annotations, kubeconfig, plain_node},
    prelude::*,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
/// Where kubelet mounts it; `/var/run` is a link to `/run`.
const SERVICE_ACCOUNT: &str = "/run/secrets/kubernetes.io/serviceaccount";
const WITHIN: Duration = Duration::from_secs(5);

/// A server that knows `alder`, and the host of that name.
fn start(lab: &Lab) -> Result<(KubeStub, Node)> {
    let stub = KubeStub::new(lab)?;
    stub.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    stub.register(&alder)?;
    Ok((stub, alder))
}

/// The flags without any about credentials.
fn flags(stub: &KubeStub, more: &[String]) -> Vec<String> {
    let mut flags = stub.flags();
    flags.retain(|flag| !flag.starts_with("--kubeconfig-file"));
    flags.extend_from_slice(more);
    flags
}

/// The files of a pod's service account as kubelet mounts them: links into a folder that is
/// exchanged as a whole.
fn mount_service_account(stub: &KubeStub, node: &Node, token: &str) -> Result<()> {
    let dir = node.path(SERVICE_ACCOUNT);
    let number = fs::read_dir(&dir).map_or(0, Iterator::count);
    let data = format!("..{number}");
    fs::create_dir_all(dir.join(&data))?;
    for (name, text) in
        [("token", token), ("ca.crt", stub.authority()), ("namespace", "kube-flannel")]
    {
        fs::write(dir.join(&data).join(name), text)?;
        if number == 0 {
            symlink(format!("..data/{name}"), dir.join(name))?;
        }
    }
    symlink(&data, dir.join("..data_tmp"))?;
    Ok(fs::rename(dir.join("..data_tmp"), dir.join("..data"))?)
}

/// The variables that kubelet sets in every container, and those of flannel's `DaemonSet`.
const IN_A_POD: [(&str, &str); 5] = [
    ("KUBERNETES_SERVICE_HOST", "192.0.2.6"),
    ("KUBERNETES_SERVICE_PORT", "6443"),
    ("NODE_NAME", ""),
    ("POD_NAME", "kube-flannel-ds-x7k2p"),
    ("POD_NAMESPACE", "kube-flannel"),
];

fn a_peer_is_learnt(stub: &KubeStub, agent: &Agent, number: u8, peers: u64) -> Result<()> {
    let mut node = plain_node(&format!("extra{number}"), &[&format!("10.77.{number}.0/24")]);
    let mac = format!("02:fa:00:00:01:{number:02x}");
    annotate(&mut node, &flannel_annotations(&format!("192.0.2.{number}"), &mac));
    stub.put(node)?;
    eventually("a new peer is learnt", WITHIN, || {
        Ok((agent.status()?["peers_applied"] == peers).then_some(()))
    })
    .with_context(|| agent.log())
}

#[test]
fn a_pod_uses_its_service_account_and_the_token_that_kubelet_renews() -> Result<()> {
    let lab = Lab::new()?;
    let (stub, alder) = start(&lab)?;
    stub.put_pod("kube-flannel", "kube-flannel-ds-x7k2p", "alder");
    let mut agent = alder.agent_with(flags(&stub, &[]), &IN_A_POD)?;
    // A pod without automountServiceAccountToken.
    let words = ["no credentials", "default namespace", "kubeconfig"];
    agent.wait_complaint(&words, READY_WITHIN)?;
    mount_service_account(&stub, &alder, &stub.token())?;
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()? == "10.77.1.0/24", "{env:?}");
    a_peer_is_learnt(&stub, &agent, 100, 1)?;
    // Renewed in time, and the old one is no longer good.
    let token = stub.rotate_token(false)?;
    mount_service_account(&stub, &alder, &token)?;
    stub.drop_watches();
    a_peer_is_learnt(&stub, &agent, 101, 2)?;
    ensure!(agent.complaints(&["store does not answer"]).is_empty(), "{}", agent.log());
    // Another way to the same server: the account is good for it, too.
    agent.stop()?;
    let other = format!("--kube-api-url=https://[{}]:6443", stub.host().v6());
    let mut agent = alder.agent_with(flags(&stub, &[other]), &IN_A_POD)?;
    agent.wait_complaint(&["https://[2001:db8", "get pods"], READY_WITHIN)?;
    agent.stop()?;
    let dead = ("KUBERNETES_SERVICE_HOST", "192.0.2.250");
    let variables = [IN_A_POD.as_slice(), &[dead]].concat();
    let mut agent =
        alder.agent_with(flags(&stub, &[format!("--kube-api-url={}", stub.url())]), &variables)?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(!agent.log().contains("token-of-the-lab"), "a token is in the log");
    Ok(())
}

/// Files beside each other, as `kubectl config` writes them.
struct Folder {
    dir: PathBuf,
}

impl Folder {
    fn new(stub: &KubeStub, node: &Node) -> Result<Self> {
        let folder = Self { dir: node.dir().join("credentials") };
        fs::create_dir_all(&folder.dir)?;
        let (certificate, key) = stub.client_certificate()?;
        for (name, text) in [
            ("ca.pem", stub.authority()),
            ("client.pem", &certificate),
            ("client-key.pem", &key),
            // As an editor or `echo` leaves it.
            ("token", &format!("{}\n", stub.token())),
        ] {
            fs::write(folder.dir.join(name), text)?;
        }
        Ok(folder)
    }

    fn data(&self, name: &str) -> Result<String> {
        Ok(base64::encode(&fs::read(self.dir.join(name))?))
    }

    fn flag(&self) -> String {
        format!("--kubeconfig-file={}", self.dir.join("config").display())
    }

    fn write(&self, cluster: &Value, user: &Value) -> Result<()> {
        Ok(fs::write(self.dir.join("config"), kubeconfig(cluster, user).to_string())?)
    }
}

#[test]
fn kubeconfigs_of_all_kinds_lead_to_the_server() -> Result<()> {
    let lab = Lab::new()?;
    let (stub, alder) = start(&lab)?;
    let folder = Folder::new(&stub, &alder)?;
    let (url, token) = (stub.url(), stub.token());
    let here = json!({"server": url, "certificate-authority": "ca.pem"});
    let inline = json!({"server": url, "certificate-authority-data": folder.data("ca.pem")?});
    let dead = json!({"server": "https://192.0.2.250:1", "certificate-authority": "ca.pem"});
    let nowhere = json!({"certificate-authority": "ca.pem"});
    let careless = json!({"server": url, "insecure-skip-tls-verify": true});
    let certificate = json!({"client-certificate": "client.pem", "client-key": "client-key.pem"});
    let embedded = json!({
        "client-certificate-data": folder.data("client.pem")?,
        "client-key-data": folder.data("client-key.pem")?,
    });
    let by_flag = format!("--kube-api-url={url}");
    for (cluster, user, flag) in [
        (&inline, json!({"token": token}), None),
        (&here, json!({"tokenFile": "token"}), None),
        (&here, json!({"token": "stale", "tokenFile": "token"}), None),
        (&here, certificate, None),
        (&inline, embedded, None),
        (&careless, json!({"token": token}), None),
        (&dead, json!({"token": token}), Some(&by_flag)),
        (&nowhere, json!({"token": token}), Some(&by_flag)),
    ] {
        folder.write(cluster, &user)?;
        let mut more = vec![folder.flag()];
        more.extend(flag.cloned());
        let mut agent = alder.agent(flags(&stub, &more))?;
        agent.wait_ready(READY_WITHIN).with_context(|| format!("{cluster} {user}"))?;
        agent.stop()?;
    }
    Ok(())
}

#[test]
fn what_is_wrong_with_credentials_is_said_and_mended_without_a_restart() -> Result<()> {
    let lab = Lab::new()?;
    let (stub, alder) = start(&lab)?;
    let folder = Folder::new(&stub, &alder)?;
    let server = "https://192.0.2.6:6443";
    let mut agent = alder.agent(flags(&stub, &[folder.flag()]))?;
    agent.wait_complaint(&["kubeconfig-file", "credentials/config"], READY_WITHIN)?;
    fs::write(folder.dir.join("config"), "users: [{token: hush-hush")?;
    agent.wait_complaint(&["not a kubeconfig in YAML"], WITHIN)?;
    let here = json!({"server": stub.url(), "certificate-authority": "ca.pem"});
    let mut other = here.clone();
    other["certificate-authority"] = json!("client.pem");
    let unknown = json!({"server": stub.url()});
    let good = json!({"tokenFile": "token"});
    for (cluster, user, words) in [
        (&here, json!({"tokenFile": "nowhere"}), &["cannot read token file", "/nowhere"][..]),
        (&here, json!({"token": "hush-hush"}), &[server, "get nodes alder", "401", "token"]),
        // A server that admits strangers tells them what they may not do.
        (&here, json!({}), &[server, "403", "system:anonymous", "get nodes"]),
        (&other, good.clone(), &[server, "certificate"]),
        (&unknown, good.clone(), &[server, "certificate"]),
    ] {
        folder.write(cluster, &user)?;
        agent.wait_complaint(words, WITHIN).with_context(|| format!("{cluster} {user}"))?;
        let (ready, why) = agent.readiness()?;
        ensure!(!ready && why.contains("lease"), "/readyz: {why}");
    }
    folder.write(&here, &good)?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(!agent.log().contains("hush-hush"), "a secret is in the log");
    Ok(())
}
