use super::*;
use crate::netlink::inventory::RouteTo;

const V4: Families = Families { v4: true, v6: false };
const V6: Families = Families { v4: false, v6: true };
const DUAL: Families = Families { v4: true, v6: true };

/// An address by its text and the kernel's words for its flags.
fn address(text: &str) -> Address {
    let mut words = text.split(' ');
    let ip = words.next().and_then(|ip| ip.parse().ok()).expect("an address");
    let mut address = Address {
        ip,
        permanent: true,
        secondary: false,
        deprecated: false,
        tentative: false,
        duplicate: false,
    };
    for word in words {
        match word {
            "dynamic" => address.permanent = false,
            "temporary" | "secondary" => address.secondary = true,
            "deprecated" => address.deprecated = true,
            "tentative" => address.tentative = true,
            "duplicate" => address.duplicate = true,
            _ => panic!("{word}"),
        }
    }
    address
}

fn link(index: u32, name: &str, addresses: &[&str]) -> Link {
    Link {
        index,
        name: name.to_owned(),
        mtu: 1500,
        loopback: name == "lo",
        addresses: addresses.iter().map(|text| address(text)).collect(),
    }
}

/// A host like the one of upstream's tests: `dummy0` beside a first interface.
fn host() -> Inventory {
    Inventory {
        links: vec![
            link(1, "lo", &["127.0.0.1", "::1"]),
            link(2, "eth0", &["10.0.2.15", "fd00:2::15", "fe80::2"]),
            link(
                3,
                "dummy0",
                &["172.16.30.7", "172.16.30.8 secondary", "fd00:30::7 dynamic", "fe80::3"],
            ),
        ],
        default_v4: Some(DefaultRoute::Link(2)),
        default_v6: Some(DefaultRoute::Link(2)),
        route_to: None,
    }
}

fn flags(text: &str) -> InterfaceFlags {
    let mut flags = InterfaceFlags::default();
    let mut words = text.split_whitespace();
    while let Some(flag) = words.next() {
        let value = words.next().expect("a value").to_owned();
        match flag {
            "iface" => flags.iface.push(value),
            "regex" => flags.iface_regex.push(value),
            "reach" => flags.iface_can_reach = value,
            "public" => flags.public_ip = value,
            "public6" => flags.public_ipv6 = value,
            _ => panic!("{flag}"),
        }
    }
    flags
}

/// `name addr addr_v6 public_ip public_ipv6`, with `-` for none.
fn chosen(text: &str, families: Families, inventory: &Inventory) -> String {
    let found = select(&flags(text), families, inventory).expect(text);
    let or_dash = |ip: Option<String>| ip.unwrap_or_else(|| "-".to_owned());
    format!(
        "{} {} {} {} {}",
        found.name,
        or_dash(found.addr.map(|ip| ip.to_string())),
        or_dash(found.addr_v6.map(|ip| ip.to_string())),
        or_dash(found.public_ip.map(|ip| ip.to_string())),
        or_dash(found.public_ipv6.map(|ip| ip.to_string())),
    )
}

