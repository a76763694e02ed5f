//! Putting a packet into the tunnel: the way to the peer, the room, the headers, the NIC.
//!
//! Everything that can fail comes before the first change to the packet, so that a failure
//! leaves it to the kernel's device as it was.

use core::mem;

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L2_ETH, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4,
        BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO,
        BPF_F_ADJ_ROOM_NO_CSUM_RESET, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_fib_lookup as FibLookup,
    },
    helpers::{
        bpf_fib_lookup, bpf_get_prandom_u32, bpf_jiffies64, bpf_redirect, bpf_skb_adjust_room,
    },
};
use flannel_common::{
    encap::{
        self, Each, Ethernet, HeadV4, HeadV6, OVERHEAD_V4, OVERHEAD_V6, Outer, outer_len,
        source_port,
    },
    map::{Config, Tunnel, Vtep, VtepKey},
    outcome::Outcome,
    outer::Packet,
    wire::{
        ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Header, IPV6_LEN, TCP, UDP, mac_bytes,
        mac_words, v6_quarters,
    },
};

use crate::{
    maps,
    skb::{self, Skb},
};

/// After so many jiffies a packet goes by the kernel's device: between a quarter of a second and
/// two and a half, by the kernel's HZ.
const REFRESH_JIFFIES: u64 = 256;

/// The loopback device of any network namespace. A look-up from there is the one that a local
/// sender's packet gets.
const LOOPBACK: u32 = 1;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// `ENOTSUPP` and `EALREADY`, as `bpf_skb_adjust_room` returns them.
const NOT_SUPPORTED: i64 = -524;
const ALREADY: i64 = -114;

/// An inner packet as it is about to enter the tunnel.
#[derive(Clone, Copy)]
pub struct Inner {
    /// The Ethernet header to be put inside; its destination is the peer's device.
    pub frame: Ethernet,
    /// The DS field.
    pub ds_field: u8,
    /// The length of the longest IP packet that this is on the wire.
    pub wire_len: u32,
}

/// Reads the inner packet: IPv4 or IPv6, its own or about to be segmented.
#[inline(always)]
pub fn inspect(skb: Skb) -> Result<Inner, Outcome> {
    let ip = ETHERNET_LEN as u32;
    let head = skb.head::<{ ETHERNET_LEN + 10 }>().ok_or(Outcome::NotIp)?;
    let (ds_field, header_len, protocol) = match skb.ethertype() {
        ETHERTYPE_IPV4 => {
            let header_len = u32::from(head.byte(ETHERNET_LEN) & 0x0f) * 4;
            (head.byte(ETHERNET_LEN + 1), header_len, head.byte(ETHERNET_LEN + 9))
        }
        ETHERTYPE_IPV6 => {
            let [_, ds_field] = (head.be16(ETHERNET_LEN) >> 4).to_be_bytes();
            (ds_field, IPV6_LEN as u32, head.byte(ETHERNET_LEN + 6))
        }
        _ => return Err(Outcome::NotIp),
    };
    let frame = head.words(0);
    let gso_size = skb.gso_size();
    let wire_len = if gso_size == 0 {
        skb.len().saturating_sub(ip)
    } else {
        let transport = match protocol {
            TCP => {
                let [offset] = skb.bytes(ip + header_len + 12).ok_or(Outcome::GsoKind)?;
                u32::from(offset >> 4) * 4
            }
            UDP => 8,
            // Extension headers, or a tunnel.
            _ => return Err(Outcome::GsoKind),
        };
        header_len + transport + gso_size
    };
    Ok(Inner { frame, ds_field, wire_len })
}

/// Who sends a packet that no way is known for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// The tunnel device's own program: what it leaves, the device sends.
    Tunnel,
    /// A pod's: what it leaves comes to the tunnel device's program.
    Pod,
}

