//! The half of Kvasir that holds and moves bytes.
//!
//! It knows blocks, memory, tiers and peers. It does not know Wasm, gRPC, requests or users: which block to
//! evict is told to it from outside ([`tier::dram::DramStore::offer_victims`]).

pub mod block;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod endpoint_pool;
pub mod error;
pub mod header;
pub mod layout;
pub mod memory;
pub mod metrics;
pub mod server;
pub mod stream;
mod sync;
pub mod tier;
pub mod topology;
pub mod transfer;
pub mod transport;
pub mod wire;

pub use block::{BATCH_MAX, BlockKey, BlockMeta, Pin, checksum};
pub use clock::Clock;
pub use config::{CommitCheck, DramConfig, ServerConfig};
pub use error::StoreError;
pub use tier::dram::DramStore;
