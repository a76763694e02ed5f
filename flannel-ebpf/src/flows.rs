//! What the hooks before and after the stack have in common: which flow a packet belongs to, and
//! what its proof says. The steps of the proof are in `flannel_common::flow`.

use aya_ebpf::{
    btf_maps::lpm_trie::Key,
    helpers::{bpf_check_mtu, bpf_jiffies64, bpf_ktime_get_ns, bpf_skb_store_bytes},
};
use flannel_common::{
    encap::Ethernet,
    flow::{
        Direction, Flow, Flow4Key, Flow6Key, FlowRules, FrameAddresses, Offer, Seen, Segment,
        Taken, Verdict,
        packet::{self, Inner},
    },
    map::{Config, Tunnel},
    outcome::Outcome,
    outer::Packet,
    wire::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, IPV4_LEN, IPV6_LEN, TCP},
};

use crate::{
    maps,
    skb::{Head, Skb},
};

/// Where the IP header of a frame begins.
pub const IP: usize = ETHERNET_LEN;

/// For so many jiffies a device is believed to be as it was.
const BELIEVED_JIFFIES: u32 = 1;

/// `BPF_F_RECOMPUTE_CSUM`.
const RECOMPUTE_CHECKSUM: u64 = 1;

/// One of the two kinds of inner packets.
pub trait Family {
    type Key: Copy;
    /// The start of a frame with an IP header.
    type Start: Header;
    const ETHERTYPE: u16;

    fn start(skb: Skb) -> Option<Self::Start>;
    /// Reads a packet whose IP header begins at an offset.
    fn read<H: Header>(head: &H, at: usize, direction: Direction) -> Option<Inner<Self::Key>>;
    /// Whether the local end is of our subnet.
    fn is_ours(rules: &FlowRules, key: &Self::Key) -> bool;
    /// Whether the other end is reached by the tunnel.
    fn is_tunnelled(key: &Self::Key) -> bool;
    fn mtu(rules: &FlowRules) -> u32;
    /// The tunnel that these packets go by.
    fn tunnel(config: &Config) -> &Tunnel;
    fn find(key: &Self::Key) -> Option<*mut Flow>;
    fn insert(key: &Self::Key, flow: &Flow);
    fn remove(key: &Self::Key);
    fn offer(key: &Self::Key) -> Offer;
    /// Takes one from the packet's hop limit, which has been read and is above one.
    fn hop(skb: Skb) -> bool;
}

pub struct V4;
pub struct V6;

impl Family for V4 {
    type Key = Flow4Key;
    type Start = Head<{ IP + IPV4_LEN }>;
    const ETHERTYPE: u16 = ETHERTYPE_IPV4;

    #[inline(always)]
    fn start(skb: Skb) -> Option<Self::Start> {
        skb.head()
    }

    #[inline(always)]
    fn read<H: Header>(head: &H, at: usize, direction: Direction) -> Option<Inner<Flow4Key>> {
        packet::v4(head, at, direction)
    }

    #[inline(always)]
    fn is_ours(rules: &FlowRules, key: &Flow4Key) -> bool {
        rules.is_local_v4(key.local)
    }

    #[inline(always)]
    fn is_tunnelled(key: &Flow4Key) -> bool {
        maps::SUBNETS4.get(&Key::new(32, key.remote)).is_some_and(|lease| lease.tunnelled == 1)
    }

    #[inline(always)]
    fn mtu(rules: &FlowRules) -> u32 {
        rules.mtu_v4
    }

    #[inline(always)]
    fn tunnel(config: &Config) -> &Tunnel {
        &config.v4
    }

    #[inline(always)]
    fn find(key: &Flow4Key) -> Option<*mut Flow> {
        maps::FLOWS4.get_ptr_mut(key)
    }

    #[inline(always)]
    fn insert(key: &Flow4Key, flow: &Flow) {
        // A map without room means a flow without a bypass.
        let _ = maps::FLOWS4.insert(key, flow, 0);
    }

    #[inline(always)]
    fn remove(key: &Flow4Key) {
        let _ = maps::FLOWS4.remove(key);
    }

    #[inline(always)]
    fn offer(key: &Flow4Key) -> Offer {
        Offer { v4: *key, v6: Flow6Key::default(), family: 4, reserved: 0 }
    }

