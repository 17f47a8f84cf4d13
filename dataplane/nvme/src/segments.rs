//! The books of the segments: what each is used for, how much of it is alive, and who is using it right now.
//!
//! A segment goes free → open (hot: new blocks; cold: moved ones) → sealed → reclaiming → free. Its epoch rises each
//! time it is opened, so nothing of an earlier life is taken for content of the present one.

use std::fs::File;
use std::sync::Arc;

use super::format::{Kind, Tombstone};

/// Free segments that only compaction may take, so that it can always make progress, as long as its writes succeed: one to move into,
/// and one for what does not fit because blocks cannot be split or tombstones came in between.
pub(super) const RESERVE: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Open(Kind),
    Sealed,
    /// The janitor empties it.
    Reclaiming,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) state: State,
    pub(super) epoch: u64,
    /// Pages appended so far.
    pub(super) end: u32,
    pub(super) live_blocks: u32,
    pub(super) live_pages: u32,
    /// Pages that compaction would win back.
    pub(super) dead_pages: u32,
    /// How often it could not be emptied: others are tried first.
    pub(super) setbacks: u32,
    /// Reads and writes under way.
    pub(super) readers: u32,
    pub(super) writers: u32,
    /// A write has ended since the last sync of a flush began.
    pub(super) unsynced: bool,
    /// The file was created, and its name in the folder is not yet durable.
    pub(super) unlisted: bool,
    /// `None` until the file is first needed.
    pub(super) file: Option<Arc<File>>,
}

impl Segment {
    fn new() -> Self {
        Self {
            state: State::Free,
            epoch: 0,
            end: 0,
            live_blocks: 0,
            live_pages: 0,
            dead_pages: 0,
            setbacks: 0,
            readers: 0,
            writers: 0,
            unsynced: false,
            unlisted: false,
            file: None,
        }
    }

    pub(super) fn lives(&mut self, pages: u32) {
        self.live_blocks += 1;
        self.live_pages += pages;
    }

    pub(super) fn dies(&mut self, pages: u32) {
        self.live_blocks -= 1;
        self.live_pages -= pages;
        self.dead_pages += pages;
    }

    /// Nothing in it is in use any more.
    pub(super) fn is_drained(&self) -> bool {
        self.live_blocks == 0 && self.readers == 0 && self.writers == 0
    }
}

pub(super) struct Segments {
    pub(super) list: Vec<Segment>,
    /// Pages of one segment.
    pub(super) pages: u32,
    pub(super) next_epoch: u64,
}

impl Segments {
    pub(super) fn new(count: u32, pages: u32) -> Self {
        Self { list: (0..count).map(|_| Segment::new()).collect(), pages, next_epoch: 1 }
    }

    pub(super) fn at(&mut self, segment: u32) -> &mut Segment {
        &mut self.list[segment as usize]
    }

    pub(super) fn free(&self) -> usize {
        self.list.iter().filter(|segment| segment.state == State::Free).count()
    }

    /// A segment that `kind` may open now; one whose file exists is preferred.
    pub(super) fn free_for(&self, kind: Kind) -> Option<u32> {
        let reserve = if kind == Kind::Cold { 0 } else { RESERVE };
        let free = || (0u32..).zip(&self.list).filter(|(_, segment)| segment.state == State::Free);
        if free().count() <= reserve {
            return None;
        }
        let with_file = free().find(|(_, segment)| segment.file.is_some());
        with_file.or_else(|| free().next()).map(|(number, _)| number)
    }

    /// Begins a new life of a free segment.
    pub(super) fn open(&mut self, segment: u32, kind: Kind, file: Arc<File>) {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        *self.at(segment) = Segment { state: State::Open(kind), epoch, file: Some(file), ..Segment::new() };
    }

    /// The sealed segment with the least to move, if emptying it would gain enough.
    pub(super) fn emptiest(&self) -> Option<u32> {
        // Less than this is not worth copying; what stays dead is covered by the room that capacity leaves.
        let least = (self.pages / 32).max(2);
        let sealed =
            self.sealed().filter(|(_, segment)| segment.live_blocks == 0 || segment.dead_pages >= least);
        sealed.min_by_key(|(_, segment)| (segment.setbacks, segment.live_pages)).map(|(number, _)| number)
    }

    /// The sealed segment that was opened first, of those that can be emptied.
    pub(super) fn oldest(&self) -> Option<u32> {
        self.sealed().min_by_key(|(_, segment)| (segment.setbacks, segment.epoch)).map(|(number, _)| number)
    }

    /// Whether the tombstone's target is still on the disk.
    pub(super) fn holds(&self, tombstone: &Tombstone) -> bool {
        let target = self.list.get(tombstone.target.segment as usize);
        target.is_some_and(|target| target.state != State::Free && target.epoch == tombstone.target_epoch)
    }

    /// The last writes to a sealed segment are under way: it may become something to reclaim.
    pub(super) fn settling(&self) -> bool {
        self.list.iter().any(|segment| segment.state == State::Sealed && segment.writers > 0)
    }

    fn sealed(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..).zip(&self.list).filter(|(_, segment)| segment.state == State::Sealed && segment.writers == 0)
    }

    /// Pages from the first to the last appended one of every segment that is not free.
    pub(super) fn used_pages(&self) -> u64 {
        let used = self.list.iter().filter(|segment| segment.state != State::Free);
        used.map(|segment| u64::from(segment.end)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_free_segments_are_for_compaction_and_the_emptiest_goes_first() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut segments = Segments::new(5, 256);
        for _ in 0..3 {
            let number = segments.free_for(Kind::Hot).unwrap();
            segments.open(number, Kind::Hot, file.clone());
        }
        assert_eq!((segments.free_for(Kind::Hot), segments.free_for(Kind::Cold)), (None, Some(3)));
        assert_eq!((segments.emptiest(), segments.oldest()), (None, None), "open segments are left alone");
        for (number, (live, dead)) in [(100, 20), (90, 7), (95, 30)].into_iter().enumerate() {
            let segment = segments.at(number as u32);
            (segment.state, segment.dead_pages) = (State::Sealed, dead);
            segment.lives(live);
        }
        assert_eq!(segments.emptiest(), Some(2), "segment 1 has less to move, but hardly anything to win");
        assert_eq!(segments.oldest(), Some(0));
        segments.at(1).dies(90);
        assert_eq!(segments.emptiest(), Some(1));
        segments.at(1).writers = 1;
        assert_eq!(segments.emptiest(), Some(2), "a write is still under way");
    }
}
