//! The half of Kvasir that holds and moves bytes, under one name.
//!
//! It knows blocks, memory, tiers and peers. It does not know Wasm, gRPC, requests or users: which block to
//! evict is told to it from outside ([`tier::dram::DramStore::offer_victims`]). Each subject is a crate of its own, and
//! what a crate may know is what its `Cargo.toml` lists.

pub use kvasir_cluster as cluster;
pub use kvasir_net::{endpoint_pool, topology, transfer, transport};
pub use kvasir_protocol::{block, clock, stream, wire};
pub use kvasir_server as server;
pub use kvasir_store::{config, error, metrics, times, units};

pub use kvasir_memory as memory;

/// Where blocks live.
pub mod tier {
    pub use kvasir_gpu::hbm;
    pub use kvasir_nvme as nvme;
    pub use kvasir_remote as remote;
    pub use kvasir_store::{dram, events, ghosts, lifecycle, scrub, store, tiering};
}

pub use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta, Pin, checksum};
pub use kvasir_protocol::clock::Clock;
pub use kvasir_server::ServerConfig;
pub use kvasir_store::config::{CommitCheck, DramConfig};
pub use kvasir_store::dram::DramStore;
pub use kvasir_store::error::StoreError;
