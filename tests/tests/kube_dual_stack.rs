//! Two families on a Kubernetes node: what is published, and that each is followed on its own.

use flannel_lab::{
    duo::wait_view,
    kernel_peer::RemoteVtep,
    kube_stub::{ANNOTATIONS, annotate, flannel_annotations, plain_node},
    prelude::*,
    vxlan_view::VxlanView,
};

const WITHIN: Duration = Duration::from_secs(5);

#[test]
fn both_families_annotations_are_flannels_to_the_byte() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, KubeStub::new(&lab)?)?;
    let mac = |device: &str| -> Result<String> {
        let link = duo.alder.link(device)?.context("no device")?;
        Ok(link["address"].as_str().context("no MAC")?.to_owned())
    };
    let data = |device: &str| -> Result<Value> {
        Ok(json!(format!("{{\"VNI\":1,\"VtepMAC\":\"{}\"}}", mac(device)?)))
    };
    let node = duo.store.get("alder")?;
    let annotations = node["metadata"]["annotations"].as_object().context("no annotations")?;
    let ours: Vec<(&str, &Value)> = annotations
        .iter()
        .filter_map(|(name, value)| Some((name.strip_prefix(ANNOTATIONS)?, value)))
        .collect();
    let (v4, v6) = (data("flannel.1")?, data("flannel-v6.1")?);
    let wanted = [
        ("backend-data", &v4),
        ("backend-type", &json!("vxlan")),
        ("backend-v6-data", &v6),
        ("kube-subnet-manager", &json!("true")),
        ("public-ip", &json!(duo.alder.v4())),
        ("public-ipv6", &json!(duo.alder.v6())),
    ];
    ensure!(ours == wanted, "{ours:#?}");
    Ok(())
}

/// A node of both families, as flannel publishes it.
struct Cedar {
    cidrs: [String; 2],
    ips: [String; 2],
    macs: [String; 2],
}

impl Cedar {
    fn put(&self, stub: &KubeStub) -> Result<()> {
        let [v4, v6] = &self.cidrs;
        let mut node = plain_node("cedar", &[v6, v4]);
        annotate(&mut node, &flannel_annotations(&self.ips[0], &self.macs[0]));
        let data = format!("{{\"VNI\":1,\"VtepMAC\":\"{}\"}}", self.macs[1]);
        annotate(
            &mut node,
            &json!({
                format!("{ANNOTATIONS}backend-v6-data"): data,
                format!("{ANNOTATIONS}public-ipv6"): self.ips[1],
            }),
        );
        stub.put(node)
    }

    fn vtep(&self, family: usize) -> RemoteVtep {
        RemoteVtep {
            subnet: self.cidrs[family].clone(),
            public_ip: self.ips[family].clone(),
            mac: self.macs[family].clone(),
        }
    }
}

#[test]
fn each_family_of_a_node_is_followed_on_its_own() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::dual(&lab, KubeStub::new(&lab)?)?;
    let (birch, birch_v6) = duo.birch_vteps()?;
    let birch_v6 = birch_v6.context("the peer has one family")?;
    let base = duo.env.subnet_v6()?;
    let own_v6 = format!("{}/128", base.split_once('/').context("no length")?.0);
    let in_place = |v4: Option<RemoteVtep>, v6: Option<RemoteVtep>| -> Result<()> {
        let peers: Vec<_> = [birch.clone()].into_iter().chain(v4).collect();
        duo.wait_view(&duo.wanted(&peers)?, WITHIN)?;
        let peers: Vec<_> = [birch_v6.clone()].into_iter().chain(v6).collect();
        wait_view(&duo.alder, "flannel-v6.1", &VxlanView::wanted(&own_v6, &peers)?, WITHIN)
            .with_context(|| duo.agent.log())
    };
    let text = |parts: [&str; 2]| parts.map(str::to_owned);
    let mut cedar = Cedar {
        cidrs: text(["10.77.30.0/24", "fd77:0:0:30::/64"]),
        ips: text(["192.0.2.77", "2001:db8:a::77"]),
        macs: text(["02:fa:00:00:04:77", "02:fa:00:00:06:77"]),
    };
    cedar.put(&duo.store)?;
    in_place(Some(cedar.vtep(0)), Some(cedar.vtep(1)))?;
    for (family, what) in [(0, "MAC"), (1, "MAC"), (0, "IP"), (1, "IP"), (0, "CIDR"), (1, "CIDR")] {
        match (what, family) {
            ("MAC", f) => cedar.macs[f] = cedar.macs[f].replace(":77", ":78"),
            ("IP", f) => cedar.ips[f] = cedar.ips[f].replace("77", "78"),
            (_, 0) => cedar.cidrs[0] = "10.77.31.0/24".to_owned(),
            _ => cedar.cidrs[1] = "fd77:0:0:31::/64".to_owned(),
        }
        cedar.put(&duo.store)?;
        in_place(Some(cedar.vtep(0)), Some(cedar.vtep(1)))
            .with_context(|| format!("{what} of family {family}"))?;
    }
    // Rubbish in one family costs that one.
    duo.store.edit("cedar", |node| {
        annotate(node, &json!({format!("{ANNOTATIONS}public-ipv6"): "2001:db8::x"}));
    })?;
    in_place(Some(cedar.vtep(0)), None)?;
    cedar.put(&duo.store)?;
    in_place(Some(cedar.vtep(0)), Some(cedar.vtep(1)))?;
    duo.store.edit("cedar", |node| {
        annotate(node, &json!({format!("{ANNOTATIONS}backend-data"): "{\"VNI\":"}));
    })?;
    in_place(None, Some(cedar.vtep(1)))?;
    duo.store.delete("cedar")?;
    in_place(None, None)
}

#[test]
fn rubbish_on_our_own_node_is_put_right_or_told() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    stub.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let alder = lab.node("alder")?;
    let mut node = plain_node("alder", &["10.77.1.0/24"]);
    let name = |suffix: &str| format!("{ANNOTATIONS}{suffix}");
    annotate(
        &mut node,
        &json!({
            name("backend-data"): "not JSON", name("backend-type"): "\u{fffd}",
            name("public-ip"): "::1", name("kube-subnet-manager"): "no",
            name("public-ip-overwrite"): "nat.example.org",
            name("public-ipv6-overwrite"): "192.0.2.1",
        }),
    );
    // Some tools leave a node without any.
    let mut bare = plain_node("alder", &["10.77.1.0/24"]);
    if let Some(metadata) = bare["metadata"].as_object_mut() {
        metadata.remove("annotations");
    }
    for (node, complaints) in [(node, 1), (bare, 0)] {
        stub.put(node)?;
        let mut agent = alder.agent(stub.flags())?;
        agent.wait_ready(READY_WITHIN)?;
        let mac = alder.link("flannel.1")?.context("no device")?["address"].clone();
        let now = stub.get("alder")?["metadata"]["annotations"].clone();
        let mac = mac.as_str().context("no MAC")?;
        for (name, value) in flannel_annotations(&alder.v4(), mac).as_object().into_iter().flatten()
        {
            ensure!(now[name] == *value, "{name}: {now:#}");
        }
        for (annotation, text) in
            [("public-ip-overwrite", "nat.example.org"), ("public-ipv6-overwrite", "192.0.2.1")]
        {
            let said = agent.complaints(&[annotation, text]);
            ensure!(said.len() == complaints, "{said:#?}");
        }
        agent.stop()?;
    }
    Ok(())
}
