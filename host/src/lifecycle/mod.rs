//! What becomes of resident blocks, decided by policies beside the data path.

mod books;
mod briefing;
pub mod cluster;
pub mod eviction;
mod piece;
pub mod tiers;