/// Finds the peer's end. Now and then the kernel's device has to send a packet itself.
#[inline(always)]
pub fn vtep(frame: &Ethernet, tunnel: u16, asker: Asker) -> Result<Vtep, Outcome> {
    let [a, b, c, ..] = *frame;
    let key = VtepKey { mac: mac_bytes(&[a, b, c]), tunnel };
    let vtep = maps::VTEPS.get_ptr_mut(key).ok_or(Outcome::NoVtep)?;
    // SAFETY: a valid pointer into the map. Two CPUs may both write: the later one wins.
    let vtep = unsafe { &mut *vtep };
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_jiffies64() };
    if now.wrapping_sub(vtep.kernel_jiffies) > REFRESH_JIFFIES {
        if asker == Asker::Tunnel {
            vtep.kernel_jiffies = now;
        }
        return Err(Outcome::Refresh);
    }
    Ok(*vtep)
}

/// How many ways are remembered; a power of two.
pub const WAYS: usize = 256;

/// For so many jiffies a way is believed: up to 20 milliseconds, by the kernel's HZ.
const BELIEVED_JIFFIES: u64 = 1;

/// The way that packets of one flow took a moment ago: what routing said, and their headers over
/// IPv4. Looking it up again for every packet of a busy flow costs more than all the rest, and a
/// change of a route, a neighbour or the forwarding table takes longer to get here than a way is
/// believed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Way {
    /// The headers; only what [`encap::complete_v4`] writes is of one packet.
    head: HeadV4,
    /// When it was found, in jiffies.
    found: u64,
    /// The flow's hash, which the source port is made of.
    hash: u32,
    /// What [`encap::begin_v4`] returned.
    sum: u32,
    /// The interface to send to.
    ifindex: u32,
    /// The longest outer IP packet for it.
    mtu: u32,
}

/// Whose way is sought.
struct Sought {
    /// The inner frame, between the tunnel devices.
    frame: Ethernet,
    /// The longest outer IP packet.
    wire_len: u16,
    /// The flow's hash.
    hash: u32,
    /// Now, in jiffies.
    now: u64,
    /// Whether a [`Asker::Pod`] asks.
    for_pod: u32,
}

impl Way {
    /// Whether this is the one.
    #[inline(always)]
    fn is(&self, sought: &Sought) -> bool {
        let inside: Ethernet = self.head.words(OVERHEAD_V4);
        self.hash == sought.hash
            && sought.now.wrapping_sub(self.found) <= BELIEVED_JIFFIES
            && u32::from(sought.wire_len) <= self.mtu
            && inside == sought.frame
    }

    /// Finds it. On an error it is nobody's.
    #[inline(always)]
    fn find(&mut self, skb: Skb, config: &Config, sought: &Sought) -> Result<i32, Outcome> {
        self.mtu = 0;
        let asker = if sought.for_pod == 0 { Asker::Tunnel } else { Asker::Pod };
        let vtep = vtep(&sought.frame, VtepKey::V4, asker)?;
        let port = port(config, sought.hash)?;
        // SAFETY: all zeros are a valid value.
        let mut fib: FibLookup = unsafe { mem::zeroed() };
        fib.family = AF_INET;
        let [.., a, b, c, d] = config.v4.local.octets;
        fib.__bindgen_anon_3.ipv4_src = u32::from_ne_bytes([a, b, c, d]);
        let [.., a, b, c, d] = vtep.remote.octets;
        fib.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes([a, b, c, d]);
        let next_hop = route(skb, config, &mut fib, port, sought.wire_len)?;
        let outer = outer(config, &config.v4, &sought.frame, &vtep, port, &next_hop);
        self.head = HeadV4::ZERO;
        self.sum = encap::begin_v4(&mut self.head, &outer);
        self.hash = sought.hash;
        self.ifindex = fib.ifindex;
        self.found = sought.now;
        // SAFETY: where the helper has put it (Linux 5.12), if it was asked about a length.
        self.mtu = u32::from(unsafe { fib.__bindgen_anon_1.mtu_result });
        Ok(0)
    }
}

/// [`Way::find`]. A call, for the stack's sake: few packets need it.
#[inline(never)]
fn find_way(raw: *mut __sk_buff, config: &Config, way: &mut Way, sought: &Sought) -> i64 {
    skb::pack(way.find(raw.into(), config, sought))
}

