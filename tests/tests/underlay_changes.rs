//! The NIC below the tunnel goes and comes back.

use std::thread::sleep;

use flannel_lab::{prelude::*, vxlan_view::VxlanView};

/// How soon a usable NIC has to carry pods again.
const SOON: Duration = Duration::from_secs(3);

#[test]
fn the_nic_recreated_with_another_index_and_a_smaller_mtu() -> Result<()> {
    let lab = Lab::new()?;
    let mut duo = Duo::plain(&lab, LocalStore::new(&lab)?)?;
    let lease = duo.own_lease()?["BackendData"].clone();
    duo.alder.remove_eth0()?;
    sleep(Duration::from_secs(2));
    let (ready, why) = duo.agent.readiness()?;
    ensure!(!ready, "ready without a NIC: {why}");
    duo.alder.recreate_eth0(1400)?;
    traffic::wait_reaches(duo.ours.ns(), duo.theirs.v4()?, SOON)?;
    traffic::wait_reaches(duo.theirs.ns(), duo.ours.v4()?, SOON)?;
    eventually("MTU 1350 everywhere", SOON, || {
        let device = duo.alder.link("flannel.1")?.context("no device")?["mtu"].clone();
        let file = duo.agent.subnet_env()?.mtu()?;
        ensure!(device == 1350 && file == 1350, "device {device}, subnet.env {file}");
        Ok(Some(()))
    })?;
    ensure!(duo.own_lease()?["BackendData"] == lease, "the lease's data changed");
    ensure!(duo.agent.process().exited()?.is_none(), "the agent ended");
    eventually("ready again", SOON, || Ok(duo.agent.readiness()?.0.then_some(())))
}

/// Both families, with many peers, whatever is taken away and comes back: within seconds all
/// entries are there again, with the same MACs, and the lease stays what it is.
#[test]
fn everything_comes_back_in_both_families() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    for n in 101..=120 {
        store.put_lease(
            &format!("10.77.{n}.0-24&fd77:0:0:{n}::-64"),
            &json!({"PublicIP": format!("192.0.2.{n}"), "PublicIPv6": format!("2001:db8:a::{n}"),
                "BackendType": "vxlan",
                "BackendData": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:04:{n:02x}")},
                "BackendV6Data": {"VNI": 1, "VtepMAC": format!("02:fa:00:00:06:{n:02x}")}}),
        )?;
    }
    let duo = Duo::dual(&lab, store)?;
    let views = || -> Result<_> {
        Ok(["flannel.1", "flannel-v6.1"].map(|device| VxlanView::read(duo.alder.ns(), device)))
    };
    let macs = || -> Result<Vec<Value>> {
        let of = |device| Ok(duo.alder.link(device)?.context("no device")?["address"].clone());
        ["flannel.1", "flannel-v6.1"].into_iter().map(of).collect()
    };
    let [v4, v6] = views()?;
    let wanted = [v4?, v6?];
    ensure!(wanted.iter().all(|view| view.routes.len() == 21), "{wanted:#?}");
    let (macs_before, lease) = (macs()?, duo.own_lease()?);
    let node = duo.alder.ns();
    let steps: [(&str, &dyn Fn() -> Result<()>); 4] = [
        ("the IPv4 device deleted", &|| node.ip(&["link del flannel.1"])),
        ("the IPv6 device deleted", &|| node.ip(&["link del flannel-v6.1"])),
        ("the NIC down and up", &|| {
            node.ip(&["link set eth0 down"])?;
            sleep(Duration::from_secs(1));
            node.ip(&[
                "link set eth0 up",
                "addr replace 2001:db8:a::11/64 dev eth0 nodad",
                "route replace default via 192.0.2.1",
            ])
        }),
        ("the NIC gone and back", &|| {
            duo.alder.remove_eth0()?;
            sleep(Duration::from_secs(1));
            duo.alder.recreate_eth0(1500)
        }),
    ];
    for (what, step) in steps {
        step()?;
        eventually(what, SOON, || {
            let [v4, v6] = views()?;
            ensure!([v4?, v6?] == wanted, "not all entries are back");
            ensure!(macs()? == macs_before, "another MAC");
            Ok(Some(()))
        })
        .with_context(|| duo.agent.log())?;
        for address in duo.theirs.addresses() {
            traffic::wait_reaches(duo.ours.ns(), address, SOON).context(what)?;
        }
        ensure!(duo.own_lease()? == lease, "{what}: the lease changed");
    }
    Ok(())
}
