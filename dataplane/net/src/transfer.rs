//! The transfer engine: batches of moves over every rail there is, by urgency, whatever fails.
//!
//! ```text
//! Engine::connect(peer)  -> Peer       its rails: one endpoint per transport that reaches it
//! Peer::open_segment(s)  -> Segment    a grant per rail
//! Engine::submit(batch)  -> Transfer   poll, wait, cancel; callback, future or eventfd; notice to the peer
//! ```
//!
//! A batch's entries are scatter/gather lists. Each is cut into slices; [`plan`] says which slice goes next and over
//! which rail. There is no dispatching thread: each thread that submits or completes work hands out what fits
//! ([`submit`]). A slice that fails for a reason that another rail may not share is sent again there, until the
//! transfer's deadline; whatever becomes of it, [`complete`] knows which ranges of each entry are valid.
//!
//! A segment belongs to one epoch of its peer: when the peer has restarted, the segment is opened again.
//!
//! Two threads watch (`watch.rs`): one ends transfers at their deadlines, one sees to it that broken rails are connected
//! again and grants renewed, peer by peer, on threads that last as long as that takes.

pub mod complete;
pub mod entry;
pub mod order;
pub mod peer;
pub mod plan;
pub mod submit;
mod watch;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use complete::{EntryStatus, Status, Transfer, TransferError};
pub use entry::{Batch, BatchTooLarge, Entry};
pub use order::Order;
pub use peer::{Paths, Peer, RailMetrics, Segment};
pub use plan::{Class, PlanConfig};
pub use submit::{Engine, EngineConfig};
