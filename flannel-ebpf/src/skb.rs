//! The kernel's packet, as the programs use it.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{
        bpf_get_hash_recalc, bpf_set_hash, bpf_skb_load_bytes, bpf_skb_pull_data,
        bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use flannel_common::{
    outcome::Outcome,
    outer::Packet,
    wire::{Header, Words},
};

/// `PACKET_HOST` (`linux/if_packet.h`): the frame was sent to the device's own MAC.
const THIS_HOST: u32 = 0;
/// `PACKET_OTHERHOST`: the frame was sent to another host's MAC.
const OTHER_HOST: u32 = 3;

/// What is behind the IP header of the shortest packet worth a look: ports, length, checksum.
const TRANSPORT_LEN: usize = 8;

/// So many bytes are brought together where a driver has left headers apart: all headers over
/// IPv6, and those inside.
const GATHERED: u32 = 160;

/// The start of a packet, in place. Any call that may change the packet ends its life: the
/// verifier refuses to read on.
#[derive(Clone, Copy)]
pub struct Head<const SURE: usize> {
    start: usize,
    end: usize,
}

impl<const SURE: usize> Head<SURE> {
    /// What begins and ends there, if it is as long as that.
    #[inline(always)]
    pub fn between((start, end): (usize, usize)) -> Option<Self> {
        (start + SURE <= end).then_some(Self { start, end })
    }

    /// Writes words as they lie in memory, within the bytes that are sure to be there.
    #[inline(always)]
    pub fn put<const W: usize>(&mut self, offset: usize, words: &[u16; W]) {
        let mut at = 0;
        while at < W && offset + 2 * at + 2 <= SURE {
            // SAFETY: the verifier has seen a comparison with the end.
            unsafe { *((self.start + offset + 2 * at) as *mut u16) = words[at] };
            at += 1;
        }
    }
}

impl<const SURE: usize> Header for Head<SURE> {
    #[inline(always)]
    fn word(&self, offset: usize) -> Option<u16> {
        if offset + 2 > SURE && self.start + offset + 2 > self.end {
            return None;
        }
        // SAFETY: the verifier has seen a comparison with the end, here or in `Skb::head`.
        Some(unsafe { *((self.start + offset) as *const u16) })
    }

    #[inline(always)]
    fn byte(&self, offset: usize) -> u8 {
        if offset >= SURE && self.start + offset + 1 > self.end {
            return 0;
        }
        // SAFETY: as above.
        unsafe { *((self.start + offset) as *const u8) }
    }
}

/// A packet in the kernel's hands: its parts may lie in several places.
#[derive(Clone, Copy)]
pub struct Skb {
    raw: *mut __sk_buff,
}

