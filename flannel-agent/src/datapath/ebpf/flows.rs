//! Flows that bypass the host's stack: told to the programs, asked of conntrack, promoted.
//!
//! The programs prove by observation that the stack leaves a flow as it is, and offer it. Here
//! conntrack has its say, and the flow's entry is marked as promoted. What the programs then do
//! with it ends by itself when the agent is gone.

use std::{collections::BTreeSet, io, time::Duration};

use aya::{
    Ebpf,
    maps::{Array, MapData, MapError, RingBuf},
};
use flannel_common::flow::{Flow4Key, Flow6Key, FlowRules, Offer};
use futures_util::FutureExt;
use ipnet::{Ipv4Net, Ipv6Net};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::io::{Interest, unix::AsyncFd};

use super::{EbpfError, pin, promoter::Promoter, take};
use crate::netlink::conntrack::Conntrack;

/// For so long after the agent's last sign of life flows bypass the stack.
const ALIVE: Duration = Duration::from_secs(5);

/// How often the agent gives one.
pub(super) const SIGN_OF_LIFE: Duration = Duration::from_millis(1250);

/// What the programs shall do about flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowsWanted {
    /// Each direction of a flow proves itself once in this time.
    pub interval: Duration,
    /// The host's side of the pods' devices, by interface index.
    pub pods: BTreeSet<u32>,
    /// This node's subnets.
    pub subnet_v4: Option<Ipv4Net>,
    /// See `subnet_v4`.
    pub subnet_v6: Option<Ipv6Net>,
    /// The MTU of the tunnel's device for IPv4, bytes.
    pub mtu_v4: u32,
    /// The same for IPv6.
    pub mtu_v6: u32,
}

/// The maps of flows, and whom to ask.
pub(super) struct Flows {
    rules_map: Array<MapData, FlowRules>,
    rules: FlowRules,
    v4: Promoter<Flow4Key>,
    v6: Promoter<Flow6Key>,
    events: AsyncFd<RingBuf<MapData>>,
    conntrack: Conntrack,
    pods: BTreeSet<u32>,
}