fn missing(text: &str, families: Families, inventory: &Inventory) -> String {
    match select(&flags(text), families, inventory) {
        Err(SelectError::NotFound { why, .. }) => why,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn upstreams_table() {
    let host = host();
    for (name, text, families, wanted) in [
        ("ByIfRegexForIPv4", r"regex ^172\.16\.30\.8$", V4, "dummy0 172.16.30.8 - 172.16.30.8 -"),
        ("ByIfRegexForName", "regex ^dum", V4, "dummy0 172.16.30.7 - 172.16.30.7 -"),
        ("ByName", "iface dummy0", V4, "dummy0 172.16.30.7 - 172.16.30.7 -"),
        ("ByIPv4", "iface 172.16.30.8", V4, "dummy0 172.16.30.8 - 172.16.30.8 -"),
        (
            "ByIPv4DualStack",
            "iface 172.16.30.7",
            DUAL,
            "dummy0 172.16.30.7 fd00:30::7 172.16.30.7 fd00:30::7",
        ),
        (
            "ByIfRegexMatchPublicIPv4",
            r"regex ^172\.16\.30\.8 public 192.0.2.99",
            V4,
            "dummy0 172.16.30.8 - 192.0.2.99 -",
        ),
    ] {
        assert_eq!(chosen(text, families, &host), wanted, "{name}");
    }
}

#[test]
fn can_reach_takes_the_routes_link_and_source() {
    let mut host = host();
    let source = Some("172.16.30.8".parse().expect("an address"));
    host.route_to = Some(Ok(RouteTo { link: 3, source }));
    let reach = "reach 172.16.30.200";
    assert_eq!(chosen(reach, V4, &host), "dummy0 172.16.30.8 - 172.16.30.8 -");
    // The family that the route says nothing about is chosen on the same interface.
    assert_eq!(chosen(reach, DUAL, &host), "dummy0 172.16.30.8 fd00:30::7 172.16.30.8 fd00:30::7");
    assert_eq!(chosen(reach, V6, &host), "dummy0 - fd00:30::7 - fd00:30::7");
    host.route_to = Some(Ok(RouteTo { link: 3, source: None }));
    assert_eq!(chosen(reach, V4, &host), "dummy0 172.16.30.7 - 172.16.30.7 -");

    host.route_to = Some(Ok(RouteTo { link: 1, source }));
    assert!(missing(reach, V4, &host).contains("this host itself"));
    host.route_to = Some(Ok(RouteTo { link: 9, source }));
    assert!(missing(reach, V4, &host).contains("interface 9"));
    host.route_to = Some(Err("Network is unreachable".to_owned()));
    assert!(missing(reach, V4, &host).contains("Network is unreachable"));
}

#[test]
fn candidates_are_tried_in_order() {
    let mut host = host();
    host.route_to = Some(Ok(RouteTo { link: 2, source: None }));
    for (text, wanted) in [
        ("iface eth9 iface dummy0 iface eth0", "dummy0"),
        ("iface eth9 regex eth regex dummy", "eth0"),
        ("regex eth iface dummy0", "dummy0"),
        ("iface eth9 regex wlan reach 192.0.2.1", "eth0"),
        ("regex dummy reach 192.0.2.1", "dummy0"),
        ("iface lo iface dummy0", "dummy0"),
    ] {
        let found = select(&flags(text), V4, &host).expect(text);
        assert_eq!(found.name, wanted, "{text}");
    }
    let why = missing("iface eth9 iface 192.0.2.1 regex ^wlan", V4, &host);
    for part in [
        "--iface eth9",
        "--iface 192.0.2.1",
        "--iface-regex ^wlan",
        "lo (127.0.0.1, ::1)",
        "eth0 (10.0.2.15, fd00:2::15, fe80::2)",
        "dummy0 (172.16.30.7, 172.16.30.8, fd00:30::7, fe80::3)",
    ] {
        assert!(why.contains(part), "no {part} in {why}");
    }
}

#[test]
fn without_flags_the_default_route_decides() {
    let mut host = host();
    assert_eq!(chosen("", V4, &host), "eth0 10.0.2.15 - 10.0.2.15 -");
    assert_eq!(chosen("", V6, &host), "eth0 - fd00:2::15 - fd00:2::15");
    assert_eq!(chosen("", DUAL, &host), "eth0 10.0.2.15 fd00:2::15 10.0.2.15 fd00:2::15");

    host.default_v6 = Some(DefaultRoute::Link(3));
    let why = missing("", DUAL, &host);
    assert!(why.contains("out of eth0") && why.contains("out of dummy0"), "{why}");
    host.default_v6 = None;
    assert!(missing("", V6, &host).contains("no IPv6 default route"));
    assert!(missing("", DUAL, &host).contains("no IPv6 default route"));
    assert_eq!(chosen("", V4, &host), "eth0 10.0.2.15 - 10.0.2.15 -");
    host.default_v4 = Some(DefaultRoute::NoSingleLink);
    let why = missing("", V4, &host);
    assert!(why.contains("more than one interface") && why.contains("--iface"), "{why}");
}

#[test]
fn a_public_address_alone_chooses_the_interface() {
    let host = host();
    assert_eq!(chosen("public 172.16.30.7", V4, &host), "dummy0 172.16.30.7 - 172.16.30.7 -");
    assert_eq!(chosen("public6 fd00:30::7", V6, &host), "dummy0 - fd00:30::7 - fd00:30::7");
    assert_eq!(
        chosen("public6 fd00:30::7", DUAL, &host),
        "dummy0 172.16.30.7 fd00:30::7 172.16.30.7 fd00:30::7"
    );
    let why = missing("public 192.0.2.99", V4, &host);
    assert!(why.contains("192.0.2.99") && why.contains("--iface-can-reach"), "{why}");
    // With an interface flag it may be anybody's.
    assert_eq!(chosen("iface eth0 public 192.0.2.99", V4, &host), "eth0 10.0.2.15 - 192.0.2.99 -");
    assert_eq!(
        chosen("iface eth0 public 192.0.2.99 public6 2001:db8::9", DUAL, &host),
        "eth0 10.0.2.15 fd00:2::15 192.0.2.99 2001:db8::9"
    );
}

#[test]
fn addresses_of_dual_stack_have_to_share_the_interface() {
    let host = host();
    assert_eq!(
        chosen("iface 172.16.30.8 public6 fd00:30::7", DUAL, &host),
        "dummy0 172.16.30.8 fd00:30::7 172.16.30.8 fd00:30::7"
    );
    let why = missing("iface 172.16.30.8 public6 fd00:2::15", DUAL, &host);
    assert!(why.contains("on dummy0") && why.contains("on eth0"), "{why}");
    assert!(missing("iface 172.16.30.8 public6 2001:db8::9", DUAL, &host).contains("2001:db8::9"));
    // A name argument of IPv6 needs the public address, which then decides.
    let why = missing("iface fd00:30::7", DUAL, &host);
    assert!(why.contains("--public-ipv6"), "{why}");
    assert_eq!(
        chosen("iface fd00:30::7 public6 fd00:2::15", DUAL, &host),
        "eth0 10.0.2.15 fd00:2::15 10.0.2.15 fd00:2::15"
    );
}

#[test]
fn an_address_of_the_other_family_is_refused() {
    let host = host();
    assert!(missing("iface fd00:2::15", V4, &host).contains("IPv4 only"));
    assert!(missing("iface 10.0.2.15", V6, &host).contains("IPv6 only"));
    assert_eq!(chosen("iface ::ffff:10.0.2.15", V4, &host), "eth0 10.0.2.15 - 10.0.2.15 -");
}

#[test]
fn a_regex_has_to_match_both_families_of_a_link() {
    let host = host();
    assert_eq!(
        chosen(r"regex ^172\.|^fd00:30:", DUAL, &host),
        "dummy0 172.16.30.7 fd00:30::7 172.16.30.7 fd00:30::7"
    );
    // A half match on dummy0 must not leak into the match by name that follows.
    assert_eq!(
        chosen(r"regex ^172\.|^eth", DUAL, &host),
        "eth0 10.0.2.15 fd00:2::15 10.0.2.15 fd00:2::15"
    );
    assert!(missing(r"regex ^172\.", DUAL, &host).contains("matches no"));
    assert_eq!(chosen("regex ^fd00:30", V6, &host), "dummy0 - fd00:30::7 - fd00:30::7");
    // Unanchored, and any usable address, not only the first.
    assert_eq!(chosen(r"regex 30\.8", V4, &host), "dummy0 172.16.30.8 - 172.16.30.8 -");
    // Loopback addresses are not usable, so only the name can match.
    assert!(missing("regex ^127", V4, &host).contains("matches no"));
}

#[test]
fn addresses_are_filtered_and_ordered() {
    let mut host = Inventory {
        links: vec![link(
            4,
            "eth1",
            &[
                "169.254.7.7",
                "10.1.0.2 dynamic",
                "10.1.0.3 secondary",
                "10.1.0.4",
                "fe80::4",
                "2001:db8::1 deprecated",
                "2001:db8::2 tentative",
                "2001:db8::3 duplicate",
                "2001:db8::4 dynamic temporary",
                "2001:db8::5 dynamic",
            ],
        )],
        ..Inventory::default()
    };
    assert_eq!(chosen("iface eth1", DUAL, &host), "eth1 10.1.0.4 2001:db8::5 10.1.0.4 2001:db8::5");
    host.links[0].addresses.retain(|a| !["10.1.0.4", "2001:db8::5"].contains(&&*a.ip.to_string()));
    assert_eq!(chosen("iface eth1", DUAL, &host), "eth1 10.1.0.3 2001:db8::4 10.1.0.3 2001:db8::4");
    host.links[0].addresses.retain(|a| is_link_local(a.ip) || a.deprecated || a.tentative);
    assert_eq!(chosen("iface eth1", DUAL, &host), "eth1 169.254.7.7 fe80::4 169.254.7.7 fe80::4");
    host.links[0].addresses.retain(|a| !is_link_local(a.ip));
    let why = missing("iface eth1", V6, &host);
    assert!(why.contains("2001:db8::1 deprecated") && why.contains("usable IPv6"), "{why}");
    // An address that is asked for by itself is taken as it is.
    assert_eq!(chosen("iface 2001:db8::1", V6, &host), "eth1 - 2001:db8::1 - 2001:db8::1");
}

#[test]
fn broken_links_and_flags() {
    let mut host = host();
    host.links[1].mtu = 0;
    assert!(missing("iface eth0", V4, &host).contains("eth0 has an MTU of 0"));
    assert!(missing("iface lo", V4, &host).contains("no usable IPv4 address"));
    for (text, flag) in [
        ("regex (", "--iface-regex"),
        ("iface dummy0 regex (", "--iface-regex"),
        ("public fd00::1", "--public-ip"),
        ("public6 192.0.2.1", "--public-ipv6"),
        ("public 192.0.2.256", "--public-ip"),
        ("reach nowhere", "--iface-can-reach"),
    ] {
        match select(&flags(text), V4, &host) {
            Err(SelectError::Flags(why)) => assert!(why.contains(flag), "{why}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(missing("", V4, &Inventory::default()).contains("no IPv4 default route"));
}

#[test]
fn the_choice_reads_well() {
    let found = select(&flags("iface dummy0 public 192.0.2.99"), DUAL, &host()).expect("found");
    assert_eq!(
        found.to_string(),
        "dummy0 (MTU 1500, address 172.16.30.7, public address 192.0.2.99, address fd00:30::7)"
    );
}

#[test]
fn what_is_only_late_is_told_from_a_wrong_name() {
    let bare = Inventory {
        links: vec![link(1, "lo", &["127.0.0.1"]), link(2, "eth0", &[])],
        default_v4: None,
        default_v6: None,
        route_to: Some(Err("network unreachable".to_owned())),
    };
    let routed = Inventory { default_v4: Some(DefaultRoute::Link(2)), ..bare.clone() };
    let two_ways = Inventory { default_v4: Some(DefaultRoute::NoSingleLink), ..bare.clone() };
    for (text, inventory, late) in [
        ("", &bare, true),
        ("", &routed, true),
        ("", &two_ways, false),
        ("iface eth0", &bare, true),
        ("iface eth7", &bare, false),
        ("iface eth7 iface eth0", &bare, true),
        ("iface 192.0.2.11", &bare, true),
        ("regex ^eth", &bare, true),
        ("regex ^wlan", &bare, false),
        ("reach 192.0.2.1", &bare, true),
        ("public 192.0.2.11", &bare, false),
    ] {
        match select(&flags(text), V4, inventory) {
            Err(SelectError::NotFound { only_late, .. }) => assert_eq!(only_late, late, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn an_empty_value_asks_for_nothing() {
    let host = host();
    let with = |iface: &[&str], regex: &[&str]| {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let flags = InterfaceFlags {
            iface: texts(iface),
            iface_regex: texts(regex),
            ..InterfaceFlags::default()
        };
        select(&flags, V4, &host).map(|found| found.name).map_err(|err| err.to_string())
    };
    assert_eq!(with(&[""], &[""]), Ok("eth0".to_owned()));
    assert_eq!(with(&["", "dummy0"], &[]), Ok("dummy0".to_owned()));
    assert_eq!(with(&[], &["", "^dum"]), Ok("dummy0".to_owned()));
}
