use super::{
    super::rules::{FamilyWanted, FirewallWanted, ForwardPosition, Lacks},
    *,
};

fn set() -> RuleSet {
    FirewallWanted {
        masquerade: true,
        fully_random: true,
        forward: ForwardPosition::Last,
        exclude: Vec::new(),
        tunnel_port: None,
        families: vec![FamilyWanted {
            network: "10.77.0.0/16".parse().unwrap(),
            subnet: "10.77.1.0/24".parse().unwrap(),
        }],
    }
    .rule_sets(Lacks::default())
    .remove(0)
}

#[test]
fn rules_that_change_change_within_their_chain() {
    let there = wanted_listing(&set());
    let script = transaction(&set(), Some(&there[..there.len() - 1].to_vec()));
    assert!(!script.contains("delete"), "{script}");
    assert!(script.contains("flush chain ip flannel-ipv4 postrtg\n"), "{script}");
    let rule =
        "add rule ip flannel-ipv4 postrtg ip saddr 10.77.1.0/24 ip daddr 10.77.0.0/16 return";
    assert!(script.contains(rule), "{script}");
}

#[test]
fn a_table_of_another_shape_is_made_anew_in_the_same_transaction() {
    let mut there = wanted_listing(&set());
    there[0]["chain"]["policy"] = json!("drop");
    let script = transaction(&set(), Some(&there));
    assert!(script.contains("delete table ip flannel-ipv4\n"), "{script}");
    assert!(script.contains("add chain ip flannel-ipv4 forward {"), "{script}");
}

#[test]
fn a_family_without_rules_loses_its_table_and_never_gets_one() {
    let empty = RuleSet { masquerade: Vec::new(), forward: Vec::new(), ..set() };
    assert_eq!(transaction(&empty, None), "");
    let script = transaction(&empty, Some(&Vec::new()));
    assert!(script.ends_with("delete table ip flannel-ipv4\n"), "{script}");
}

#[test]
fn order_and_duplicates_make_a_difference() {
    let wanted = wanted_listing(&set());
    let stripped = |mutate: &dyn Fn(&mut Listing)| {
        let mut listing = wanted.clone();
        mutate(&mut listing);
        listing
    };
    assert!(same(&wanted, &wanted));
    assert!(!same(&wanted, &stripped(&|l| l.swap(3, 4))), "order");
    assert!(!same(&wanted, &stripped(&|l| l.push(l[3].clone()))), "a duplicate");
    assert!(!same(&wanted, &stripped(&|l| drop(l.pop()))), "a rule less");
    let chain = json!({"chain": {"name": "another"}});
    assert!(!same(&wanted, &stripped(&|l| l.push(chain.clone()))), "another chain");
    assert!(same(&wanted, &stripped(&|l| l.swap(0, 1))), "the order of chains is nothing");
}

/// `nft -j list table ip flannel-ipv4` of nftables 1.0.6 after our transaction.
const LISTED: &str = r#"{"nftables": [{"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}}, {"table": {"family": "ip", "name": "flannel-ipv4", "handle": 1}},
{"chain": {"family": "ip", "table": "flannel-ipv4", "name": "postrtg", "handle": 1, "type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"}},
{"chain": {"family": "ip", "table": "flannel-ipv4", "name": "forward", "handle": 9, "type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 2, "expr": [{"match": {"op": "==", "left": {"&": [{"meta": {"key": "mark"}}, 16384]}, "right": 16384}}, {"return": null}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 5, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.1.0", "len": 24}}}}, {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"return": null}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 6, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "10.77.1.0", "len": 24}}}}, {"return": null}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 7, "expr": [{"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "10.77.1.0", "len": 24}}}}, {"return": null}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 8, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "224.0.0.0", "len": 4}}}}, {"masquerade": {"flags": "fully-random"}}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "postrtg", "handle": 10, "expr": [{"match": {"op": "!=", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"masquerade": {"flags": "fully-random"}}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "forward", "handle": 11, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"accept": null}]}},
{"rule": {"family": "ip", "table": "flannel-ipv4", "chain": "forward", "handle": 12, "expr": [{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "10.77.0.0", "len": 16}}}}, {"accept": null}]}}]}"#;

#[test]
fn what_nft_lists_is_what_is_wanted() {
    let listed = parse_listing(LISTED).unwrap();
    assert!(same(&listed, &wanted_listing(&set())), "{listed:#?}");
    assert!(!transaction(&set(), Some(&listed)).contains("delete table"));
}

#[test]
fn handles_and_comments_are_no_difference() {
    let listed = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
        {"table": {"family": "ip", "name": "flannel-ipv4", "handle": 1}},
        {"rule": {"family": "ip", "table": "t", "chain": "c", "handle": 9, "comment": "x", "expr": []}}]}"#;
    let rule = json!({"rule": {"family": "ip", "table": "t", "chain": "c", "expr": []}});
    assert_eq!(parse_listing(listed), Some(vec![rule]));
    assert_eq!(parse_listing("not JSON"), None);
}
