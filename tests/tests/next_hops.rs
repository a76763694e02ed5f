//! The way to a peer changes, and every mode follows within a second: a gateway comes or goes,
//! has another MAC, nobody's MAC is known, the NIC's MTU is another.

use std::time::Instant;

use flannel_lab::{prelude::*, promoted};

/// How long no answer may come. The kernel's own notices are immediate; the rest is for a busy
/// machine.
const SILENCE: Duration = Duration::from_secs(1);

const KERNEL: &[&str] = &["--datapath=kernel"];
const STACK: &[&str] = &["--datapath=ebpf", "--fast-path=stack"];
const FLOWS: &[&str] = &["--datapath=ebpf", "--fast-path=flows"];

/// A node with an agent, a kernel peer on the same link, two routers there, and a conversation
/// between pods that never pauses for long.
struct Story {
    duo: Duo<LocalStore>,
    router: flannel_lab::netns::Netns,
    other_router: Node,
    datagrams: Datagrams,
    in_flows: bool,
    v6: bool,
}

impl Story {
    fn begin(lab: &Lab, flags: &[&str], v6: bool) -> Result<Self> {
        let config = r#"{"Network":"10.77.0.0/16","EnableIPv6":true,"IPv6Network":"fd77::/48","Backend":{"Type":"vxlan"}}"#;
        let duo = Duo::start(lab, LocalStore::new(lab)?, config, true, flags)?;
        let router = lab.router()?.clone();
        let other_router = lab.node("gate")?;
        // They send on by the link that it came from, and need not say that there is a shorter way.
        for ns in [&router, other_router.ns()] {
            ns.sysctls(&[
                ("net/ipv4/conf/all/send_redirects", "0"),
                ("net/ipv4/conf/eth0/send_redirects", "0"),
                ("net/ipv4/conf/eth0/arp_notify", "1"),
                ("net/ipv6/conf/eth0/ndisc_notify", "1"),
            ])?;
        }
        let address = if v6 { duo.theirs.v6()? } else { duo.theirs.v4()? };
        let datagrams = Datagrams::between(duo.ours.ns(), duo.theirs.ns(), address)?;
        let in_flows = flags == FLOWS;
        let mut story = Self { duo, router, other_router, datagrams, in_flows, v6 };
        story.promote()?;
        Ok(story)
    }

    /// Where flows go past the stack, this one has to.
    fn promote(&mut self) -> Result<()> {
        if !self.in_flows {
            return Ok(());
        }
        let port = self.datagrams.port()?;
        eventually("the flow is promoted", Duration::from_secs(15), || {
            self.datagrams.talk(Duration::from_millis(50))?;
            Ok(promoted::flow(&self.duo.alder, port)?.is_some().then_some(()))
        })
    }

    /// Does something and listens for how long no answer comes.
    fn after(&mut self, what: &str, act: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        self.promote()?;
        let silence = self.silence_after(Duration::from_secs(2), act).context(what.to_owned())?;
        ensure!(silence < SILENCE, "{what}: no answer for {silence:?}");
        Ok(())
    }

