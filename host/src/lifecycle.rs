//! What becomes of resident blocks, decided by policies beside the data path.
//!
//! # Files
//!
//! * `eviction`: the thread that owns the eviction policy: tells it what happened, and asks it for victims.
//! * `briefing`: how a new engine of the policy learns of a pool that lives on meanwhile.
//! * `haste`: whether puts wait for copies of victims.
//! * `books`: what an engine has been told, and so which answers are within the contract.
//! * `piece`: a choice of victims as a record that any evictor can be asked again.
//! * `tiers`: opens the tiers below the pool; asks the admitter which blocks they take.
//! * `cluster`: opens this host's cluster; writes its events to the log.

mod books;
mod briefing;
pub mod cluster;
pub mod eviction;
mod haste;
mod piece;
pub mod tiers;
