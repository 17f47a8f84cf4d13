//! Conductor state: the instances, the work they have been given, and what the scheduler policies see
//! of it. A state machine: (state, event, now) to state; no clock, no I/O, no lock.
//!
//! One request passes through it so: [`Conductor::request`] turns it into the arguments of `schedule`
//! (the prefix column comes from [`crate::prefix_index`]), [`Conductor::check`] holds the policy's answer
//! against the tables, [`Conductor::admit`] books the work, and `transfer_done`, `prefill_done`, `progress`
//! and `finished` settle it. Workers keep their policy instance current with
//! [`Conductor::changes_since`].

mod changes;
mod clock;
mod conductor;
mod cost;
mod error;
mod table;
#[cfg(test)]
mod tests;

pub use clock::TableClock;
pub use conductor::{Admission, Ask, Changes, Conductor, DecodeSpec, Limits, Outcome, PrefillSpec, Version};
pub use cost::{DecodeCost, PrefillCost, TransferCost};
pub use error::{Error, Invalid};
