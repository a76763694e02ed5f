//! Native XDP of the underlay device: what the program at TC would take out of the tunnel is taken
//! out here, before the kernel makes a packet of it, and handed over to TC. What the filter
//! refuses ends here. Everything else passes as it came, and TC has the say.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::{
        xdp_action::{XDP_DROP, XDP_PASS},
        xdp_md,
    },
    helpers::{
        bpf_check_mtu, bpf_xdp_adjust_head, bpf_xdp_adjust_meta, bpf_xdp_get_buff_len,
        bpf_xdp_load_bytes,
    },
    programs::XdpContext,
};
use flannel_common::{
    decap::{self as common, NO_PEER, Plain, filter, plain_v4, plain_v6},
    ecn::{self, Decapsulate},
    encap::{OVERHEAD_V4, OVERHEAD_V6},
    map::{Config, Cookie, OuterAddress, Tunnel, XdpFront, switch},
    outcome::Outcome,
    outer::{self, Packet, Seen},
    wire::{
        ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, IPV4_LEN, IPV6_LEN, UDP, mac_words,
        v6_bytes,
    },
};

use crate::{
    count,
    decap::{Flow, HeadV4, HeadV6, Maps},
    maps,
    skb::Head,
    xdp_front,
};

/// The metadata's length in bytes.
const META: usize = size_of::<Cookie>();

/// Where the outer destination address and the UDP header are in the frame.
const DESTINATION_V4: usize = ETHERNET_LEN + 16;
const DESTINATION_V6: usize = ETHERNET_LEN + 24;
const UDP_V4: usize = ETHERNET_LEN + IPV4_LEN;
const UDP_V6: usize = ETHERNET_LEN + IPV6_LEN;

/// A packet in the driver's hands: its end may lie in pieces elsewhere.
#[derive(Clone, Copy)]
struct Frame {
    raw: *mut xdp_md,
}

impl Frame {
    /// The bytes in one piece: where they begin, and where they end. Volatile for the reason given
    /// at [`Skb::linear`](crate::skb::Skb::linear).
    #[inline(always)]
    fn linear(self) -> (usize, usize) {
        // SAFETY: fields of a valid context.
        let (start, end) = unsafe {
            (
                read_volatile(&raw const (*self.raw).data),
                read_volatile(&raw const (*self.raw).data_end),
            )
        };
        (start as usize, end as usize)
    }

    /// The start of the packet, if it is in one piece and has so many bytes.
    #[inline(always)]
    fn head<const SURE: usize>(self) -> Option<Head<SURE>> {
        Head::between(self.linear())
    }

    /// The length in bytes, from the Ethernet header on.
    #[inline(always)]
    fn len(self) -> u32 {
        // SAFETY: the kernel passes a valid context.
        unsafe { bpf_xdp_get_buff_len(self.raw) as u32 }
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        XdpContext::new(self.raw).ingress_ifindex() as u32
    }
}

impl Packet for Frame {
    #[inline(always)]
    fn bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the helper writes N bytes to a buffer of N bytes, or fails.
        let result =
            unsafe { bpf_xdp_load_bytes(self.raw, offset, bytes.as_mut_ptr().cast(), N as u32) };
        (result == 0).then_some(bytes)
    }
}

/// Looks at one packet.
#[inline(always)]
pub fn run(ctx: &XdpContext) -> u32 {
    let frame = Frame { raw: ctx.ctx };
    let Some(front) = xdp_front::front(frame.ifindex()) else { return XDP_PASS };
    let Some(config) = maps::CONFIG.get(0) else { return XDP_PASS };
    if config.switches & switch::DECAP == 0 {
        return XDP_PASS;
    }
    let len = frame.len();
    let packed = match concerns(frame, config, front) {
        ETHERTYPE_IPV4 => over_v4(frame.raw, config, front),
        ETHERTYPE_IPV6 => over_v6(frame.raw, config, front),
        _ => return XDP_PASS,
    };
    let packed = if packed == UNUSUAL { unusual(frame.raw, config) } else { packed };
    let (outcome, action) = unpack(packed);
    count::add(&maps::XDP_OUTCOMES, outcome, 1, len);
    action
}