/// Puts the packet into the tunnel over IPv4; returns the interface to send to, or why not
/// by its number. On an error nothing was changed, but for `DropNoMemory`.
#[inline(always)]
pub fn push_over_v4(skb: Skb, config: &Config, inner: &Inner, asker: Asker) -> Result<u32, u32> {
    let too_big = Outcome::TooBig.index();
    let ip_len = skb.len().saturating_sub(ETHERNET_LEN as u32);
    let len = outer_len(ip_len, OVERHEAD_V4).ok_or(too_big)?;
    let wire_len = outer_len(inner.wire_len, OVERHEAD_V4).ok_or(too_big)?;
    // SAFETY: a helper without conditions.
    let now = unsafe { bpf_jiffies64() };
    let for_pod = u32::from(asker == Asker::Pod);
    let sought = Sought { frame: inner.frame, wire_len, hash: skb.hash(), now, for_pod };
    let slot = sought.hash & (WAYS as u32 - 1);
    let way = maps::WAYS.get_ptr_mut(slot).ok_or(Outcome::NoRoom.index())?;
    // SAFETY: this CPU's own slot, and nothing else of ours runs on this CPU in between.
    let way = unsafe { &mut *way };
    if !way.is(&sought) {
        skb::unpack(find_way(skb.raw(), config, way, &sought))?;
    }
    let each = Each { ds_field: inner.ds_field, len };
    encap::complete_v4(&mut way.head, way.sum, each, id(skb.segments()));
    push_v4(skb, &way.head).map_err(Outcome::index)?;
    Ok(way.ifindex)
}

/// Finds the way over IPv6 and makes the headers; returns the interface to send to. `inner_sum` is
/// [`inner_sum`]'s.
#[inline(always)]
pub fn prepare_v6(
    skb: Skb,
    config: &Config,
    inner: &Inner,
    inner_sum: i64,
    vtep: &Vtep,
    head: &mut HeadV6,
) -> Result<u32, Outcome> {
    let sum = u32::try_from(inner_sum).map_err(|_| Outcome::NeedsChecksum)?;
    let len = outer_len(skb.len().saturating_sub(ETHERNET_LEN as u32), OVERHEAD_V6)
        .ok_or(Outcome::TooBig)?;
    let port = port(config, skb.hash())?;
    // SAFETY: all zeros are a valid value.
    let mut fib: FibLookup = unsafe { mem::zeroed() };
    fib.family = AF_INET6;
    fib.__bindgen_anon_3.ipv6_src = v6_quarters(&config.v6.local.octets);
    fib.__bindgen_anon_4.ipv6_dst = v6_quarters(&vtep.remote.octets);
    let next_hop = route(skb, config, &mut fib, port, len)?;
    let outer = outer(config, &config.v6, &inner.frame, vtep, port, &next_hop);
    encap::head_v6(head, &outer, Each { ds_field: inner.ds_field, len }, sum);
    Ok(fib.ifindex)
}

/// [`encap::inner_sum`] of the packet; negative if there is none. What is to be segmented has none:
/// only the kernel can promise a checksum for every segment.
#[inline(always)]
pub fn inner_sum(skb: Skb) -> i64 {
    if skb.gso_size() != 0 || skb.ethertype() != ETHERTYPE_IPV6 {
        return -1;
    }
    sum_inner(skb.raw())
}

/// A call of its own, for the stack's sake.
#[inline(never)]
fn sum_inner(raw: *mut __sk_buff) -> i64 {
    let head = Skb::from(raw).head::<{ ETHERNET_LEN + IPV6_LEN }>();
    head.and_then(|head| encap::inner_sum(&head)).map_or(-1, i64::from)
}

/// Makes room for the headers over IPv4 and puts them there. On an error nothing was changed, but
/// for `DropNoMemory`.
#[inline(always)]
pub fn push_v4(skb: Skb, head: &HeadV4) -> Result<(), Outcome> {
    make_room(skb, OVERHEAD_V4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4)?;
    // What was just made is in one piece.
    let mut room = skb.in_place::<{ ETHERNET_LEN + OVERHEAD_V4 }>().ok_or(Outcome::DropNoMemory)?;
    room.put(0, &head.0);
    Ok(())
}

