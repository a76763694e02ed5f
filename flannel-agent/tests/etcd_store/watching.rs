//! Following the leases of the others.

use std::time::Duration;

use etcd_client::CompactionOptions;
use flannel_agent::subnet_manager::{Connection, SubnetManager};

use super::server::{Etcd, acquire, attributes, beside, request, value};

const OURS: &str = "192.0.2.11";
const SOON: Duration = Duration::from_secs(5);

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn peers_come_change_expire_and_go() {
    let etcd = Etcd::start().await;
    etcd.put("subnets/10.77.2.0-24", &value("192.0.2.12", "a"), 0).await;
    let manager = etcd.manager();
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced() && l.connections == [Connection::Up]).await;
        assert_eq!(l.peer("10.77.2.0/24"), Some(&attributes("192.0.2.12", "a")));
        assert_eq!(l.table.peers().count(), 1, "our own lease is no peer");
        etcd.put("subnets/10.77.3.0-24", &value("192.0.2.13", "a"), 0).await;
        l.until(SOON, |l| l.peer("10.77.3.0/24").is_some()).await;
        etcd.put("subnets/10.77.3.0-24", &value("192.0.2.13", "b"), 0).await;
        l.until(SOON, |l| l.peer("10.77.3.0/24") == Some(&attributes("192.0.2.13", "b"))).await;
        etcd.delete("subnets/10.77.3.0-24").await;
        l.until(SOON, |l| l.peer("10.77.3.0/24").is_none()).await;
        let short = etcd.grant(1).await;
        etcd.put("subnets/10.77.4.0-24", &value("192.0.2.14", "a"), short).await;
        l.until(SOON, |l| l.peer("10.77.4.0/24").is_some()).await;
        l.until(Duration::from_secs(15), |l| l.peer("10.77.4.0/24").is_none()).await;
        assert_eq!((l.snapshots, l.connections.len()), (1, 1));
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn junk_never_costs_a_peer() {
    let etcd = Etcd::start().await;
    etcd.put("subnets/10.77.2.0-24", &value("192.0.2.12", "a"), 0).await;
    let (manager, metrics) = etcd.manager_with(|_| {});
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.synced()).await;
        etcd.put("subnets/foo", "bar", 0).await;
        etcd.put("subnets/10.77.2.0-24", "{\"PublicIP\":7}", 0).await;
        etcd.put("subnets/10.77.9.0-24", &value("192.0.2.19", "a"), 0).await;
        l.until(SOON, |l| l.peer("10.77.9.0/24").is_some()).await;
        assert_eq!(l.peer("10.77.2.0/24"), Some(&attributes("192.0.2.12", "a")));
        assert_eq!(metrics.store_bad_entries.get(), 2);
        // The same key with another suffix is another lease.
        etcd.put("subnets/10.77.9.0-24&fd00:9::-64", &value("192.0.2.29", "a"), 0).await;
        l.until(SOON, |l| l.table.peers().count() == 3).await;
        assert_eq!(l.peer("10.77.9.0/24"), Some(&attributes("192.0.2.19", "a")));
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_restart_and_a_compaction_meanwhile_lose_nothing() {
    let mut etcd = Etcd::start().await;
    for n in 2..=6 {
        let key = format!("subnets/10.77.{n}.0-24");
        etcd.put(&key, &value(&format!("192.0.2.1{n}"), "a"), 0).await;
    }
    let manager = etcd.manager();
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.table.peers().count() == 5).await;
        etcd.signal("-STOP");
        l.until(Duration::from_secs(12), |l| l.connections.len() == 2).await;
        let Connection::Down(why) = &l.connections[1] else { panic!("{:?}", l.connections) };
        assert!(why.contains(&etcd.url()) && why.contains("answer"), "{why}");
        assert_eq!(l.table.peers().count(), 5, "an outage removes nobody");
        etcd.signal("-CONT");
        // Before the agent looks again: a change and two deletions, then their history goes.
        etcd.stop();
        etcd.restart();
        etcd.put("subnets/10.77.2.0-24", &value("192.0.2.12", "b"), 0).await;
        etcd.delete("subnets/10.77.3.0-24").await;
        etcd.delete("subnets/10.77.4.0-24").await;
        let last = etcd.put("subnets/10.77.7.0-24", &value("192.0.2.17", "a"), 0).await;
        let options = CompactionOptions::new().with_physical();
        etcd.client().await.compact(last, Some(options)).await.unwrap();
        l.until(SOON, |l| l.table.peers().count() == 4 && l.peer("10.77.7.0/24").is_some()).await;
        assert_eq!(l.peer("10.77.2.0/24"), Some(&attributes("192.0.2.12", "b")));
        l.until(SOON, |l| l.connections.len() == 3).await;
        assert_eq!(l.connections[2], Connection::Up);
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn etcd_back_after_an_absence_is_noticed_within_three_seconds() {
    let mut etcd = Etcd::start().await;
    let manager = etcd.manager();
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.connections.len() == 1).await;
        etcd.stop();
        l.until(SOON, |l| l.connections.len() == 2).await;
        let Connection::Down(why) = &l.connections[1] else { panic!("{:?}", l.connections) };
        assert!(why.contains("refuses the connection"), "{why}");
        tokio::time::sleep(Duration::from_secs(8)).await;
        etcd.restart();
        etcd.put("subnets/10.77.2.0-24", &value("192.0.2.12", "a"), 0).await;
        l.until(Duration::from_secs(3), |l| l.peer("10.77.2.0/24").is_some()).await;
        assert_eq!(l.connections.len(), 3, "told once per change");
        assert_eq!(l.snapshots, 1, "resumed, not listed again");
    })
    .await;
}

