//! Which interface and addresses carry the tunnel: specification §2.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use regex::Regex;

use crate::{
    cli::flags::InterfaceFlags,
    netlink::inventory::{self, Address, DefaultRoute, Inventory, InventoryError, Link},
};

/// The external interface and the addresses chosen on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalInterface {
    /// Interface name.
    pub name: String,
    /// Interface index.
    pub index: u32,
    /// Interface MTU in bytes, never 0.
    pub mtu: u32,
    /// Address on the interface (`IfaceAddr`).
    pub addr: Option<Ipv4Addr>,
    /// IPv6 address on the interface (`IfaceV6Addr`).
    pub addr_v6: Option<Ipv6Addr>,
    /// Advertised IPv4 address (`ExtAddr`).
    pub public_ip: Option<Ipv4Addr>,
    /// Advertised IPv6 address (`ExtV6Addr`).
    pub public_ipv6: Option<Ipv6Addr>,
}

impl fmt::Display for ExternalInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (MTU {}", self.name, self.mtu)?;
        let v4 = (self.addr.map(IpAddr::V4), self.public_ip.map(IpAddr::V4));
        let v6 = (self.addr_v6.map(IpAddr::V6), self.public_ipv6.map(IpAddr::V6));
        for (address, public) in [v4, v6] {
            if let Some(address) = address {
                write!(f, ", address {address}")?;
            }
            if let Some(public) = public.filter(|_| public != address) {
                write!(f, ", public address {public}")?;
            }
        }
        f.write_str(")")
    }
}

/// The address families that are enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Families {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Families {
    fn dual(self) -> bool {
        self.v4 && self.v6
    }
}

/// Why no interface was chosen.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// A flag's value makes no sense on any host: only a restart with another one helps.
    #[error("{0}")]
    Flags(String),
    /// Nothing here fits, for now: an address, link or route may come yet.
    #[error("{why}")]
    NotFound {
        /// What was looked for and what there is.
        why: String,
        /// What was asked for is here but for an address or a route, as on a host that is still
        /// starting. Otherwise a name is wrong, most likely.
        only_late: bool,
    },
    /// The kernel could not be asked.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
}

/// Reads what is there and chooses from it.
pub async fn discover(
    flags: &InterfaceFlags,
    families: Families,
) -> Result<ExternalInterface, SelectError> {
    let can_reach = parse_ip::<IpAddr>("--iface-can-reach", &flags.iface_can_reach)?;
    let any = !flags.restrict();
    let inventory = inventory::read(any && families.v4, any && families.v6, can_reach).await?;
    select(flags, families, &inventory)
}

/// Chooses the external interface. Upstream's order of attempts is kept; what was tried and why
/// it did not fit is part of the error.
pub fn select(
    flags: &InterfaceFlags,
    families: Families,
    inventory: &Inventory,
) -> Result<ExternalInterface, SelectError> {
    let selection = Selection {
        families,
        public_ip: parse_ip("--public-ip", &flags.public_ip)?,
        public_ipv6: parse_ip("--public-ipv6", &flags.public_ipv6)?,
        inventory,
    };
    // Every regular expression has to be one, also when an earlier flag decides.
    let regexes = flags.patterns().map(|text| parse_regex(text));
    let regexes = regexes.collect::<Result<Vec<_>, _>>()?;
    let can_reach = parse_ip::<IpAddr>("--iface-can-reach", &flags.iface_can_reach)?;

    if !flags.restrict() {
        let public = match (selection.public_ip, selection.public_ipv6) {
            (Some(ip), _) => Some(("--public-ip", IpAddr::V4(ip))),
            (None, Some(ip)) => Some(("--public-ipv6", IpAddr::V6(ip))),
            (None, None) => None,
        };
        let found = match public {
            Some((flag, ip)) => selection.by_address(ip).map_err(|why| {
                format!(
                    "{flag} {ip}: {why}; on its own this flag has to name an address of this \
                     host: to advertise an address of a NAT device, choose the interface with \
                     --iface, --iface-regex or --iface-can-reach as well"
                )
            }),
            None => selection.by_default_route().map_err(|why| {
                format!(
                    "{why}; name the interface with --iface, --iface-regex or --iface-can-reach"
                )
            }),
        };
        return found
            .and_then(|choice| selection.complete(&choice))
            .map_err(|why| selection.not_found(&why, selection.only_late(flags, &regexes)));
    }

    let by_name = flags.names().map(|text| (format!("--iface {text}"), selection.by_name(text)));
    let by_regex =
        regexes.iter().map(|regex| (format!("--iface-regex {regex}"), selection.by_regex(regex)));
    let by_route =
        can_reach.iter().map(|ip| (format!("--iface-can-reach {ip}"), selection.by_route_to(*ip)));
    let mut misses = Vec::new();
    // All three are lazy: nothing is looked up after the first hit.
    for (flag, found) in by_name.chain(by_regex).chain(by_route) {
        match found.and_then(|choice| selection.complete(&choice)) {
            Ok(interface) => {
                if !misses.is_empty() {
                    tracing::info!("{flag} decides, because {}", misses.join("; "));
                }
                return Ok(interface);
            }
            Err(why) => misses.push(format!("{flag}: {why}")),
        }
    }
    Err(selection.not_found(&misses.join("; "), selection.only_late(flags, &regexes)))
}