/// The Ethernet type of a packet that may be one of the tunnel's, else 0: to our MAC, UDP without IP
/// options, to the tunnel's port. Of what this misses TC does not.
#[inline(always)]
fn concerns(frame: Frame, config: &Config, front: &XdpFront) -> u16 {
    /// Ethernet, IP without options, ports.
    const V4: usize = UDP_V4 + 4;
    const V6: usize = UDP_V6 + 4;
    let (start, end) = frame.linear();
    if config.port == 0 || start + V4 > end {
        return 0;
    }
    // SAFETY: the verifier has seen the comparison with the end.
    let word = |at: usize| unsafe { *((start + at) as *const u16) };
    let mac = mac_words(&front.mac);
    if word(0) != mac[0] || word(2) != mac[1] || word(4) != mac[2] {
        return 0;
    }
    let port = config.port.to_be();
    let is_udp = |of: u16, place: usize| of.to_be_bytes()[place] == UDP;
    match u16::from_be(word(12)) {
        ETHERTYPE_IPV4 if is_udp(u16::from_be(word(22)), 1) && word(UDP_V4 + 2) == port => {
            ETHERTYPE_IPV4
        }
        ETHERTYPE_IPV6
            if is_udp(u16::from_be(word(20)), 0)
                && start + V6 <= end
                && word(UDP_V6 + 2) == port =>
        {
            ETHERTYPE_IPV6
        }
        _ => 0,
    }
}

/// Neither outcome nor action: the packet has to be looked at in another way. Not within a function
/// that has read it already, for the stack's sake.
const UNUSUAL: u64 = u64::MAX;

/// BPF functions return one number.
#[inline(always)]
fn pack((outcome, action): (Outcome, u32)) -> u64 {
    u64::from(outcome.index()) << 32 | u64::from(action)
}

#[inline(always)]
fn unpack(packed: u64) -> (u32, u32) {
    ((packed >> 32) as u32, packed as u32)
}

#[inline(never)]
fn over_v4(raw: *mut xdp_md, config: &Config, front: &XdpFront) -> u64 {
    let frame = Frame { raw };
    let Some(head): Option<HeadV4> = frame.head() else { return UNUSUAL };
    let Some(mut plain) = plain_v4(&head, frame.len(), config) else { return UNUSUAL };
    if OuterAddress::from_v4_words(head.words(DESTINATION_V4)) != config.v4.local {
        return UNUSUAL;
    }
    plain.checksum_fits = head.raw16(UDP_V4 + 6) == 0 || checksum_fits_v4(raw) != 0;
    let judged = judge(frame, config, &config.v4, &plain, head.raw16(UDP_V4));
    let taken = match judged {
        Ok(taken) => taken,
        Err(end) => return pack(end),
    };
    let ip = ETHERNET_LEN + OVERHEAD_V4;
    let (first, checksum) = ecn::set_ce_v4(head.be16(ip), head.be16(ip + 10));
    let mark = match taken.ecn {
        Decapsulate::SetCe => Some(Mark { first, checksum: Some(checksum) }),
        _ => None,
    };
    pack(take_out::<OVERHEAD_V4, IPV4_LEN>(frame, front, mark.as_ref(), &taken))
}

#[inline(never)]
fn over_v6(raw: *mut xdp_md, config: &Config, front: &XdpFront) -> u64 {
    let frame = Frame { raw };
    let Some(head): Option<HeadV6> = frame.head() else { return UNUSUAL };
    let Some(mut plain) = plain_v6(&head, frame.len(), config) else { return UNUSUAL };
    if OuterAddress::from_v6(v6_bytes(&head.words(DESTINATION_V6))) != config.v6.local {
        return UNUSUAL;
    }
    plain.checksum_fits = checksum_fits_v6(raw) != 0;
    let judged = judge(frame, config, &config.v6, &plain, head.raw16(UDP_V6));
    let taken = match judged {
        Ok(taken) => taken,
        Err(end) => return pack(end),
    };
    let first = ecn::set_ce_v6(head.be16(ETHERNET_LEN + OVERHEAD_V6));
    let mark = match taken.ecn {
        Decapsulate::SetCe => Some(Mark { first, checksum: None }),
        _ => None,
    };
    pack(take_out::<OVERHEAD_V6, IPV6_LEN>(frame, front, mark.as_ref(), &taken))
}

/// Calls of their own, for the stack's sake.
#[inline(never)]
fn checksum_fits_v4(raw: *mut xdp_md) -> u64 {
    let head: Option<HeadV4> = Frame { raw }.head();
    u64::from(head.is_some_and(|head| common::checksum_fits_v4(&head)))
}

#[inline(never)]
fn checksum_fits_v6(raw: *mut xdp_md) -> u64 {
    let head: Option<HeadV6> = Frame { raw }.head();
    u64::from(head.is_some_and(|head| common::checksum_fits_v6(&head)))
}

/// Not plain, or not to the tunnel's address: TC's to judge. The kernel's device may get it, so its
/// flow is not to be overtaken.
#[inline(never)]
fn unusual(raw: *mut xdp_md, config: &Config) -> u64 {
    let frame = Frame { raw };
    if let Seen::Tunnel { source, inner, .. } = outer::recognise(&frame, config)
        && let Some(port) = frame.bytes::<2>(inner - 16)
        && let Some(flow) = Flow::of(&source, u16::from_ne_bytes(port))
    {
        flow.leave();
    }
    pack((Outcome::Unusual, XDP_PASS))
}

