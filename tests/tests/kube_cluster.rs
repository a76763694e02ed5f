//! A cluster whose leases are the nodes of Kubernetes.

use flannel_lab::{
    kube_stub::{ANNOTATIONS, annotate, flannel_annotations, plain_node},
    prelude::*,
};

const CONFIG: &str = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;

#[test]
fn agents_and_a_peer_with_flannels_annotations_reach_each_other_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let plan = Plan { agents: 2, kernel_peer: true, dual_stack: true, ..Plan::default() };
    let cluster = Cluster::start(&lab, &stub, &plan)?;
    cluster.wait_peers(2, READY_WITHIN)?;
    cluster.assert_entries(&stub)?;
    cluster.assert_full_mesh()
}

#[test]
fn what_is_patched_is_what_flannel_patches_to_the_byte() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let duo = Duo::plain(&lab, stub)?;
    let stub = &duo.store;
    eventually("the condition is set", Duration::from_secs(5), || {
        Ok((stub.patches().len() >= 2).then_some(()))
    })?;
    let patches = stub.patches();
    ensure!(patches.len() == 2, "{patches:#?}");
    for patch in &patches {
        ensure!(patch.status && patch.node == "alder", "{patch:?}");
    }
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    let mac = mac.as_str().context("no MAC")?;
    let wanted = format!(
        concat!(
            r#"{{"metadata":{{"annotations":{{"#,
            r#""flannel.alpha.coreos.com/backend-data":"{{\"VNI\":1,\"VtepMAC\":\"{mac}\"}}","#,
            r#""flannel.alpha.coreos.com/backend-type":"vxlan","#,
            r#""flannel.alpha.coreos.com/kube-subnet-manager":"true","#,
            r#""flannel.alpha.coreos.com/public-ip":"192.0.2.11"}}}}}}"#
        ),
        mac = mac
    );
    ensure!(patches[0].body == wanted, "{}\nnot\n{wanted}", patches[0].body);
    let condition: Value = serde_json::from_str(&patches[1].body)?;
    let condition = &condition["status"]["conditions"][0];
    for (field, text) in [
        ("type", "NetworkUnavailable"),
        ("status", "False"),
        ("reason", "FlannelIsUp"),
        ("message", "Flannel is running on this node"),
    ] {
        ensure!(condition[field] == text, "{field}: {condition}");
    }
    for field in ["lastHeartbeatTime", "lastTransitionTime"] {
        let time = condition[field].as_str().context("no time")?;
        ensure!(time.len() == 20 && time.ends_with('Z'), "{field}: {time}");
    }
    let node = stub.get("alder")?;
    ensure!(node["metadata"]["annotations"]["example.org/keep"] == "as it is", "{node}");
    ensure!(node["status"]["conditions"].as_array().map(Vec::len) == Some(2), "{node}");
    Ok(())
}

#[test]
fn a_restart_patches_nothing_and_a_new_device_gets_the_published_mac() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let mut duo = Duo::plain(&lab, stub)?;
    eventually("the condition is set", Duration::from_secs(5), || {
        Ok((duo.store.patches().len() >= 2).then_some(()))
    })?;
    let mac = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
    for delete_device in [false, true] {
        let before = duo.store.patches().len();
        duo.agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(10))?;
        if delete_device {
            duo.alder.run("ip link del flannel.1")?;
        }
        duo.start_agent_again()?;
        holds_for("nothing is patched", Duration::from_secs(2), || {
            Ok(duo.store.patches().len() == before)
        })
        .with_context(|| format!("{:#?}", duo.store.patches()))?;
        let now = duo.alder.link("flannel.1")?.context("no device")?["address"].clone();
        ensure!(now == mac, "MAC {mac} became {now}");
    }
    Ok(())
}

#[test]
fn the_condition_is_left_alone_if_told_so() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    stub.register(&alder)?;
    let mut flags = stub.flags();
    flags.push("--set-node-network-unavailable=false".into());
    alder.agent(flags)?.wait_ready(READY_WITHIN)?;
    holds_for("one patch only", Duration::from_secs(2), || Ok(stub.patches().len() == 1))
}

#[test]
fn annotations_on_our_node_set_the_addresses() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.put_config(CONFIG)?;
    let alder = lab.node("alder")?;
    alder.ns().ip(&["addr add 192.0.2.99/24 dev eth0"])?;
    let mut node = plain_node("alder", &["10.77.1.0/24"]);
    annotate(
        &mut node,
        &json!({
            "example.org/net-node-public-ip": "192.0.2.99",
            "example.org/net-public-ip-overwrite": "203.0.113.7",
        }),
    );
    stub.put(node)?;
    let mut flags = stub.flags();
    flags.push("--kube-annotation-prefix=example.org/net".into());
    let mut agent = alder.agent(flags)?;
    agent.wait_ready(READY_WITHIN)?;
    let node = stub.get("alder")?;
    let annotations = &node["metadata"]["annotations"];
    ensure!(annotations["example.org/net-public-ip"] == "203.0.113.7", "{annotations}");
    ensure!(annotations["example.org/net-backend-type"] == "vxlan", "{annotations}");
    ensure!(annotations[format!("{ANNOTATIONS}backend-type")].is_null(), "{annotations}");
    let link = alder.link("flannel.1")?.context("no device")?;
    ensure!(link["linkinfo"]["info_data"]["local"] == "192.0.2.99", "{link}");
    Ok(())
}