impl InterfaceFlags {
    /// Whether a flag says which interface to take, so that default routes do not matter.
    fn restrict(&self) -> bool {
        self.names().next().is_some()
            || self.patterns().next().is_some()
            || !self.iface_can_reach.is_empty()
    }

    /// The values of `--iface`. An empty one asks for nothing, as upstream has it: manifests that
    /// fill it in may leave it so.
    fn names(&self) -> impl Iterator<Item = &String> {
        self.iface.iter().filter(|text| !text.is_empty())
    }

    /// The values of `--iface-regex`, likewise.
    fn patterns(&self) -> impl Iterator<Item = &String> {
        self.iface_regex.iter().filter(|text| !text.is_empty())
    }
}

fn parse_ip<T: std::str::FromStr>(flag: &str, text: &str) -> Result<Option<T>, SelectError> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        let kind = match flag {
            "--public-ip" => "IPv4 ",
            "--public-ipv6" => "IPv6 ",
            _ => "",
        };
        SelectError::Flags(format!("{flag} \"{text}\" is no {kind}address; correct the flag"))
    })
}

fn parse_regex(text: &str) -> Result<Regex, SelectError> {
    Regex::new(text).map_err(|error| {
        SelectError::Flags(format!(
            "--iface-regex \"{text}\" is no regular expression; correct the flag: {error}"
        ))
    })
}

/// A link, and addresses on it if the way it was found decides them.
struct Choice<'a> {
    link: &'a Link,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
}

impl<'a> Choice<'a> {
    fn link(link: &'a Link) -> Self {
        Self { link, v4: None, v6: None }
    }
}

/// One run of the selection. Errors are half-sentences that say why a flag does not fit.
struct Selection<'a> {
    families: Families,
    public_ip: Option<Ipv4Addr>,
    public_ipv6: Option<Ipv6Addr>,
    inventory: &'a Inventory,
}

