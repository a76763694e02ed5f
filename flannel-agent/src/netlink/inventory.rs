//! A snapshot of links, addresses and default routes, to choose the external interface from.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use futures_util::{StreamExt, TryStreamExt, future};
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
};
use rtnetlink::Handle;

/// The kernel could not be asked.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what} from the kernel: {reason}")]
pub struct InventoryError {
    what: &'static str,
    reason: String,
}

/// Links, addresses and routes at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// All links in the order of their indices.
    pub links: Vec<Link>,
    /// The IPv4 default route of the main table with the lowest metric.
    pub default_v4: Option<DefaultRoute>,
    /// The IPv6 default route of the main table with the lowest metric.
    pub default_v6: Option<DefaultRoute>,
    /// What the kernel says to a look-up of the address asked for; the error is its own words.
    pub route_to: Option<Result<RouteTo, String>>,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it is a loopback.
    pub loopback: bool,
    /// Its addresses in the kernel's order.
    pub addresses: Vec<Address>,
}

/// An address on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// `IFA_F_PERMANENT`: configured, not by DHCP or SLAAC.
    pub permanent: bool,
    /// `IFA_F_SECONDARY`, which for IPv6 means TEMPORARY, a privacy address.
    pub secondary: bool,
    /// `IFA_F_DEPRECATED`.
    pub deprecated: bool,
    /// Duplicate address detection has not finished, and the address is not optimistic.
    pub tentative: bool,
    /// Duplicate address detection found the address on another host.
    pub duplicate: bool,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ip.fmt(f)?;
        for (set, word) in [
            (self.deprecated, " deprecated"),
            (self.tentative, " tentative"),
            (self.duplicate, " duplicate"),
            (self.secondary && self.ip.is_ipv6(), " temporary"),
        ] {
            if set {
                f.write_str(word)?;
            }
        }
        Ok(())
    }
}

/// Where a default route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultRoute {
    /// Out of the link with this index.
    Link(u32),
    /// Out of several, or in another way that names no single link.
    NoSingleLink,
}

/// The first result of a route look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTo {
    /// Index of the output link.
    pub link: u32,
    /// The source address that the kernel would use.
    pub source: Option<IpAddr>,
}

/// Reads a snapshot. Default routes of a family and the route to an address only if asked for:
/// a host without IPv6 has nothing to say about its routes.
pub async fn read(
    default_v4: bool,
    default_v6: bool,
    can_reach: Option<IpAddr>,
) -> Result<Inventory, InventoryError> {
    let failed = |what| move |reason: String| InventoryError { what, reason };
    // Strict checking makes the kernel filter dumps: a node has thousands of routes.
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()
        .map_err(|e| failed("anything")(e.to_string()))?;
    // Ends by itself when the handle is gone.
    tokio::spawn(connection);

    let mut links = read_links(&handle).await.map_err(failed("links"))?;
    links.sort_by_key(|link| link.index);
    let mut addresses = handle.address().get().execute();
    while let Some(message) =
        addresses.try_next().await.map_err(|e| failed("addresses")(e.to_string()))?
    {
        let link = links.binary_search_by_key(&message.header.index, |link| link.index);
        // A link that appeared after the first dump is left to the next snapshot.
        if let (Ok(at), Some(address)) = (link, address(&message)) {
            links[at].addresses.push(address);
        }
    }
    let mut inventory = Inventory { links, ..Inventory::default() };
    if default_v4 {
        inventory.default_v4 =
            read_default(&handle, AddressFamily::Inet).await.map_err(failed("IPv4 routes"))?;
    }
    if default_v6 {
        inventory.default_v6 =
            read_default(&handle, AddressFamily::Inet6).await.map_err(failed("IPv6 routes"))?;
    }
    if let Some(ip) = can_reach {
        inventory.route_to = Some(read_route_to(&handle, ip).await);
    }
    Ok(inventory)
}

async fn read_links(handle: &Handle) -> Result<Vec<Link>, String> {
    let without_statistics = vec![LinkExtentMask::SkipStats];
    let request = handle.link().get().set_filter_mask(AddressFamily::Unspec, without_statistics);
    request.execute().map_ok(link).try_collect().await.map_err(|e| e.to_string())
}

fn link(message: LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        loopback: message.header.flags.contains(LinkFlags::Loopback),
        ..Link::default()
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            _ => (),
        }
    }
    link
}

