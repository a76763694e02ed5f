//! How long a change of a peer takes from etcd to the kernel.
//!
//! The clock starts when the packet with the watch event reaches the node (the kernel's own time
//! stamp), and ends when the kernel has told of route, neighbour and forwarding entry. etcd's own
//! work is thereby left out; it is reported beside. Works with any agent that takes leases from
//! etcd without TLS.

use std::{
    io::IoSliceMut,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, ControlMessageOwned, MsgFlags, NetlinkAddr, SockFlag, SockProtocol,
        SockType, bind, recv, recvmsg, setsockopt, socket, sockopt,
    },
};
use serde_json::json;

use crate::{
    capture,
    etcd::Etcd,
    lease_store::{LeaseStore, SUBNETS_PREFIX},
    node::Node,
};

/// `RTMGRP_NEIGH | RTMGRP_IPV4_ROUTE` (linux/rtnetlink.h).
const GROUPS: u32 = 0x4 | 0x40;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;

/// How long a change may take before the measurement is given up.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the removal of what is no longer wanted is waited for after the rest is there.
const CLEANING: Duration = Duration::from_secs(2);
/// The most operations that etcd takes in one transaction.
const TXN_OPERATIONS: usize = 128;

/// A vxlan peer as it stands in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeteredPeer {
    /// The base of its subnet, a /24.
    pub base: Ipv4Addr,
    /// Where packets to it go.
    pub public_ip: Ipv4Addr,
    /// Its VTEP's MAC.
    pub mac: [u8; 6],
}

impl MeteredPeer {
    /// The peer of this number, in 10.64.0.0/11; `generation` makes another MAC and address.
    pub fn numbered(number: u16, generation: u16) -> Self {
        let [high, low] = number.to_be_bytes();
        let [_, round] = generation.to_be_bytes();
        Self {
            base: Ipv4Addr::new(10, 64 + high, low, 0),
            public_ip: Ipv4Addr::new(198, 18 + (round & 1), high, low),
            mac: [0x02, 0xfa, round, 0, high, low],
        }
    }

    fn key(&self) -> String {
        format!("{}-24", self.base)
    }

    fn lease(&self) -> serde_json::Value {
        let mac = self.mac.map(|byte| format!("{byte:02x}")).join(":");
        json!({"PublicIP": self.public_ip, "PublicIPv6": null, "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": mac}})
    }

    fn route(&self, kind: u16) -> Expected {
        Expected { kind, holds: vec![self.base.octets().to_vec()] }
    }

    fn neighbour(&self, kind: u16) -> Expected {
        let mut holds = vec![self.base.octets().to_vec()];
        // A deleted neighbour is told without its MAC.
        holds.extend((kind == RTM_NEWNEIGH).then(|| self.mac.to_vec()));
        Expected { kind, holds }
    }

    fn forwarding(&self, kind: u16) -> Expected {
        Expected { kind, holds: vec![self.mac.to_vec(), self.public_ip.octets().to_vec()] }
    }
}

/// What is done to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new peer.
    Add(MeteredPeer),
    /// A peer whose subnet stays and whose MAC and address change.
    Move {
        /// What it was.
        from: MeteredPeer,
        /// What it is to be.
        to: MeteredPeer,
    },
    /// A peer goes.
    Remove(MeteredPeer),
}

/// When what happened, counted from the moment the write to etcd began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// etcd had acknowledged the write.
    pub etcd_replied: Duration,
    /// The packet with the watch event had reached the node.
    pub event_arrived: Duration,
    /// Route, neighbour and forwarding entry were as the lease says.
    pub in_kernel: Duration,
    /// What the change made stale was gone too; `None` if it is still there two seconds later.
    pub cleaned: Option<Duration>,
}

impl Timing {
    /// From the event's arrival to the kernel.
    pub fn latency(&self) -> Duration {
        self.in_kernel.saturating_sub(self.event_arrived)
    }
}

/// A notification to wait for: its type, and addresses that it holds.
#[derive(Clone, Debug)]
struct Expected {
    kind: u16,
    holds: Vec<Vec<u8>>,
}

impl Expected {
    fn is(&self, kind: u16, message: &[u8]) -> bool {
        self.kind == kind && self.holds.iter().all(|bytes| contains(message, bytes))
    }
}

