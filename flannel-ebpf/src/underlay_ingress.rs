//! TC ingress of the underlay device: refuse, take out of the tunnel, or leave to the kernel.

use core::ptr::null_mut;

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_FIB_LKUP_RET_NOT_FWDED, TC_ACT_SHOT, TC_ACT_UNSPEC,
        bpf_fib_lookup as FibLookup,
    },
    helpers::{bpf_check_mtu, bpf_fib_lookup, bpf_ktime_get_ns, bpf_redirect, bpf_redirect_peer},
    programs::TcContext,
};
use aya_log_ebpf::{
    info,
    macro_support::{Level, level_enabled},
};
use flannel_common::{
    decap::{Addresses, ArrivedV4, Leases, NO_PEER, Plain, filter},
    ecn::Decapsulate,
    encap::{Ethernet, OVERHEAD_V4, OVERHEAD_V6},
    flow::{Direction, Flow as FlowEntry, FlowRules},
    map::{Config, Mac, OuterAddress, Tunnel, switch},
    outcome::Outcome,
    outer::{self, Packet, Seen},
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, UDP, v4_bytes, v6_bytes, v6_quarters},
};

use crate::{
    count,
    decap::{self, Flow, Maps},
    flows::{self, Family, V4, V6},
    maps,
    skb::{self, Skb},
    xdp_front,
};

/// "Next": whoever else is at this hook has a say, and then the kernel.
const NEXT: i32 = TC_ACT_UNSPEC;

/// From the UDP header to the inner frame.
const UDP_AND_VXLAN: u32 = 16;

/// At most one log line a second.
const LOG_INTERVAL_NS: u64 = 1_000_000_000;

/// Where the addresses are in the frame.
const DESTINATION_V4: u32 = 14 + 16;
const DESTINATION_V6: u32 = 14 + 24;

/// Looks at one packet.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let skb = Skb::new(ctx);
    if let Some(action) = xdp_front::handed_over(skb) {
        return action;
    }
    // What belongs to another host, or to a VLAN device on top, is not the tunnel's.
    if skb.for_other_host() || skb.tagged() {
        return NEXT;
    }
    let Some(config) = maps::CONFIG.get(0) else { return NEXT };
    if !concerns_port(skb, config) {
        return NEXT;
    }
    xdp_front::attend();
    let (segments, len) = (skb.segments(), skb.len());
    let Some((outcome, action)) = judge(skb, config) else { return NEXT };
    count::add(&maps::OUTCOMES, outcome, segments, len);
    action
}

/// A quick look at what most packets at the underlay are not. Says yes if it cannot tell.
#[inline(always)]
fn concerns_port(skb: Skb, config: &Config) -> bool {
    /// Ethernet, IP without options, ports.
    const V4: usize = 14 + 20 + 4;
    const V6: usize = 14 + 40 + 4;
    const FRAGMENT: u8 = 44;
    let (start, end) = skb.linear();
    if config.port == 0 {
        return false;
    }
    // SAFETY: the verifier has seen the comparison with the end.
    let byte = |at: usize| unsafe { *((start + at) as *const u8) };
    match skb.ethertype() {
        ETHERTYPE_IPV4 if start + V4 <= end => {
            if byte(23) != UDP {
                return false;
            }
            // With options the ports are further on.
            byte(14) != 0x45 || u16::from_be_bytes([byte(36), byte(37)]) == config.port
        }
        ETHERTYPE_IPV6 if start + V6 <= end => {
            let port = u16::from_be_bytes([byte(56), byte(57)]);
            (byte(20) == UDP && port == config.port) || byte(20) == FRAGMENT
        }
        ETHERTYPE_IPV4 | ETHERTYPE_IPV6 => true,
        _ => false,
    }
}

