//! Our VXLAN devices: what each is to be, and the steps from what is there to that.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{identity::StateFile, options::VxlanOptions};
use crate::{
    external_interface::ExternalInterface,
    mac::MacAddr,
    netlink::{
        address::Address,
        link::{self, Link, Vxlan},
        mirror::Tables,
        socket::Request,
    },
};

/// The address family of a tunnel: of its inner packets and its underlay alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4 in IPv4.
    V4,
    /// IPv6 in IPv6.
    V6,
}

impl Family {
    /// Bytes around an inner IP packet: outer IP, UDP, VXLAN and inner Ethernet header. flannel
    /// counts 50 in both families; IPv6 takes 70.
    pub const fn overhead(self) -> u32 {
        match self {
            Self::V4 => 50,
            Self::V6 => 70,
        }
    }

    /// Whether an address is of this family.
    pub fn has(self, ip: IpAddr) -> bool {
        ip.is_ipv4() == (self == Self::V4)
    }
}

/// One of our devices.
#[derive(Debug)]
pub struct Device {
    /// Its family.
    pub family: Family,
    /// `flannel.<VNI>` or `flannel-v6.<VNI>`.
    pub name: String,
    /// The cluster's network of this family.
    pub network: IpNet,
    /// The MAC peers send to. Known once a device was adopted or a MAC chosen.
    pub mac: Option<MacAddr>,
    /// Where the MAC survives a reboot.
    pub state: StateFile,
}

/// What a device has to be right now: depends on the underlay as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its parameters.
    pub vxlan: Vxlan,
    /// Its MTU in bytes.
    pub mtu: u32,
}

/// What has to be done to a device.
#[derive(Debug)]
pub enum Step {
    /// It is right.
    Nothing,
    /// Change it in place.
    Change(Request),
    /// Make it; the index is that of an unusable one that has to go first.
    Make {
        /// An existing device of the name with other parameters.
        instead_of: Option<u32>,
    },
}

impl Device {
    /// What the device is to be on the underlay as it is now.
    ///
    /// # Errors
    /// A sentence that says what the underlay lacks.
    pub fn target(
        &self,
        tables: &Tables,
        external: &ExternalInterface,
        options: &VxlanOptions,
    ) -> Result<Target, String> {
        let parent = tables
            .link(&external.name)
            .ok_or_else(|| format!("external interface {} is gone", external.name))?;
        let local = self.local(tables, external, parent).ok_or_else(|| {
            format!("external interface {} has no usable address for {}", parent.name, self.name)
        })?;
        // The kernel refuses a tunnel that does not fit into the underlay.
        let base = options.mtu.map_or(parent.mtu, |mtu| mtu.min(parent.mtu));
        let mtu = base.checked_sub(self.family.overhead()).filter(|mtu| *mtu > 0);
        let mtu = mtu.ok_or_else(|| format!("MTU {base} leaves no room for {}", self.name))?;
        let vxlan = Vxlan {
            vni: options.vni,
            port: options.port,
            parent: parent.index,
            local: Some(local),
            group: None,
            learning: options.learning,
            gbp: options.gbp,
            external: false,
        };
        Ok(Target { vxlan, mtu })
    }

    /// The source of outer packets: the advertised address if this host has it, as flannel takes
    /// it; else (behind NAT) the interface's; else whatever the interface has by now.
    fn local(
        &self,
        tables: &Tables,
        external: &ExternalInterface,
        parent: &Link,
    ) -> Option<IpAddr> {
        let usable = || {
            tables.addresses.iter().filter_map(|(address, usable)| {
                (*usable && self.family.has(address.net.addr())).then_some(address)
            })
        };
        let has = |ip: IpAddr| usable().any(|address| address.net.addr() == ip);
        let (public, own) = self.configured(external);
        if let Some(public) = public.filter(|ip| has(*ip)) {
            return Some(public);
        }
        let on_parent = || usable().filter(|address| address.link == parent.index);
        if let Some(own) = own.filter(|ip| on_parent().any(|address| address.net.addr() == *ip)) {
            return Some(own);
        }
        on_parent().map(|address| address.net.addr()).find(|ip| !is_link_local(*ip))
    }

