//! A lab: a switch with two segments, a router between them on demand, and hosts.

use std::{
    cell::{Cell, OnceCell},
    ops::Deref,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context, Result};

use crate::{
    netns::Netns,
    node::{Attachment, Node},
    run::Run,
};

/// A segment of the underlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// 192.0.2.0/24 and `2001:db8:a::/64`.
    A,
    /// 198.51.100.0/24 and `2001:db8:b::/64`, behind the router.
    B,
}

impl Segment {
    /// The bridge in the switch.
    fn bridge(self) -> &'static str {
        match self {
            Self::A => "brA",
            Self::B => "brB",
        }
    }

    /// IPv4 address of host number `n`.
    pub fn v4(self, n: u8) -> String {
        match self {
            Self::A => format!("192.0.2.{n}"),
            Self::B => format!("198.51.100.{n}"),
        }
    }

    /// IPv6 address of host number `n`, its digits read as they stand.
    pub fn v6(self, n: u8) -> String {
        match self {
            Self::A => format!("2001:db8:a::{n}"),
            Self::B => format!("2001:db8:b::{n}"),
        }
    }
}

/// The lab. Cheap to clone; everything goes away with the last handle to its run.
#[derive(Clone, Debug)]
pub struct Lab(Rc<Inner>);

/// What a lab consists of.
#[derive(Debug)]
pub struct Inner {
    run: Arc<Run>,
    switch: Netns,
    router: OnceCell<Netns>,
    next_host: Cell<u8>,
    next_port: Cell<u32>,
}

impl Deref for Lab {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Lab {
    /// A lab with a switch and nothing else.
    pub fn new() -> Result<Self> {
        Self::in_run(Run::new()?)
    }

    /// A lab whose processes can be left running.
    pub fn to_keep() -> Result<Self> {
        let mut run = Run::new()?;
        run.plan_to_keep();
        Self::in_run(run)
    }

    fn in_run(run: Run) -> Result<Self> {
        let run = Arc::new(run);
        let switch = Netns::new(&run, "switch")?;
        switch.sysctls(&[("net/ipv6/conf/default/disable_ipv6", "1")])?;
        switch.ip(&[
            "link add brA type bridge mcast_snooping 0",
            "link set brA up",
            "link add brB type bridge mcast_snooping 0",
            "link set brB up",
        ])?;
        Ok(Self(Rc::new(Inner {
            run,
            switch,
            router: OnceCell::new(),
            next_host: Cell::new(11),
            next_port: Cell::new(0),
        })))
    }

    /// A node on segment A with the next free address, 192.0.2.11 for the first.
    pub fn node(&self, name: &str) -> Result<Node> {
        let n = self.next_host.get();
        self.next_host.set(n + 1);
        self.node_at(name, Segment::A, n)
    }

    /// A node with a given place.
    pub fn node_at(&self, name: &str, segment: Segment, n: u8) -> Result<Node> {
        if segment == Segment::B {
            self.router()?;
        }
        Node::new(self, name, segment, n)
    }
}

impl Inner {
    /// The run.
    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// The namespace with the bridges.
    pub fn switch(&self) -> &Netns {
        &self.switch
    }

    /// The router between the segments, `.1` in both; made when first asked for.
    pub fn router(&self) -> Result<&Netns> {
        if let Some(router) = self.router.get() {
            return Ok(router);
        }
        let router = Netns::new(&self.run, "router")?;
        router.sysctls(&[("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")])?;
        for (segment, interface) in [(Segment::A, "eth0"), (Segment::B, "eth1")] {
            self.plug(&router, segment, interface, 1500)?;
            router.ip(&[
                &format!("addr add {}/24 dev {interface}", segment.v4(1)),
                &format!("addr add {}/64 dev {interface} nodad", segment.v6(1)),
            ])?;
        }
        Ok(self.router.get_or_init(|| router))
    }

    /// Plugs a new interface of `ns` into the switch. Its far end is returned.
    pub fn plug(
        &self,
        ns: &Netns,
        segment: Segment,
        interface: &str,
        mtu: u32,
    ) -> Result<Attachment> {
        let number = self.next_port.get() + 1;
        self.next_port.set(number);
        let port = format!("p{number}");
        self.switch
            .ip(&[
                &format!(
                    "link add {port} mtu {mtu} type veth peer name {interface} mtu {mtu} netns {}",
                    ns.name()
                ),
                &format!("link set {port} master {} up", segment.bridge()),
            ])
            .with_context(|| format!("cannot plug {} in", ns.name()))?;
        ns.ip(&[&format!("link set {interface} up")])?;
        Ok(Attachment { switch: self.switch.clone(), port })
    }
}