    #[inline(always)]
    fn hop(skb: Skb) -> bool {
        let Some(mut head) = skb.in_place::<{ IP + IPV4_LEN }>() else { return false };
        let [hops, protocol] = head.raw16(IP + 8).to_ne_bytes();
        let checksum = packet::checksum_after_hop(head.be16(IP + 10));
        head.put(IP + 8, &[u16::from_ne_bytes([hops.wrapping_sub(1), protocol])]);
        head.put(IP + 10, &[checksum.to_be()]);
        true
    }
}

impl Family for V6 {
    type Key = Flow6Key;
    type Start = Head<{ IP + IPV6_LEN }>;
    const ETHERTYPE: u16 = ETHERTYPE_IPV6;

    #[inline(always)]
    fn start(skb: Skb) -> Option<Self::Start> {
        skb.head()
    }

    #[inline(always)]
    fn read<H: Header>(head: &H, at: usize, direction: Direction) -> Option<Inner<Flow6Key>> {
        packet::v6(head, at, direction)
    }

    #[inline(always)]
    fn is_ours(rules: &FlowRules, key: &Flow6Key) -> bool {
        rules.is_local_v6(key.local)
    }

    #[inline(always)]
    fn is_tunnelled(key: &Flow6Key) -> bool {
        maps::SUBNETS6.get(&Key::new(128, key.remote)).is_some_and(|lease| lease.tunnelled == 1)
    }

    #[inline(always)]
    fn mtu(rules: &FlowRules) -> u32 {
        rules.mtu_v6
    }

    #[inline(always)]
    fn tunnel(config: &Config) -> &Tunnel {
        &config.v6
    }

    #[inline(always)]
    fn find(key: &Flow6Key) -> Option<*mut Flow> {
        maps::FLOWS6.get_ptr_mut(key)
    }

    #[inline(always)]
    fn insert(key: &Flow6Key, flow: &Flow) {
        let _ = maps::FLOWS6.insert(key, flow, 0);
    }

    #[inline(always)]
    fn remove(key: &Flow6Key) {
        let _ = maps::FLOWS6.remove(key);
    }

    #[inline(always)]
    fn offer(key: &Flow6Key) -> Offer {
        Offer { v4: Flow4Key::default(), v6: *key, family: 6, reserved: 0 }
    }

    #[inline(always)]
    fn hop(skb: Skb) -> bool {
        // No checksum in the header makes up for it: a NIC's sum over the packet has to follow.
        const AT: u32 = IP as u32 + 7;
        let Some([hops]) = skb.bytes(AT) else { return false };
        store(skb, AT, &[hops.wrapping_sub(1)], RECOMPUTE_CHECKSUM)
    }
}

/// The rules, unless all of this is switched off.
#[inline(always)]
pub fn rules() -> Option<&'static FlowRules> {
    maps::FLOW_RULES.get(0).filter(|rules| rules.alive_until != 0)
}

/// A reading of the clock.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Reading {
    /// When it was read, in jiffies.
    jiffies: u64,
    /// Nanoseconds of the monotonic clock.
    nanos: u64,
}

/// Nanoseconds of the monotonic clock, up to ten milliseconds ago: a CPU reads it once in a jiffy.
#[inline(always)]
fn now() -> u64 {
    // SAFETY: helpers without conditions.
    let (jiffies, read) = unsafe { (bpf_jiffies64(), || bpf_ktime_get_ns()) };
    let Some(reading) = maps::CLOCK.get_ptr_mut(0) else { return read() };
    // SAFETY: this CPU's own slot, and nothing else of ours runs on this CPU in between.
    let reading = unsafe { &mut *reading };
    if reading.jiffies != jiffies {
        *reading = Reading { jiffies, nanos: read() };
    }
    reading.nanos
}

/// Where and when.
#[inline(always)]
fn seen<H: Header>(skb: Skb, head: &H) -> Seen {
    Seen { ifindex: skb.ifindex(), frame: head.words(0), now: now() }
}

/// A packet in plain sight: neither marked nor tagged.
#[inline(always)]
pub fn is_plain(skb: Skb) -> bool {
    skb.mark() == 0 && !skb.tagged()
}

