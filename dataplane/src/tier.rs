//! Tiers: where blocks live. The trait they share is [`store::BlockStore`]; [`dram`] is the one that lends in place,
//! [`memory`] the plain one that the others are compared with. [`fault`] makes any of them fail on purpose.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod dram;
pub mod events;
pub mod fault;
pub mod ghosts;
pub mod hbm;
pub mod lifecycle;
pub mod memory;
pub mod nvme;
#[cfg(feature = "remote")]
pub mod remote;
pub mod scrub;
pub mod store;
pub mod tiering;

mod counters;
mod extras;
mod lease;
mod record;
mod resident;
mod shard;
pub(crate) mod tenants;
#[cfg(test)]
mod tests;