/// Measures changes on one node.
#[derive(Debug)]
pub struct ChangeMeter<'a> {
    etcd: &'a Etcd,
    ears: Ears,
}

/// Where what happens is heard.
#[derive(Debug)]
struct Ears {
    /// A packet socket at the node's `eth0`.
    wire: OwnedFd,
    /// A netlink socket with the kernel's notifications.
    kernel: OwnedFd,
}

impl<'a> ChangeMeter<'a> {
    /// Listens on the node's underlay and to its kernel.
    pub fn open(etcd: &'a Etcd, node: &Node) -> Result<Self> {
        let (wire, kernel) = node.ns().within(|| {
            let wire = capture::open("eth0")?;
            setsockopt(&wire, sockopt::ReceiveTimestampns, &true)?;
            let kernel = socket(
                AddressFamily::Netlink,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::NetlinkRoute,
            )?;
            setsockopt(&kernel, sockopt::RcvBufForce, &(8 << 20))?;
            bind(kernel.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
            Ok((wire, kernel))
        })?;
        Ok(Self { etcd, ears: Ears { wire, kernel } })
    }

    /// Writes many peers without measuring.
    pub fn fill(&self, peers: &[MeteredPeer]) -> Result<()> {
        for chunk in peers.chunks(TXN_OPERATIONS) {
            let pairs: Vec<_> = chunk
                .iter()
                .map(|peer| (format!("{SUBNETS_PREFIX}{}", peer.key()), peer.lease().to_string()))
                .collect();
            self.etcd.put_all(&pairs)?;
        }
        Ok(())
    }

    /// Makes one change and waits for the kernel to show it.
    pub fn measure(&self, change: &Change) -> Result<Timing> {
        let (key, wanted, stale) = match change {
            Change::Add(peer) => (peer.key(), present(peer), Vec::new()),
            Change::Move { from, to } => {
                ensure!(from.base == to.base, "{from:?} and {to:?} are two peers");
                ensure!(from.mac != to.mac, "{from:?} keeps its MAC");
                let wanted = vec![to.forwarding(RTM_NEWNEIGH), to.neighbour(RTM_NEWNEIGH)];
                (to.key(), wanted, vec![from.forwarding(RTM_DELNEIGH)])
            }
            Change::Remove(peer) => {
                let wanted = vec![
                    peer.route(RTM_DELROUTE),
                    peer.neighbour(RTM_DELNEIGH),
                    peer.forwarding(RTM_DELNEIGH),
                ];
                (peer.key(), wanted, Vec::new())
            }
        };
        self.ears.drain()?;
        let (ears, key) = (&self.ears, key.as_str());
        thread::scope(|scope| {
            let began = SystemTime::now();
            let watcher = scope.spawn(move || ears.watch(began, key, wanted, stale));
            match change {
                Change::Add(peer) | Change::Move { to: peer, .. } => {
                    self.etcd.put_lease(key, &peer.lease())?;
                }
                Change::Remove(_) => self.etcd.delete_lease(key)?,
            }
            let etcd_replied = since(began, SystemTime::now());
            let Ok(watched) = watcher.join() else { bail!("the meter's thread panicked") };
            let timing = watched.with_context(|| format!("{change:?}"))?;
            Ok(Timing { etcd_replied, ..timing })
        })
    }
}

impl Ears {
    /// Forgets what came before.
    fn drain(&self) -> Result<()> {
        let mut buffer = vec![0; 1 << 17];
        for fd in [&self.wire, &self.kernel] {
            while readable([fd.as_fd()], Duration::ZERO)?[0] {
                recv(fd.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)?;
            }
        }
        Ok(())
    }

