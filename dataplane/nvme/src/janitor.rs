//! The thread that keeps space free: it empties segments, and saves summaries to the checkpoint.
//!
//! A segment is emptied by moving what lives in it (or, where the store may evict, by forgetting it), and free only once
//! the copies are durable and its first page says so on the disk. The janitor reads sealed segments by itself; whatever
//! changes the index goes through the engine.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::OnFull;
use super::append::Moving;
use super::checkpoint::{Checkpoint, Summary};
use super::engine::{self, Command, Why};
use super::format::{self, Block, Entry, GroupHead, Kind, PAGE, Place, Tombstone};
use super::io::{Op, OpKind, Piece};
use super::scan::Scan;
use super::scrub::Scrub;
use super::segments::{RESERVE, Segments, State};
use super::shared::{Shared, count};
use super::threads::Faults;
use kvasir_memory::buffer::Buffer;
use kvasir_os::disk;
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::{BlockKey, checksum};
use kvasir_store::store::Pending;

/// Bytes read before they are written again.
const MOVE_BYTES: usize = 4 << 20;
/// How long to wait for readers of a segment before looking again.
const PAUSE: Duration = Duration::from_millis(2);
/// How long to leave a segment alone after it could not be emptied.
const SETBACK: Duration = Duration::from_millis(20);

pub(super) struct Janitor {
    pub(super) shared: Arc<Shared>,
    pub(super) checkpoint: Option<Checkpoint>,
    /// Copies in segments that could not be emptied whole: the block was moved, or forgotten. To be removed before any
    /// segment with tombstones is freed, as the removal of a block is kept no longer than the copy that was removed.
    pub(super) left_behind: Vec<Tombstone>,
    pub(super) scrub: Scrub,
    /// Faults of what it writes and syncs by itself.
    pub(super) faults: Faults,
}

/// How a segment is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Move,
    Forget,
}

/// What to do about space.
enum Choice {
    Empty(u32, How),
    /// Writes to a sealed segment have yet to end; then look again.
    Wait,
    /// There is nothing to do. Holds the next epoch if new blocks find no segment.
    Nothing {
        stuck: Option<u64>,
    },
}

impl Janitor {
    /// Works until the store closes; gives the checkpoint back.
    pub(super) fn run(mut self) -> Option<Checkpoint> {
        loop {
            let mut chores = self.shared.wait_for_chores(self.scrub.due);
            let asked = chores.look || chores.starving || !chores.summaries.is_empty();
            let (summaries, starving) = (std::mem::take(&mut chores.summaries), chores.starving);
            (chores.look, chores.starving) = (false, false);
            let close = chores.close;
            drop(chores);
            self.save(&summaries);
            if close {
                return self.checkpoint;
            }
            if asked {
                self.reclaim(starving);
            }
            self.scrub();
        }
    }

    fn save(&self, summaries: &[Summary]) {
        let current = |summary: &&Summary| {
            let mut segments = self.shared.segments();
            let segment = segments.at(summary.segment);
            let same = segment.epoch == summary.epoch && segment.state != State::Free;
            let file = same.then(|| segment.file.clone()).flatten();
            drop(segments);
            file.is_some_and(|file| self.sync(file))
        };
        let durable: Vec<Summary> = summaries.iter().filter(current).cloned().collect();
        if let (Some(checkpoint), false) = (&self.checkpoint, durable.is_empty())
            && checkpoint.save(&durable).is_err()
        {
            // Recovery reads these segments instead.
            count(&self.shared.counters.io_errors, 1);
        }
    }

    /// Makes what was written to a file durable. Returns false if that failed, now or earlier.
    fn sync(&self, file: Arc<File>) -> bool {
        if let Err(error) = self.faults.perform(&engine::sync(file, None)) {
            count(&self.shared.counters.io_errors, 1);
            self.shared.breaks(&error.to_string());
        }
        self.shared.broken().is_none()
    }

    /// Empties segments until enough are free or none is worth it.
    fn reclaim(&mut self, starving: bool) {
        let mut may_move = true;
        loop {
            match self.choose(starving, may_move) {
                Choice::Empty(segment, how) => {
                    if self.reclaim_segment(segment, how, starving).is_some() {
                        self.shared.send(Command::Space { stuck: None });
                        continue;
                    }
                    let mut segments = self.shared.segments();
                    segments.at(segment).state = State::Sealed;
                    segments.at(segment).setbacks += 1;
                    drop(segments);
                    if self.shared.chores_pause(SETBACK) {
                        return;
                    }
                    if !may_move || self.shared.config.on_full == OnFull::Refuse {
                        let stuck = stuck(&self.shared.segments());
                        return self.give_up(stuck.filter(|_| starving));
                    }
                    may_move = false;
                }
                Choice::Wait if starving => {
                    if self.shared.chores_pause(PAUSE) {
                        return;
                    }
                }
                Choice::Wait => return,
                Choice::Nothing { stuck } if starving => return self.give_up(stuck),
                Choice::Nothing { .. } => return,
            }
        }
    }

    /// Tells puts that wait for space that nothing can be reclaimed.
    fn give_up(&self, stuck: Option<u64>) {
        if stuck.is_some() {
            self.shared.send(Command::Space { stuck });
        }
    }

