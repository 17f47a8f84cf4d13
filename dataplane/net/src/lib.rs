//! Bytes between hosts. A [`transport`] moves them between a local region and memory that a peer granted, an [`endpoint_pool`]
//! keeps connections, [`transfer`] cuts batches into slices over all rails, and [`topology`] says which NIC serves which memory.
//! It knows no blocks, no tiers and no requests.

pub mod endpoint_pool;
pub mod topology;
pub mod transfer;
pub mod transport;
