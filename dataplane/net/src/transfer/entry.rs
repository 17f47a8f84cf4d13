//! What a batch consists of, and how its parts become operations.

use std::sync::Arc;
use std::time::Duration;

use super::complete::Inner;
use super::order::Order;
use super::peer::{Peer, Segment};
use super::plan::{Class, Schedule, Slice, Work};
use crate::transport::op::remote_part_of;
use crate::transport::{Direction, Op, OpError, RemoteRange};
use kvasir_memory::region::{LocalRange, part_of};

/// The most entries of one batch.
pub const ENTRIES_MAX: usize = 1 << 16;

/// One move of a batch: a list of ranges on either side, equally long together.
#[derive(Clone)]
pub struct Entry {
    pub direction: Direction,
    pub segment: Arc<Segment>,
    pub local: Vec<LocalRange>,
    pub remote: Vec<RemoteRange>,
}

impl Entry {
    pub fn len(&self) -> u64 {
        self.local.iter().map(LocalRange::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    pub(super) fn check(&self) -> Result<(), OpError> {
        let local = self.len();
        let remote = self.remote.iter().fold(0u64, |sum, range| sum.saturating_add(range.len));
        if local == 0 || local != remote { Err(OpError::Lengths { local, remote }) } else { Ok(()) }
    }

    /// Joins neighbours: fewer ranges, the same bytes.
    pub(super) fn coalesce(&mut self) {
        self.local.dedup_by(|next, last| last.join(next));
        self.remote.dedup_by(|next, last| {
            let adjoin = last.region == next.region && last.offset.checked_add(last.len) == Some(next.offset);
            if adjoin {
                last.len += next.len;
            }
            adjoin
        });
    }

    /// Where to cut so that no part has more than `most` ranges on a side; the last is the end.
    fn cuts(&self, most: usize) -> Vec<u64> {
        let ends = |lens: &mut dyn Iterator<Item = u64>| -> Vec<u64> {
            let mut end = 0;
            let sums: Vec<u64> = lens
                .map(|len| {
                    end += len;
                    end
                })
                .collect();
            sums.chunks(most).filter_map(|chunk| chunk.last().copied()).collect()
        };
        let mut cuts = ends(&mut self.local.iter().map(LocalRange::len));
        cuts.extend(ends(&mut self.remote.iter().map(|range| range.len)));
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}

/// Moves that belong together.
pub struct Batch {
    pub class: Class,
    pub entries: Vec<Entry>,
    /// Counted from submission; what is not done by then is given up. `None` means the engine's default.
    pub deadline: Option<Duration>,
    /// Sent to the peers once all entries are done, but not if one failed.
    pub notice: Option<Vec<u8>>,
}

impl Batch {
    pub fn new(class: Class) -> Self {
        Self { class, entries: Vec::new(), deadline: None, notice: None }
    }
}

/// What a piece of work belongs to.
#[derive(Clone)]
pub(super) struct Piece {
    pub(super) transfer: Arc<Inner>,
    pub(super) entry: u32,
}

/// A batch above [`ENTRIES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a batch of {0} entries; the most is {max}, submit several", max = ENTRIES_MAX)]
pub struct BatchTooLarge(pub(super) usize);

/// Adds an entry to the queue, in parts of at most `ranges_max` ranges.
pub(super) fn push_entry(
    schedule: &mut Schedule<Piece>,
    entry: &Entry,
    piece: &Piece,
    ranges_max: usize,
    order: Order,
) {
    let class = piece.transfer.class;
    // Equal for entries whose pieces may share an operation: one transfer, one segment, one direction.
    let merge_key = (piece.transfer.id, entry.segment.id << 1 | entry.direction as u64);
    let work =
        |offset, len, ranges| Work { token: piece.clone(), offset, len, ranges, merge_key, avoid: 0, order };
    let ranges = entry.local.len().max(entry.remote.len());
    if ranges <= ranges_max {
        return schedule.push(class, work(0, entry.len(), ranges as u32));
    }
    let mut start = 0;
    // Half, because a part may begin and end inside of ranges.
    for end in entry.cuts(ranges_max / 2) {
        schedule.push(class, work(start, end - start, ranges_max as u32));
        start = end;
    }
}

/// The operation that moves a slice over a rail, or why its segment cannot be used there.
pub(super) fn op_of(id: u64, slice: &Slice<Piece>, rail: usize) -> Result<Op, OpError> {
    // A slice has at least one piece.
    let Piece { transfer, entry } = &slice.pieces[0].token;
    let first = &transfer.entries[*entry as usize];
    let (grant, direction) = (first.segment.grant(rail)?, first.direction);
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    for piece in &slice.pieces {
        let entry = &transfer.entries[piece.token.entry as usize];
        local.extend(part_of(&entry.local, piece.offset, piece.len));
        remote.extend(remote_part_of(&entry.remote, piece.offset, piece.len));
    }
    Ok(Op { id, direction, grant, local, remote, cancel: Some(transfer.cancel.clone()) })
}

pub(super) fn peers_of(inner: &Inner) -> Vec<Arc<Peer>> {
    let mut peers: Vec<Arc<Peer>> = Vec::new();
    for entry in &inner.entries {
        let peer = entry.segment.peer();
        // Batches mostly have one peer, so the last is the one.
        if !peers.iter().rev().any(|known| Arc::ptr_eq(known, peer)) {
            peers.push(peer.clone());
        }
    }
    peers
}
