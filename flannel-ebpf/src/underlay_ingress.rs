//! TC ingress of the underlay device: refuse, take out of the tunnel, or leave to the kernel.

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_FIB_LKUP_RET_NOT_FWDED, TC_ACT_SHOT, TC_ACT_UNSPEC,
        bpf_fib_lookup as FibLookup,
    },
    helpers::{
        bpf_check_mtu, bpf_fib_lookup, bpf_jiffies64, bpf_ktime_get_ns, bpf_redirect,
        bpf_redirect_peer,
    },
    programs::TcContext,
};
use aya_log_ebpf::{
    info,
    macro_support::{Level, level_enabled},
};
use flannel_common::{
    decap::{Addresses, Leases, NO_PEER, Plain, filter, plain_v4, plain_v6},
    ecn::Decapsulate,
    encap::{Ethernet, OVERHEAD_V4, OVERHEAD_V6},
    flow::Direction,
    map::{Config, Mac, OuterAddress, switch},
    outcome::Outcome,
    outer::{self, Packet, Seen},
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, UDP, v6_bytes, v6_quarters},
};

use crate::{
    count,
    decap::{self, Flow, HeadV4, HeadV6, Maps},
    flows::{self, Family, V4, V6},
    maps, readdress,
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
    if config.switches & switch::FILTER != 0 && readdress::is_due(skb, config) {
        readdress::underlay_readdress(skb.raw());
    }
    let plain = match skb.ethertype() {
        ETHERTYPE_IPV4 => over_v4(skb.raw(), config),
        ETHERTYPE_IPV6 => {
            // Here, because the stack is short.
            let fits = skb.head().map_or(0, |head| decap::checksum_fits_v6(skb, &head));
            over_v6(skb.raw(), config, fits)
        }
        _ => return None,
    };
    let packed = if plain == UNUSUAL { underlay_unusual(skb.raw()) } else { plain };
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
fn over_v4(raw: *mut __sk_buff, config: &Config) -> i64 {
    let skb = Skb::from(raw);
    let Some(head): Option<HeadV4> = skb.head() else { return UNUSUAL };
    let Some(mut plain) = plain_v4(&head, skb.len(), config) else { return UNUSUAL };
    let destination = OuterAddress::from_v4_words(head.words(DESTINATION_V4 as usize));
    if destination != config.v4.local {
        return UNUSUAL;
    }
    plain.checksum_fits = decap::checksum_fits_v4(skb, &head);
    let source_port = head.raw16(14 + 20);
    let arrived = Arrived { head, source_port, overhead: OVERHEAD_V4 };
    pack(plain_packet::<V4, _>(skb, config, &plain, &arrived))
}

#[inline(never)]
fn over_v6(raw: *mut __sk_buff, config: &Config, checksum_fits: u64) -> i64 {
    let skb = Skb::from(raw);
    let Some(head): Option<HeadV6> = skb.head() else { return UNUSUAL };
    let Some(mut plain) = plain_v6(&head, skb.len(), config) else { return UNUSUAL };
    let destination = v6_bytes(&head.words(DESTINATION_V6 as usize));
    if OuterAddress::from_v6(destination) != config.v6.local {
        return UNUSUAL;
    }
    plain.checksum_fits = checksum_fits != 0;
    let source_port = head.raw16(14 + 40);
    let arrived = Arrived { head, source_port, overhead: OVERHEAD_V6 };
    pack(plain_packet::<V6, _>(skb, config, &plain, &arrived))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn underlay_unusual(raw: *mut __sk_buff) -> i64 {
    let Some(config) = maps::CONFIG.get(0) else { return OTHER };
    unusual_packet(Skb::from(raw), config).map_or(OTHER, pack)
}

/// What else matters of a packet with the usual headers.
struct Arrived<H> {
    /// Its bytes: those of a plain packet.
    head: H,
    /// The outer source port, as on the wire.
    source_port: u16,
    /// The length of the headers before the inner frame's IP packet, Ethernet left out.
    overhead: usize,
}

/// A packet with the usual headers, to the tunnel's address.
#[inline(always)]
fn plain_packet<F: Family, H: Header>(
    skb: Skb,
    config: &Config,
    plain: &Plain,
    arrived: &Arrived<H>,
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
        take_out::<F, H>(skb, config, plain, arrived)
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

/// Takes a packet out and hands it to the pod if its flow is promoted, else to the tunnel device's
/// ingress.
#[inline(always)]
fn take_out<F: Family, H: Header>(
    skb: Skb,
    config: &Config,
    plain: &Plain,
    arrived: &Arrived<H>,
) -> Result<i32, Outcome> {
    let Arrived { head, overhead, .. } = arrived;
    let tunnel = F::tunnel(config);
    let ecn = plain.decapsulate(tunnel, config.switches & switch::FILTER != 0)?;
    let frame: Ethernet = head.words(*overhead);
    if flows::rules().is_some() && flows::is_plain(skb) {
        let set_ce = u32::from(ecn == Decapsulate::SetCe);
        let packed = if *overhead == OVERHEAD_V4 {
            underlay_to_pod_v4(skb.raw(), set_ce)
        } else {
            underlay_to_pod_v6(skb.raw(), set_ce)
        };
        match skb::unpack(packed) {
            Ok(NEXT) => (),
            Ok(action) => return Ok(action),
            Err(outcome) if outcome == Outcome::DropNoMemory.index() => {
                return Err(Outcome::DropNoMemory);
            }
            Err(_) => return Err(Outcome::Unusual),
        }
    }
    if !exists(skb, tunnel.ifindex) {
        return Err(Outcome::NoDevice);
    }
    decap::strip(skb, *overhead, &frame, ecn)?;
    // SAFETY: a helper without conditions.
    Ok(unsafe { bpf_redirect(tunnel.ifindex, u64::from(BPF_F_INGRESS)) } as i32)
}

/// Takes a packet of a promoted flow out and hands it to the pod. [`NEXT`]: it is none.
///
/// This and other functions are visible from outside, so that the kernel verifies each once and for
/// itself, not in every state of its caller.
#[inline(always)]
fn underlay_to_pod_v4(raw: *mut __sk_buff, set_ce: u32) -> i64 {
    let head: Option<HeadV4> = Skb::from(raw).in_place();
    skb::pack(head.map_or(Ok(NEXT), |head| to_pod::<V4, _>(raw.into(), &head, OVERHEAD_V4, set_ce)))
}

/// See `underlay_to_pod_v4`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn underlay_to_pod_v6(raw: *mut __sk_buff, set_ce: u32) -> i64 {
    let head: Option<HeadV6> = Skb::from(raw).in_place();
    skb::pack(head.map_or(Ok(NEXT), |head| to_pod::<V6, _>(raw.into(), &head, OVERHEAD_V6, set_ce)))
}

#[inline(always)]
fn to_pod<F: Family, H: Header>(
    skb: Skb,
    head: &H,
    overhead: usize,
    set_ce: u32,
) -> Result<i32, Outcome> {
    let Some(rules) = flows::rules() else { return Ok(NEXT) };
    let flow = flows::look_inside::<F, H>(head, flows::IP + overhead, skb.len(), rules);
    let Some(flow) = flow else { return Ok(NEXT) };
    let ifindex = flow.pod_ifindex;
    if !flows::takes(skb, &mut flow.taken[1], ifindex, overhead as u32) {
        return Ok(NEXT);
    }
    let frame = flows::ethernet(&flow.pod_frame, F::ETHERTYPE);
    let ecn = if set_ce == 0 { Decapsulate::Keep } else { Decapsulate::SetCe };
    decap::strip(skb, overhead, &frame, ecn)?;
    if !F::hop(skb) {
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
            let refuse = filtering && for_us(skb);
            return Some(if refuse { (refused, TC_ACT_SHOT) } else { (outcome, NEXT) });
        }
        Seen::Tunnel { source, inner, fragment } => (source, inner, fragment),
    };
    let judged = inner_of(&skb, inner)
        .map(|(frame_to, addresses)| filter(&Maps, config, &source, frame_to, &addresses));
    let peer = match judged {
        Some(Ok(peer)) => peer,
        Some(Err(refused)) if for_us(skb) => return Some((refused, TC_ACT_SHOT)),
        None if filtering && for_us(skb) => {
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
pub fn for_us(skb: Skb) -> bool {
    underlay_for_us(skb.raw()) != 0
}

/// See `underlay_to_pod_v4`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn underlay_for_us(raw: *mut __sk_buff) -> i64 {
    i64::from(maps::CONFIG.get(0).is_some_and(|config| is_local(Skb::from(raw), config)))
}

#[inline(always)]
fn is_local(skb: Skb, config: &Config) -> bool {
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

/// Whether the tunnel's device exists: a redirection to one that is gone would lose the packet. The
/// kernel is asked once in a jiffy.
#[inline(always)]
fn exists(skb: Skb, ifindex: u32) -> bool {
    let Some(seen) = maps::TUNNEL_SEEN.get_ptr_mut(0) else { return false };
    // SAFETY: this CPU's own slot, and nothing else of ours runs on this CPU in between.
    let seen = unsafe { &mut *seen };
    // SAFETY: a helper without conditions.
    let now = Existence { ifindex, jiffies: unsafe { bpf_jiffies64() } as u32 };
    if *seen == now {
        return true;
    }
    let mut mtu = 0;
    // SAFETY: the helper writes one number; that the packet may not fit is not asked here.
    let exists = ifindex != 0
        && unsafe { bpf_check_mtu(skb.raw().cast(), ifindex, &raw mut mtu, 0, 0) } >= 0;
    if exists {
        *seen = now;
    }
    exists
}

/// When a device was there.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Existence {
    ifindex: u32,
    /// The last bits.
    jiffies: u32,
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
