//! Replays request traces through the components that run in production.

pub mod cache;
pub mod chains;
pub mod classes;
pub mod cluster;
pub mod content;
pub mod generate;
pub mod pool;
pub mod stats;
pub mod store;
pub mod trace;