/// What becomes of a packet: the number of the outcome, and the program's result; `None` if it is
/// none of ours.
#[inline(always)]
fn judge(skb: Skb, config: &Config) -> Option<(u32, i32)> {
    let flow = find(skb);
    let plain = match skb.ethertype() {
        ETHERTYPE_IPV4 => over_v4(skb.raw(), config, flow),
        ETHERTYPE_IPV6 => over_v6(skb.raw(), config, flow, decap::checksum_fits_v6(skb.raw())),
        _ => return None,
    };
    let packed = if plain == UNUSUAL { unusual(skb.raw(), config) } else { plain };
    if packed == OTHER { None } else { Some(unpack(packed)) }
}

/// Neither outcome nor action: the packet has to be looked at in another way, or is none of ours.
const UNUSUAL: i64 = -1;
const OTHER: i64 = -2;

/// BPF functions return one number.
#[inline(always)]
fn pack((outcome, action): (Outcome, i32)) -> i64 {
    i64::from(outcome.index()) << 32 | i64::from(action.cast_unsigned())
}

#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "see `pack`")]
fn unpack(packed: i64) -> (u32, i32) {
    ((packed >> 32) as u32, packed as i32)
}

#[inline(never)]
fn over_v4(raw: *mut __sk_buff, config: &Config, flow: *mut FlowEntry) -> i64 {
    let skb = Skb::from(raw);
    let mut words = ArrivedV4::ZERO;
    let Some(mut plain) = decap::take_v4(skb, config, &mut words) else { return UNUSUAL };
    plain.checksum_fits = decap::checksum_fits_v4(&words);
    let destination = v4_bytes(&words.words(DESTINATION_V4 as usize));
    if OuterAddress::from_v4(destination) != config.v4.local {
        return UNUSUAL;
    }
    let tunnel = &config.v4;
    let (source_port, frame) = (words.raw16(14 + 20), decap::frame_v4(&words));
    let arrived = Arrived { source_port, overhead: OVERHEAD_V4, frame, flow };
    pack(plain_packet(skb, config, tunnel, &plain, &arrived))
}

#[inline(never)]
fn over_v6(raw: *mut __sk_buff, config: &Config, flow: *mut FlowEntry, checksum_fits: u64) -> i64 {
    let skb = Skb::from(raw);
    let Some(words) = maps::scratch() else { return UNUSUAL };
    let Some(mut plain) = decap::take_v6(skb, config, words) else { return UNUSUAL };
    plain.checksum_fits = checksum_fits != 0;
    let destination = v6_bytes(&words.words(DESTINATION_V6 as usize));
    if OuterAddress::from_v6(destination) != config.v6.local {
        return UNUSUAL;
    }
    let tunnel = &config.v6;
    let (source_port, frame) = (words.raw16(14 + 40), decap::frame_v6(words));
    let arrived = Arrived { source_port, overhead: OVERHEAD_V6, frame, flow };
    pack(plain_packet(skb, config, tunnel, &plain, &arrived))
}

#[inline(never)]
fn unusual(raw: *mut __sk_buff, config: &Config) -> i64 {
    unusual_packet(Skb::from(raw), config).map_or(OTHER, pack)
}

/// What else matters of a packet with the usual headers.
struct Arrived {
    /// The outer source port, as on the wire.
    source_port: u16,
    /// The length of the headers before the inner frame's IP packet, Ethernet left out.
    overhead: usize,
    /// The inner Ethernet header.
    frame: Ethernet,
    /// The flow of what is inside, if it goes straight to a pod; else null.
    flow: *mut FlowEntry,
}

