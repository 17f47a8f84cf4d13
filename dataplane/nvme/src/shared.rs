//! What the store's handle, its engine and its janitor share.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::checkpoint::Summary;
use super::disk::Disk;
use super::engine::Command;
use super::format::PAGE;
use super::inbox::Inbox;
use super::index::Index;
use super::io::Waker;
use super::segments::Segments;
use super::{NvmeConfig, TierStats};
use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockKey;
use kvasir_store::departures::Departures;

pub(super) struct Shared {
    pub(super) config: NvmeConfig,
    pub(super) disk: Disk,
    pub(super) index: Index,
    segments: Mutex<Segments>,
    pub(super) counters: Counters,
    /// Blocks dropped because they were damaged, for a caller that can fetch them again.
    damaged: Mutex<VecDeque<BlockKey>>,
    /// Where it notes which blocks it lets go.
    pub(super) departures: OnceLock<Arc<Departures>>,
    /// Why a sync failed, once one has.
    broken: OnceLock<String>,
    /// Items of batches taken and not yet answered.
    pub(super) under_way: AtomicUsize,
    /// For the engine.
    pub(super) inbox: Inbox<Command>,
    waker: Waker,
    chores: Mutex<Chores>,
    chores_changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) blocks: AtomicU64,
    pub(super) block_bytes: AtomicU64,
    /// Pages of payload that live or are about to.
    pub(super) claimed_pages: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) io_errors: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) compacted_segments: AtomicU64,
    pub(super) moved_bytes: AtomicU64,
    pub(super) scrubbed_bytes: AtomicU64,
}

/// What waits for the janitor.
#[derive(Default)]
pub(super) struct Chores {
    pub(super) summaries: Vec<Summary>,
    /// Puts wait for a free segment.
    pub(super) starving: bool,
    /// Something may have changed about what can be reclaimed.
    pub(super) look: bool,
    pub(super) close: bool,
}

impl Shared {
    pub(super) fn new(
        config: NvmeConfig,
        disk: Disk,
        index: Index,
        segments: Segments,
        waker: Waker,
    ) -> Self {
        Self {
            config,
            disk,
            index,
            segments: Mutex::new(segments),
            counters: Counters::default(),
            damaged: Mutex::default(),
            departures: OnceLock::new(),
            broken: OnceLock::new(),
            under_way: AtomicUsize::new(0),
            inbox: Inbox::default(),
            waker,
            chores: Mutex::default(),
            chores_changed: Condvar::new(),
        }
    }

    pub(super) fn segments(&self) -> MutexGuard<'_, Segments> {
        self.segments.lock()
    }

    /// A sync failed. The system then forgets what it could not write, and a further sync would report success for it. So
    /// nothing is written any more: what is there is served, and recovery finds out what is on the disk.
    pub(super) fn breaks(&self, reason: &str) {
        if planted::is(Bug::BelievesSyncAfterFailure) {
            return;
        }
        let _ = self.broken.set(format!(
            "a sync failed ({reason}), so what was written may be lost; the tier is read-only: check the disk, then restart"
        ));
    }

    /// Why nothing is written any more.
    pub(super) fn broken(&self) -> Option<String> {
        self.broken.get().cloned()
    }

    pub(super) fn note_damaged(&self, key: BlockKey) {
        /// The oldest beyond this are forgotten.
        const MAX: usize = 4096;
        let mut damaged = self.damaged.lock();
        if damaged.len() == MAX {
            damaged.pop_front();
        }
        damaged.push_back(key);
    }

    pub(super) fn take_damaged(&self) -> Vec<BlockKey> {
        self.damaged.lock().drain(..).collect()
    }

    /// Hands the engine something to do.
    pub(super) fn send(&self, command: Command) {
        self.inbox.send(command, || self.waker.wake());
    }

    /// Tells the janitor something.
    pub(super) fn chore(&self, change: impl FnOnce(&mut Chores)) {
        change(&mut self.chores.lock());
        self.chores_changed.notify_all();
    }

    /// Waits until the janitor has something to do, and no longer than until then.
    pub(super) fn wait_for_chores(&self, until: Option<Instant>) -> MutexGuard<'_, Chores> {
        let mut chores = self.chores.lock();
        while chores.summaries.is_empty() && !chores.look && !chores.close {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match left {
                None => self.chores_changed.wait(&mut chores),
                Some(Duration::ZERO) => break,
                Some(left) => drop(self.chores_changed.wait_for(&mut chores, left)),
            }
        }
        chores
    }

    /// Waits for the next change of the chores.
    pub(super) fn chores_pause(&self, at_most: Duration) -> bool {
        let mut chores = self.chores.lock();
        self.chores_changed.wait_for(&mut chores, at_most);
        chores.close
    }

    pub(super) fn stats(&self) -> TierStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        TierStats {
            blocks: read(&counters.blocks),
            block_bytes: read(&counters.block_bytes),
            used_bytes: self.segments().used_pages() * PAGE as u64,
            hits: read(&counters.hits),
            misses: read(&counters.misses),
            read_bytes: read(&counters.read_bytes),
            written_bytes: read(&counters.written_bytes),
            corrupt: read(&counters.corrupt),
            scrubbed_bytes: read(&counters.scrubbed_bytes),
            io_errors: read(&counters.io_errors),
            evicted: read(&counters.evicted),
            broken: self.broken.get().is_some(),
        }
    }
}

pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(super) fn uncount(counter: &AtomicU64, by: u64) {
    counter.fetch_sub(by, Ordering::Relaxed);
}
