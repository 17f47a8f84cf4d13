//! Tiers: where blocks live. The trait they share is [`store::BlockStore`]; [`dram`] is the one that lends in place.

pub mod dram;
pub mod events;
pub mod lifecycle;
pub mod store;

mod lease;
mod shard;
#[cfg(test)]
mod tests;
