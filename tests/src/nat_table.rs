//! Who sees whom under which address: one table for every renderer, family and moment.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::net::if_::if_nametoindex;

use crate::{
    duo::Duo,
    lab::{Lab, Segment},
    lease_store::LocalStore,
    netns::Netns,
    node::Node,
    pod::Pod,
};

/// Host number of the outside server that pods reach under their own address.
const EXCLUDED: u8 = 97;

/// Which tool writes the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renderer {
    /// `EnableNFTables` false.
    Iptables,
    /// `EnableNFTables` true.
    Nftables,
}

impl Renderer {
    /// The network configuration that chooses it.
    pub fn config(self) -> String {
        format!(
            r#"{{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","EnableNFTables":{},"Backend":{{"Type":"vxlan"}}}}"#,
            self == Self::Nftables
        )
    }
}

/// A node with an agent, a kernel peer, a stranger that routes through the node, two servers
/// outside.
#[derive(Debug)]
pub struct NatLab {
    /// Node and peer, a pod on each.
    pub duo: Duo<LocalStore>,
    /// Another pod on our node.
    pub second: Pod,
    /// On the node's link, with a route to the pods through it.
    pub stranger: Node,
    /// Outside, behind a router.
    pub web: Node,
    /// Outside as well, in the range excluded from masquerading.
    pub archive: Node,
}

/// One row: packets of one way and the source they have to be seen with.
struct Row {
    what: &'static str,
    from: Netns,
    /// The address the sender binds to; `None` leaves it to the kernel.
    bind: Option<IpAddr>,
    to: Netns,
    address: IpAddr,
    seen_as: IpAddr,
}

impl NatLab {
    /// Everything up, the agent ready with this renderer.
    pub fn start(lab: &Lab, renderer: Renderer, more_flags: &[&str]) -> Result<Self> {
        Self::start_after(lab, renderer, more_flags, |_| Ok(()))
    }

    /// The same, with something done to the node before the agent comes.
    pub fn start_after(
        lab: &Lab,
        renderer: Renderer,
        more_flags: &[&str],
        before: impl FnOnce(&Node) -> Result<()>,
    ) -> Result<Self> {
        let exclude = [Segment::B.v4(EXCLUDED) + "/32", Segment::B.v6(EXCLUDED) + "/128"]
            .map(|net| format!("--masq-exclude={net}"));
        let mut flags = vec!["--ip-masq", &exclude[0], &exclude[1]];
        flags.extend(more_flags);
        let store = LocalStore::new(lab)?;
        let duo = Duo::start_after(lab, store, &renderer.config(), true, &flags, before)?;
        let second = duo.alder.add_pods(&duo.env, 1)?.pop().context("a second pod")?;
        let stranger = lab.node("stranger")?;
        stranger.ns().ip(&[
            &format!("route add 10.77.0.0/16 via {}", duo.alder.v4()),
            &format!("route add fd77::/48 via {}", duo.alder.v6()),
        ])?;
        for pod in [&duo.ours, &second] {
            pod.ns().ip(&["route add 224.0.0.0/4 dev eth0"])?;
        }
        Ok(Self {
            web: lab.node_at("web", Segment::B, 80)?,
            archive: lab.node_at("archive", Segment::B, EXCLUDED)?,
            second,
            stranger,
            duo,
        })
    }

