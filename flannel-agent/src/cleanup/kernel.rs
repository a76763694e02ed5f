//! Devices and routes; neighbours and forwarding entries go with their device.

use std::{collections::BTreeSet, io};

use ipnet::IpNet;

use super::Report;
use crate::{
    netlink::{
        link::{self, Link},
        mirror::{Mirror, Scope, Tables},
        route::{OUR_PROTOCOL, Route, Via},
        socket::Request,
    },
    subnet_env::SubnetFile,
};

/// Removes the devices of these names and our routes. Returns the names of devices that are still
/// there.
pub fn remove(
    names: &BTreeSet<String>,
    subnet_file: &SubnetFile,
    report: &mut Report,
) -> BTreeSet<String> {
    let networks = subnet_file.networks();
    let scope = Scope { networks: networks.clone(), devices: names.iter().cloned().collect() };
    let mirror = Mirror::open(scope).and_then(|mut mirror| mirror.refresh().map(|_| mirror));
    let mut mirror = match mirror {
        Ok(mirror) => mirror,
        Err(err) => {
            report.problems.push(format!("cannot read the kernel's links and routes: {err}"));
            return names.clone();
        }
    };
    let mut rest = BTreeSet::new();
    let mut devices = Vec::new();
    for link in mirror.tables().links.values() {
        match (names.contains(&link.name), tunnel_by_name(link)) {
            (true, true) => devices.push(link.clone()),
            (true, false) => report.left.push(format!(
                "device {} has an agent's name but is no VXLAN device with the VNI in it",
                link.name
            )),
            (false, true) => report.left.push(format!(
                "device {} looks like flannel's, but neither the state directory nor the pins \
                 know it: name those of its agent with --state-dir and --bpf-pin-dir, or remove \
                 it with `ip link del {0}`",
                link.name
            )),
            (false, false) => {}
        }
    }
    let (routes, others) = routes(mirror.tables(), &devices, &networks);
    report.left.extend(others.iter().map(|route| {
        format!(
            "route {} {} is marked as an agent's, but {} names no network that it is in: give \
             the agent's --subnet-file, or remove it with `ip route del {0}`",
            route.destination,
            mirror.tables().way_of(route),
            subnet_file.path().display()
        )
    }));
    let named = |route: &Route| format!("{} {}", route.destination, mirror.tables().way_of(route));
    let routes: Vec<_> = routes.into_iter().map(|route| (named(&route), route.delete())).collect();
    let entries = entries(mirror.tables(), &devices);
    for (name, outcome) in run(&mut mirror, routes) {
        report.note("route", &name, outcome);
    }
    let requests = devices.iter().map(|link| (link.name.clone(), link::delete(link.index)));
    for (name, outcome) in run(&mut mirror, requests.collect()) {
        if outcome.is_ok() {
            let on_it = entries.iter().filter(|(device, ..)| *device == name);
            for (_, kind, entry) in on_it {
                report.removed(kind, entry);
            }
        } else {
            rest.insert(name.clone());
        }
        report.note("device", &name, outcome);
    }
    rest
}

/// `flannel.<VNI>` or `flannel-v6.<VNI>`, and what the name says.
fn tunnel_by_name(link: &Link) -> bool {
    let vni = ["flannel.", "flannel-v6."].iter().find_map(|prefix| link.name.strip_prefix(prefix));
    let vni = vni.and_then(|vni| vni.parse().ok());
    vni.is_some() && link.vxlan.as_ref().map(|vxlan| vxlan.vni) == vni
}

/// Our routes, and those that only have our protocol.
fn routes(tables: &Tables, devices: &[Link], networks: &[IpNet]) -> (Vec<Route>, Vec<Route>) {
    let on_ours = |route: &Route| match route.via {
        Via::Gateway { link, .. } | Via::Link(link) => devices.iter().any(|d| d.index == link),
        Via::Blackhole => false,
    };
    let inside = |route: &Route| networks.iter().any(|net| net.contains(&route.destination));
    let tagged = tables.routes.iter().filter(|route| route.protocol == OUR_PROTOCOL);
    tagged.copied().partition(|route| on_ours(route) || inside(route))
}

/// What goes with the devices: (device, kind, name).
fn entries(tables: &Tables, devices: &[Link]) -> Vec<(String, &'static str, String)> {
    let name = |index: u32| devices.iter().find(|d| d.index == index).map(|d| d.name.clone());
    let neighbours = tables.neighbours.iter().filter_map(|((link, ip), mac)| {
        let device = name(*link)?;
        Some((device.clone(), "neighbour", format!("{ip} dev {device} lladdr {mac}")))
    });
    let forwarding = tables.forwarding.iter().filter_map(|((link, mac), remote)| {
        let device = name(*link)?;
        Some((device.clone(), "fdb", format!("{mac} dev {device} dst {remote}")))
    });
    let mut entries: Vec<_> = neighbours.chain(forwarding).collect();
    entries.sort();
    entries
}

/// Makes the requests. What is gone by itself counts as not removed.
fn run(
    mirror: &mut Mirror,
    requests: Vec<(String, Request)>,
) -> Vec<(String, Result<bool, String>)> {
    let (names, requests): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
    let outcomes = mirror.requests().run(requests);
    let told = |outcome: io::Result<()>| match outcome {
        Ok(()) => Ok(true),
        Err(err) => match err.raw_os_error() {
            Some(libc::ENODEV | libc::ESRCH | libc::ENOENT) => Ok(false),
            _ => Err(err.to_string()),
        },
    };
    match outcomes {
        Ok(outcomes) => names.into_iter().zip(outcomes.into_iter().map(told)).collect(),
        Err(err) => names.into_iter().map(|name| (name, Err(err.to_string()))).collect(),
    }
}
