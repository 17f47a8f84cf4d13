//! Conductor state: the instances, the work they have been given, and what the scheduler policies see
//! of it. A state machine: (state, event, now) to state; no clock, no I/O, no lock.
//!
//! One request passes through it so: [`Conductor::request`] turns it into the arguments of `schedule`
//! (the prefix column comes from [`crate::prefix_index`]), [`Told::check`] holds the policy's answer
//! against what it was told, [`Conductor::forecast`] predicts its times, [`Conductor::admit`] checks it
//! against the present and books the work, and `transfer_done`, `prefill_done`, `progress` and `finished`
//! settle it. Workers keep their copy of the tables and their policy instance current with
//! [`Told::catch_up`].

mod answer;
mod changes;
mod clock;
mod conductor;
mod cost;
mod error;
mod table;
#[cfg(test)]
mod tests;
mod told;

pub use clock::TableClock;
pub use conductor::{Admission, Ask, Conductor, DecodeSpec, Limits, Outcome, PrefillSpec, Version};
pub use cost::{DecodeCost, PrefillCost, TransferCost};
pub use error::{Error, Invalid};
pub use told::{Changes, Told};
