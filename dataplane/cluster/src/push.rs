//! Hand-over of blocks that are stored here to a peer that is about to need them: a [hand-over](super::handover) in one
//! layer, of which the peer keeps each block that arrives intact.

use super::handover::{BLOCKS_MAX, HandOverError, HandingOver};
use super::message::{Copied, Loan};
use super::{Cluster, NoPeer, Shared};
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_store::dram::Held;

/// The most blocks of one push.
pub const PUSH_MAX: usize = BLOCKS_MAX;

/// Why blocks could not be handed over at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    #[error(transparent)]
    NoPeer(#[from] NoPeer),
    #[error("{count} blocks in one hand-over; the most is {PUSH_MAX}, send several")]
    TooMany { count: usize },
    #[error("the blocks were not pushed to {peer}: {source}")]
    Failed { peer: String, source: HandOverError },
}

/// The outcome of a block that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pushed {
    /// In the peer's pool, compared with its checksum.
    Done,
    /// It was there already.
    Had,
    /// Not stored here.
    Missing,
    NoRoom,
    Failed,
}

impl Cluster {
    /// Writes blocks of this host into a peer's pool, in order. Returns when the peer has compared all of them with their
    /// checksums.
    ///
    /// # Errors
    /// The peer is not known, is down, or does not answer; some blocks may have arrived.
    pub fn push(&self, peer: &str, keys: &[BlockKey]) -> Result<Vec<Pushed>, PushError> {
        let shared = &self.shared;
        let link = shared.link_to(peer)?;
        if keys.len() > PUSH_MAX {
            return Err(PushError::TooMany { count: keys.len() });
        }
        let mut pushed = vec![Pushed::Missing; keys.len()];
        let put_after = shared.put_after(keys.iter().copied());
        let held = shared.hold_here(keys).into_iter();
        let (at, held): (Vec<usize>, Vec<_>) =
            held.map(|(at, meta, held)| (at, (meta, put_after[at], held))).unzip();
        if held.is_empty() {
            return Ok(pushed);
        }
        let outcomes = HandingOver::push(shared, link, held);
        let outcomes = outcomes.map_err(|source| PushError::Failed { peer: peer.to_owned(), source })?;
        for (at, outcome) in at.into_iter().zip(outcomes) {
            pushed[at] = match outcome {
                Copied::Done => Pushed::Done,
                Copied::Had => Pushed::Had,
                Copied::NoRoom => Pushed::NoRoom,
                Copied::Failed | Copied::Enough => Pushed::Failed,
            };
        }
        Ok(pushed)
    }
}

impl Shared {
    /// The blocks that this host has, by their index, brought into its pool and held there.
    fn hold_here(&self, keys: &[BlockKey]) -> Vec<(usize, BlockMeta, Held)> {
        let loans = self.lend(self.owner, keys);
        let hold = |(at, loan): (usize, &Option<Loan>)| {
            let meta = loan.as_ref()?.meta;
            Some((at, meta, self.receiving.hold_stored(&meta).ok()?))
        };
        let held = loans.iter().enumerate().filter_map(hold).collect();
        let leases: Vec<u64> = loans.iter().flatten().map(|loan| loan.lease).collect();
        let _ = self.store.release(self.owner, &leases);
        held
    }
}