impl Skb {
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self { raw: ctx.skb.skb }
    }

    #[inline(always)]
    pub fn raw(self) -> *mut __sk_buff {
        self.raw
    }

    /// For what wants aya's type.
    #[inline(always)]
    pub fn context(self) -> TcContext {
        TcContext::new(self.raw)
    }

    #[inline(always)]
    fn fields(&self) -> &__sk_buff {
        // SAFETY: the kernel passes a valid context; the verifier checks every access to it.
        unsafe { &*self.raw }
    }

    /// The length in bytes, from the Ethernet header on.
    #[inline(always)]
    pub fn len(self) -> u32 {
        self.fields().len
    }

    /// The Ethernet type in host order.
    #[inline(always)]
    pub fn ethertype(self) -> u16 {
        u16::from_be(self.fields().protocol as u16)
    }

    /// Whether the frame was sent to this host's MAC, and not to many.
    #[inline(always)]
    pub fn for_this_host(self) -> bool {
        self.fields().pkt_type == THIS_HOST
    }

    /// Whether the frame was sent to another host's MAC.
    #[inline(always)]
    pub fn for_other_host(self) -> bool {
        self.fields().pkt_type == OTHER_HOST
    }

    /// Whether there is a VLAN tag, which the kernel keeps beside the packet.
    #[inline(always)]
    pub fn tagged(self) -> bool {
        self.fields().vlan_present != 0
    }

    /// The firewall mark.
    #[inline(always)]
    pub fn mark(self) -> u32 {
        self.fields().mark
    }

    /// The hash of the flow: that of the sender's socket, or the kernel computes it now.
    #[inline(always)]
    pub fn hash(self) -> u32 {
        // SAFETY: the kernel passes a valid context.
        unsafe { bpf_get_hash_recalc(self.raw) }
    }

    /// Whether nobody has computed a hash yet.
    #[inline(always)]
    pub fn lacks_hash(self) -> bool {
        self.fields().hash == 0
    }

    /// Spares the kernel computing the hash.
    #[inline(always)]
    pub fn set_hash(self, hash: u32) {
        // SAFETY: the kernel passes a valid context.
        unsafe { bpf_set_hash(self.raw, hash) };
    }

    /// The device whose hook this is.
    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        self.fields().ifindex
    }

    /// The payload of each segment of a merged packet; 0 if it is none.
    #[inline(always)]
    pub fn gso_size(self) -> u32 {
        self.fields().gso_size
    }

    /// How many packets this is on the wire.
    #[inline(always)]
    pub fn segments(self) -> u32 {
        self.fields().gso_segs.max(1)
    }

    /// The bytes in one piece: where they begin, and where they end.
    ///
    /// Volatile, because LLVM would load them in a caller and hand them on, cut into halves that the
    /// verifier takes for no packet's.
    #[inline(always)]
    pub fn linear(self) -> (usize, usize) {
        let fields = self.fields();
        // SAFETY: fields of a valid context.
        let (start, end) = unsafe {
            (read_volatile(&raw const fields.data), read_volatile(&raw const fields.data_end))
        };
        (start as usize, end as usize)
    }

    /// The start of the packet: at least `SURE` bytes, and more if they are there. `None` of a
    /// shorter packet. Headers that the driver left elsewhere are first brought to the rest.
    #[inline(always)]
    pub fn head<const SURE: usize>(self) -> Option<Head<SURE>> {
        let (start, end) = self.linear();
        if start + SURE + TRANSPORT_LEN <= end {
            return Some(Head { start, end });
        }
        self.gather::<SURE>()
    }

    /// The same of what is in one piece already.
    #[inline(always)]
    pub fn in_place<const SURE: usize>(self) -> Option<Head<SURE>> {
        Head::between(self.linear())
    }

    #[inline(always)]
    fn gather<const SURE: usize>(self) -> Option<Head<SURE>> {
        let len = self.len();
        // SAFETY: the kernel passes a valid context.
        if unsafe { bpf_skb_pull_data(self.raw, if len < GATHERED { len } else { GATHERED }) } != 0
        {
            return None;
        }
        self.in_place()
    }

    /// The metadata that a program in XDP has put before the packet: where it begins, and where
    /// the packet does.
    #[inline(always)]
    pub fn metadata(self) -> (usize, usize) {
        (self.fields().data_meta as usize, self.fields().data as usize)
    }

    /// Reads the first `LEN` bytes. Words beyond stay as they are.
    #[inline(always)]
    pub fn load<const LEN: u32, const N: usize>(self, words: &mut Words<N>) -> bool {
        const { assert!(LEN as usize <= 2 * N) };
        let to = words.0.as_mut_ptr().cast();
        // SAFETY: the helper writes at most as many bytes as there are, or fails.
        unsafe { bpf_skb_load_bytes(self.raw.cast(), 0, to, LEN) == 0 }
    }

    /// Writes words over the start of the packet, which has to be that long.
    #[inline(always)]
    pub fn store<const N: usize>(self, words: &Words<N>) -> bool {
        let len = (2 * N) as u32;
        // SAFETY: the helper reads `len` bytes from a buffer of that length.
        unsafe { bpf_skb_store_bytes(self.raw().cast(), 0, words.0.as_ptr().cast(), len, 0) == 0 }
    }
}

impl Packet for Skb {
    #[inline(always)]
    fn bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the helper writes N bytes to a buffer of N bytes, or fails.
        let result = unsafe {
            bpf_skb_load_bytes(self.raw.cast(), offset, bytes.as_mut_ptr().cast(), N as u32)
        };
        (result == 0).then_some(bytes)
    }
}

impl From<*mut __sk_buff> for Skb {
    #[inline(always)]
    fn from(raw: *mut __sk_buff) -> Self {
        Self { raw }
    }
}

/// A result as one number: BPF functions return no more.
#[inline(always)]
pub fn pack(result: Result<i32, Outcome>) -> i64 {
    match result {
        Ok(action) => i64::from(action.cast_unsigned()),
        Err(outcome) => -1 - i64::from(outcome.index()),
    }
}

/// The other way round; the outcome by its number.
#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "see `pack`")]
pub fn unpack(packed: i64) -> Result<i32, u32> {
    if packed >= 0 { Ok(packed as i32) } else { Err((-1 - packed) as u32) }
}