    /// The table, for one family.
    fn rows(&self, v6: bool) -> Result<Vec<Row>> {
        let node =
            |node: &Node| -> Result<IpAddr> { Ok(if v6 { node.v6() } else { node.v4() }.parse()?) };
        let pod = |pod: &Pod| if v6 { pod.v6() } else { pod.v4() };
        let base = if v6 { self.duo.env.subnet_v6()? } else { self.duo.env.subnet_v4()? };
        let vtep: IpAddr = base.split('/').next().context("no subnet")?.parse()?;
        let multicast: IpAddr = if v6 { "ff05::fb" } else { "224.0.0.251" }.parse()?;
        let (alder, birch) = (&self.duo.alder, self.duo.birch.node());
        let (ours, theirs) = (&self.duo.ours, &self.duo.theirs);
        let (host, remote_host, stranger) = (node(alder)?, node(birch)?, node(&self.stranger)?);
        let row = |what, from: &Netns, bind, to: &Netns, address, seen_as| Row {
            what,
            from: from.clone(),
            bind,
            to: to.clone(),
            address,
            seen_as,
        };
        let (web, archive) = (node(&self.web)?, node(&self.archive)?);
        let second = pod(&self.second)?;
        let (our_ip, their_ip) = (pod(ours)?, pod(theirs)?);
        let from_pod =
            |what, to: &Netns, address, seen_as| row(what, ours.ns(), None, to, address, seen_as);
        let from_host = |what, to: &Netns, address, seen_as| {
            row(what, alder.ns(), Some(host), to, address, seen_as)
        };
        let from_stranger = |what, to: &Netns, address, seen_as| {
            row(what, self.stranger.ns(), None, to, address, seen_as)
        };
        Ok(vec![
            from_pod("own pod to own pod", self.second.ns(), second, our_ip),
            from_pod("own pod to remote pod", theirs.ns(), their_ip, our_ip),
            from_pod("own pod to own host", alder.ns(), host, our_ip),
            from_pod("own pod to remote host", birch.ns(), remote_host, host),
            from_pod("own pod to the outside", self.web.ns(), web, host),
            from_pod("own pod to an excluded range", self.archive.ns(), archive, our_ip),
            from_pod("own pod to multicast", self.second.ns(), multicast, our_ip),
            row("remote pod to own pod", theirs.ns(), None, ours.ns(), our_ip, their_ip),
            row(
                "remote host to own pod",
                birch.ns(),
                Some(remote_host),
                ours.ns(),
                our_ip,
                remote_host,
            ),
            from_host("own host to own pod", ours.ns(), our_ip, host),
            from_host("own host to remote pod", theirs.ns(), their_ip, vtep),
            from_host("own host to remote host", birch.ns(), remote_host, host),
            from_host("own host to the outside", self.web.ns(), web, host),
            from_host("own host to an excluded range", self.archive.ns(), archive, host),
            from_stranger("stranger to own pod", ours.ns(), our_ip, stranger),
            from_stranger("stranger to remote pod", theirs.ns(), their_ip, vtep),
            from_stranger("stranger to own host", alder.ns(), host, stranger),
        ])
    }