/// A port that accepts connections and never says a word.
fn mute() -> socket2::Socket {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let loopback: std::net::SocketAddr = ([127, 0, 0, 1], 0).into();
    socket.bind(&loopback.into()).unwrap();
    socket.listen(0).unwrap();
    socket
}

/// Fills the port's queue: from then on the kernel drops what comes, as a firewall would.
fn swallow(socket: &socket2::Socket) -> Vec<socket2::Socket> {
    let to = socket.local_addr().unwrap();
    let connect = |_| {
        let client =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        client.set_nonblocking(true).unwrap();
        // In progress: nobody ever accepts it.
        assert!(client.connect(&to).is_err());
        client
    };
    (0..4).map(connect).collect()
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_silent_endpoint_is_left_for_another() {
    let etcd = Etcd::start().await;
    for drops in [false, true] {
        let silent = mute();
        let queue = if drops { swallow(&silent) } else { Vec::new() };
        let url = format!("http://{}", silent.local_addr().unwrap().as_socket().unwrap());
        let alone = vec![url.clone()];
        let error =
            etcd.manager_with(|o| o.endpoints = alone).0.network_config().await.unwrap_err();
        assert!(error.to_string().contains(&url), "{error}");
        assert!(error.to_string().contains("firewall"), "{error}");
        let both = vec![url, etcd.url()];
        let (manager, _) = etcd.manager_with(|options| options.endpoints = both);
        let started = std::time::Instant::now();
        let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
        beside(&manager, lease, async |l| {
            l.until(SOON, |l| l.connections == [Connection::Up]).await;
            assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
            let mac = if drops { "b" } else { "a" };
            etcd.put("subnets/10.77.2.0-24", &value("192.0.2.12", mac), 0).await;
            let wanted = attributes("192.0.2.12", mac);
            l.until(Duration::from_secs(1), |l| l.peer("10.77.2.0/24") == Some(&wanted)).await;
        })
        .await;
        drop(queue);
    }
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_cluster_may_lose_members_and_its_quorum() {
    let members = Etcd::cluster().await;
    let urls = members.iter().map(Etcd::url).collect();
    let (manager, _) = members[0].manager_with(|options| options.endpoints = urls);
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.connections == [Connection::Up]).await;
        let mut watched = 0;
        for (index, member) in members.iter().enumerate() {
            if member.is_watched().await {
                watched = index;
            }
        }
        let (silent, second, third) =
            (&members[watched], &members[(watched + 1) % 3], &members[(watched + 2) % 3]);
        // One member falls silent: the others serve on.
        silent.signal("-STOP");
        second.put("subnets/10.77.2.0-24", &value("192.0.2.12", "a"), 0).await;
        l.until(Duration::from_secs(10), |l| l.peer("10.77.2.0/24").is_some()).await;
        assert_eq!(l.connections.len(), 1, "nobody has to know");
        // The second falls silent: the third has no leader and says so.
        second.signal("-STOP");
        l.until(Duration::from_secs(25), |l| l.connections.len() == 2).await;
        let Connection::Down(why) = &l.connections[1] else { panic!("{:?}", l.connections) };
        assert!(members.iter().all(|member| why.contains(&member.url())), "{why}");
        assert!(why.contains("no leader"), "{why}");
        assert!(l.peer("10.77.2.0/24").is_some());
        silent.signal("-CONT");
        second.signal("-CONT");
        third.put("subnets/10.77.3.0-24", &value("192.0.2.13", "a"), 0).await;
        l.until(Duration::from_secs(10), |l| l.peer("10.77.3.0/24").is_some()).await;
        assert_eq!(l.connections.last(), Some(&Connection::Up));
        assert_eq!((l.snapshots, l.connections.len()), (1, 3));
    })
    .await;
}
