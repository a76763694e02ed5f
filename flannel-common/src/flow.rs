//! Flows that may skip the host's stack, and the proof that they may.
//!
//! A packet on its way out is seen at the pod's device before the stack and at the tunnel's
//! device after it; on its way in at the tunnel's before and at the pod's after. If a flow's
//! packets come out with the tuple they went in with, in both directions, the stack is the
//! identity for this flow: no NAT, no rule in its way. The agent then asks conntrack and promotes
//! the flow. A promoted flow proves itself again in every interval, or lapses.
//!
//! Programs on several CPUs change a [`Flow`] at the same time without a lock. A lost write makes
//! a flow take the stack for longer, never for less: what lets a packet bypass the stack is written
//! after a packet came out of it.

use core::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

pub mod packet;

/// How many flows `FLOWS4` and `FLOWS6` have room for, each.
pub const MAX_FLOWS: u32 = 65_536;

/// Packets that a flow sends through the stack before it is worth the agent's while.
pub const WORTH_PACKETS: u32 = 16;

/// The first pause between two offers of a flow to the agent, in nanoseconds. It doubles.
const OFFER_PAUSE_NS: u64 = 250_000_000;

/// The pause doubles this often.
const OFFER_DOUBLINGS: u32 = 8;

/// An IPv4 flow as seen from the local pod: a key of `FLOWS4`. The alignment has BPF move it by
/// words instead of bytes.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
pub struct Flow4Key {
    /// The pod's address, network order.
    pub local: [u8; 4],
    /// The other end's address, network order.
    pub remote: [u8; 4],
    /// The pod's port, network order.
    pub local_port: [u8; 2],
    /// The other end's port, network order.
    pub remote_port: [u8; 2],
    /// IP protocol number: TCP or UDP.
    pub protocol: u8,
    /// Keeps the size a multiple of four; zero.
    pub reserved: [u8; 3],
}

/// An IPv6 flow as seen from the local pod: a key of `FLOWS6`.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Pod, Zeroable)]
pub struct Flow6Key {
    /// The pod's address, network order.
    pub local: [u8; 16],
    /// The other end's address, network order.
    pub remote: [u8; 16],
    /// The pod's port, network order.
    pub local_port: [u8; 2],
    /// The other end's port, network order.
    pub remote_port: [u8; 2],
    /// IP protocol number: TCP or UDP.
    pub protocol: u8,
    /// Keeps the size a multiple of four; zero.
    pub reserved: [u8; 3],
}

/// What the programs are told about flows: the one entry of `FLOW_RULES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowRules {
    /// Until when flows may bypass the stack, nanoseconds of the monotonic clock. The agent moves
    /// it on; without an agent it passes. 0 switches all of it off, the learning too.
    pub alive_until: u64,
    /// Once in this time each direction has to prove itself again, nanoseconds.
    pub interval: u64,
    /// Flows of another epoch begin anew.
    pub epoch: u32,
    /// The tunnel device's MTU for IPv4 packets, bytes.
    pub mtu_v4: u32,
    /// The tunnel device's MTU for IPv6 packets, bytes.
    pub mtu_v6: u32,
    /// This node's IPv4 subnet, network order.
    pub subnet_v4: [u8; 4],
    /// This node's IPv6 subnet, network order.
    pub subnet_v6: [u8; 16],
    /// The mask of `subnet_v4`; all ones with an all zero subnet stands for none.
    pub mask_v4: [u8; 4],
    /// The mask of `subnet_v6`.
    pub mask_v6: [u8; 16],
    /// Keeps the size a multiple of eight; zero.
    pub reserved: u32,
}

impl FlowRules {
    /// Whether an address, in network order, is of this node's IPv4 subnet.
    #[inline(always)]
    pub fn is_local_v4(&self, address: [u8; 4]) -> bool {
        let mask = u32::from_ne_bytes(self.mask_v4);
        u32::from_ne_bytes(address) & mask == u32::from_ne_bytes(self.subnet_v4)
    }

    /// Whether an address, in network order, is of this node's IPv6 subnet.
    #[inline(always)]
    pub fn is_local_v6(&self, address: [u8; 16]) -> bool {
        let mask = u128::from_ne_bytes(self.mask_v6);
        u128::from_ne_bytes(address) & mask == u128::from_ne_bytes(self.subnet_v6)
    }
}

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the pod into the tunnel.
    Out = 0,
    /// From the tunnel to the pod.
    In = 1,
}

