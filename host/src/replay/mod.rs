//! Replays request traces through the components that run in production.

pub mod cache;
pub mod caches;
pub mod chains;
pub mod classes;
pub mod cluster;
pub mod compare;
pub mod contender;
pub mod content;
pub mod generate;
pub mod optimum;
pub mod page;
mod plot;
pub mod pool;
pub mod recorded;
pub mod stats;
pub mod store;
pub mod tally;
pub mod tiers;
pub mod trace;