    /// The next segment to empty, now in state reclaiming.
    fn choose(&self, starving: bool, may_move: bool) -> Choice {
        let mut segments = self.shared.segments();
        let enough = RESERVE + (segments.list.len() / 16).max(1);
        let wanted = segments.free() < enough;
        // Space is made ahead of need, but nothing is given up before it must be.
        let forget = self.shared.config.on_full == OnFull::Evict && (starving || segments.free() <= RESERVE);
        let emptiest = segments.emptiest();
        let for_nothing = emptiest.filter(|&segment| segments.at(segment).live_blocks == 0);
        let choice = match for_nothing.or(emptiest.filter(|_| wanted && may_move)) {
            Some(segment) => Choice::Empty(segment, How::Move),
            None => match segments.oldest().filter(|_| wanted && forget) {
                Some(segment) => Choice::Empty(segment, How::Forget),
                None if segments.settling() => Choice::Wait,
                None => Choice::Nothing { stuck: stuck(&segments) },
            },
        };
        if let Choice::Empty(segment, _) = choice {
            segments.at(segment).state = State::Reclaiming;
        }
        choice
    }

    /// Empties and frees a segment. Returns `None` if that failed.
    fn reclaim_segment(&mut self, number: u32, how: How, starving: bool) -> Option<()> {
        let mut segments = self.shared.segments();
        let (pages, epoch) = (segments.pages, segments.at(number).epoch);
        let file = segments.at(number).file.clone()?;
        drop(segments);
        let entries = self.entries(number, &file, pages, epoch)?;
        // Without tombstones no removal goes with it; the space that it makes may be what they wait for.
        if self.bury().is_none() && entries.iter().any(|entry| matches!(entry, Entry::Tombstone(_))) {
            return None;
        }
        let lives = |&(key, from): &(BlockKey, Place)| {
            self.shared.index.get(key).is_some_and(|found| found.place == from)
        };
        let lived: Vec<_> = blocks(&entries).map(|block| place(number, &block)).filter(lives).collect();
        let freed = self.empty(number, &file, &entries, how, starving).and_then(|()| self.free(number));
        if freed.is_none() && !planted::is(Bug::LeavesMovedCopies) {
            let gone = lived.into_iter().filter(|block| !lives(block));
            let tombstone = |(key, target)| Tombstone { key, sequence: 0, target, target_epoch: epoch };
            let gone: Vec<Tombstone> = gone.map(tombstone).collect();
            self.left_behind.extend(gone);
            self.bury();
        }
        freed
    }

    /// Removes what was left behind, once what it was copied to is durable. Returns `None` if not all of it could be.
    fn bury(&mut self) -> Option<()> {
        if self.left_behind.is_empty() {
            return Some(());
        }
        self.flush()?;
        self.move_tombstones(self.left_behind.iter().copied())?;
        self.left_behind.clear();
        Some(())
    }

    /// Takes everything that is in use out of a segment. Returns `None` if that failed.
    fn empty(&self, number: u32, file: &File, entries: &[Entry], how: How, starving: bool) -> Option<()> {
        let blocks = blocks(entries);
        let tombstones = entries.iter().filter_map(|entry| match entry {
            Entry::Tombstone(tombstone) if tombstone.target.segment != number => Some(*tombstone),
            _ => None,
        });
        match how {
            How::Move => self.move_blocks(number, file, blocks, starving)?,
            How::Forget => self.forget(blocks.map(|block| place(number, &block)).collect(), Why::Evicted),
        }
        self.move_tombstones(tombstones)?;
        self.take_leftovers(number, file, how, starving)?;
        while !self.shared.segments().at(number).is_drained() {
            if self.shared.chores_pause(PAUSE) {
                return None;
            }
        }
        count(&self.shared.counters.compacted_segments, 1);
        Some(())
    }