/// A packet with the usual headers, to the tunnel's address.
#[inline(always)]
fn plain_packet(
    skb: Skb,
    config: &Config,
    tunnel: &Tunnel,
    plain: &Plain,
    arrived: &Arrived,
) -> (Outcome, i32) {
    let peer = match filter(&Maps, config, &plain.source, plain.frame_to, &plain.addresses) {
        Ok(peer) => peer,
        Err(refused) => return (refused, TC_ACT_SHOT),
    };
    note_sender(skb, peer, &plain.source);
    if config.switches & switch::DECAP == 0 {
        return (known(peer), NEXT);
    }
    let Some(flow) = Flow::of(&plain.source, arrived.source_port) else {
        return (known(peer), NEXT);
    };
    let merged = skb.gso_size() != 0;
    let taken = if merged {
        Err(Outcome::Merged)
    } else if plain.mergeable {
        Err(Outcome::Burst)
    } else if flow.behind_burst() {
        return (Outcome::BehindBurst, NEXT);
    } else {
        take_out(skb, config, tunnel, plain, arrived)
    };
    match taken {
        Ok(action) => (Outcome::Decapsulated, action),
        Err(outcome @ (Outcome::DropCongested | Outcome::DropNoMemory)) => (outcome, TC_ACT_SHOT),
        Err(outcome) => {
            flow.leave();
            (outcome, NEXT)
        }
    }
}

/// Takes a packet out and hands it to the tunnel device's ingress.
#[inline(always)]
fn take_out(
    skb: Skb,
    config: &Config,
    tunnel: &Tunnel,
    plain: &Plain,
    arrived: &Arrived,
) -> Result<i32, Outcome> {
    let ecn = plain.decapsulate(tunnel, config.switches & switch::FILTER != 0)?;
    if let Some(action) = straight_to_pod(skb, arrived.overhead, ecn, arrived.flow)? {
        return Ok(action);
    }
    if !exists(skb, tunnel.ifindex) {
        return Err(Outcome::NoDevice);
    }
    decap::strip(skb, arrived.overhead, &arrived.frame, ecn)?;
    // SAFETY: a helper without conditions.
    Ok(unsafe { bpf_redirect(tunnel.ifindex, u64::from(BPF_F_INGRESS)) } as i32)
}

/// Takes a packet of a promoted flow out and hands it to the pod. `None`: the tunnel device's
/// ingress is next.
#[inline(always)]
fn straight_to_pod(
    skb: Skb,
    overhead: usize,
    ecn: Decapsulate,
    flow: *mut FlowEntry,
) -> Result<Option<i32>, Outcome> {
    if flow.is_null() {
        return Ok(None);
    }
    let set_ce = u32::from(ecn == Decapsulate::SetCe);
    let packed = if overhead == OVERHEAD_V4 {
        straight_v4(skb.raw(), flow, set_ce)
    } else {
        straight_v6(skb.raw(), flow, set_ce)
    };
    match skb::unpack(packed) {
        Ok(TC_ACT_UNSPEC) => Ok(None),
        Ok(action) => Ok(Some(action)),
        Err(_) => Err(flows::HALF_DONE),
    }
}

/// Looks for the flow of what is inside, before anything is judged: by calls beside those that
/// judge, because the stack is short. Null if there is none that goes straight to a pod.
#[inline(always)]
fn find(skb: Skb) -> *mut FlowEntry {
    let Some(rules) = flows::rules() else { return null_mut() };
    if skb.gso_size() != 0 || !flows::is_plain(skb) {
        return null_mut();
    }
    match skb.ethertype() {
        ETHERTYPE_IPV4 => find_v4(skb.raw(), rules),
        ETHERTYPE_IPV6 => find_v6(skb.raw(), rules),
        _ => null_mut(),
    }
}

#[inline(never)]
fn find_v4(raw: *mut __sk_buff, rules: &FlowRules) -> *mut FlowEntry {
    flows::look_inside::<V4>(Skb::from(raw), flows::IP + OVERHEAD_V4 as u32, rules)
}

#[inline(never)]
fn find_v6(raw: *mut __sk_buff, rules: &FlowRules) -> *mut FlowEntry {
    flows::look_inside::<V6>(Skb::from(raw), flows::IP + OVERHEAD_V6 as u32, rules)
}