/// A packet that is to be taken out.
struct Taken {
    ecn: Decapsulate,
    /// Whose it is.
    peer: u32,
    /// Its length on the wire.
    len: u32,
}

/// Judges a plain packet as TC would. If it is not to be taken out: what it ends as here.
#[inline(always)]
fn judge(
    frame: Frame,
    config: &Config,
    tunnel: &Tunnel,
    plain: &Plain,
    source_port: u16,
) -> Result<Taken, (Outcome, u32)> {
    let peer = match filter(&Maps, config, &plain.source, plain.frame_to, &plain.addresses) {
        // Whoever is no peer may have to be logged, which TC does.
        Ok(NO_PEER) => return Err((Outcome::UnknownSource, XDP_PASS)),
        Ok(peer) => peer,
        Err(refused) => return Err((refused, XDP_DROP)),
    };
    let Some(flow) = Flow::of(&plain.source, source_port) else {
        return Err((Outcome::Unusual, XDP_PASS));
    };
    if plain.mergeable {
        flow.leave();
        return Err((Outcome::Burst, XDP_PASS));
    }
    if flow.behind_burst() {
        return Err((Outcome::BehindBurst, XDP_PASS));
    }
    if !xdp_front::attended() {
        return Err((Outcome::Unattended, XDP_PASS));
    }
    match plain.decapsulate(tunnel, config.switches & switch::FILTER != 0) {
        Ok(ecn) if exists(frame, tunnel.ifindex) => Ok(Taken { ecn, peer, len: frame.len() }),
        Ok(_) => {
            flow.leave();
            Err((Outcome::NoDevice, XDP_PASS))
        }
        Err(Outcome::DropCongested) => {
            count::add(&maps::PEER_COUNTERS, peer, 1, frame.len());
            Err((Outcome::DropCongested, XDP_DROP))
        }
        Err(outcome) => {
            flow.leave();
            Err((outcome, XDP_PASS))
        }
    }
}

/// What marks a header as congested: its first word and, over IPv4, its checksum, in host order.
struct Mark {
    first: u16,
    checksum: Option<u16>,
}

/// Takes the outer headers away and puts the cookie before what is left.
#[inline(always)]
fn take_out<const OVERHEAD: usize, const IP: usize>(
    frame: Frame,
    front: &XdpFront,
    mark: Option<&Mark>,
    taken: &Taken,
) -> (Outcome, u32) {
    let (start, end) = frame.linear();
    if start + OVERHEAD + ETHERNET_LEN + IP > end {
        return (Outcome::Unusual, XDP_PASS);
    }
    let meta = META as i32;
    // SAFETY: the kernel passes a valid context.
    if unsafe { bpf_xdp_adjust_meta(frame.raw, -meta) } != 0 {
        return (Outcome::NoMetadata, XDP_PASS);
    }
    // SAFETY: as above.
    if unsafe { bpf_xdp_adjust_head(frame.raw, OVERHEAD as i32) } != 0 {
        // What lies in the metadata may be an old cookie: it must not pass with it.
        // SAFETY: as above.
        let undone = unsafe { bpf_xdp_adjust_meta(frame.raw, meta) } == 0;
        return if undone {
            (Outcome::Unusual, XDP_PASS)
        } else {
            (Outcome::DropNoMemory, XDP_DROP)
        };
    }
    let context = XdpContext::new(frame.raw);
    let (meta, start, end) = (context.metadata(), context.data(), context.data_end());
    // As long as it was before; the verifier does not know.
    if meta + META > start || start + ETHERNET_LEN + IP > end {
        return (Outcome::DropNoMemory, XDP_DROP);
    }
    // SAFETY: the verifier has seen the comparisons.
    let put = |at: usize, word: u16| unsafe { *(at as *mut u16) = word };
    let mut at = 0;
    while at < META / 2 {
        put(meta + 2 * at, front.cookie[at]);
        at += 1;
    }
    if let Some(mark) = mark {
        put(start + ETHERNET_LEN, mark.first.to_be());
        if let Some(checksum) = mark.checksum {
            put(start + ETHERNET_LEN + 10, checksum.to_be());
        }
    }
    count::add(&maps::PEER_COUNTERS, taken.peer, 1, taken.len);
    (Outcome::Decapsulated, XDP_PASS)
}

/// Whether an interface exists. What is handed over for one that is gone would be lost.
#[inline(always)]
fn exists(frame: Frame, ifindex: u32) -> bool {
    let mut mtu = 0;
    // SAFETY: the helper writes one number; that the packet may not fit is not asked here.
    ifindex != 0 && unsafe { bpf_check_mtu(frame.raw.cast(), ifindex, &raw mut mtu, 0, 0) } >= 0
}