impl Flows {
    /// Takes the maps over; flows that an earlier agent promoted have to prove themselves anew.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, EbpfError> {
        let rules_map: Array<MapData, FlowRules> = take(ebpf, pin::FLOW_RULES.name)?;
        let found = rules_map.get(&0, 0).map_err(|error| EbpfError::map(&error))?;
        let events: RingBuf<MapData> = take(ebpf, "EVENTS")?;
        let failed = |error: io::Error| EbpfError::Map(format!("ring buffer EVENTS: {error}"));
        // SAFETY: the ring buffer keeps its one descriptor open as long as it lives.
        let events = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) };
        Ok(Self {
            rules_map,
            rules: FlowRules { alive_until: 0, epoch: found.epoch, ..FlowRules::default() },
            v4: Promoter::new(take(ebpf, pin::FLOWS4.name)?),
            v6: Promoter::new(take(ebpf, pin::FLOWS6.name)?),
            events: events.map_err(|error| failed(error.into()))?,
            conntrack: Conntrack::open().map_err(failed)?,
            pods: BTreeSet::new(),
        })
    }

    /// Tells the programs what is wanted; `None` switches all of it off. Returns the number of
    /// changes.
    pub(super) fn apply(&mut self, wanted: Option<&FlowsWanted>) -> Result<usize, MapError> {
        let Some(wanted) = wanted else {
            let was_on = self.rules.alive_until != 0;
            self.pods.clear();
            self.rules.alive_until = 0;
            self.rules_map.set(0, self.rules, 0)?;
            return Ok(usize::from(was_on));
        };
        let mut rules = rules(wanted);
        rules.epoch = self.rules.epoch;
        let same = FlowRules { alive_until: self.rules.alive_until, ..rules } == self.rules;
        if !same || self.rules.alive_until == 0 {
            rules.epoch = rules.epoch.wrapping_add(1);
        }
        self.rules = rules;
        self.sign_of_life()?;
        let gone = self.pods.iter().any(|pod| !wanted.pods.contains(pod));
        self.pods.clone_from(&wanted.pods);
        if gone {
            self.forget_strangers()?;
        }
        Ok(usize::from(!same))
    }

    /// Everything that is known of flows is worthless: somebody may want something else of them.
    pub(super) fn begin_epoch(&mut self) -> Result<(), MapError> {
        self.rules.epoch = self.rules.epoch.wrapping_add(1);
        self.rules_map.set(0, self.rules, 0)
    }

    /// Lets flows bypass the stack for some more time.
    pub(super) fn sign_of_life(&mut self) -> Result<(), MapError> {
        let ahead = ALIVE.max(Duration::from_nanos(self.rules.interval.saturating_mul(3)));
        self.rules.alive_until = now().saturating_add(nanoseconds(ahead));
        self.rules_map.set(0, self.rules, 0)
    }

    /// Resolves when the programs offer flows. Cancel-safe.
    pub(super) async fn offered(&self) {
        // An error here means that the runtime is going down.
        match self.events.readable().await {
            Ok(guard) => drop(guard),
            Err(_) => std::future::pending().await,
        }
    }

    /// Looks at the flows that were offered.
    pub(super) fn consider(&mut self) {
        // Cleared first: what comes in while we read makes it ready again.
        if let Some(Ok(mut guard)) = self.events.readable().now_or_never() {
            guard.clear_ready();
        }
        let mut offers = Vec::new();
        while let Some(item) = self.events.get_mut().next() {
            let bytes = item.get(..size_of::<Offer>());
            offers.extend(bytes.map(bytemuck::pod_read_unaligned::<Offer>));
        }
        for offer in offers {
            let Self { v4, v6, rules, pods, conntrack, .. } = self;
            let result = match offer.family {
                4 => v4.promote(&offer.v4, rules, pods, conntrack),
                6 => v6.promote(&offer.v6, rules, pods, conntrack),
                _ => continue,
            };
            if let Err(reason) = result {
                tracing::debug!("flow {offer:?} is not promoted: {reason}");
            }
        }
    }

    /// Asks conntrack again about some of the promoted flows, all of them in turn.
    pub(super) fn look_after(&mut self) {
        let Self { v4, v6, rules, conntrack, .. } = self;
        v4.look_after(rules, conntrack);
        v6.look_after(rules, conntrack);
    }

    /// The pods' devices.
    pub(super) fn pods(&self) -> impl Iterator<Item = u32> {
        self.pods.iter().copied()
    }

    /// Has the flows of some pods take the stack from now on.
    pub(super) fn leave_alone(&mut self, pods: &[u32]) -> Result<(), MapError> {
        if pods.is_empty() {
            return Ok(());
        }
        self.pods.retain(|pod| !pods.contains(pod));
        self.forget_strangers()
    }

    /// For the status.
    pub(super) fn status(&self) -> Value {
        json!({
            "pods": self.pods.len(),
            "interval_ms": self.rules.interval / 1_000_000,
            "epoch": self.rules.epoch,
            "promotions": self.v4.promotions() + self.v6.promotions(),
        })
    }

    /// Removes the flows of pods that are no longer there.
    fn forget_strangers(&mut self) -> Result<(), MapError> {
        self.v4.forget_strangers(&self.pods)?;
        self.v6.forget_strangers(&self.pods)
    }
}

fn rules(wanted: &FlowsWanted) -> FlowRules {
    let none_v4 = ([0; 4], [0xff; 4]);
    let none_v6 = ([0; 16], [0xff; 16]);
    let v4 = wanted.subnet_v4.map(|net| (net.network().octets(), net.netmask().octets()));
    let v6 = wanted.subnet_v6.map(|net| (net.network().octets(), net.netmask().octets()));
    let (subnet_v4, mask_v4) = v4.unwrap_or(none_v4);
    let (subnet_v6, mask_v6) = v6.unwrap_or(none_v6);
    FlowRules {
        interval: nanoseconds(wanted.interval),
        mtu_v4: wanted.mtu_v4,
        mtu_v6: wanted.mtu_v6,
        subnet_v4,
        subnet_v6,
        mask_v4,
        mask_v6,
        ..FlowRules::default()
    }
}

/// The clock that the programs read, in nanoseconds.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    time.map(nanoseconds).unwrap_or_default()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
