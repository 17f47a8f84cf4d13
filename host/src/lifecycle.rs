//! What becomes of resident blocks, decided by policies beside the data path.
//!
//! # Files
//!
//! * `chooser`: what the thread that owns the eviction policy asks (the thread is the crate `kvasir-eviction`); keeps the choices.
//! * `piece`: a choice of victims as a record that any evictor can be asked again.
//! * `tiers`: opens the tiers below the pool; asks the admitter which blocks they take.
//! * `cluster`: opens this host's cluster; writes its events to the log.

pub mod chooser;
pub mod cluster;
mod piece;
pub mod tiers;
