//! The way down: one bounded queue and one thread per tier.
//!
//! A queued block is held, so its memory cannot be given to another. That is why blocks and bytes are bounded; the bounds
//! cover what waits and what the tier works on. A victim that finds the queue full is evicted without a copy.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::moves::Moving;
use crate::dram::{DramStore, Held};
use crate::store::{BlockStore, Pending, Put, PutDone, Stored, TierError};
use kvasir_memory::buffer::Source;
use kvasir_os::thread;
use kvasir_os::thread::JoinHandle;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockMeta;
use kvasir_protocol::clock::Clock;

/// Blocks and bytes in one put; a tier gains little from more, and a smaller batch frees its memory sooner.
const BATCH_BLOCKS: usize = 128;
const BATCH_BYTES: u64 = 4 << 20;
/// Puts under way at once: as much as keeps a disk busy.
const BATCHES_UNDER_WAY: usize = 8;
/// How long a tier counts as taking no copies after a whole put failed there; then it may be tried again.
const FAILING: Duration = Duration::from_secs(5);
/// How often a thread that waits for a tier checks whether it should give up.
const LOOK_UP: Duration = Duration::from_millis(50);

/// A victim to copy down.
pub(super) struct Job {
    pub(super) held: Held,
    pub(super) meta: BlockMeta,
    pub(super) moving: Moving,
}

/// What one tier's queue did in total, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadStats {
    /// Victims meant for this tier.
    pub offered: u64,
    /// Victims the tier held already: evicted without another copy.
    pub held_below: u64,
    /// Victims that admission refused.
    pub refused: u64,
    /// Victims evicted without a copy because the queue was full or a put was waiting.
    pub skipped: u64,
    /// Victims copied, and their bytes.
    pub stored: u64,
    pub stored_bytes: u64,
    /// Victims evicted without a copy because the tier refused it or failed.
    pub failed: u64,
    /// Waiting or under way now.
    pub queued: u64,
    pub queued_bytes: u64,
}

#[derive(Default)]
pub(super) struct Counts {
    pub(super) offered: AtomicU64,
    pub(super) held_below: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) skipped: AtomicU64,
    stored: AtomicU64,
    stored_bytes: AtomicU64,
    failed: AtomicU64,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Waiting or under way.
    blocks: usize,
    bytes: u64,
    closed: bool,
    /// The thread has ended.
    over: bool,
    /// When the last put ended, if nothing of it was stored.
    failed: Option<Instant>,
}

impl Queue {
    /// Blocks of these sizes do not wait and are not under way any more.
    fn leave(&mut self, sizes: impl Iterator<Item = u32>) {
        for size in sizes {
            self.blocks -= 1;
            self.bytes -= u64::from(size);
        }
    }
}

struct Shared {
    dram: Arc<DramStore>,
    below: Arc<dyn BlockStore>,
    clock: Clock,
    blocks_max: usize,
    bytes_max: u64,
    queue: Mutex<Queue>,
    changed: Condvar,
    abandoned: AtomicBool,
    counts: Counts,
}

