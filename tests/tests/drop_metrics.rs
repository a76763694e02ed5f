//! What the eBPF programs do with packets is in the metrics, drops by their reason.

use std::net::UdpSocket;

use flannel_lab::{lab::Segment, prelude::*};

/// A VXLAN header of VNI 1 and an inner frame that is whole as far as headers go.
fn tunnelled() -> Vec<u8> {
    let mut bytes = b"\x08\0\0\0\0\0\x01\0".to_vec();
    bytes.extend(b"to-allfrom-m\x08\0\x45\0\0\x2e");
    bytes.resize(8 + 14 + 46, 0);
    bytes
}

fn outcome(name: &str) -> String {
    format!("flannel_datapath_packets_total{{outcome=\"{name}\"}}")
}

#[test]
fn a_dropped_packet_is_counted_under_its_reason() -> Result<()> {
    const SENT: u8 = 3;
    let lab = Lab::new()?;
    let flags = ["--datapath=ebpf", "--peer-filter=strict"];
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, config, false, &flags)?;
    let moth = lab.node_at("moth", Segment::A, 66)?;
    let dropped = outcome("drop-unknown-source");
    let before = duo.agent.metric(&dropped)?;
    let to = duo.alder.v4();
    moth.ns().within(move || {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        for _ in 0..SENT {
            socket.send_to(&tunnelled(), (to.as_str(), 8472))?;
        }
        Ok(())
    })?;
    eventually("the drops are counted", Duration::from_secs(3), || {
        let now = duo.agent.metric(&dropped)?;
        ensure!(now <= before + f64::from(SENT), "{now} after {before}");
        Ok((now > before + f64::from(SENT) - 0.5).then_some(()))
    })
    .with_context(|| duo.agent.log())?;
    let bytes = duo.agent.metric(&dropped.replace("packets", "bytes"))?;
    ensure!(bytes >= f64::from(SENT) * 68.0, "{bytes} bytes dropped");
    Ok(())
}

#[test]
fn the_kernels_path_alone_has_no_such_counts() -> Result<()> {
    let lab = Lab::new()?;
    let config = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let duo = Duo::start(&lab, LocalStore::new(&lab)?, config, false, &["--datapath=kernel"])?;
    let page = duo.agent.get("/metrics")?.body;
    ensure!(!page.contains("outcome="), "{page}");
    Ok(())
}
