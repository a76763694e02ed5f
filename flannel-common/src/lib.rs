//! What the agent and its BPF programs share.
//!
//! [`map`] is the contract between the two: the keys and values of the pinned maps.
//! [`outer`] recognises tunnel packets, as a pure function over bytes, so that ordinary
//! tests run the very source that becomes BPF. [`encap`] makes the outer headers, [`decap`] judges
//! what comes with them. [`outcome`] names what can become of a packet.
#![no_std]
#![expect(
    clippy::inline_always,
    reason = "in BPF a call costs a stack frame of 512 bytes at most, and the verifier loses what it knew"
)]

pub mod decap;
pub mod ecn;
pub mod encap;
pub mod map;
pub mod outcome;
pub mod outer;
pub mod wire;