#[inline(never)]
fn straight_v4(raw: *mut __sk_buff, flow: *mut FlowEntry, set_ce: u32) -> i64 {
    skb::pack(straight::<V4>(Skb::from(raw), flow, OVERHEAD_V4, set_ce))
}

#[inline(never)]
fn straight_v6(raw: *mut __sk_buff, flow: *mut FlowEntry, set_ce: u32) -> i64 {
    skb::pack(straight::<V6>(Skb::from(raw), flow, OVERHEAD_V6, set_ce))
}

#[inline(always)]
fn straight<F: Family>(
    skb: Skb,
    flow: *mut FlowEntry,
    overhead: usize,
    set_ce: u32,
) -> Result<i32, Outcome> {
    // SAFETY: a valid pointer into the map, which the caller has compared with null.
    let flow = unsafe { &mut *flow };
    let ifindex = flow.pod_ifindex;
    if !flows::takes(skb, ifindex, overhead as u32) {
        return Ok(NEXT);
    }
    let frame = flows::ethernet(&flow.pod_frame, F::ETHERTYPE);
    let ecn = if set_ce == 0 { Decapsulate::Keep } else { Decapsulate::SetCe };
    match decap::strip(skb, overhead, &frame, ecn) {
        Ok(()) => (),
        Err(Outcome::DropNoMemory) => return Err(flows::HALF_DONE),
        // Nothing was changed.
        Err(_) => return Ok(NEXT),
    }
    if !F::hop(skb, flows::IP) {
        return Err(flows::HALF_DONE);
    }
    flows::count(flow, Direction::In);
    // SAFETY: a helper without conditions.
    Ok((unsafe { bpf_redirect_peer(ifindex, 0) }) as i32)
}

/// Options, fragments, truncated or malformed packets, and those to another of our addresses:
/// never taken out, but refused like the others.
#[inline(always)]
fn unusual_packet(skb: Skb, config: &Config) -> Option<(Outcome, i32)> {
    let filtering = config.switches & switch::FILTER != 0;
    let (source, inner, fragment) = match outer::recognise(&skb, config) {
        Seen::Other => return None,
        Seen::Odd(outcome) => {
            let refused = match outcome {
                Outcome::NoVni => Outcome::DropNoVni,
                Outcome::WrongVni if config.switches & switch::OTHER_VNIS == 0 => {
                    Outcome::DropWrongVni
                }
                Outcome::Malformed => Outcome::DropMalformed,
                other => return Some((other, NEXT)),
            };
            let refuse = filtering && for_us(skb, config);
            return Some(if refuse { (refused, TC_ACT_SHOT) } else { (outcome, NEXT) });
        }
        Seen::Tunnel { source, inner, fragment } => (source, inner, fragment),
    };
    let judged = inner_of(&skb, inner)
        .map(|(frame_to, addresses)| filter(&Maps, config, &source, frame_to, &addresses));
    let peer = match judged {
        Some(Ok(peer)) => peer,
        Some(Err(refused)) if for_us(skb, config) => return Some((refused, TC_ACT_SHOT)),
        None if filtering && for_us(skb, config) => {
            return Some((Outcome::DropMalformed, TC_ACT_SHOT));
        }
        Some(Err(_)) | None => Maps.peer(&source).map_or(NO_PEER, |peer| peer.index),
    };
    note_sender(skb, peer, &source);
    if let Some(port) = skb.bytes::<2>(inner - UDP_AND_VXLAN)
        && let Some(flow) = Flow::of(&source, u16::from_ne_bytes(port))
    {
        flow.leave();
    }
    let outcome = if fragment {
        Outcome::Fragment
    } else if config.switches & switch::DECAP == 0 {
        known(peer)
    } else {
        Outcome::Unusual
    };
    Some((outcome, NEXT))
}