/// Stands in a packet's traffic control index, which nothing else uses any more, between a pod's
/// device and the tunnel's, either way: this one did not come out of the stack.
const BRAND: u32 = 0x464c;

/// Marks a packet that bypasses the stack.
#[inline(always)]
pub fn brand(skb: Skb) {
    // SAFETY: the kernel passes a valid context; the verifier checks the access.
    unsafe { (*skb.raw()).tc_index = BRAND };
}

/// Whether a packet has bypassed the stack; takes the mark off.
#[inline(always)]
pub fn was_branded(skb: Skb) -> bool {
    // SAFETY: as above.
    let branded = unsafe { (*skb.raw()).tc_index } == BRAND;
    if branded {
        // SAFETY: as above.
        unsafe { (*skb.raw()).tc_index = 0 };
    }
    branded
}

/// What a packet means for its flow: one that needs the stack means nothing.
#[inline(always)]
fn segment<K>(skb: Skb, inner: &Inner<K>, mtu: u32) -> Segment {
    let may = inner.may_bypass(skb.len().saturating_sub(IP as u32), skb.gso_size(), mtu);
    if inner.segment == Segment::Plain && !may { Segment::Odd } else { inner.segment }
}

/// Makes an entry. A call, for the stack's sake: a flow needs it once.
#[inline(never)]
fn begin<F: Family>(key: &F::Key, seen: &Seen, rules: &FlowRules) -> i32 {
    // The exact time, to tell two flows with one tuple within a jiffy.
    // SAFETY: a helper without conditions.
    let mut flow = Flow::begin(unsafe { bpf_ktime_get_ns() }, rules);
    let _ = flow.before(Direction::Out, seen, Segment::Plain, rules);
    F::insert(key, &flow);
    0
}

/// A packet before the stack: its flow, if it may bypass the stack.
#[inline(always)]
pub fn before<F: Family>(
    skb: Skb,
    direction: Direction,
    rules: &FlowRules,
) -> Option<&'static mut Flow> {
    let head = F::start(skb)?;
    let inner = F::read(&head, IP, direction)?;
    if !F::is_ours(rules, &inner.key) {
        return None;
    }
    let segment = segment(skb, &inner, F::mtu(rules));
    let seen = seen(skb, &head);
    let Some(flow) = F::find(&inner.key) else {
        // Only a local pod makes entries: a stranger's flood shall not push others out.
        if segment == Segment::Plain
            && matches!(direction, Direction::Out)
            && F::is_tunnelled(&inner.key)
        {
            begin::<F>(&inner.key, &seen, rules);
        }
        return None;
    };
    // SAFETY: a valid pointer into the map. Others may write too; see `flannel_common::flow`.
    let flow = unsafe { &mut *flow };
    match flow.before(direction, &seen, segment, rules) {
        Verdict::Stack => None,
        Verdict::Forget => {
            F::remove(&inner.key);
            None
        }
        Verdict::Bypass => Some(flow),
    }
}

/// Has a packet of a known flow go with the flow's hash. Over IPv6 the kernel makes it of the flow
/// label, which is the sender's to change with each packet.
#[inline(always)]
pub fn hash<F: Family>(skb: Skb, flow: &mut Flow) {
    if F::ETHERTYPE != ETHERTYPE_IPV4 || !skb.lacks_hash() {
        return;
    }
    if flow.hash == 0 {
        flow.hash = skb.hash();
    } else {
        skb.set_hash(flow.hash);
    }
}

/// A packet that came out of the stack.
#[inline(always)]
pub fn after<F: Family>(skb: Skb, direction: Direction, rules: &FlowRules) {
    let Some(head) = F::start(skb) else { return };
    let Some(inner) = F::read(&head, IP, direction) else { return };
    if !F::is_ours(rules, &inner.key) {
        return;
    }
    let Some(flow) = F::find(&inner.key) else { return };
    let seen = seen(skb, &head);
    // SAFETY: as above.
    let flow = unsafe { &mut *flow };
    if matches!(direction, Direction::Out) {
        hash::<F>(skb, flow);
    }
    if flow.after(direction, &seen, inner.segment, rules) {
        // Without room the agent hears of it the next time.
        let _ = maps::EVENTS.output(F::offer(&inner.key), 0);
    }
}