    /// Sends along every row in both families and compares. Returns how many rows there were.
    pub fn check(&self) -> Result<usize> {
        let (mut count, mut wrong) = (0, Vec::new());
        for v6 in [false, true] {
            for row in self.rows(v6)? {
                count += 1;
                let seen = row.seen()?;
                if seen != Some(row.seen_as) {
                    let family = if v6 { "IPv6" } else { "IPv4" };
                    let seen = seen
                        .map_or_else(|| "nothing arrived".to_owned(), |s| format!("seen as {s}"));
                    wrong.push(format!("{}, {family}: {seen}, not {}", row.what, row.seen_as));
                }
            }
        }
        ensure!(
            wrong.is_empty(),
            "{} of {count} rows are wrong:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
        Ok(count)
    }

    /// Our rules as the tools list them, and every jump to them.
    pub fn rules(&self) -> Result<String> {
        let listed = self.duo.alder.shell(
            "for f in iptables ip6tables; do for v in nft legacy; do for t in nat filter; do \
             $f-$v-save -t $t 2>/dev/null | grep -- '^-A.*FLANNEL'; done; done; done; \
             nft -s list table ip flannel-ipv4 2>/dev/null; \
             nft -s list table ip6 flannel-ipv6 2>/dev/null; true",
        )?;
        Ok(String::from_utf8_lossy(&listed.stdout).into_owned())
    }

    /// Runs a shell line on the node, which has to work.
    pub fn tamper(&self, line: &str) -> Result<()> {
        let done = self.duo.alder.shell(line)?;
        ensure!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(())
    }
}

impl Row {
    /// The source that the receiver sees; `None` if nothing arrives.
    fn seen(&self) -> Result<Option<IpAddr>> {
        let address = self.address;
        let listener = self.to.within(move || listen(address))?;
        let target = SocketAddr::new(address, listener.local_addr()?.port());
        let bind = self.bind.unwrap_or_else(|| unspecified(address));
        let sender = self.from.within(move || {
            UdpSocket::bind(SocketAddr::new(bind, 0)).with_context(|| format!("bind to {bind}"))
        })?;
        let mut buffer = [0; 16];
        // The first may be lost to an address that is not resolved yet.
        for _ in 0..4 {
            // A refusal is as good as a loss.
            let _ = sender.send_to(b"row", target);
            if let Ok((_, source)) = listener.recv_from(&mut buffer) {
                return Ok(Some(source.ip()));
            }
        }
        Ok(None)
    }
}

fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// A socket at an address or in a group, in the calling thread's namespace.
fn listen(address: IpAddr) -> Result<UdpSocket> {
    let bind = if address.is_multicast() { unspecified(address) } else { address };
    let socket = UdpSocket::bind(SocketAddr::new(bind, 0))
        .with_context(|| format!("cannot listen on {bind}"))?;
    match address {
        IpAddr::V4(group) if group.is_multicast() => {
            // On the interface that the group is routed to.
            socket.join_multicast_v4(&group, &Ipv4Addr::UNSPECIFIED)?;
        }
        IpAddr::V6(group) if group.is_multicast() => {
            socket.join_multicast_v6(&group, if_nametoindex("eth0")?)?;
        }
        _ => {}
    }
    socket.set_read_timeout(Some(Duration::from_millis(300)))?;
    Ok(socket)
}

/// A stream of which every packet begins a flow of its own, so that each is decided upon anew.
#[derive(Debug)]
pub struct NewFlows {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<Result<u64>>,
    receiver: JoinHandle<(u64, BTreeSet<IpAddr>)>,
}

impl NewFlows {
    /// Starts sending, one flow each 5 ms.
    pub fn start(from: &Netns, to: &Netns, address: IpAddr) -> Result<Self> {
        let socket = to.within(move || listen(address))?;
        let target = SocketAddr::new(address, socket.local_addr()?.port());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let receiver = thread::spawn(move || {
            let (mut count, mut sources) = (0, BTreeSet::new());
            loop {
                match socket.recv_from(&mut [0; 16]) {
                    Ok((_, source)) => {
                        count += 1;
                        sources.insert(source.ip());
                    }
                    // Nothing for a while after the last was sent: nothing is under way.
                    Err(_) if stopped.load(Ordering::Relaxed) => return (count, sources),
                    Err(_) => {}
                }
            }
        });
        let stopped = Arc::clone(&stop);
        let sender = from.spawn(move || {
            let mut sent = 0;
            while !stopped.load(Ordering::Relaxed) {
                let socket = UdpSocket::bind(SocketAddr::new(unspecified(address), 0))?;
                // A refusal is a loss, which is counted.
                let _ = socket.send_to(b"new", target);
                sent += 1;
                thread::sleep(Duration::from_millis(5));
            }
            Ok(sent)
        })?;
        Ok(Self { stop, sender, receiver })
    }

    /// Ends the stream; an error unless every packet came, from `source`.
    pub fn ensure_all_from(self, source: IpAddr) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let (Ok(sent), Ok((arrived, sources))) = (self.sender.join(), self.receiver.join()) else {
            bail!("a thread of the stream panicked");
        };
        let sent = sent?;
        ensure!(sent > 0 && arrived == sent, "{arrived} of {sent} flows arrived");
        ensure!(sources == BTreeSet::from([source]), "flows came from {sources:?}");
        Ok(sent)
    }
}
