//! Peers that send to a MAC which our tunnel device no longer has.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_csum_diff, bpf_l4_csum_replace, bpf_skb_store_bytes},
};
use flannel_common::{
    encap::{OVERHEAD_V4, OVERHEAD_V6},
    map::{Config, Mac},
    outer::{Packet, Seen, recognise},
    wire::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, mac_words},
};

use crate::{maps, skb::Skb, underlay_ingress::for_us};

/// Whether the frame inside goes to another MAC than the tunnel device's. A quick look.
#[inline(always)]
pub fn is_due(skb: Skb, config: &Config) -> bool {
    match skb.ethertype() {
        ETHERTYPE_IPV4 => differs::<OVERHEAD_V4>(skb, &config.v4.mac),
        ETHERTYPE_IPV6 => differs::<OVERHEAD_V6>(skb, &config.v6.mac),
        _ => false,
    }
}

#[inline(always)]
fn differs<const FRAME: usize>(skb: Skb, mac: &Mac) -> bool {
    let (start, end) = skb.linear();
    if start + FRAME + size_of::<Mac>() > end {
        return false;
    }
    // SAFETY: the verifier has seen the comparison with the end.
    let word = |at: usize| unsafe { *((start + FRAME + at) as *const u16) };
    [word(0), word(2), word(4)] != mac_words(mac)
}

/// Gives a peer's packet the tunnel device's MAC in place of another, which a peer that has missed
/// a change goes on using and for which the kernel would drop it. Whether the peer may send it at
/// all is judged after that, by its addresses.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn underlay_readdress(raw: *mut __sk_buff) -> u32 {
    let skb = Skb::from(raw);
    maps::CONFIG.get(0).map_or(0, |config| u32::from(readdress(skb, config).is_some()))
}

#[inline(always)]
fn readdress(skb: Skb, config: &Config) -> Option<()> {
    /// From the checksum to the frame: the VXLAN header and the checksum itself.
    const CHECKSUM_TO_FRAME: u32 = 10;
    /// `BPF_F_RECOMPUTE_CSUM`.
    const RECOMPUTE: u64 = 1;
    let Seen::Tunnel { source, inner, fragment: false } = recognise(&skb, config) else {
        return None;
    };
    let old: [u8; 8] = skb.bytes(inner)?;
    let to_many = old[0] & 1 != 0;
    // SAFETY: only whether there is one counts.
    if to_many || !for_us(skb) || unsafe { maps::PEERS.get(source) }.is_none() {
        return None;
    }
    let mac = if skb.ethertype() == ETHERTYPE_IPV4 { config.v4.mac } else { config.v6.mac };
    let mut new = old;
    let mut at = 0;
    while at < mac.len() {
        new[at] = mac[at];
        at += 1;
    }
    let recompute = if skb.bytes(inner - CHECKSUM_TO_FRAME) == Some([0, 0]) {
        RECOMPUTE
    } else {
        // The two changes make up for each other in a sum over the packet.
        // SAFETY: the helpers read two buffers of eight bytes, and change the packet.
        let replaced = unsafe {
            let (old, new) = (old.as_ptr().cast_mut().cast(), new.as_ptr().cast_mut().cast());
            let difference = bpf_csum_diff(old, 8, new, 8, 0).cast_unsigned();
            bpf_l4_csum_replace(skb.raw(), inner - CHECKSUM_TO_FRAME, 0, difference, 0)
        };
        if replaced != 0 {
            return None;
        }
        0
    };
    // SAFETY: the helper reads as many bytes as a MAC has.
    let stored =
        unsafe { bpf_skb_store_bytes(skb.raw().cast(), inner, new.as_ptr().cast(), 6, recompute) };
    (stored == 0).then_some(())
}
