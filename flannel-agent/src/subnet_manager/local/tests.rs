use std::{collections::HashSet, path::Path, thread};

use tokio::time::timeout;

use super::*;

const DAY: Duration = Duration::from_hours(24);
const HOUR: Duration = Duration::from_hours(1);

fn store(dir: &Path) -> LocalSubnetManager {
    store_with(dir, DAY, HOUR)
}

fn store_with(dir: &Path, ttl: Duration, margin: Duration) -> LocalSubnetManager {
    LocalSubnetManager::new(dir, ttl, margin, Metrics::default()).expect("a store")
}

fn config() -> NetworkConfig {
    NetworkConfig::parse(r#"{"Network":"10.3.0.0/16","Backend":{"Type":"vxlan"}}"#)
        .expect("a config")
}

fn request(ip: &str) -> LeaseRequest {
    let attributes = LeaseAttributes { public_ip: ip.parse().ok(), ..LeaseAttributes::default() };
    LeaseRequest { attributes, previous: Subnets::default() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs a store and a test that sees its events, until the test is through.
fn with_events<
    F: AsyncFnOnce(&LocalSubnetManager, &GrantedLease, &mut mpsc::Receiver<StoreEvent>),
>(
    store: &LocalSubnetManager,
    test: F,
) {
    runtime().block_on(async {
        let granted = store.acquire(&config(), &request("1.1.1.1")).await.expect("a lease");
        let (tx, mut rx) = mpsc::channel(64);
        let run = store.run(granted.clone(), tx);
        let test = async {
            assert!(matches!(next(&mut rx).await, StoreEvent::Connection(Connection::Up)));
            test(store, &granted, &mut rx).await;
            rx.close();
            while rx.recv().await.is_some() {}
        };
        timeout(Duration::from_secs(20), async { tokio::join!(run, test) }).await.expect("ends");
    });
}

async fn next(rx: &mut mpsc::Receiver<StoreEvent>) -> StoreEvent {
    timeout(Duration::from_secs(8), rx.recv()).await.expect("an event in time").expect("an event")
}

async fn changes(rx: &mut mpsc::Receiver<StoreEvent>) -> Vec<LeaseChange> {
    match next(rx).await {
        StoreEvent::Peers(PeerUpdate::Changes(changes)) => changes,
        other => panic!("{other:?}"),
    }
}

async fn snapshot(rx: &mut mpsc::Receiver<StoreEvent>) -> Vec<Lease> {
    match next(rx).await {
        StoreEvent::Peers(PeerUpdate::Snapshot(leases)) => leases,
        other => panic!("{other:?}"),
    }
}

fn peer(dir: &Path, key: &str, text: &str) -> Subnets {
    let temp = dir.join("subnets/.peer");
    fs::write(&temp, text).expect("written");
    fs::rename(temp, dir.join(format!("subnets/{key}.json"))).expect("renamed");
    Subnets::parse_key(key).expect(key)
}

#[test]
fn configuration_is_found_or_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("a/b");
    let store = store(&dir);
    let read = || runtime().block_on(store.network_config());
    let error = read().expect_err("nothing there");
    assert!(
        matches!(&error, StoreError::NoConfig(text) if text.contains("config.json")),
        "{error}"
    );
    fs::write(dir.join("net-conf.json"), r#"{"Network":"10.3.0.0/16"}"#).expect("written");
    assert!(read().is_ok());
    fs::write(dir.join("config.json"), r#"{"Network":"10.3.0.0/33"}"#).expect("written");
    let error = read().expect_err("config.json comes first");
    assert!(
        matches!(&error, StoreError::BadConfig(text) if text.contains("Network 10.3.0.0/33") && text.contains("config.json")),
        "{error}"
    );
}

#[test]
fn an_unusable_directory_is_fatal_and_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("written");
    for place in [file.clone(), file.join("below")] {
        let error = LocalSubnetManager::new(place.clone(), DAY, HOUR, Metrics::default())
            .expect_err("a file is no directory");
        assert!(
            matches!(&error, StoreError::Fatal(text) if text.contains(&place.display().to_string())),
            "{error}"
        );
    }
}

#[test]
fn a_lease_is_found_again_and_a_reservation_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = store(dir.path());
    runtime().block_on(async {
        let first = store.acquire(&config(), &request("1.1.1.1")).await.expect("a lease");
        assert!(first.expires.is_some());
        let again = store.acquire(&config(), &request("1.1.1.1")).await.expect("a lease");
        assert_eq!(first.lease, again.lease);
        let identity = store.stored_identity(&request("1.1.1.1").attributes).await.expect("read");
        assert_eq!(identity.attributes, Some(first.lease.attributes));

        peer(dir.path(), "10.3.40.0-24", r#"{"PublicIP":"1.1.1.2"}"#);
        let reserved = store.acquire(&config(), &request("1.1.1.2")).await.expect("a lease");
        assert_eq!(reserved.lease.subnets, Subnets::parse_key("10.3.40.0-24").expect("a key"));
        assert_eq!(reserved.expires, None);
        let text = fs::read_to_string(dir.path().join("subnets/10.3.40.0-24.json")).expect("read");
        assert_eq!(text, "{\"PublicIP\":\"1.1.1.2\",\"PublicIPv6\":null}\n");
    });
}

#[test]
fn ended_leases_are_free_again_but_ours_comes_back_to_us() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = store(dir.path());
    let small = NetworkConfig::parse(r#"{"Network":"10.3.0.0/22","SubnetMax":"10.3.1.0"}"#)
        .expect("a config");
    runtime().block_on(async {
        let own = peer(dir.path(), "10.3.9.0-24", r#"{"PublicIP":"1.1.1.1","Expires":5}"#);
        let granted = store.acquire(&config(), &request("1.1.1.1")).await.expect("a lease");
        assert_eq!(granted.lease.subnets, own);

        let only = peer(dir.path(), "10.3.1.0-24", r#"{"PublicIP":"1.1.1.2","Expires":5}"#);
        fs::write(dir.path().join("subnets/.lease-crash"), "{\"Publ").expect("written");
        let granted = store.acquire(&small, &request("1.1.1.3")).await.expect("a lease");
        assert_eq!(granted.lease.subnets, only);
        assert!(
            !dir.path().join("subnets/.lease-crash").exists(),
            "remains of a crash are removed"
        );
        let error = store.acquire(&small, &request("1.1.1.4")).await.expect_err("full");
        assert!(matches!(&error, StoreError::NoLease(text) if text.contains("1.1.1.3")), "{error}");
    });
}

#[test]
fn a_file_without_sense_is_not_free() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = store(dir.path());
    let small = NetworkConfig::parse(r#"{"Network":"10.3.0.0/22","SubnetMax":"10.3.1.0"}"#)
        .expect("a config");
    peer(dir.path(), "10.3.1.0-24", "garbage");
    assert!(runtime().block_on(store.acquire(&small, &request("1.1.1.1"))).is_err());
}

#[test]
fn agents_that_race_never_get_the_same_subnet() {
    let dir = tempfile::tempdir().expect("a directory");
    let tight = NetworkConfig::parse(r#"{"Network":"10.3.0.0/16","SubnetMax":"10.3.8.0"}"#)
        .expect("a config");
    let threads: Vec<_> = (1..=8)
        .map(|i| {
            let (dir, config) = (dir.path().to_owned(), tight.clone());
            thread::spawn(move || {
                let store = store(&dir);
                runtime()
                    .block_on(store.acquire(&config, &request(&format!("1.1.1.{i}"))))
                    .expect("eight nodes, eight subnets")
                    .lease
                    .subnets
            })
        })
        .collect();
    let got: HashSet<_> = threads.into_iter().map(|t| t.join().expect("no panic")).collect();
    assert_eq!(got.len(), 8, "{got:?}");
}

#[test]
fn peers_come_change_and_go() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path();
    with_events(&store(path), async |_, granted, rx| {
        assert_eq!(snapshot(rx).await, std::slice::from_ref(&granted.lease));
        let subnets = peer(path, "10.4.7.0-24", r#"{"PublicIP":"1.1.1.7"}"#);
        let lease = |ip| Lease { subnets, attributes: request(ip).attributes };
        assert_eq!(changes(rx).await, [LeaseChange::Put(lease("1.1.1.7"))]);
        peer(path, "10.4.7.0-24", "garbage");
        peer(path, "10.4.7.0-24", r#"{"PublicIP":"1.1.1.8"}"#);
        assert_eq!(changes(rx).await, [LeaseChange::Put(lease("1.1.1.8"))]);
        fs::remove_file(path.join("subnets/10.4.7.0-24.json")).expect("removed");
        assert_eq!(changes(rx).await, [LeaseChange::Removed(subnets)]);
        let soon = unix_seconds(SystemTime::now()) + 2;
        peer(path, "10.4.7.0-24", &format!(r#"{{"PublicIP":"1.1.1.9","Expires":{soon}}}"#));
        assert_eq!(changes(rx).await, [LeaseChange::Put(lease("1.1.1.9"))]);
        assert_eq!(changes(rx).await, [LeaseChange::Removed(subnets)]);
        assert!(unix_seconds(SystemTime::now()) >= soon, "not before it ends");
    });
}

#[test]
fn a_lease_is_renewed_in_time_and_follows_outside_changes() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = store_with(dir.path(), Duration::from_secs(4), Duration::from_secs(2));
    with_events(&store, async |store, granted, rx| {
        snapshot(rx).await;
        // A new address is published meanwhile; it has to survive the renewal.
        let mut moved = granted.clone();
        moved.lease.attributes = request("1.1.1.99").attributes;
        store.publish(&moved).await.expect("published");
        assert_eq!(changes(rx).await, [LeaseChange::Put(moved.lease.clone())]);
        let StoreEvent::Renewed { expires: Some(end) } = next(rx).await else {
            panic!("not renewed")
        };
        assert!(Some(end) > granted.expires);
        let file = dir.path().join("subnets").join(directory::file_name(granted.lease.subnets));
        assert!(fs::read_to_string(&file).expect("read").contains("1.1.1.99"));
        fs::write(&file, moved.lease.attributes.to_json()).expect("written");
        let event = next(rx).await;
        assert!(matches!(event, StoreEvent::Renewed { expires: None }), "{event:?}");
    });
}

#[test]
fn a_lease_taken_or_deleted_is_lost_and_not_written_again() {
    let other = r#"{"PublicIP":"1.1.1.2"}"#;
    for taken in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path();
        with_events(&store(path), async |store, granted, rx| {
            snapshot(rx).await;
            let file = path.join("subnets").join(directory::file_name(granted.lease.subnets));
            if taken {
                peer(path, &granted.lease.subnets.key(), other);
            } else {
                fs::remove_file(&file).expect("removed");
            }
            let StoreEvent::Lost(lost) = next(rx).await else { panic!("not lost") };
            assert_eq!(lost.subnets, granted.lease.subnets);
            assert_eq!(lost.holder, taken.then(|| request("1.1.1.2").attributes));
            assert!(rx.recv().await.is_none(), "the run is over");
            let error = store.publish(granted).await.expect_err("not ours");
            assert!(matches!(error, StoreError::NoLease(_)), "{error}");
            let left = fs::read_to_string(&file).ok();
            assert_eq!(left.as_deref(), taken.then_some(other));
        });
    }
}

#[test]
fn a_directory_that_comes_back_is_watched_again() {
    let parent = tempfile::tempdir().expect("a directory");
    let path = parent.path().join("store");
    let away = parent.path().join("away");
    with_events(&store(&path), async |_, _, rx| {
        snapshot(rx).await;
        fs::rename(&path, &away).expect("moved away");
        let StoreEvent::Connection(Connection::Down(text)) = next(rx).await else {
            panic!("not noticed")
        };
        assert!(text.contains("store"), "{text}");
        fs::rename(&away, &path).expect("moved back");
        let event = next(rx).await;
        assert!(matches!(event, StoreEvent::Connection(Connection::Up)), "{event:?}");
        let subnets = peer(&path, "10.4.7.0-24", r#"{"PublicIP":"1.1.1.7"}"#);
        let attributes = request("1.1.1.7").attributes;
        assert_eq!(changes(rx).await, [LeaseChange::Put(Lease { subnets, attributes })]);
        // Only the leases are removed: a clean slate, and our lease is gone with it.
        fs::rename(path.join("subnets"), parent.path().join("old")).expect("moved away");
        let event = next(rx).await;
        assert!(matches!(event, StoreEvent::Lost(LeaseLost { holder: None, .. })), "{event:?}");
    });
}