    /// The advertised and the interface's own address, as chosen at start.
    pub fn configured(&self, external: &ExternalInterface) -> (Option<IpAddr>, Option<IpAddr>) {
        match self.family {
            Family::V4 => (external.public_ip.map(Into::into), external.addr.map(Into::into)),
            Family::V6 => (external.public_ipv6.map(Into::into), external.addr_v6.map(Into::into)),
        }
    }

    /// The step from what is there to the target.
    ///
    /// # Errors
    /// A sentence that names the foreign device in the way.
    pub fn step(&self, tables: &Tables, target: &Target) -> Result<Step, String> {
        let Some(link) = tables.link(&self.name) else {
            self.refuse_conflict(tables, &target.vxlan)?;
            return Ok(Step::Make { instead_of: None });
        };
        if !compatible(link, &target.vxlan) {
            self.refuse_conflict(tables, &target.vxlan)?;
            return Ok(Step::Make { instead_of: Some(link.index) });
        }
        let learning = link.vxlan.as_ref().is_some_and(|vxlan| vxlan.learning);
        if learning != target.vxlan.learning {
            // Without the rest: the kernel takes no MTU together with parameters of vxlan. But
            // with "up": of a device that stays down the kernel does not tell the change.
            let change = link::Change {
                learning: Some(target.vxlan.learning),
                up: !link.up,
                ..link::Change::default()
            };
            return Ok(Step::Change(link::change(link.index, &change)));
        }
        let change = link::Change {
            mtu: (link.mtu != target.mtu).then_some(target.mtu),
            mac: self.mac.filter(|mac| link.mac != Some(*mac)),
            up: !link.up,
            learning: None,
        };
        if change == link::Change::default() {
            return Ok(Step::Nothing);
        }
        Ok(Step::Change(link::change(link.index, &change)))
    }

    /// The kernel would answer "file exists" or "address in use", which tells nobody anything.
    fn refuse_conflict(&self, tables: &Tables, wanted: &Vxlan) -> Result<(), String> {
        let family = |vxlan: &Vxlan| vxlan.local.or(vxlan.group).map(|ip| ip.is_ipv4());
        for link in tables.links.values().filter(|link| link.name != self.name) {
            let Some(other) = &link.vxlan else { continue };
            if other.port != wanted.port {
                continue;
            }
            let same_family = family(other).is_none() || family(other) == family(wanted);
            // Devices share the socket of a port if they agree on its flags.
            let other_flags = link.up && same_family && other.gbp != wanted.gbp;
            if other.external || other_flags || (other.vni == wanted.vni && same_family) {
                let what = if other.external {
                    "takes every VNI of".to_owned()
                } else if other_flags {
                    "uses, with another Backend.GBP,".to_owned()
                } else {
                    format!("has VNI {} on", other.vni)
                };
                return Err(format!(
                    "cannot make {}: the device {} already {what} UDP port {}; remove that device \
                     or set another Backend.Port (on all nodes)",
                    self.name, link.name, other.port
                ));
            }
        }
        Ok(())
    }

    /// The address this device carries for a subnet: its base with a full-length prefix, so that
    /// no broadcast or connected route comes with it.
    pub fn address(link: u32, subnet: IpNet) -> Option<Address> {
        let net = IpNet::new(subnet.network(), subnet.max_prefix_len()).ok()?;
        Some(Address { link, net })
    }

    /// Changes of addresses: ours is there, and no other of the cluster's network. Foreign ones
    /// are nobody's harm and stay.
    pub fn address_changes(&self, tables: &Tables, own: Address) -> Vec<Request> {
        let on_device = tables.addresses.keys().filter(|address| address.link == own.link);
        let mut requests = Vec::new();
        // First the new, then the old: the kernel drops a link's routes with its last address.
        if !tables.addresses.contains_key(&own) {
            requests.push(own.add());
        }
        requests.extend(
            on_device
                .filter(|address| **address != own && self.network.contains(&address.net.addr()))
                .map(|address| address.delete()),
        );
        requests
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Whether an existing device can be used as it is, apart from what can be changed in place.
fn compatible(link: &Link, wanted: &Vxlan) -> bool {
    let Some(there) = &link.vxlan else { return false };
    let unspecified = there.group.is_none_or(|ip| ip.is_unspecified());
    unspecified
        && !there.external
        && there.vni == wanted.vni
        && there.port == wanted.port
        && there.parent == wanted.parent
        && there.local == wanted.local
        && there.gbp == wanted.gbp
}
