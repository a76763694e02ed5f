//! Reading the configuration and leasing a subnet.

use std::collections::HashSet;

use flannel_agent::subnet_manager::{StoreError, SubnetManager};

use super::server::{Etcd, acquire, attributes, request, subnet, value};

const OURS: &str = "192.0.2.11";
const MAC: &str = "02:fa:00:00:00:11";

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_lease_is_written_as_flannel_writes_it() {
    let etcd = Etcd::start().await;
    let granted = acquire(&etcd.manager(), &request(OURS, None)).await.unwrap();
    let subnets = granted.lease.subnets;
    assert!("10.77.0.0/16".parse::<ipnet::Ipv4Net>().unwrap().contains(&subnets.v4.unwrap()));
    assert_ne!(subnets, subnet("10.77.0.0/24"), "the first subnet is never used");
    let key = format!("subnets/{}", subnets.key());
    let (value, _, etcd_lease) = etcd.get(&key).await.unwrap();
    assert_eq!(
        value,
        r#"{"PublicIP":"192.0.2.11","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:fa:00:00:00:11"}}"#
    );
    let ttl = etcd.client().await.lease_time_to_live(etcd_lease, None).await.unwrap();
    assert_eq!(ttl.granted_ttl(), 86_400);
    let left = granted.expires.unwrap().duration_since(std::time::SystemTime::now()).unwrap();
    assert!((86_390..=86_400).contains(&left.as_secs()), "{left:?}");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn our_own_lease_is_taken_over_and_renewed() {
    let etcd = Etcd::start().await;
    let old = etcd.grant(100).await;
    etcd.put("subnets/10.77.1.0-24", &value(OURS, "02:fa:00:00:00:99"), old).await;
    let manager = etcd.manager();
    let own = attributes(OURS, MAC);
    let stored = manager.stored_identity(&own).await.unwrap().attributes.unwrap();
    assert_eq!(stored, attributes(OURS, "02:fa:00:00:00:99"));
    let granted = acquire(&manager, &request(OURS, Some("10.77.7.0/24"))).await.unwrap();
    assert_eq!(granted.lease.subnets, subnet("10.77.1.0/24"));
    let (now, _, etcd_lease) = etcd.get("subnets/10.77.1.0-24").await.unwrap();
    assert_eq!(now, value(OURS, MAC));
    assert!(etcd_lease != old && etcd_lease != 0);
    assert_eq!(
        manager.stored_identity(&attributes("192.0.2.99", MAC)).await.unwrap().attributes,
        None
    );
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn the_previous_subnet_is_used_if_it_is_free_and_fits() {
    let etcd = Etcd::start().await;
    let previous = async |net| {
        acquire(&etcd.manager(), &request(OURS, Some(net))).await.unwrap().lease.subnets
    };
    assert_eq!(previous("10.77.44.0/24").await, subnet("10.77.44.0/24"));
    etcd.delete("subnets/10.77.44.0-24").await;
    assert_ne!(previous("10.99.44.0/24").await, subnet("10.99.44.0/24"));
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn the_previous_subnet_is_not_taken_from_its_new_holder() {
    let etcd = Etcd::start().await;
    let theirs = value("192.0.2.12", "02:fa:00:00:00:12");
    let revision = etcd.put("subnets/10.77.1.0-24", &theirs, 0).await;
    let granted = acquire(&etcd.manager(), &request(OURS, Some("10.77.1.0/24"))).await.unwrap();
    assert_ne!(granted.lease.subnets, subnet("10.77.1.0/24"));
    assert_eq!(etcd.get("subnets/10.77.1.0-24").await.unwrap(), (theirs, revision, 0));
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_changed_network_gives_a_new_lease_and_the_old_one_back() {
    let etcd = Etcd::start().await;
    let manager = etcd.manager();
    let old = acquire(&manager, &request(OURS, None)).await.unwrap().lease.subnets;
    etcd.put("config", r#"{"Network":"10.88.0.0/16","SubnetLen":26}"#, 0).await;
    let new = acquire(&manager, &request(OURS, None)).await.unwrap().lease.subnets;
    assert!(
        new.v4.unwrap().to_string().starts_with("10.88.") && new.v4.unwrap().prefix_len() == 26
    );
    assert!(etcd.get(&format!("subnets/{}", old.key())).await.is_none());
    assert!(etcd.get(&format!("subnets/{}", new.key())).await.is_some());
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_reservation_stays_one_in_every_revision() {
    let etcd = Etcd::start().await;
    etcd.put("subnets/10.77.40.0-24", r#"{"PublicIP":"192.0.2.11"}"#, 0).await;
    let granted = acquire(&etcd.manager(), &request(OURS, None)).await.unwrap();
    assert_eq!(granted.lease.subnets, subnet("10.77.40.0/24"));
    assert_eq!(granted.expires, None);
    let first = etcd.get("subnets/10.77.40.0-24").await.unwrap();
    assert_eq!((first.0.as_str(), first.2), (value(OURS, MAC).as_str(), 0));
    // A restart changes nothing, so it writes nothing.
    acquire(&etcd.manager(), &request(OURS, None)).await.unwrap();
    assert_eq!(etcd.get("subnets/10.77.40.0-24").await.unwrap(), first);
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn twenty_nodes_at_once_get_twenty_subnets() {
    let etcd = Etcd::empty(&[]).await;
    // Exactly twenty subnets, so that they have to fight for them.
    let config = r#"{"Network":"10.77.0.0/16","SubnetMin":"10.77.1.0","SubnetMax":"10.77.20.0"}"#;
    etcd.put("config", config, 0).await;
    let nodes: Vec<_> =
        (1..=20).map(|n| (etcd.manager(), request(&format!("192.0.2.{n}"), None))).collect();
    let claims = nodes.iter().map(async |(manager, request)| {
        // As the agent does: a lost race is tried again.
        loop {
            match acquire(manager, request).await {
                Ok(granted) => break granted.lease.subnets,
                Err(StoreError::NoLease(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    let got = futures_util::future::join_all(claims).await;
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 20);
    let error = acquire(&etcd.manager(), &request("192.0.2.99", None)).await.unwrap_err();
    assert!(
        matches!(error, StoreError::NoLease(_)) && error.to_string().contains("out of subnets")
    );
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn both_families_are_leased_in_one_key() {
    let etcd = Etcd::empty(&[]).await;
    let config = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:77::/48"}"#;
    etcd.put("config", config, 0).await;
    let granted = acquire(&etcd.manager(), &request(OURS, None)).await.unwrap();
    let key = granted.lease.subnets.key();
    assert!(key.contains("&fd00:77:0:") && key.ends_with("-64"), "{key}");
    assert!(etcd.get(&format!("subnets/{key}")).await.is_some());
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn junk_under_the_prefix_is_neither_used_nor_fatal() {
    let etcd = Etcd::start().await;
    etcd.put("subnets/foo", "bar", 0).await;
    etcd.put("subnets/10.77.1.0-24", "{not json", 0).await;
    let (manager, metrics) = etcd.manager_with(|_| {});
    let granted = acquire(&manager, &request(OURS, Some("10.77.1.0/24"))).await.unwrap();
    assert_ne!(granted.lease.subnets, subnet("10.77.1.0/24"));
    acquire(&manager, &request(OURS, None)).await.unwrap();
    assert_eq!(metrics.store_bad_entries.get(), 2, "complained about once each");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_missing_or_unusable_configuration_is_told_apart() {
    let etcd = Etcd::empty(&[]).await;
    let manager = etcd.manager();
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, StoreError::NoConfig(_)));
    for word in ["/coreos.com/network/config", "v2", "-etcd-prefix"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    for (config, word) in [
        ("{", "/coreos.com/network/config"),
        (r#"{"Network":"10.77.0.0/33"}"#, "Network"),
        (r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:77::/48"}"#, "EnableIPv4"),
    ] {
        etcd.put("config", config, 0).await;
        let error = manager.network_config().await.unwrap_err();
        assert!(matches!(error, StoreError::BadConfig(_)), "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn more_leases_than_fit_in_one_page_are_all_seen() {
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    // 10.78/16 is outside the network: these only have to be listed.
    for block in 0..60_u8 {
        let puts: Vec<_> = (0..100_u16)
            .map(|n| {
                let host = n * 2;
                let key = format!("/coreos.com/network/subnets/10.{}.{block}.{host}-31", 78);
                etcd_client::TxnOp::put(key, value("192.0.2.12", "02:fa:00:00:00:12"), None)
            })
            .collect();
        client.txn(etcd_client::Txn::new().and_then(puts)).await.unwrap();
    }
    etcd.put("subnets/10.99.9.0-24", &value("192.0.2.77", MAC), 0).await;
    let found = etcd.manager().stored_identity(&attributes("192.0.2.77", "")).await.unwrap();
    assert_eq!(found.attributes, Some(attributes("192.0.2.77", MAC)));
}