    fn silence_after(
        &mut self,
        time: Duration,
        act: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Duration> {
        act(self)?;
        let start = Instant::now();
        let (mut last, mut longest) = (start, Duration::ZERO);
        while start.elapsed() < time {
            let (_, answered) = self.datagrams.talk(Duration::from_millis(20))?;
            longest = longest.max(last.elapsed());
            if answered > 0 {
                last = Instant::now();
            }
        }
        Ok(longest)
    }

    /// `ip` on our node, for the family of the story.
    fn ip(&self, line: &str) -> Result<()> {
        let family = if self.v6 { "-6" } else { "-4" };
        self.duo.alder.run(&format!("ip {family} {line}")).map(drop)
    }

    fn peer(&self) -> String {
        let birch = self.duo.birch.node();
        if self.v6 { format!("{}/128", birch.v6()) } else { format!("{}/32", birch.v4()) }
    }

    fn gateway(&self) -> &str {
        if self.v6 { "2001:db8:a::1" } else { "192.0.2.1" }
    }

    fn other_gateway(&self) -> String {
        if self.v6 { self.other_router.v6() } else { self.other_router.v4() }
    }

    fn via(&self, gateway: &str) -> Result<()> {
        self.ip(&format!("route replace {} via {gateway} dev eth0", self.peer()))
    }
}

fn routes_and_gateways(flags: &[&str], v6: bool) -> Result<()> {
    let lab = Lab::new()?;
    let mut story = Story::begin(&lab, flags, v6)?;
    story.after("behind a gateway", |s| s.via(s.gateway()))?;
    story.after("the gateway has another MAC", |s| {
        s.router.ip(&["link set eth0 address 02:fa:00:00:99:01"])
    })?;
    story.after("behind another gateway", |s| s.via(&s.other_gateway()))?;
    story.after("nobody's MAC is known", |s| s.ip("neigh flush dev eth0"))?;
    story.after("on the link", |s| s.ip(&format!("route replace {} dev eth0", s.peer())))?;
    story.after("no route of its own", |s| s.ip(&format!("route del {}", s.peer())))?;
    story.after("the peer's own MAC is another", |s| {
        let birch = s.duo.birch.node();
        birch.ns().sysctls(&[
            ("net/ipv4/conf/eth0/arp_notify", "1"),
            ("net/ipv6/conf/eth0/ndisc_notify", "1"),
        ])?;
        birch.ns().ip(&["link set eth0 address 02:fa:00:00:99:02"])
    })?;
    traffic::assert_reaches(&story.duo.ours, &story.duo.theirs)
}

#[test]
fn routes_and_gateways_are_followed_by_the_kernels_path() -> Result<()> {
    routes_and_gateways(KERNEL, false)
}

#[test]
fn routes_and_gateways_are_followed_by_the_stacks() -> Result<()> {
    routes_and_gateways(STACK, false)
}

#[test]
fn routes_and_gateways_are_followed_by_flows() -> Result<()> {
    routes_and_gateways(FLOWS, false)
}

#[test]
fn routes_and_gateways_over_ipv6_are_followed_by_the_stacks() -> Result<()> {
    routes_and_gateways(STACK, true)
}

#[test]
fn routes_and_gateways_over_ipv6_are_followed_by_flows() -> Result<()> {
    routes_and_gateways(FLOWS, true)
}

/// A gateway that changes its MAC and tells nobody. The kernel's own packets find out by asking
/// again; a program's do not count as use of the entry, so now and then one goes the kernel's way.
fn a_silent_change(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let mut story = Story::begin(&lab, flags, false)?;
    story.router.sysctls(&[("net/ipv4/conf/eth0/arp_notify", "0")])?;
    // Half a minute and more by default.
    story.duo.alder.ns().sysctls(&[
        ("net/ipv4/neigh/eth0/base_reachable_time_ms", "500"),
        ("net/ipv4/neigh/eth0/delay_first_probe_time", "1"),
        ("net/ipv4/neigh/eth0/retrans_time_ms", "100"),
    ])?;
    story.after("behind a gateway", |s| s.via(s.gateway()))?;
    story.promote()?;
    let silence = story.silence_after(Duration::from_secs(10), |s| {
        s.router.ip(&["link set eth0 address 02:fa:00:00:99:03"])
    })?;
    // Reachable, delay, three probes, and a packet by the kernel's device before.
    ensure!(silence < Duration::from_secs(6), "no answer for {silence:?}");
    Ok(())
}

#[test]
fn a_gateway_that_changes_in_silence_is_found_out_by_the_kernels_path() -> Result<()> {
    a_silent_change(KERNEL)
}

#[test]
fn a_gateway_that_changes_in_silence_is_found_out_by_the_stacks() -> Result<()> {
    a_silent_change(STACK)
}

#[test]
fn a_gateway_that_changes_in_silence_is_found_out_by_flows() -> Result<()> {
    a_silent_change(FLOWS)
}

/// The NIC takes shorter packets from now on, then long ones again.
fn another_mtu(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let mut story = Story::begin(&lab, flags, false)?;
    for mtu in [1400, 1500] {
        story.after(&format!("the NIC's MTU is {mtu}"), |s| {
            s.duo.alder.ns().ip(&[&format!("link set eth0 mtu {mtu}")])
        })?;
        let address = story.duo.theirs.v4()?;
        let sent = traffic::tcp_transfer(&story.duo.ours, &story.duo.theirs, address, 4 << 20)?;
        ensure!(sent.intact && sent.time < Duration::from_secs(5), "MTU {mtu}: {sent:?}");
        let address = story.duo.ours.v4()?;
        let sent = traffic::tcp_transfer(&story.duo.theirs, &story.duo.ours, address, 4 << 20)?;
        ensure!(sent.intact && sent.time < Duration::from_secs(5), "MTU {mtu}: {sent:?}");
    }
    Ok(())
}

#[test]
fn another_mtu_of_the_nic_is_followed_by_the_kernels_path() -> Result<()> {
    another_mtu(KERNEL)
}

#[test]
fn another_mtu_of_the_nic_is_followed_by_the_stacks() -> Result<()> {
    another_mtu(STACK)
}

#[test]
fn another_mtu_of_the_nic_is_followed_by_flows() -> Result<()> {
    another_mtu(FLOWS)
}

/// Somebody routes by a mark: the device's packets have the inner one's, and so its way.
fn marked(flags: &[&str]) -> Result<()> {
    let lab = Lab::new()?;
    let mut story = Story::begin(&lab, flags, false)?;
    let (alder, peer) = (&story.duo.alder, story.peer());
    alder.run("ip rule add fwmark 0x20 table 100")?;
    alder.run(&format!("ip route add {peer} via 192.0.2.1 dev eth0 table 100"))?;
    let ways = |capture: &Capture| -> std::collections::BTreeSet<Vec<u8>> {
        let frames = capture.frames();
        let out = frames.iter().filter(|frame| frame.outgoing);
        let tunnel = out.filter(|frame| frame.bytes.get(36..38) == Some(&8472_u16.to_be_bytes()));
        tunnel.map(|frame| frame.bytes[..6].to_vec()).collect()
    };
    let wire = Capture::start(alder.ns(), "eth0")?;
    story.datagrams.talk(Duration::from_millis(200))?;
    let direct = ways(&wire);
    ensure!(direct.len() == 1, "{direct:02x?}");
    story.duo.alder.run("iptables -t mangle -A FORWARD -p udp -j MARK --set-mark 0x20")?;
    // Where the flow goes past the stack, the rule is first seen when the flow has to ask.
    let silence = story.silence_after(Duration::from_secs(2), |_| Ok(()))?;
    ensure!(silence < SILENCE, "no answer for {silence:?}");
    let wire = Capture::start(story.duo.alder.ns(), "eth0")?;
    story.datagrams.talk(Duration::from_millis(200))?;
    let by_mark = ways(&wire);
    ensure!(by_mark.len() == 1 && by_mark != direct, "{by_mark:02x?}, {direct:02x?} without");
    Ok(())
}

#[test]
fn a_mark_chooses_the_way_by_the_kernels_path() -> Result<()> {
    marked(KERNEL)
}

#[test]
fn a_mark_chooses_the_way_by_the_stacks() -> Result<()> {
    marked(STACK)
}

#[test]
fn a_mark_chooses_the_way_of_flows() -> Result<()> {
    marked(FLOWS)
}
