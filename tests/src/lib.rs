//! The lab: namespaces as hosts, pods, real etcd, kernel VXLAN peers, packet capture and
//! crafting, a loss meter. The stories in `tests/` and `cargo xtask demo` are told with it.
//!
//! Everything is made under a [`run::Run`], a name of its own, and taken away with it: when the
//! last handle is dropped, when the process gets SIGINT or SIGTERM, and, if it was killed, by
//! the next run. Two runs never meet: all traffic stays in namespaces of the run, and no
//! interface is made in the host's.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use flannel_lab::prelude::*;
//!
//! let lab = Lab::new()?;
//! let store = LocalStore::new(&lab)?;
//! store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
//! let alder = lab.node("alder")?;
//! let mut agent = alder.agent(store.flags())?;
//! agent.wait_ready(READY_WITHIN)?;
//! # Ok(())
//! # }
//! ```

pub mod agent;
pub mod arrivals;
pub mod base64;
pub mod bench;
pub mod capture;
pub mod change_meter;
pub mod cluster;
pub mod cni;
pub mod container;
pub mod conversation;
pub mod craft;
pub mod duo;
pub mod etcd;
pub mod foreign_program;
pub mod generated;
pub mod http;
pub mod kernel_peer;
pub mod kube_stub;
pub mod lab;
pub mod lease_store;
pub mod loss_meter;
pub mod nat_table;
pub mod netns;
pub mod node;
pub mod outcomes;
pub mod pod;
pub mod process;
pub mod promoted;
pub mod run;
pub mod traffic;
pub mod udp_proxy;
pub mod usage;
pub mod vxlan_view;
pub mod wait;

/// What nearly every story needs.
pub mod prelude {
    pub use std::time::Duration;

    pub use anyhow::{Context, Result, bail, ensure};
    pub use serde_json::{Value, json};

    pub use crate::{
        agent::{Agent, READY_WITHIN, SubnetEnv},
        capture::Capture,
        cluster::{Cluster, Plan},
        conversation::{Bulk, Conversation, Datagrams},
        duo::Duo,
        etcd::{Etcd, EtcdOptions},
        kernel_peer::{KernelPeer, PeerSpec},
        kube_stub::{Fault, KubeStub},
        lab::Lab,
        lease_store::{LeaseStore, LocalStore, SUBNETS_PREFIX},
        loss_meter::LossMeter,
        nat_table::{NatLab, NewFlows, Renderer},
        node::Node,
        pod::Pod,
        traffic,
        udp_proxy::UdpProxy,
        wait::{eventually, holds_for},
    };
}