pub(super) struct Offloader {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A put under way.
struct Batch {
    pending: Pending<Vec<PutDone>>,
    blocks: Vec<Sent>,
}

struct Sent {
    slot: u32,
    size: u32,
    moving: Moving,
}

/// The thread was told to give up.
struct Abandoned;

impl Offloader {
    pub(super) fn start(
        dram: Arc<DramStore>,
        below: Arc<dyn BlockStore>,
        clock: Clock,
        (blocks_max, bytes_max): (usize, u64),
    ) -> io::Result<Self> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let (abandoned, counts) = (AtomicBool::new(false), Counts::default());
        let shared =
            Arc::new(Shared { dram, below, clock, blocks_max, bytes_max, queue, changed, abandoned, counts });
        let worker = Arc::clone(&shared);
        let thread = thread::Builder::new().name("kvasir-offload".into()).spawn(move || {
            // Giving up and being done end it in the same way.
            let _ = worker.run();
            worker.queue.lock().over = true;
            worker.changed.notify_all();
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Takes a job over. Returns false if the queue is full or closed: the hold has then ended.
    pub(super) fn push(&self, job: Job) -> bool {
        let mut queue = self.shared.queue.lock();
        let bytes = u64::from(job.held.size);
        let full = queue.blocks >= self.shared.blocks_max || queue.bytes + bytes > self.shared.bytes_max;
        if full || queue.closed {
            drop(queue);
            return false;
        }
        queue.blocks += 1;
        queue.bytes += bytes;
        queue.jobs.push_back(job);
        self.shared.changed.notify_all();
        true
    }

    pub(super) fn stats(&self) -> OffloadStats {
        let c = &self.shared.counts;
        let queue = self.shared.queue.lock();
        OffloadStats {
            offered: c.offered.load(Relaxed),
            held_below: c.held_below.load(Relaxed),
            refused: c.refused.load(Relaxed),
            skipped: c.skipped.load(Relaxed),
            stored: c.stored.load(Relaxed),
            stored_bytes: c.stored_bytes.load(Relaxed),
            failed: c.failed.load(Relaxed),
            queued: queue.blocks as u64,
            queued_bytes: queue.bytes,
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.shared.queue.lock().blocks
    }

    /// How many more blocks of `bytes` the queue takes.
    pub(super) fn room(&self, bytes: u64) -> usize {
        let Shared { blocks_max, bytes_max, .. } = *self.shared;
        let queue = self.shared.queue.lock();
        let by_bytes = bytes_max.saturating_sub(queue.bytes) / bytes.max(1);
        blocks_max.saturating_sub(queue.blocks).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }

    /// Whether a victim offered now would be copied, as far as can be told.
    pub(super) fn takes_copies(&self) -> bool {
        let failed = self.shared.queue.lock().failed;
        self.room(1) > 0 && failed.is_none_or(|failed| failed.elapsed() >= FAILING)
    }

    /// Blocks until nothing is queued or under way. Returns false if `until` passes first.
    pub(super) fn drain(&self, until: Instant) -> bool {
        self.shared.wait_until(until, |queue| queue.blocks == 0 || queue.over)
    }

    /// Takes no more jobs, finishes what is queued until `until`, and ends the thread. Returns true if all was finished.
    pub(super) fn close(&self, until: Instant) -> bool {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
        let finished = self.shared.wait_until(until, |queue| queue.over);
        self.shared.abandoned.store(true, Relaxed);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        finished
    }
}

impl Drop for Offloader {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

impl Shared {
    fn run(&self) -> Result<(), Abandoned> {
        let mut under_way: VecDeque<Batch> = VecDeque::new();
        loop {
            let jobs = self.next(under_way.is_empty());
            let idle = jobs.is_empty();
            under_way.extend(self.submit(jobs));
            if idle || under_way.len() == BATCHES_UNDER_WAY {
                let Some(batch) = under_way.pop_front() else { return Ok(()) };
                self.finish(batch)?;
            }
        }
    }

    /// The next batch. With `wait`, empty only when the queue is closed.
    fn next(&self, wait: bool) -> Vec<Job> {
        let mut queue = self.queue.lock();
        while wait && queue.jobs.is_empty() && !queue.closed {
            self.changed.wait(&mut queue);
        }
        let (mut jobs, mut bytes) = (Vec::new(), 0);
        while let Some(job) = queue.jobs.front() {
            bytes += u64::from(job.held.size);
            if jobs.len() == BATCH_BLOCKS || (bytes > BATCH_BYTES && !jobs.is_empty()) {
                break;
            }
            jobs.extend(queue.jobs.pop_front());
        }
        jobs
    }

    /// Gives the tier those blocks that were not removed while they waited. `None` if that is none.
    fn submit(&self, jobs: Vec<Job>) -> Option<Batch> {
        let (mut puts, mut blocks) = (Vec::with_capacity(jobs.len()), Vec::with_capacity(jobs.len()));
        let mut removed = Vec::new();
        for Job { held, meta, mut moving } in jobs {
            let size = held.size;
            if moving.goes_down() {
                blocks.push(Sent { slot: held.slot, size, moving });
                puts.push(Put { meta, checksum: held.checksum, buffer: Source::from(held) });
            } else {
                removed.push(size);
            }
        }
        if !removed.is_empty() {
            self.queue.lock().leave(removed.into_iter());
            self.changed.notify_all();
        }
        (!blocks.is_empty()).then(|| Batch { pending: self.below.put(puts), blocks })
    }

    /// Waits for a put; its blocks are then free to be evicted, copied or not.
    fn finish(&self, Batch { pending, mut blocks }: Batch) -> Result<(), Abandoned> {
        let done = self.wait(pending)?;
        let outcomes: Vec<_> = done.into_iter().map(|done| done.outcome).collect(); // ends the holds
        for (outcome, sent) in outcomes.iter().zip(&blocks) {
            self.count(outcome, sent.size);
        }
        let moving = blocks.iter_mut().map(|sent| &mut sent.moving);
        let mut removed: Vec<&mut Moving> =
            moving.filter_map(|moving| (!moving.has_come_down()).then_some(moving)).collect();
        if !removed.is_empty() {
            let keys = removed.iter().map(|moving| moving.key()).collect();
            let gone = self.wait(self.below.remove(keys))?;
            let taken_back = removed.iter_mut().zip(gone).filter(|(_, gone)| gone.is_ok());
            taken_back.for_each(|(moving, _)| moving.is_taken_back());
        }
        let slots: Vec<u32> = blocks.iter().map(|sent| sent.slot).collect();
        {
            let mut queue = self.queue.lock();
            queue.leave(blocks.iter().map(|sent| sent.size));
            queue.failed = outcomes.iter().all(Result::is_err).then(Instant::now);
        }
        drop(blocks);
        self.dram.make_ready(&slots, self.clock.now_ms());
        self.changed.notify_all();
        Ok(())
    }

    fn count(&self, outcome: &Result<Stored, TierError>, size: u32) {
        let c = &self.counts;
        match outcome {
            Ok(Stored::Stored) => {
                c.stored.fetch_add(1, Relaxed);
                c.stored_bytes.fetch_add(size.into(), Relaxed);
            }
            Ok(Stored::AlreadyStored) => drop(c.held_below.fetch_add(1, Relaxed)),
            Err(_) => drop(c.failed.fetch_add(1, Relaxed)),
        }
    }

    fn wait<T>(&self, mut pending: Pending<T>) -> Result<T, Abandoned> {
        loop {
            pending = match pending.wait_timeout(LOOK_UP) {
                Ok(done) => return Ok(done),
                Err(_) if self.abandoned.load(Relaxed) => return Err(Abandoned),
                Err(pending) => pending,
            };
        }
    }

    fn wait_until(&self, until: Instant, done: impl Fn(&Queue) -> bool) -> bool {
        let mut queue = self.queue.lock();
        while !done(&queue) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut queue, left);
        }
        true
    }
}
