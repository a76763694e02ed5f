//! Many peers. Times are printed, not judged: machines differ.

use std::time::Instant;

use flannel_agent::{lease::Lease, peer_table::LeaseChange::Put};

use crate::host::{Node, entries, on_host, peer};

fn many(count: u32) -> impl Iterator<Item = Lease> {
    (0..count).map(|n| numbered(n, 0xfa))
}

fn numbered(n: u32, mac: u32) -> Lease {
    let [_, _, high, low] = (n + 64).to_be_bytes();
    // A /28 each: 4 096 fit into the network.
    let [_, _, third, fourth] = ((n + 64) << 4).to_be_bytes();
    peer(
        &format!("10.77.{third}.{fourth}/28"),
        &format!("02:{mac:02x}:00:00:{high:02x}:{low:02x}"),
        &format!("198.18.{high}.{low}"),
    )
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn thousands_of_peers_are_all_served() {
    for count in [1000_u32, 4000] {
        on_host(move || async move {
            let expected = 3 * count as usize;
            let mut node = Node::up("{}", false).await;
            let start = Instant::now();
            let report = node.list(many(count)).await;
            let cold = start.elapsed();
            assert_eq!(report.problems, Vec::<String>::new());
            assert_eq!(report.peers_applied, count as usize);
            assert_eq!(entries("flannel.1").len(), expected);

            let mut times: Vec<_> = Vec::new();
            for round in 0..200 {
                let start = Instant::now();
                let report = node.change(vec![Put(numbered(round % 50, round))]).await;
                times.push(start.elapsed());
                assert_ne!(report.changes, 0);
            }
            times.sort();
            let start = Instant::now();
            assert_eq!(node.apply().await.changes, 0);
            let idle = start.elapsed();
            node.restart("{}", false);
            let start = Instant::now();
            flannel_agent::backend::Backend::prepare(&mut node.backend, None)
                .await
                .expect("devices");
            node.apply().await;
            let adopted = start.elapsed();
            let start = Instant::now();
            node.list([]).await;
            println!(
                "{count} peers: cold {cold:?}, one change {:?} (median) {:?} (p99), no change \
                 {idle:?}, adopted {adopted:?}, all removed {:?}",
                times[100],
                times[197],
                start.elapsed()
            );
            assert_eq!(entries("flannel.1").len(), 0);
        });
    }
}