/// What is inside a frame at an offset: where it goes, and its addresses. `None` if it ends
/// before.
#[inline(always)]
fn inner_of(skb: &Skb, frame: u32) -> Option<(Mac, Addresses)> {
    let frame_to = skb.bytes(frame)?;
    let [high, low] = skb.bytes(frame + 12)?;
    let ip = frame + 14;
    let outer_is_v4 = skb.ethertype() == ETHERTYPE_IPV4;
    let addresses = match u16::from_be_bytes([high, low]) {
        ETHERTYPE_IPV4 if outer_is_v4 => {
            Addresses::V4 { source: skb.bytes(ip + 12)?, destination: skb.bytes(ip + 16)? }
        }
        ETHERTYPE_IPV6 if !outer_is_v4 => {
            Addresses::V6 { source: skb.bytes(ip + 8)?, destination: skb.bytes(ip + 24)? }
        }
        _ => Addresses::Other,
    };
    Some((frame_to, addresses))
}

/// Whether the packet is sent to an address of this host. What is on its way to others is
/// nobody's to judge here.
#[inline(always)]
fn for_us(skb: Skb, config: &Config) -> bool {
    // SAFETY: all zeros are a valid value.
    let mut fib: FibLookup = unsafe { core::mem::zeroed() };
    if skb.ethertype() == ETHERTYPE_IPV4 {
        let Some(v4) = skb.bytes::<4>(DESTINATION_V4) else { return false };
        if OuterAddress::from_v4(v4) == config.v4.local {
            return true;
        }
        fib.family = 2;
        fib.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes(v4);
    } else {
        let Some(v6) = skb.bytes::<16>(DESTINATION_V6) else { return false };
        if OuterAddress::from_v6(v6) == config.v6.local {
            return true;
        }
        fib.family = 10;
        fib.__bindgen_anon_4.ipv6_dst = v6_quarters(&v6);
    }
    fib.l4_protocol = 17;
    fib.ifindex = skb.ifindex();
    let size = size_of::<FibLookup>() as i32;
    // SAFETY: the helper reads and writes one structure of this size.
    let result = unsafe { bpf_fib_lookup(skb.raw().cast(), &raw mut fib, size, 0) };
    // There is no way on: it stays here.
    u32::try_from(result) == Ok(BPF_FIB_LKUP_RET_NOT_FWDED)
}

/// Whether an interface exists. A redirection to one that is gone would lose the packet.
#[inline(always)]
fn exists(skb: Skb, ifindex: u32) -> bool {
    let mut mtu = 0;
    // SAFETY: the helper writes one number; that the packet may not fit is not asked here.
    ifindex != 0 && unsafe { bpf_check_mtu(skb.raw().cast(), ifindex, &raw mut mtu, 0, 0) } >= 0
}

#[inline(always)]
fn known(peer: u32) -> Outcome {
    if peer == NO_PEER { Outcome::UnknownSource } else { Outcome::FromPeer }
}

/// Counts the packet for its peer.
#[inline(always)]
fn note_sender(skb: Skb, peer: u32, source: &OuterAddress) {
    if peer == NO_PEER {
        log_unknown(skb, source);
    } else {
        count::add(&maps::PEER_COUNTERS, peer, skb.segments(), skb.len());
    }
}
/// Says who it was. The level is a constant that the loader sets: below it, the verifier takes
/// all of this out.
#[inline(always)]
fn log_unknown(skb: Skb, source: &OuterAddress) {
    if !level_enabled(Level::Info) {
        return;
    }
    let Some(last) = maps::LAST_LOGGED.get_ptr_mut(0) else { return };
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a valid pointer into the map. Two CPUs may both win the race: two lines, no harm.
    let last = unsafe { &mut *last };
    if *last != 0 && now.wrapping_sub(*last) < LOG_INTERVAL_NS {
        return;
    }
    *last = now;
    if let Some(v4) = source.v4() {
        info!(&skb.context(), "tunnel packet from {:i}, which is no peer", u32::from_be_bytes(v4));
    } else {
        info!(&skb.context(), "tunnel packet from {:i}, which is no peer", source.octets);
    }
}