fn address(message: &AddressMessage) -> Option<Address> {
    let (mut local, mut other) = (None, None);
    // The header holds the first eight flags only; the attribute, if there is one, all.
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point link `Address` is the far end's, so `Local` goes first.
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => other = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => (),
        }
    }
    Some(Address {
        ip: local.or(other)?,
        permanent: flags.contains(AddressFlags::Permanent),
        secondary: flags.contains(AddressFlags::Secondary),
        deprecated: flags.contains(AddressFlags::Deprecated),
        tentative: flags.contains(AddressFlags::Tentative)
            && !flags.contains(AddressFlags::Optimistic),
        duplicate: flags.contains(AddressFlags::Dadfailed),
    })
}

/// The best default route. The kernel dumps a prefix's routes by rising metric, but for IPv6
/// not over all routers, so metrics are compared here.
async fn read_default(
    handle: &Handle,
    family: AddressFamily,
) -> Result<Option<DefaultRoute>, String> {
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    request.header.table = RouteHeader::RT_TABLE_MAIN;
    request.header.kind = RouteType::Unicast;
    let mut best: Option<(u32, DefaultRoute)> = None;
    let mut routes = handle.route().get(request).execute();
    while let Some(route) = routes.try_next().await.map_err(|e| e.to_string())? {
        // Kernels before 4.20 do not filter.
        let wanted = route.header.address_family == family
            && route.header.destination_prefix_length == 0
            && route.header.table == RouteHeader::RT_TABLE_MAIN
            && route.header.kind == RouteType::Unicast;
        if !wanted {
            continue;
        }
        let (metric, way) = default_route(&route);
        if best.is_none_or(|(lowest, _)| metric < lowest) {
            best = Some((metric, way));
        }
    }
    Ok(best.map(|(_, way)| way))
}

fn default_route(route: &RouteMessage) -> (u32, DefaultRoute) {
    let (mut metric, mut way) = (0, DefaultRoute::NoSingleLink);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(index) => way = DefaultRoute::Link(*index),
            _ => (),
        }
    }
    let multipath = |a: &RouteAttribute| matches!(a, RouteAttribute::MultiPath(_));
    if route.attributes.iter().any(multipath) {
        way = DefaultRoute::NoSingleLink;
    }
    (metric, way)
}

async fn read_route_to(handle: &Handle, ip: IpAddr) -> Result<RouteTo, String> {
    let mut request = RouteMessage::default();
    let (family, length) = match ip {
        IpAddr::V4(_) => (AddressFamily::Inet, Ipv4Addr::BITS),
        IpAddr::V6(_) => (AddressFamily::Inet6, Ipv6Addr::BITS),
    };
    request.header.address_family = family;
    request.header.destination_prefix_length = u8::try_from(length).unwrap_or(u8::MAX);
    request.attributes.push(RouteAttribute::Destination(ip.into()));
    let mut found = None;
    let results = handle.route().get(request).execute();
    // The first result counts; the stream is read to its end all the same.
    results
        .for_each(|result| {
            found.get_or_insert(result);
            future::ready(())
        })
        .await;
    let route = found.ok_or("no answer")?.map_err(|e| e.to_string())?;
    let mut link = None;
    let mut source = None;
    for attribute in route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => link = Some(index),
            RouteAttribute::PrefSource(RouteAddress::Inet(ip)) => source = Some(ip.into()),
            RouteAttribute::PrefSource(RouteAddress::Inet6(ip)) => source = Some(ip.into()),
            _ => (),
        }
    }
    Ok(RouteTo { link: link.ok_or("the route leads out of no link")?, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_host_has_a_loopback() {
        let inventory = read(true, true, Some(Ipv4Addr::LOCALHOST.into())).await.expect("readable");
        let link = inventory.links.iter().find(|link| link.loopback).expect("lo");
        assert_eq!(link.name, "lo");
        assert!(link.mtu > 0);
        let address = link.addresses.iter().find(|a| a.ip == Ipv4Addr::LOCALHOST);
        assert!(address.is_some_and(|a| a.permanent && !a.tentative), "{link:?}");
        let route = inventory.route_to.expect("asked for").expect("found");
        assert_eq!(route.link, link.index);
        assert_eq!(route.source, Some(Ipv4Addr::LOCALHOST.into()));
    }
}
