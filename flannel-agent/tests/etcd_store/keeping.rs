//! Keeping the lease we hold, and losing it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use flannel_agent::subnet_manager::{LeaseLost, StoreError, SubnetManager};

use super::server::{Etcd, acquire, attributes, beside, request, subnet, value};

const OURS: &str = "192.0.2.11";
const MAC: &str = "02:fa:00:00:00:11";
const KEY: &str = "subnets/10.77.1.0-24";
const SOON: Duration = Duration::from_secs(5);

/// What was logged on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_writer(move || log.clone())
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    fn lines(&self) -> Vec<String> {
        let bytes = self.0.lock().unwrap();
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn at_home() -> flannel_agent::subnet_manager::LeaseRequest {
    request(OURS, Some("10.77.1.0/24"))
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn renewal_keeps_the_etcd_lease_alive_without_a_write() {
    let etcd = Etcd::start().await;
    let (manager, _) = etcd.manager_with(|options| {
        options.lease_ttl = Duration::from_secs(6);
        options.renew_margin = Duration::from_secs(4);
    });
    let lease = acquire(&manager, &at_home()).await.unwrap();
    let before = etcd.get(KEY).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(Duration::from_secs(10), |l| l.renewed == 3).await;
        let left = etcd.client().await.lease_time_to_live(before.2, None).await.unwrap();
        assert!(left.ttl() >= 4, "{}", left.ttl());
    })
    .await;
    assert_eq!(etcd.get(KEY).await.unwrap(), before);
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_key_moved_to_a_shorter_lease_is_renewed_in_time() {
    let etcd = Etcd::start().await;
    let (manager, _) = etcd.manager_with(|options| options.renew_margin = Duration::from_mins(1));
    let lease = acquire(&manager, &at_home()).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        let foreign = etcd.grant(63).await;
        let revision = etcd.put(KEY, &value(OURS, MAC), foreign).await;
        l.until(Duration::from_secs(10), |l| l.renewed == 1).await;
        let (now, mod_revision, etcd_lease) = etcd.get(KEY).await.unwrap();
        assert_eq!(now, value(OURS, MAC));
        assert!(mod_revision > revision && etcd_lease != foreign && etcd_lease != 0);
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_deleted_lease_is_lost_and_can_be_had_again() {
    let etcd = Etcd::start().await;
    let manager = etcd.manager();
    let lease = acquire(&manager, &at_home()).await.unwrap();
    let lost = beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        etcd.delete(KEY).await;
        l.until(SOON, |_| false).await
    })
    .await;
    let subnets = subnet("10.77.1.0/24");
    assert_eq!(lost, Some(LeaseLost { subnets, holder: None }));
    assert_eq!(acquire(&manager, &at_home()).await.unwrap().lease.subnets, subnets);
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_subnet_that_went_to_somebody_else_is_lost_and_never_overwritten() {
    let etcd = Etcd::start().await;
    let (manager, _) = etcd.manager_with(|options| {
        options.lease_ttl = Duration::from_secs(4);
        options.renew_margin = Duration::from_secs(3);
    });
    let lease = acquire(&manager, &at_home()).await.unwrap();
    let log = Log::default();
    let _guard = log.listen();
    let theirs = value("192.0.2.12", "b");
    let (lost, revision) = beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        let revision = etcd.put(KEY, &theirs, 0).await;
        (l.until(SOON, |_| false).await, revision)
    })
    .await;
    let lost = lost.unwrap();
    assert_eq!(lost.subnets, subnet("10.77.1.0/24"));
    assert_eq!(lost.holder, Some(attributes("192.0.2.12", "b")));
    assert_ne!(acquire(&manager, &at_home()).await.unwrap().lease.subnets, lost.subnets);
    assert_eq!(etcd.get(KEY).await.unwrap(), (theirs, revision, 0));
    // The operator hears of it once, with both owners in the line.
    let loud: Vec<_> = log.lines().into_iter().filter(|l| l.contains("192.0.2.12")).collect();
    assert_eq!(loud.len(), 1, "{loud:?}");
    assert!(loud[0].contains("ERROR") && loud[0].contains("10.77.1.0/24"), "{loud:?}");
    assert!(loud[0].contains(OURS), "{loud:?}");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_loss_during_an_outage_is_found_by_the_resumed_watch() {
    let mut etcd = Etcd::start().await;
    let manager = etcd.manager();
    let lease = acquire(&manager, &at_home()).await.unwrap();
    let theirs = value("192.0.2.12", "b");
    let lost = beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.connections.len() == 1).await;
        etcd.stop();
        l.until(SOON, |l| l.connections.len() == 2).await;
        etcd.restart();
        etcd.put(KEY, &theirs, 0).await;
        l.until(SOON, |_| false).await
    })
    .await;
    assert_eq!(lost.unwrap().holder, Some(attributes("192.0.2.12", "b")));
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn foreign_data_under_our_address_are_put_right() {
    let etcd = Etcd::start().await;
    let manager = etcd.manager();
    let lease = acquire(&manager, &at_home()).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        etcd.put(KEY, &value(OURS, "02:fa:00:00:00:99"), 0).await;
        l.until(SOON, |l| l.renewed == 1).await;
        let (now, _, etcd_lease) = etcd.get(KEY).await.unwrap();
        assert_eq!(
            (now, etcd_lease),
            (value(OURS, MAC), 0),
            "and what became a reservation is one"
        );
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn changed_attributes_are_published_on_the_same_etcd_lease() {
    let etcd = Etcd::start().await;
    let manager = etcd.manager();
    let mut lease = acquire(&manager, &at_home()).await.unwrap();
    let (_, _, etcd_lease) = etcd.get(KEY).await.unwrap();
    beside(&manager, lease.clone(), async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        lease.lease.attributes = attributes(OURS, "02:fa:00:00:00:55");
        manager.publish(&lease).await.unwrap();
        let (now, _, on) = etcd.get(KEY).await.unwrap();
        assert_eq!((now, on), (value(OURS, "02:fa:00:00:00:55"), etcd_lease));
        etcd.delete(KEY).await;
        etcd.put(KEY, &value("192.0.2.12", "b"), 0).await;
        let error = manager.publish(&lease).await.unwrap_err();
        assert!(matches!(error, StoreError::NoLease(_)), "{error:?}");
        assert_eq!(etcd.get(KEY).await.unwrap().0, value("192.0.2.12", "b"));
    })
    .await;
}