    fn watch(
        &self,
        began: SystemTime,
        key: &str,
        mut wanted: Vec<Expected>,
        mut stale: Vec<Expected>,
    ) -> Result<Timing> {
        let mut buffer = vec![0; 1 << 17];
        let (mut arrived, mut in_kernel, mut cleaned) = (None, None, None);
        loop {
            let now = since(began, SystemTime::now());
            if wanted.is_empty() && in_kernel.is_none() {
                in_kernel = Some(now);
            }
            if stale.is_empty() && cleaned.is_none() {
                cleaned = Some(now);
            }
            if let (Some(event_arrived), Some(in_kernel)) = (arrived, in_kernel)
                && (cleaned.is_some() || now > in_kernel + CLEANING)
            {
                let cleaned = cleaned.map(|time| time.max(in_kernel));
                return Ok(Timing {
                    etcd_replied: Duration::ZERO,
                    event_arrived,
                    in_kernel,
                    cleaned,
                });
            }
            ensure!(
                now < PATIENCE,
                "not in the kernel within {PATIENCE:?}: the event has {}arrived, missing {wanted:?}",
                if arrived.is_some() { "" } else { "not " }
            );
            let [wire, kernel] =
                readable([self.wire.as_fd(), self.kernel.as_fd()], Duration::from_millis(200))?;
            if wire && let Some(time) = self.receive_event(&mut buffer, key)? {
                arrived.get_or_insert(since(began, time));
            }
            if kernel {
                let length = recv(self.kernel.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
                for (kind, message) in messages(&buffer[..length]) {
                    wanted.retain(|expected| !expected.is(kind, message));
                    stale.retain(|expected| !expected.is(kind, message));
                }
            }
        }
    }

    /// Takes one frame; the time at which it reached the node if it names the key.
    fn receive_event(&self, buffer: &mut [u8], key: &str) -> Result<Option<SystemTime>> {
        let mut space = nix::cmsg_space!(libc::timespec);
        let mut parts = [IoSliceMut::new(buffer)];
        let message = recvmsg::<()>(
            self.wire.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_DONTWAIT,
        )?;
        let stamp = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmTimestampns(time) => Some(time),
            _ => None,
        });
        let length = message.bytes;
        if !contains(&buffer[..length], key.as_bytes()) {
            return Ok(None);
        }
        let stamp = stamp.context("a frame without a time stamp")?;
        let since_epoch = Duration::new(
            u64::try_from(stamp.tv_sec())?,
            u32::try_from(stamp.tv_nsec()).context("odd nanoseconds")?,
        );
        Ok(Some(SystemTime::UNIX_EPOCH + since_epoch))
    }
}

fn present(peer: &MeteredPeer) -> Vec<Expected> {
    vec![peer.forwarding(RTM_NEWNEIGH), peer.neighbour(RTM_NEWNEIGH), peer.route(RTM_NEWROUTE)]
}

/// Which of the descriptors have something to read.
fn readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    within: Duration,
) -> Result<[bool; N]> {
    let mut polled = descriptors.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    poll(&mut polled, PollTimeout::try_from(within).context("too long")?)?;
    Ok(polled.map(|fd| fd.any().unwrap_or(false)))
}

/// The netlink messages of a datagram: type, and all of it.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let message = bytes.get(..length).filter(|message| message.len() >= 16)?;
        let kind = u16::from_ne_bytes([message[4], message[5]]);
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
        Some((kind, message))
    })
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

fn since(began: SystemTime, time: SystemTime) -> Duration {
    time.duration_since(began).unwrap_or_default()
}

/// The value below which the given share of the values lie, in percent. Sorts them.
pub fn percentile(values: &mut [Duration], percent: usize) -> Duration {
    values.sort_unstable();
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_apart_and_recognised() {
        let peer = MeteredPeer::numbered(258, 1);
        let mut datagram = Vec::new();
        for (kind, body) in [(RTM_NEWROUTE, peer.base.octets().to_vec()), (3, vec![1; 5])] {
            let length = 16 + body.len();
            datagram.extend(u32::try_from(length).unwrap().to_ne_bytes());
            datagram.extend(kind.to_ne_bytes());
            datagram.extend([0; 10]);
            datagram.extend(body);
            datagram.resize(datagram.len().next_multiple_of(4), 0);
        }
        let found: Vec<_> = messages(&datagram).collect();
        assert_eq!(found.len(), 2);
        assert!(peer.route(RTM_NEWROUTE).is(found[0].0, found[0].1));
        assert!(!peer.route(RTM_DELROUTE).is(found[0].0, found[0].1));
        assert_eq!(messages(&datagram[..10]).count(), 0);
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<_> = (1..=200).rev().map(Duration::from_micros).collect();
        assert_eq!(percentile(&mut values, 50), Duration::from_micros(100));
        assert_eq!(percentile(&mut values, 99), Duration::from_micros(198));
        assert_eq!(percentile(&mut values, 100), Duration::from_micros(200));
        assert_eq!(percentile(&mut [], 99), Duration::ZERO);
    }
}
