//! Rules of others that the eBPF data path would bypass: found by reading, never touched.
//!
//! Two kinds of packets take a shorter way. Outer packets meet no rule of the host as soon as the
//! programs encapsulate; inner packets meet none once their flow bypasses the stack. A flow proves
//! again and again that the rules let it through unchanged, so what accepts or drops a whole flow
//! is no matter; work on single packets is. Of outer packets there is no such proof, so what may
//! drop them counts, too.

mod condition;
mod nft;
mod ruleset;
mod walk;
mod watch;
mod xtables;

pub use self::{
    walk::{Findings, Surroundings},
    watch::RuleWatch,
};