/// The same over IPv6.
#[inline(always)]
pub fn push_v6(skb: Skb, head: &HeadV6) -> Result<(), Outcome> {
    make_room(skb, OVERHEAD_V6, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6)?;
    skb.store(head).then_some(()).ok_or(Outcome::DropNoMemory)
}

/// Sends the packet out; returns what the program has to return.
#[inline(always)]
pub fn send(ifindex: u32) -> i32 {
    // SAFETY: a helper without conditions.
    (unsafe { bpf_redirect(ifindex, 0) }) as i32
}

#[inline(always)]
fn port(config: &Config, hash: u32) -> Result<u16, Outcome> {
    source_port(hash, config.source_port_min, config.source_port_max).ok_or(Outcome::NoHash)
}

/// Asks for the next hop and writes its MAC and ours as they begin the outer frame.
#[inline(always)]
fn route(
    skb: Skb,
    config: &Config,
    fib: &mut FibLookup,
    port: u16,
    wire_len: u16,
) -> Result<[u16; 6], Outcome> {
    fib.l4_protocol = UDP;
    fib.sport = port.to_be();
    fib.dport = config.port.to_be();
    fib.__bindgen_anon_1.tot_len = wire_len;
    fib.ifindex = LOOPBACK;
    // SAFETY: the helper reads and writes one structure of this size.
    let result = unsafe {
        bpf_fib_lookup(skb.raw().cast(), core::ptr::from_mut(fib), size_of::<FibLookup>() as i32, 0)
    };
    if result != 0 {
        return Err(match u32::try_from(result) {
            Ok(BPF_FIB_LKUP_RET_NO_NEIGH) => Outcome::NoNeighbour,
            Ok(BPF_FIB_LKUP_RET_FRAG_NEEDED) => Outcome::TooBig,
            _ => Outcome::NoRoute,
        });
    }
    let (to, from) = (mac_words(&fib.dmac), mac_words(&fib.smac));
    Ok([to[0], to[1], to[2], from[0], from[1], from[2]])
}

#[inline(always)]
fn outer<'a>(
    config: &'a Config,
    tunnel: &'a Tunnel,
    inner: &'a Ethernet,
    vtep: &'a Vtep,
    source_port: u16,
    next_hop: &'a [u16; 6],
) -> Outer<'a> {
    Outer { config, tunnel, remote: &vtep.remote.octets, source_port, inner, next_hop }
}

/// The IP id: in sequence, because receivers merge only such packets.
#[inline(always)]
fn id(segments: u32) -> u16 {
    // SAFETY: a helper without conditions.
    let random = || unsafe { bpf_get_prandom_u32() };
    let Some(next) = maps::IP_IDS.get_ptr_mut(0) else { return random() as u16 };
    // SAFETY: this CPU's own slot.
    let next = unsafe { &mut *next };
    if *next == 0 {
        // CPUs shall not walk side by side.
        *next = random();
    }
    let id = *next;
    *next = id.wrapping_add(segments);
    id as u16
}

#[inline(always)]
fn make_room(skb: Skb, overhead: usize, family: u32) -> Result<(), Outcome> {
    let ethernet = (ETHERNET_LEN as u64) << 56;
    let flags = BPF_F_ADJ_ROOM_FIXED_GSO
        | BPF_F_ADJ_ROOM_NO_CSUM_RESET
        | BPF_F_ADJ_ROOM_ENCAP_L4_UDP
        | BPF_F_ADJ_ROOM_ENCAP_L2_ETH
        | family;
    // SAFETY: the kernel passes a valid context.
    let result = unsafe {
        bpf_skb_adjust_room(
            skb.raw(),
            overhead as i32,
            BPF_ADJ_ROOM_MAC,
            u64::from(flags) | ethernet,
        )
    };
    match result {
        0 => Ok(()),
        ALREADY => Err(Outcome::Nested),
        NOT_SUPPORTED => Err(Outcome::GsoKind),
        _ => Err(Outcome::NoRoom),
    }
}
