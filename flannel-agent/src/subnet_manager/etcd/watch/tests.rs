use std::{net::Ipv4Addr, time::SystemTime};

use tokio::net::TcpListener;

use super::*;
use crate::{
    lease::Lease,
    subnet_manager::{GrantedLease, SubnetManager, etcd::EtcdOptions},
    telemetry::metrics::Metrics,
};

/// How often etcd is called up in vain.
const CALLS: usize = 300;

/// A port at which every connection is cut at once, and when that was.
async fn cut(listener: TcpListener) -> Vec<Instant> {
    let mut calls = Vec::new();
    while calls.len() < CALLS {
        let (stream, _) = listener.accept().await.expect("a connection");
        drop(stream);
        calls.push(Instant::now());
    }
    calls
}

#[tokio::test(start_paused = true)]
async fn however_long_etcd_is_away_it_is_called_up_again_within_seconds() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let options = EtcdOptions {
        endpoints: vec![format!("http://{address}")],
        prefix: "/coreos.com/network".to_owned(),
        keyfile: None,
        certfile: None,
        cafile: None,
        username: None,
        password: None,
        lease_ttl: Duration::from_hours(24),
        renew_margin: Duration::from_hours(1),
    };
    let manager = EtcdSubnetManager::new(options, Metrics::default()).expect("a manager");
    let subnets = Subnets { v4: "10.77.1.0/24".parse().ok(), v6: None };
    let lease = Lease { subnets, attributes: LeaseAttributes::default() };
    let granted = GrantedLease { lease, expires: None::<SystemTime> };
    let (events, mut told) = mpsc::channel(CALLS);
    let calls = tokio::select! {
        () = manager.run(granted, events) => panic!("it gave up"),
        calls = cut(listener) => calls,
    };
    let longest = calls.windows(2).map(|pair| pair[1] - pair[0]).max().expect("calls");
    assert!(longest <= Duration::from_secs(2), "{longest:?} between two calls");
    let away = calls[CALLS - 1] - calls[0];
    assert!(away >= Duration::from_secs(90), "all calls within {away:?}");
    assert!(matches!(told.try_recv(), Ok(StoreEvent::Connection(Connection::Down(_)))));
    assert!(told.try_recv().is_err(), "told more than once");
}
