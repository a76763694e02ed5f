use super::*;

const DEVICE: u32 = 7;

fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

fn wanted_with(peers: &[u8]) -> Wanted {
    let mut wanted = Wanted {
        devices: vec![DEVICE],
        networks: vec![net("10.77.0.0/16")],
        own: vec![net("10.77.1.0/24")],
        complete: true,
        ..Wanted::default()
    };
    for peer in peers {
        let subnet = net(&format!("10.77.{peer}.0/24"));
        let mac = MacAddr([2, 0xfa, 0, 0, 0, *peer]);
        let remote: IpAddr = format!("192.0.2.{peer}").parse().expect("an address");
        let via = Via::Gateway { link: DEVICE, gateway: subnet.network(), onlink: true };
        wanted.routes.insert(subnet, via);
        wanted.neighbours.insert((DEVICE, subnet.network()), mac);
        wanted.forwarding.insert((DEVICE, mac), remote);
        wanted.gateways.insert(remote);
    }
    wanted
}

/// Does to the tables what the kernel would do.
fn make(tables: &mut Tables, changes: &[Change]) {
    for change in changes {
        match *change {
            Change::SetForwarding(e) => drop(tables.forwarding.insert((e.link, e.mac), e.remote)),
            Change::SetNeighbour(e) => drop(tables.neighbours.insert((e.link, e.ip), e.mac)),
            Change::SetRoute(route) => {
                tables.routes.retain(|old| {
                    (old.destination, old.metric) != (route.destination, route.metric)
                });
                tables.routes.insert(route);
            }
            Change::RemoveRoute(route) => assert!(tables.routes.remove(&route), "{route:?}"),
            Change::RemoveNeighbour(e) => drop(tables.neighbours.remove(&(e.link, e.ip))),
            Change::RemoveForwarding(e) => drop(tables.forwarding.remove(&(e.link, e.mac))),
        }
    }
}