/// A packet inside of a tunnel packet of `len` bytes, whose IP header begins at an offset: the
/// flow, if it may go straight to the pod. Nothing is noted; on the other way it comes by the
/// tunnel's device.
#[inline(always)]
pub fn look_inside<F: Family, H: Header>(
    head: &H,
    at: usize,
    len: u32,
    rules: &FlowRules,
) -> Option<&'static mut Flow> {
    let inner = F::read(head, at, Direction::In)?;
    if inner.segment != Segment::Plain
        || !F::is_ours(rules, &inner.key)
        || !inner.may_bypass(len.saturating_sub(at as u32), 0, F::mtu(rules))
    {
        return None;
    }
    let flow = F::find(&inner.key)?;
    let seen = Seen { ifindex: 0, frame: [0; 6], now: now() };
    // SAFETY: as above.
    let flow = unsafe { &mut *flow };
    flow.may_pass(Direction::In, &seen, rules).then_some(flow)
}

/// Whether a device is there and takes a packet, after it has become shorter, or each of those that
/// a merged one is made of. The kernel is asked once in a while.
#[inline(always)]
pub fn takes(skb: Skb, taken: &mut Taken, ifindex: u32, shorter_by: u32) -> bool {
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_jiffies64() } as u32;
    let merged = skb.gso_size() != 0;
    let len = if merged { segment_len(skb) } else { skb.len().saturating_sub(shorter_by) };
    if now.wrapping_sub(taken.asked) <= BELIEVED_JIFFIES && len <= taken.len {
        return true;
    }
    let mut mtu = 0;
    let delta = -(shorter_by as i32);
    // SAFETY: the helper writes one number: the device's MTU, without the Ethernet header.
    let mut ask = || unsafe { bpf_check_mtu(skb.raw().cast(), ifindex, &raw mut mtu, delta, 0) };
    if ifindex == 0 || ask() != 0 {
        return false;
    }
    // The helper takes a merged packet for one that fits.
    if merged && len > mtu + ETHERNET_LEN as u32 {
        return false;
    }
    *taken = Taken { asked: now, len };
    true
}

/// The length of each packet that a merged one is made of, from the Ethernet header on. It may
/// bypass the stack: it has neither options nor extension headers. A length that cannot be read is
/// longer than any device's.
#[inline(always)]
fn segment_len(skb: Skb) -> u32 {
    const IP: u32 = ETHERNET_LEN as u32;
    let (header, protocol_at) =
        if skb.ethertype() == ETHERTYPE_IPV4 { (20, IP + 9) } else { (40, IP + 6) };
    let transport = match skb.bytes(protocol_at) {
        Some([TCP]) => match skb.bytes(IP + header + 12) {
            Some([offset]) => u32::from(offset >> 4) * 4,
            None => return u32::MAX,
        },
        Some(_) => 8,
        None => return u32::MAX,
    };
    IP + header + transport + skb.gso_size()
}

/// Writes a frame's addresses.
#[inline(always)]
pub fn address(skb: Skb, frame: &FrameAddresses) -> bool {
    skb.in_place::<ETHERNET_LEN>().is_some_and(|mut head| {
        head.put(0, frame);
        true
    })
}

/// Counts a packet that bypassed the stack.
#[inline(always)]
pub fn count(flow: &mut Flow, direction: Direction) {
    let way = direction as usize & 1;
    flow.bypassed[way] = flow.bypassed[way].wrapping_add(1);
}

#[inline(always)]
fn store<const N: usize>(skb: Skb, at: u32, bytes: &[u8; N], flags: u64) -> bool {
    // SAFETY: the helper reads N bytes from a buffer of N bytes.
    unsafe {
        bpf_skb_store_bytes(skb.raw().cast(), at, bytes.as_ptr().cast(), N as u32, flags) == 0
    }
}

/// What a change that cannot be undone and failed half-way comes to.
pub const HALF_DONE: Outcome = Outcome::DropNoMemory;

/// An Ethernet header.
#[inline(always)]
pub fn ethernet(addresses: &FrameAddresses, ethertype: u16) -> Ethernet {
    let mut header = [ethertype.to_be(); 7];
    let (start, _) = header.split_at_mut(addresses.len());
    start.copy_from_slice(addresses);
    header
}