#[test]
fn the_pod_says_which_node_it_is() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.put_config(CONFIG)?;
    let host = lab.node("unnamed")?;
    stub.put(plain_node("worker-1.example.org", &["10.77.4.0/24"]))?;
    stub.put_pod("kube-flannel", "kube-flannel-ds-x7k2p", "worker-1.example.org");
    stub.deny("get", "pods", true);
    let mut agent = host.agent_with(
        stub.flags(),
        &[
            ("NODE_NAME", ""),
            ("POD_NAME", "kube-flannel-ds-x7k2p"),
            ("POD_NAMESPACE", "kube-flannel"),
        ],
    )?;
    agent.wait_complaint(&["get pods kube-flannel-ds-x7k2p", "ClusterRole"], READY_WITHIN)?;
    stub.deny("get", "pods", false);
    let env = agent.wait_ready(READY_WITHIN)?;
    ensure!(env.subnet_v4()? == "10.77.4.0/24", "{env:?}");
    ensure!(stub.patches().iter().all(|patch| patch.node == "worker-1.example.org"));
    Ok(())
}

#[test]
fn peers_change_come_and_go_with_their_nodes() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let duo = Duo::plain(&lab, stub)?;
    let (birch, _) = duo.birch_vteps()?;
    let within = Duration::from_secs(5);
    let cedar = |cidr: &str, ip: &str, mac: &str| {
        let mut node = plain_node("cedar", &[cidr]);
        annotate(&mut node, &flannel_annotations(ip, mac));
        node
    };
    let vtep = |subnet: &str, ip: &str, mac: &str| flannel_lab::kernel_peer::RemoteVtep {
        subnet: subnet.to_owned(),
        public_ip: ip.to_owned(),
        mac: mac.to_owned(),
    };
    let mac = "02:fa:00:00:00:77";
    for (cidr, ip, mac) in [
        ("10.77.30.0/24", "192.0.2.77", mac),
        ("10.77.30.0/24", "192.0.2.78", mac),
        ("10.77.30.0/24", "192.0.2.78", "02:fa:00:00:00:78"),
        ("10.77.31.0/24", "192.0.2.78", "02:fa:00:00:00:78"),
    ] {
        duo.store.put(cedar(cidr, ip, mac))?;
        duo.wait_view(&duo.wanted(&[birch.clone(), vtep(cidr, ip, mac)])?, within)
            .with_context(|| format!("{cidr} {ip} {mac}"))?;
    }
    // Its subnet is given to another node before it is gone.
    let mut elm = plain_node("elm", &["10.77.31.0/24"]);
    elm["metadata"]["creationTimestamp"] = json!("2026-02-01T00:00:00Z");
    annotate(&mut elm, &flannel_annotations("192.0.2.79", "02:fa:00:00:00:79"));
    duo.store.put(elm)?;
    let living = vtep("10.77.31.0/24", "192.0.2.79", "02:fa:00:00:00:79");
    let wanted = duo.wanted(&[birch.clone(), living])?;
    duo.wait_view(&wanted, within)?;
    duo.store.delete("cedar")?;
    holds_for("the living node keeps it", Duration::from_secs(1), || {
        Ok(flannel_lab::vxlan_view::VxlanView::read(duo.alder.ns(), "flannel.1")? == wanted)
    })?;
    duo.store.delete("elm")?;
    duo.wait_view(&duo.wanted(&[birch])?, within)
}

#[test]
fn a_node_made_anew_with_another_pod_cidr_is_followed() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let duo = Duo::plain(&lab, stub)?;
    duo.store.delete("alder")?;
    eventually("the agent misses its node", Duration::from_secs(5), || {
        Ok(duo.agent.readiness()?.1.contains("alder").then_some(()))
    })?;
    ensure!(duo.alder.link("flannel.1")?.is_some(), "the device went with the node");
    duo.store.put(plain_node("alder", &["10.77.40.0/24"]))?;
    eventually("the new subnet is written", Duration::from_secs(6), || {
        let env = duo.agent.subnet_env()?;
        Ok((env.subnet_v4()? == "10.77.40.0/24" && duo.agent.readiness()?.0).then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    let node = duo.store.get("alder")?;
    let annotation = &node["metadata"]["annotations"][format!("{ANNOTATIONS}public-ip")];
    ensure!(annotation == "192.0.2.11", "{node}");
    Ok(())
}

#[test]
fn somebody_who_strips_our_annotations_gets_them_put_back() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let mut duo = Duo::plain(&lab, stub)?;
    let name = format!("{ANNOTATIONS}backend-data");
    duo.store.edit("alder", |node| {
        if let Some(annotations) = node["metadata"]["annotations"].as_object_mut() {
            annotations.remove(&name);
        }
    })?;
    eventually("it is back", Duration::from_secs(5), || {
        Ok(duo.store.get("alder")?["metadata"]["annotations"][&name].as_str().map(|_| ()))
    })?;
    duo.agent.wait_complaint(&["backend-data", "put back"], Duration::from_secs(2))?;
    Ok(())
}