impl Direction {
    const fn other(self) -> Self {
        match self {
            Self::Out => Self::In,
            Self::In => Self::Out,
        }
    }
}

/// What a packet means for its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Data or acknowledgement of an open connection, or a datagram.
    Plain,
    /// The start of a connection: nothing known of the tuple holds.
    Opening,
    /// The end of a connection.
    Closing,
    /// Flags that no open connection sends.
    Odd,
}

/// The first twelve bytes of a frame, destination and source, as words in network order: cheap
/// to compare and to copy in BPF.
pub type FrameAddresses = [u16; 6];

/// Where and how a packet was seen at a pod's or the tunnel's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The device's index.
    pub ifindex: u32,
    /// The frame's addresses.
    pub frame: FrameAddresses,
    /// Nanoseconds of the monotonic clock.
    pub now: u64,
}

/// What to do with a packet before the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// Through the stack.
    Stack,
    /// Past it.
    Bypass,
    /// Through the stack, and the entry has to go: a promotion under way must not find it.
    Forget,
}

/// What becomes of a flow: a value of `FLOWS4` and `FLOWS6`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// When the entry was made: tells a connection from the next one with its tuple.
    pub born: u64,
    /// By direction, when a packet last came out of the stack as it went in; 0 is never.
    pub confirmed: [u64; 2],
    /// By direction, since when packets went into the stack and none came out; 0 if none did.
    pub asked: [u64; 2],
    /// When the flow was last offered to the agent.
    pub offered: u64,
    /// By direction, how many packets bypassed the stack. Merged ones count once.
    pub bypassed: [u64; 2],
    /// By direction, what the device at the way's end was found to take.
    pub taken: [Taken; 2],
    /// The epoch in which the proof began.
    pub epoch: u32,
    /// [`PROMOTED`], [`CLOSED`].
    pub state: u32,
    /// Packets that came out of the stack unchanged, up to [`WORTH_PACKETS`].
    pub proved: u32,
    /// How often the flow was offered to the agent.
    pub offers: u32,
    /// The pod's device.
    pub pod_ifindex: u32,
    /// What the stack writes to the pod: the pod's MAC, then the gateway's.
    pub pod_frame: FrameAddresses,
    /// What the stack writes into the tunnel: the peer's MAC, then our own.
    pub tunnel_frame: FrameAddresses,
    /// The kernel's hash of packets whose sender's socket gave them none; 0 is not known yet.
    /// Computing it takes longer than all that a program does with a packet.
    pub hash: u32,
}

/// What a device takes, and since when that is known.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Taken {
    /// When the kernel was asked, in jiffies; the last bits.
    pub asked: u32,
    /// A frame's length that it said yes to; of a merged packet, that of each of its parts.
    pub len: u32,
}

/// The agent has let the flow bypass the stack.
pub const PROMOTED: u32 = 1;
/// The connection is ending: it takes the stack to its last packet.
pub const CLOSED: u32 = 2;

const _: () = {
    assert!(size_of::<Flow4Key>() == 16);
    assert!(size_of::<Flow6Key>() == 40);
    assert!(size_of::<FlowRules>() == 72);
    assert!(offset_of!(FlowRules, subnet_v4) == 28);
    assert!(size_of::<Flow>() == 128);
    assert!(offset_of!(Flow, epoch) == 80);
    assert!(offset_of!(Flow, pod_frame) == 100);
    assert!(size_of::<Offer>() == 64);
};

/// A flow that may be worth a promotion: what comes through the ring buffer `EVENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Offer {
    /// The flow, if `family` is 4.
    pub v4: Flow4Key,
    /// The flow, if `family` is 6.
    pub v6: Flow6Key,
    /// 4 or 6.
    pub family: u32,
    /// Keeps the size a multiple of eight; zero.
    pub reserved: u32,
}

mod proof;

#[cfg(feature = "user")]
mod user {
    use super::{Flow, Flow4Key, Flow6Key, FlowRules, Offer};

    // SAFETY: the derives of bytemuck's `Pod` checked it: no padding, any bit pattern is valid.
    unsafe impl aya::Pod for Flow4Key {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Flow6Key {}
    // SAFETY: as above.
    unsafe impl aya::Pod for FlowRules {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Flow {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Offer {}
}
