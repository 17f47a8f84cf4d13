//! Tiers: where blocks live. Today one, [`dram`].

pub mod dram;
pub mod events;
pub mod lifecycle;

mod lease;
mod shard;
#[cfg(test)]
mod tests;