impl<'a> Selection<'a> {
    /// `--iface`: an address or a name.
    fn by_name(&self, text: &str) -> Result<Choice<'a>, String> {
        if let Ok(ip) = text.parse() {
            return self.by_address(ip);
        }
        let link = self.inventory.links.iter().find(|link| link.name == text);
        link.map(Choice::link).ok_or_else(|| "there is no interface of that name".to_owned())
    }

    /// The interface that has an address; its family has to be enabled.
    fn by_address(&self, ip: IpAddr) -> Result<Choice<'a>, String> {
        // What Go calls an IPv4 address includes the mapped ones.
        let ip = ip.to_canonical();
        match ip {
            IpAddr::V4(v4) if self.families.v4 => {
                let link = self.owner(ip)?;
                let mut choice = Choice { link, v4: Some(v4), v6: None };
                if let Some(v6) = self.public_ipv6.filter(|_| self.families.v6) {
                    let other = self.owner(v6.into())?;
                    if other.index != link.index {
                        return Err(format!(
                            "{ip} is on {} but --public-ipv6 {v6} is on {}; both have to be on \
                             one interface",
                            link.name, other.name
                        ));
                    }
                    choice.v6 = Some(v6);
                }
                Ok(choice)
            }
            IpAddr::V4(_) => Err("an IPv4 address does not fit a network of IPv6 only".to_owned()),
            IpAddr::V6(v6) if self.families.dual() => {
                let Some(public) = self.public_ipv6 else {
                    return Err(format!(
                        "an IPv6 address alone does not decide the interface of a dual-stack \
                         network: give --public-ipv6 {v6} too, or the interface's name"
                    ));
                };
                Ok(Choice { link: self.owner(public.into())?, v4: None, v6: Some(public) })
            }
            IpAddr::V6(v6) if self.families.v6 => {
                Ok(Choice { link: self.owner(ip)?, v4: None, v6: Some(v6) })
            }
            IpAddr::V6(_) => Err("an IPv6 address does not fit a network of IPv4 only".to_owned()),
        }
    }

    /// The link that has exactly this address, whatever its scope and state.
    fn owner(&self, ip: IpAddr) -> Result<&'a Link, String> {
        let owns = |link: &&Link| link.addresses.iter().any(|address| address.ip == ip);
        let owner = self.inventory.links.iter().find(owns);
        owner.ok_or_else(|| format!("no interface has the address {ip}"))
    }

    /// `--iface-regex`: by an address of each enabled family, else by name.
    fn by_regex(&self, regex: &Regex) -> Result<Choice<'a>, String> {
        let links = &self.inventory.links;
        let by_address =
            links.iter().find_map(|link| {
                let v4 = self.families.v4.then(|| {
                    usable_v4(link).into_iter().find(|ip| regex.is_match(&ip.to_string()))
                });
                let v6 = self.families.v6.then(|| {
                    usable_v6(link).into_iter().find(|ip| regex.is_match(&ip.to_string()))
                });
                // A family that is enabled and does not match rules the link out as a whole.
                let fits = v4 != Some(None) && v6 != Some(None);
                fits.then(|| Choice { link, v4: v4.flatten(), v6: v6.flatten() })
            });
        let by_name = || links.iter().find(|link| regex.is_match(&link.name)).map(Choice::link);
        by_address
            .or_else(by_name)
            .ok_or_else(|| "it matches no interface's address or name".to_owned())
    }

    /// `--iface-can-reach`: where the kernel would send a packet to this address from.
    fn by_route_to(&self, ip: IpAddr) -> Result<Choice<'a>, String> {
        let route = match &self.inventory.route_to {
            Some(Ok(route)) => route,
            Some(Err(why)) => return Err(format!("the kernel knows no route there: {why}")),
            None => return Err("the route there was not looked up".to_owned()),
        };
        let link = self.link(route.link)?;
        if link.loopback {
            return Err(format!("{ip} is an address of this host itself"));
        }
        let mut choice = Choice::link(link);
        match route.source {
            Some(IpAddr::V4(v4)) if self.families.v4 => choice.v4 = Some(v4),
            Some(IpAddr::V6(v6)) if self.families.v6 => choice.v6 = Some(v6),
            _ => (),
        }
        Ok(choice)
    }

    /// Without any flag: the default route's, which has to be the same for all families.
    fn by_default_route(&self) -> Result<Choice<'a>, String> {
        let way = |route: Option<DefaultRoute>, family: &str| match route {
            Some(DefaultRoute::Link(index)) => self.link(index),
            Some(DefaultRoute::NoSingleLink) => {
                Err(format!("the {family} default route leads out of more than one interface"))
            }
            None => Err(format!("there is no {family} default route in the main table")),
        };
        let v4 = self.families.v4.then(|| way(self.inventory.default_v4, "IPv4")).transpose()?;
        let v6 = self.families.v6.then(|| way(self.inventory.default_v6, "IPv6")).transpose()?;
        match (v4, v6) {
            (Some(v4), Some(v6)) if v4.index != v6.index => Err(format!(
                "the IPv4 default route leads out of {} and the IPv6 one out of {}; both have to \
                 be on one interface",
                v4.name, v6.name
            )),
            (Some(link), _) | (None, Some(link)) => Ok(Choice::link(link)),
            (None, None) => Err("neither IPv4 nor IPv6 is enabled".to_owned()),
        }
    }

    fn link(&self, index: u32) -> Result<&'a Link, String> {
        let links = &self.inventory.links;
        let link = links.iter().find(|link| link.index == index);
        link.ok_or_else(|| format!("the route leads out of interface {index}, which is gone"))
    }

    /// Fills in the addresses that are not decided yet.
    fn complete(&self, choice: &Choice<'a>) -> Result<ExternalInterface, String> {
        let Choice { link, v4, v6 } = *choice;
        if link.mtu == 0 {
            return Err(format!("{} has an MTU of 0", link.name));
        }
        let none = |family: &str| {
            format!("{} has no usable {family} address", Listed(std::slice::from_ref(link)))
        };
        let addr = match v4 {
            None if self.families.v4 => {
                Some(usable_v4(link).first().copied().ok_or_else(|| none("IPv4"))?)
            }
            fixed => fixed,
        };
        let addr_v6 = match v6 {
            None if self.families.v6 => {
                Some(usable_v6(link).first().copied().ok_or_else(|| none("IPv6"))?)
            }
            fixed => fixed,
        };
        Ok(ExternalInterface {
            name: link.name.clone(),
            index: link.index,
            mtu: link.mtu,
            addr,
            addr_v6,
            public_ip: self.public_ip.or(addr),
            public_ipv6: self.public_ipv6.or(addr_v6),
        })
    }

    /// Whether what the flags ask for lacks nothing but an address or a route.
    fn only_late(&self, flags: &InterfaceFlags, regexes: &[Regex]) -> bool {
        let links = &self.inventory.links;
        let is_here = |text: &String| {
            text.parse::<IpAddr>().is_ok() || links.iter().any(|link| link.name == *text)
        };
        let matches = |regex: &Regex| links.iter().any(|link| regex.is_match(&link.name));
        if flags.restrict() {
            return flags.names().any(is_here)
                || regexes.iter().any(matches)
                || !flags.iface_can_reach.is_empty();
        }
        // On its own, a public address that no interface has is a mistake.
        let by_route = self.public_ip.is_none() && self.public_ipv6.is_none();
        let lacks_address = |link: &Link| {
            self.families.v4 && usable_v4(link).is_empty()
                || self.families.v6 && usable_v6(link).is_empty()
        };
        let incomplete = |wanted: bool, route: Option<DefaultRoute>| {
            wanted
                && match route {
                    None => true,
                    Some(DefaultRoute::NoSingleLink) => false,
                    Some(DefaultRoute::Link(index)) => self.link(index).is_ok_and(lacks_address),
                }
        };
        by_route
            && (incomplete(self.families.v4, self.inventory.default_v4)
                || incomplete(self.families.v6, self.inventory.default_v6))
    }

    fn not_found(&self, why: &str, only_late: bool) -> SelectError {
        let links = &self.inventory.links;
        SelectError::NotFound {
            why: format!("no interface to other nodes: {why}; interfaces here: {}", Listed(links)),
            only_late,
        }
    }
}

