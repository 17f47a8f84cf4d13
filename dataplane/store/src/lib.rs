//! Tiers: where blocks live. The trait they share is [`store::BlockStore`]; [`dram`] is the one that lends in place,
//! `memory` the plain one that the others are compared with. `fault` makes any of them fail on purpose.

pub mod config;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod counters;
pub mod departures;
pub mod dram;
pub mod error;
pub mod events;
#[cfg(any(test, feature = "conformance"))]
pub mod fault;
pub mod ghosts;
pub mod lifecycle;
#[cfg(any(test, feature = "conformance"))]
pub mod memory;
pub mod metrics;
pub mod scrub;
pub mod store;
pub mod tiering;
pub mod times;
pub mod units;

mod extras;
mod index;
mod lease;
mod record;
pub mod resident;
mod shard;
mod sync;
mod tenants;
#[cfg(test)]
mod tests;

pub use shard::hash_of;