    /// What was written to a segment. Returns `None` if not all of it can be read now: a removal may be noted nowhere else.
    pub(super) fn entries(&self, number: u32, file: &File, pages: u32, epoch: u64) -> Option<Vec<Entry>> {
        let saved = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.load(number, pages));
        let saved = saved.filter(|saved| saved.epoch == epoch);
        let is_whole = saved.as_ref().is_some_and(|saved| saved.sealed);
        // Recovery went by what is saved. A removal whose write had failed is not among it, and may be on the disk all the same;
        // since then its block may have been promised again.
        let (mut entries, from) = saved.map_or((Vec::new(), 0), |saved| (saved.entries, saved.end));
        if !is_whole {
            let scan =
                Scan { segment: number, pages, store: self.shared.disk.store, from, epoch, verify: false };
            let scanned = scan.run(file);
            count(&self.shared.counters.io_errors, scanned.unreadable);
            entries.extend((scanned.unreadable == 0).then_some(scanned.entries)?);
        }
        Some(entries)
    }

    /// What the index knows to be in the segment, though the segment's own headers do not say so: they are damaged.
    fn take_leftovers(&self, number: u32, file: &File, how: How, starving: bool) -> Option<()> {
        if self.shared.segments().at(number).live_blocks == 0 {
            return Some(());
        }
        let left = self.shared.index.in_segment(number);
        let blocks = left.into_iter().map(|found| {
            // The sequence was lost with the header; the engine gives it a new one.
            Block { meta: found.meta, checksum: found.checksum, sequence: 0, page: found.place.page }
        });
        match how {
            How::Move => self.move_blocks(number, file, blocks, starving),
            How::Forget => {
                self.forget(blocks.map(|block| place(number, &block)).collect(), Why::Evicted);
                Some(())
            }
        }
    }

    fn move_blocks(
        &self,
        number: u32,
        file: &File,
        blocks: impl Iterator<Item = Block>,
        starving: bool,
    ) -> Option<()> {
        let (mut batch, mut bytes, mut begun) = (Vec::new(), 0, Instant::now());
        for block in blocks {
            let (key, from) = place(number, &block);
            if self.shared.index.get(key).is_none_or(|found| found.place != from) {
                continue;
            }
            match read(file, &block).ok().flatten() {
                Some(buffer) => {
                    bytes += buffer.len();
                    batch.push(Moving::Block { block, from, buffer });
                }
                None => self.forget(vec![(key, from)], Why::Corrupt),
            }
            if bytes >= MOVE_BYTES {
                self.moved(std::mem::take(&mut batch))?;
                if !starving && self.rest(std::mem::take(&mut bytes), begun) {
                    return None;
                }
                (bytes, begun) = (0, Instant::now());
            }
        }
        self.moved(batch)
    }

    fn move_tombstones(&self, tombstones: impl Iterator<Item = Tombstone>) -> Option<()> {
        let needed: Vec<Moving> = {
            let segments = self.shared.segments();
            tombstones.filter(|tombstone| segments.holds(tombstone)).map(Moving::Tombstone).collect()
        };
        self.moved(needed)
    }

    fn moved(&self, batch: Vec<Moving>) -> Option<()> {
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Move(batch, completion));
        pending.wait().into_iter().all(|moved| moved).then_some(())
    }

    pub(super) fn forget(&self, blocks: Vec<(BlockKey, Place)>, why: Why) {
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Forget(blocks, why, completion));
        pending.wait();
    }

    /// Keeps to the rate. Returns true if the store closes.
    fn rest(&self, bytes: usize, begun: Instant) -> bool {
        let due = Duration::from_secs_f64(bytes as f64 / self.shared.config.compaction_bytes_per_s as f64);
        let left = due.saturating_sub(begun.elapsed());
        !left.is_zero() && self.shared.chores_pause(left)
    }

    /// Makes everything written so far durable. Returns `None` if that failed.
    fn flush(&self) -> Option<()> {
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Flush(completion));
        pending.wait().ok()
    }

    /// Marks an emptied segment free, on the disk first.
    fn free(&self, number: u32) -> Option<()> {
        self.flush()?;
        let mut segments = self.shared.segments();
        let epoch = segments.at(number).epoch;
        let file = segments.at(number).file.clone()?;
        drop(segments);
        let head = GroupHead { segment: number, epoch, page: 0, pages: 1, kind: Kind::Free };
        let mut page = Buffer::zeroed(PAGE);
        format::encode_group(&head, &[], self.shared.disk.store, page.bytes_mut());
        let pieces = vec![Piece::of(page.bytes().into())];
        let op = Op { kind: OpKind::Write, file: file.clone(), slot: None, offset: 0, pieces };
        if self.faults.perform(&op).ok() != Some(PAGE) {
            count(&self.shared.counters.io_errors, 1);
            return None;
        }
        if !self.sync(file) {
            return None;
        }
        if let Some(checkpoint) = &self.checkpoint
            && checkpoint.remove(number).is_err()
        {
            // Recovery sees from the first page that the summary is of an earlier life.
            count(&self.shared.counters.io_errors, 1);
        }
        let mut segments = self.shared.segments();
        let segment = segments.at(number);
        (segment.state, segment.end, segment.dead_pages, segment.unsynced) = (State::Free, 0, 0, false);
        Some(())
    }
}

fn stuck(segments: &Segments) -> Option<u64> {
    segments.free_for(Kind::Hot).is_none().then_some(segments.next_epoch)
}

pub(super) fn blocks(entries: &[Entry]) -> impl Iterator<Item = Block> {
    entries.iter().filter_map(|entry| match entry {
        Entry::Block(block) => Some(*block),
        Entry::Tombstone(_) => None,
    })
}

pub(super) fn place(segment: u32, block: &Block) -> (BlockKey, Place) {
    (block.meta.key, Place { segment, page: block.page })
}

/// A block's payload, or `None` if it is damaged.
pub(super) fn read(file: &File, block: &Block) -> io::Result<Option<Buffer>> {
    let size = block.meta.size as usize;
    let mut buffer = Buffer::zeroed(size.next_multiple_of(PAGE));
    match disk::read_exact_at(file, buffer.bytes_mut(), u64::from(block.page) * PAGE as u64) {
        // The file ends before the block.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        done => done?,
    }
    Ok((checksum(&buffer.bytes()[..size]) == block.checksum).then_some(buffer))
}