/// Links with their addresses, for messages.
struct Listed<'a>(&'a [Link]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, link) in self.0.iter().enumerate() {
            let addresses: Vec<_> = link.addresses.iter().map(Address::to_string).collect();
            let addresses =
                if addresses.is_empty() { "no address".to_owned() } else { addresses.join(", ") };
            let separator = if at > 0 { ", " } else { "" };
            write!(f, "{separator}{} ({addresses})", link.name)?;
        }
        Ok(())
    }
}

fn usable_v4(link: &Link) -> Vec<Ipv4Addr> {
    let v4 = |ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None };
    usable(link).filter_map(v4).collect()
}

fn usable_v6(link: &Link) -> Vec<Ipv6Addr> {
    let v6 = |ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None };
    usable(link).filter_map(v6).collect()
}

/// The addresses that may carry a tunnel, best first (§2.3): global before link-local, static
/// before temporary. One that another host has or that may turn out so is left out.
fn usable(link: &Link) -> impl Iterator<Item = IpAddr> {
    let fits = |a: &&Address| is_unicast(a.ip) && !a.deprecated && !a.tentative && !a.duplicate;
    let mut addresses: Vec<_> = link.addresses.iter().filter(fits).collect();
    addresses.sort_by_key(|a| (is_link_local(a.ip), !a.permanent, a.secondary));
    addresses.into_iter().map(|a| a.ip)
}

/// Global or link-local unicast, in Go's sense: private ranges are global.
fn is_unicast(ip: IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !(broadcast || ip.is_unspecified() || ip.is_loopback() || ip.is_multicast())
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
