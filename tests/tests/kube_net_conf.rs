//! `net-conf.json` changes under a running agent: what can be taken over is, without a lost packet;
//! the rest is told with its old and its new value.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use flannel_lab::prelude::*;

const WITHIN: Duration = Duration::from_secs(5);

fn config(network: &str, backend: &str) -> String {
    format!(r#"{{"Network":"{network}","Backend":{{"Type":"vxlan"{backend}}}}}"#)
}

fn plain(backend: &str) -> String {
    config("10.77.0.0/16", backend)
}

/// The folder of `net-conf.json` as kubelet mounts a `ConfigMap`: a link to a link to a folder,
/// which is exchanged as a whole.
struct MountedConfigMap {
    dir: PathBuf,
    number: u32,
}

impl MountedConfigMap {
    fn new(stub: &KubeStub, text: &str) -> Result<Self> {
        let dir = stub.net_conf().parent().context("no folder")?.to_owned();
        let mut map = Self { dir, number: 0 };
        map.swap(text)?;
        symlink("..data/net-conf.json", stub.net_conf())?;
        Ok(map)
    }

    fn swap(&mut self, text: &str) -> Result<()> {
        let before = self.dir.join(format!("..{}", self.number));
        self.number += 1;
        let name = format!("..{}", self.number);
        fs::create_dir(self.dir.join(&name))?;
        fs::write(self.dir.join(&name).join("net-conf.json"), text)?;
        symlink(&name, self.dir.join("..data_tmp"))?;
        fs::rename(self.dir.join("..data_tmp"), self.dir.join("..data"))?;
        // As kubelet does, once the new one stands.
        if before.exists() {
            fs::remove_dir_all(before)?;
        }
        Ok(())
    }
}

/// What the agent says that a restart is needed for.
fn told(duo: &Duo<KubeStub>) -> Result<Option<String>> {
    Ok(duo.agent.status()?["config_change"].as_str().map(str::to_owned))
}

fn wait_told(duo: &Duo<KubeStub>, words: &[&str]) -> Result<()> {
    eventually(&format!("{words:?} is told"), WITHIN, || {
        let told = told(duo)?;
        let told = told.as_deref().unwrap_or_default();
        ensure!(words.iter().all(|word| told.contains(word)), "told: {told}");
        Ok(Some(()))
    })
    .with_context(|| duo.agent.log())
}

/// The way to the peer's pods, as `ip route` prints it.
fn way(duo: &Duo<KubeStub>) -> Result<String> {
    duo.alder.run("ip route show 10.77.200.0/24")
}

fn wait_way(duo: &Duo<KubeStub>, wanted: &str) -> Result<()> {
    eventually(&format!("the peer is reached {wanted}"), WITHIN, || {
        let way = way(duo)?;
        ensure!(way.contains(wanted), "{way}");
        Ok(Some(()))
    })
    .with_context(|| duo.agent.log())
}

fn wait_mtu(duo: &Duo<KubeStub>, mtu: u32) -> Result<()> {
    eventually(&format!("MTU {mtu} for the device and for new pods"), WITHIN, || {
        let link = duo.alder.link("flannel.1")?.context("no device")?;
        let env = duo.agent.subnet_env()?;
        ensure!(link["mtu"] == mtu && env.mtu()? == mtu, "{} and {env:?}", link["mtu"]);
        Ok(Some(()))
    })
    .with_context(|| duo.agent.log())
}

#[test]
fn mtu_and_direct_routing_are_taken_over_without_a_lost_packet() -> Result<()> {
    let lab = Lab::new()?;
    let duo = Duo::plain(&lab, KubeStub::new(&lab)?)?;
    let device = duo.alder.link("flannel.1")?.context("no device")?["ifindex"].clone();
    let meter = LossMeter::start(duo.ours.ns(), duo.theirs.ns(), duo.theirs.v4()?)?;

    duo.store.put_config(&plain(r#","MTU":1400"#))?;
    wait_mtu(&duo, 1350)?;
    ensure!(
        !duo.agent.log_lines("Backend.MTU: unset is now 1400").is_empty(),
        "{}",
        duo.agent.log()
    );
    ensure!(told(&duo)?.is_none(), "a restart is asked for: {:?}", told(&duo)?);

    duo.store.put_config(&plain(r#","DirectRouting":true"#))?;
    wait_mtu(&duo, 1450)?;
    wait_way(&duo, "via 192.0.2.12 dev eth0")?;
    duo.store.put_config(&plain(r#","Learning":true"#))?;
    wait_way(&duo, "dev flannel.1")?;
    eventually("the device learns", WITHIN, || {
        let link = duo.alder.link("flannel.1")?.context("no device")?;
        Ok((link["linkinfo"]["info_data"]["learning"] == true).then_some(()))
    })?;
    ensure!(duo.agent.readiness()?.0 && told(&duo)?.is_none(), "{:?}", told(&duo)?);
    ensure!(duo.alder.link("flannel.1")?.context("no device")?["ifindex"] == device, "made anew");
    meter.stop()?.ensure_none(duo.ours.v4()?)
}

#[test]
fn what_needs_a_restart_is_told_with_both_values_and_changes_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, KubeStub::new(&lab)?)?;
    let link = duo.alder.link("flannel.1")?.context("no device")?;
    // Of a change of two kinds the one that can be is made.
    duo.store.put_config(&config("10.76.0.0/15", r#","VNI":7,"Port":4789,"MTU":1400"#))?;
    let words = [
        "restart",
        "Backend.VNI: unset is now 7",
        "Backend.Port: unset is now 4789",
        r#"Network: "10.77.0.0/16" is now "10.76.0.0/15""#,
    ];
    wait_told(&duo, &words)?;
    ensure!(!told(&duo)?.unwrap_or_default().contains("MTU"), "{:?}", told(&duo)?);
    duo.agent.wait_complaint(&["restart", "Backend.VNI"], WITHIN)?;
    wait_mtu(&duo, 1350)?;
    let now = duo.alder.link("flannel.1")?.context("no device")?;
    ensure!(now["linkinfo"] == link["linkinfo"] && now["ifindex"] == link["ifindex"], "{now:#}");

    // Another backend has other options.
    duo.store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"udp"}}"#)?;
    wait_told(&duo, &[r#"Backend.Type: "vxlan" is now "udp""#])?;
    // A good file with a bad option is no better than a bad file.
    duo.store.put_config(&plain(r#","MTU":17"#))?;
    wait_told(&duo, &["Backend.MTU 17 is not between 576 and 65535", "in use stays"])?;
    wait_mtu(&duo, 1350)?;
    duo.store.put_config(&plain(r#","MTU":1400"#))?;
    eventually("nothing is left to tell", WITHIN, || Ok(told(&duo)?.is_none().then_some(())))?;
    ensure!(duo.agent.readiness()?.0, "no longer ready");

    // The restart does what was told.
    duo.store.put_config(&plain(r#","Port":4789"#))?;
    wait_told(&duo, &["Backend.Port: unset is now 4789"])?;
    duo.agent.process().stop(nix::sys::signal::Signal::SIGTERM, Duration::from_secs(10))?;
    duo.start_agent_again()?;
    let now = duo.alder.link("flannel.1")?.context("no device")?;
    ensure!(now["linkinfo"]["info_data"]["port"] == 4789, "{now:#}");
    ensure!(told(&duo)?.is_none(), "{:?}", told(&duo)?);
    Ok(())
}

#[test]
fn an_exchanged_config_map_is_noticed_and_rubbish_in_it_hurts_nobody() -> Result<()> {
    let lab = Lab::new()?;
    let stub = KubeStub::new(&lab)?;
    let mut map = MountedConfigMap::new(&stub, &plain(""))?;
    let alder = lab.node("alder")?;
    stub.register(&alder)?;
    let mut agent = alder.agent(stub.flags())?;
    agent.wait_ready(READY_WITHIN)?;
    map.swap(&plain(r#","MTU":1400"#))?;
    eventually("the new MTU is in use", WITHIN, || {
        Ok((agent.subnet_env()?.mtu()? == 1350).then_some(()))
    })?;
    map.swap("{\"Network\":")?;
    agent.wait_complaint(&["error parsing subnet config", "in use stays"], WITHIN)?;
    map.swap(&plain(""))?;
    eventually("all is as it was", WITHIN, || {
        let mtu = agent.subnet_env()?.mtu()?;
        Ok((agent.status()?["config_change"].is_null() && mtu == 1450).then_some(()))
    })
    .with_context(|| agent.log())?;
    ensure!(agent.readiness()?.0, "no longer ready");
    Ok(())
}
