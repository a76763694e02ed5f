//! What the agent and its BPF programs share.
//!
//! [`map`] is the contract between the two: the keys and values of the pinned maps; those of
//! flows are in [`flow`]. The data path's decisions are pure functions over bytes, so that
//! ordinary tests run the very source that becomes BPF: [`outer`] recognises tunnel packets,
//! [`encap`] makes outer headers, [`decap`] judges and takes them off, [`ecn`] says what becomes
//! of congestion marks, [`flow`] says which flows may skip the stack. [`outcome`] names what can
//! become of a packet.
#![no_std]
#![expect(
    clippy::inline_always,
    reason = "in BPF a call costs a stack frame of 512 bytes at most, and the verifier loses what it knew"
)]

pub mod decap;
pub mod ecn;
pub mod encap;
pub mod flow;
pub mod map;
pub mod outcome;
pub mod outer;
pub mod wire;
