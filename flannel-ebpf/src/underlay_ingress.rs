//! TC ingress of the underlay device: refuse, take out of the tunnel, or leave to the kernel.

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_FIB_LKUP_RET_NOT_FWDED, TC_ACT_SHOT, TC_ACT_UNSPEC,
        bpf_fib_lookup as FibLookup,
    },
    helpers::{bpf_check_mtu, bpf_fib_lookup, bpf_ktime_get_ns, bpf_redirect},
    programs::TcContext,
};
use aya_log_ebpf::{
    info,
    macro_support::{Level, level_enabled},
};
use flannel_common::{
    decap::{Addresses, ArrivedV4, Leases, NO_PEER, Plain, filter},
    encap::{OVERHEAD_V4, OVERHEAD_V6},
    map::{Config, Mac, OuterAddress, Tunnel, switch},
    outcome::Outcome,
    outer::{self, Packet, Seen},
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, UDP, v4_bytes, v6_bytes, v6_quarters},
};

use crate::{
    count,
    decap::{self, Flow, Maps},
    maps,
    skb::Skb,
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
    // What belongs to another host, or to a VLAN device on top, is not the tunnel's.
    if skb.for_other_host() || skb.tagged() {
        return NEXT;
    }
    let Some(config) = maps::CONFIG.get(0) else { return NEXT };
    if !concerns_port(skb, config) {
        return NEXT;
    }
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
    let plain = match skb.ethertype() {
        ETHERTYPE_IPV4 => over_v4(skb.raw(), config),
        ETHERTYPE_IPV6 => over_v6(skb.raw(), config, decap::checksum_fits_v6(skb.raw())),
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
fn over_v4(raw: *mut __sk_buff, config: &Config) -> i64 {
    let skb = Skb::from(raw);
    let mut words = ArrivedV4::ZERO;
    let Some(mut plain) = decap::take_v4(skb, config, &mut words) else { return UNUSUAL };
    plain.checksum_fits = decap::checksum_fits_v4(&words);
    let destination = v4_bytes(&words.words(DESTINATION_V4 as usize));
    if OuterAddress::from_v4(destination) != config.v4.local {
        return UNUSUAL;
    }
    let tunnel = &config.v4;
    let (port, frame) = (words.raw16(14 + 20), decap::frame_v4(&words));
    pack(plain_packet(skb, config, tunnel, &plain, port, OVERHEAD_V4, &frame))
}

#[inline(never)]
fn over_v6(raw: *mut __sk_buff, config: &Config, checksum_fits: u64) -> i64 {
    let skb = Skb::from(raw);
    let Some(words) = maps::scratch() else { return UNUSUAL };
    let Some(mut plain) = decap::take_v6(skb, config, words) else { return UNUSUAL };
    plain.checksum_fits = checksum_fits != 0;
    let destination = v6_bytes(&words.words(DESTINATION_V6 as usize));
    if OuterAddress::from_v6(destination) != config.v6.local {
        return UNUSUAL;
    }
    let tunnel = &config.v6;
    let (port, frame) = (words.raw16(14 + 40), decap::frame_v6(words));
    pack(plain_packet(skb, config, tunnel, &plain, port, OVERHEAD_V6, &frame))
}

#[inline(never)]
fn unusual(raw: *mut __sk_buff, config: &Config) -> i64 {
    unusual_packet(Skb::from(raw), config).map_or(OTHER, pack)
}

/// A packet with the usual headers, to the tunnel's address.
#[inline(always)]
fn plain_packet(
    skb: Skb,
    config: &Config,
    tunnel: &Tunnel,
    plain: &Plain,
    source_port: u16,
    overhead: usize,
    frame: &[u16; 7],
) -> (Outcome, i32) {
    let peer = match filter(&Maps, config, &plain.source, plain.frame_to, &plain.addresses) {
        Ok(peer) => peer,
        Err(refused) => return (refused, TC_ACT_SHOT),
    };
    note_sender(skb, peer, &plain.source);
    if config.switches & switch::DECAP == 0 {
        return (known(peer), NEXT);
    }
    let Some(flow) = Flow::of(&plain.source, source_port) else { return (known(peer), NEXT) };
    let merged = skb.gso_size() != 0;
    let taken = if merged {
        Err(Outcome::Merged)
    } else if plain.mergeable {
        Err(Outcome::Burst)
    } else if flow.behind_burst() {
        return (Outcome::BehindBurst, NEXT);
    } else {
        take_out(skb, config, tunnel, plain, overhead, frame)
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
    overhead: usize,
    frame: &[u16; 7],
) -> Result<i32, Outcome> {
    let ecn = plain.decapsulate(tunnel, config.switches & switch::FILTER != 0)?;
    if !exists(skb, tunnel.ifindex) {
        return Err(Outcome::NoDevice);
    }
    decap::strip(skb, overhead, frame, ecn)?;
    // SAFETY: a helper without conditions.
    Ok(unsafe { bpf_redirect(tunnel.ifindex, u64::from(BPF_F_INGRESS)) } as i32)
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
