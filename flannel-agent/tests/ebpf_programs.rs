//! The eBPF programs in the kernel: what they see, and that they stay attached.
//!
//! Every test here needs root and a BPF toolchain: `cargo xtask test` provides both.

#[path = "ebpf_programs/attaching.rs"]
mod attaching;
#[path = "ebpf_programs/counting.rs"]
mod counting;
#[path = "ebpf_programs/forwarding.rs"]
mod forwarding;
#[path = "ebpf_programs/logging.rs"]
mod logging;
#[path = "ebpf_programs/namespace.rs"]
mod namespace;
#[path = "ebpf_programs/packet.rs"]
mod packet;
#[path = "ebpf_programs/verifying.rs"]
mod verifying;
#[path = "ebpf_programs/xdp.rs"]
mod xdp;

use std::path::Path;

use flannel_agent::{
    datapath::ebpf::{AttachMode, EbpfDatapath, EbpfError, EbpfOptions, FastPathWanted, PeerEntry},
    lease::Subnets,
};

const V4_PEER: &str = "192.0.2.7";
const V6_PEER: &str = "2001:db8::7";

fn options(pin_dir: &Path) -> EbpfOptions {
    EbpfOptions {
        pin_dir: pin_dir.to_owned(),
        device: "flannel.66051".to_owned(),
        attach: AttachMode::Auto,
        log: false,
    }
}

fn load(pin_dir: &Path) -> EbpfDatapath {
    EbpfDatapath::load(options(pin_dir)).expect("loaded")
}

fn load_clsact(pin_dir: &Path) -> EbpfDatapath {
    EbpfDatapath::load(EbpfOptions { attach: AttachMode::Clsact, ..options(pin_dir) })
        .expect("loaded")
}

fn load_error(options: EbpfOptions) -> EbpfError {
    match EbpfDatapath::load(options) {
        Ok(_) => panic!("it loads"),
        Err(error) => error,
    }
}

fn peer(outer: &str, v4: &str) -> PeerEntry {
    let subnets = Subnets { v4: Some(v4.parse().expect("a subnet")), v6: None };
    PeerEntry { outer: outer.parse().expect("an address"), subnets }
}

/// Two peers, by IPv4 and by IPv6.
fn wanted(underlay: &[u32]) -> FastPathWanted {
    FastPathWanted {
        underlay: underlay.to_vec(),
        vni: packet::VNI,
        port: packet::PORT,
        peers: vec![peer(V4_PEER, "10.5.1.0/24"), peer(V6_PEER, "10.5.2.0/24")],
        ..FastPathWanted::default()
    }
}
