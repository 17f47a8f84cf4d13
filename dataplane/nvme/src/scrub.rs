//! Reads what lies on the disk before somebody asks for it: of a block that nobody reads nobody would notice that it is damaged,
//! until the last good copy elsewhere is gone.
//!
//! The janitor does it between its chores, a little at a time, one sealed segment after the other. What differs from its
//! checksum is forgotten, counted and told as if a reader had found it.

use super::engine::Why;
use super::format::{Block, Place};
use super::janitor::{self, Janitor};
use super::segments::State;
use super::shared::count;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockKey;

/// Bytes of one step, after which the rest is as long as the rate demands.
const STEP_BYTES: u64 = 1 << 20;
/// The shortest rest after a full pass: a disk with little on it need not be read all the time.
const REST: Duration = Duration::from_secs(1);

/// How far it has come.
pub(super) struct Scrub {
    /// When the next step is due. `None` means that there are none.
    pub(super) due: Option<Instant>,
    /// Segments before this one have been read in this pass, but for what is `left` of the last.
    next: u32,
    /// Last first.
    left: Vec<(BlockKey, Place)>,
}

impl Scrub {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self { due: (bytes_per_s > 0).then(Instant::now), next: 0, left: Vec::new() }
    }
}

impl Janitor {
    /// Compares some blocks with their checksums, if a step is due. One segment is begun in a step at most, so that chores do not wait
    /// for a row of segments in which nothing lives.
    pub(super) fn scrub(&mut self) {
        if self.scrub.due.is_none_or(|due| Instant::now() < due) {
            return;
        }
        let passed = self.scrub.left.is_empty() && !self.begin_next();
        let mut bytes = 0;
        while bytes < STEP_BYTES
            && let Some((key, place)) = self.scrub.left.pop()
        {
            bytes += self.compare(key, place);
        }
        let rest = Duration::from_secs_f64(bytes as f64 / self.shared.config.scrub_bytes_per_s as f64);
        self.scrub.due = Some(Instant::now() + if passed { rest.max(REST) } else { rest });
    }

    /// Goes on to the next sealed segment. Returns false if it was the last; then the next pass begins.
    fn begin_next(&mut self) -> bool {
        let mut segments = self.shared.segments();
        let mut rest = (0u32..).zip(&segments.list).skip(self.scrub.next as usize);
        let Some((number, _)) = rest.find(|(_, segment)| segment.state == State::Sealed) else {
            self.scrub.next = 0;
            return false;
        };
        let (pages, epoch, file) =
            (segments.pages, segments.at(number).epoch, segments.at(number).file.clone());
        drop(segments);
        self.scrub.next = number + 1;
        let entries = file.and_then(|file| self.entries(number, &file, pages, epoch)).unwrap_or_default();
        self.scrub.left = janitor::blocks(&entries).map(|block| janitor::place(number, &block)).collect();
        self.scrub.left.reverse();
        true
    }

    /// Compares a block with its checksum, if it is still in its place: nobody but this thread frees a segment. Returns how much
    /// was read.
    fn compare(&self, key: BlockKey, place: Place) -> u64 {
        let Some(found) = self.shared.index.get(key).filter(|found| found.place == place) else { return 0 };
        let Some(file) = self.shared.segments().at(place.segment).file.clone() else { return 0 };
        count(&self.shared.counters.scrubbed_bytes, found.meta.size.into());
        let block = Block { meta: found.meta, checksum: found.checksum, sequence: 0, page: place.page };
        match janitor::read(&file, &block) {
            Ok(Some(_)) => {}
            Ok(None) => self.forget(vec![(key, place)], Why::Corrupt),
            // It may succeed the next time; a reader is told the same.
            Err(_) => count(&self.shared.counters.io_errors, 1),
        }
        found.meta.size.into()
    }
}
