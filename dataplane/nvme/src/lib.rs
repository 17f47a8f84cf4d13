//! The NVMe tier: blocks in a log on a plain directory.
//!
//! The log is cut into segment files of one size, written front to back with `io_uring` and `O_DIRECT`
//! ([`format`](self) of what is in them: `nvme/format.rs`). One thread, the engine, owns the index and both open ends
//! of the log; another, the janitor, empties segments, keeps the checkpoint, and reads slowly through all that is there. `docs/design/0003-nvme-tier.md` says why.
//!
//! A block is visible once its write has ended, outlives a kill of the process from then on, and a power cut from the
//! next [`flush`](BlockStore::flush) on; a removal outlives both once it is done. When a sync fails, the store only reads. Every read is compared with the block's checksum: what is torn, flipped or
//! truncated is a miss and counted. It knows no time: a block comes back with a time to live of 0.

pub mod bench;

mod append;
mod checkpoint;
mod config;
mod disk;
mod engine;
mod fetch;
pub mod format;
mod inbox;
mod index;
mod io;
mod janitor;
mod recover;
mod ring;
mod scan;
mod scrub;
mod segments;
mod shared;
mod sync;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use self::config::{NvmeConfig, OpenError, OpenReport, SyncMode};
pub use self::ring::io_uring_refusal;
pub use kvasir_store::config::OnFull;

use self::checkpoint::{Checkpoint, Summary};
use self::disk::Disk;
use self::engine::{Command, Engine, admit};
use self::io::Io;
use self::janitor::Janitor;
use self::recover::{Recovered, recover};
use self::ring::Ring;
use self::scrub::Scrub;
use self::shared::Shared;
use self::threads::{Faults, Threads};
use kvasir_os::thread::{self, JoinHandle};
use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockKey;
use kvasir_store::departures::Departures;
use kvasir_store::store::{
    BlockStore, Capabilities, Get, GetDone, Pending, Put, PutDone, Tier, TierError, TierStats,
};

const NAME: &str = "nvme";
/// Threads that do system calls where `io_uring` is refused.
const IO_THREADS: u32 = 8;

/// A store on a directory. Dropping it completes what was begun, makes it durable and saves the checkpoint.
pub struct NvmeStore {
    shared: Arc<Shared>,
    engine: Option<JoinHandle<Vec<Summary>>>,
    janitor: Option<JoinHandle<Option<Checkpoint>>>,
    report: OpenReport,
}

impl NvmeStore {
    /// Opens the store in `config.dir`, creating or recovering it.
    ///
    /// # Errors
    /// See [`OpenError`]. Damaged content is not an error: it is missing, and counted in the report.
    pub fn open(config: NvmeConfig) -> Result<Self, OpenError> {
        Self::open_with(config, Faults::default())
    }

    /// What opening it found.
    pub fn report(&self) -> &OpenReport {
        &self.report
    }

    /// Bytes of memory that the index takes.
    pub fn index_bytes(&self) -> u64 {
        self.shared.index.memory_bytes()
    }

    /// Bytes that compaction has written again since the store was opened.
    pub fn moved_bytes(&self) -> u64 {
        self.shared.counters.moved_bytes.load(Ordering::Relaxed)
    }

    fn open_with(config: NvmeConfig, faults: Faults) -> Result<Self, OpenError> {
        let begun = Instant::now();
        config.validate()?;
        raise_descriptor_limit(config.segments())?;
        let disk = Disk::open(&config.dir, config.segment_bytes, config.direct_io)?;
        let mut warnings = Vec::new();
        if config.direct_io && !disk.direct {
            warnings.push(format!("{} refuses O_DIRECT: buffered I/O is slower", config.dir.display()));
        }
        let io = start_io(&config, &disk, faults.clone(), &mut warnings).map_err(|source| OpenError::Io {
            step: "starting I/O threads for",
            path: config.dir.clone(),
            source,
        })?;
        let checkpoint = Checkpoint::open(&disk.checkpoint_path());
        let (checkpoint, damaged) = checkpoint
            .map_err(|error| warnings.push(format!("no checkpoint, every segment is read: {error}")))
            .map_or((None, None), |(checkpoint, damaged)| (Some(checkpoint), damaged));
        if let Some(kept) = damaged {
            let kept = kept.display();
            warnings.push(format!("the checkpoint was damaged and is kept as {kept}; every segment is read"));
        }
        let mut recovered = recover(&config, &disk, checkpoint.as_ref()).map_err(|source| OpenError::Io {
            step: "recovering",
            path: config.dir.clone(),
            source,
        })?;
        let mut report = std::mem::take(&mut recovered.report);
        report.warnings = warnings;
        report.took = begun.elapsed();
        Ok(Self::start(config, disk, (io, faults), checkpoint, recovered, report))
    }

    fn start(
        config: NvmeConfig,
        disk: Disk,
        (io, faults): (Io, Faults),
        checkpoint: Option<Checkpoint>,
        recovered: Recovered,
        report: OpenReport,
    ) -> Self {
        let Recovered { index, segments, heads, open, sealed, owed, sequence, report: _ } = recovered;
        let live: u64 = segments.list.iter().map(|segment| u64::from(segment.live_pages)).sum();
        let shared = Arc::new(Shared::new(config, disk, index, segments, io.waker()));
        let counters = &shared.counters;
        counters.blocks.store(report.blocks, Ordering::Relaxed);
        counters.block_bytes.store(report.block_bytes, Ordering::Relaxed);
        counters.claimed_pages.store(live, Ordering::Relaxed);
        counters.corrupt.store(report.corrupt, Ordering::Relaxed);
        shared.chore(|chores| (chores.summaries, chores.look) = (sealed, true));
        let scrub = Scrub::new(shared.config.scrub_bytes_per_s);
        let janitor = Janitor { shared: shared.clone(), checkpoint, left_behind: Vec::new(), scrub, faults };
        let engine_shared = shared.clone();
        let engine = thread::spawn(move || {
            let mut engine = Engine::new(io, engine_shared, heads, sequence);
            engine.summaries = open.into_iter().map(|summary| (summary.segment, summary)).collect();
            owed.into_iter().for_each(|tombstone| engine.owe(tombstone));
            engine.run()
        });
        let janitor = thread::spawn(move || janitor.run());
        Self { shared, engine: Some(engine), janitor: Some(janitor), report }
    }

    /// Takes a batch of this many items under way.
    fn admit(&self, items: usize) -> Result<(), TierError> {
        let limit = self.shared.config.items_max;
        let admitted = admit(&self.shared.under_way, items, limit);
        admitted.then_some(()).ok_or(TierError::Busy { tier: NAME, limit })
    }

    /// Ends as a kill would, except that what is under way is waited for.
    #[cfg(test)]
    fn crash(mut self) {
        self.close(false);
    }

    /// Ends both threads; with `save`, everything is durable and in the checkpoint then.
    fn close(&mut self, save: bool) {
        self.shared.chore(|chores| chores.close = true);
        let checkpoint = self.janitor.take().and_then(|janitor| janitor.join().ok()).flatten();
        let flushed = save && self.flush().wait().is_ok();
        self.shared.send(Command::Close);
        let open = self.engine.take().and_then(|engine| engine.join().ok()).unwrap_or_default();
        if let (true, Some(checkpoint)) = (flushed, checkpoint) {
            // Without it the segments are read at the next start.
            let _ = checkpoint.save(&open);
        }
    }
}

impl BlockStore for NvmeStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Nvme,
            name: NAME,
            durable: true,
            block_bytes_max: self.shared.config.block_bytes_largest(),
            capacity_bytes: Some(self.shared.config.block_bytes_max()),
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        if let Err(busy) = self.admit(batch.len()) {
            let refuse = |put: Put| PutDone { buffer: put.buffer, outcome: Err(busy.clone()) };
            return Pending::ready(batch.into_iter().map(refuse).collect());
        }
        // The checksum is taken here, on the caller's thread: it is most of the work of a put, and callers are many.
        let largest = self.shared.config.block_bytes_largest();
        let items = batch.into_iter().map(|put| (put.check(NAME, largest), put)).collect();
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Put(items, completion));
        pending
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        if let Err(busy) = self.admit(batch.len()) {
            let refuse = |get: Get| GetDone { buffer: get.buffer, outcome: Err(busy.clone()) };
            return Pending::ready(batch.into_iter().map(refuse).collect());
        }
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Get(batch, completion));
        pending
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        keys.iter().map(|&key| self.shared.index.get(key).map(|found| found.meta.size)).collect()
    }

    fn exists(&self, keys: &[BlockKey]) -> Vec<bool> {
        keys.iter().map(|&key| self.shared.index.contains(key)).collect()
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        if let Err(busy) = self.admit(keys.len()) {
            return Pending::ready(keys.iter().map(|_| Err(busy.clone())).collect());
        }
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Remove(keys, completion));
        pending
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        let (completion, pending) = Pending::new();
        self.shared.send(Command::Flush(completion));
        pending
    }

    fn stats(&self) -> TierStats {
        self.shared.stats()
    }

    fn note_departures(&self, departures: &Arc<Departures>) {
        // A second pool is not told what this one lets go.
        let _ = self.shared.departures.set(Arc::clone(departures));
    }

    fn take_damaged(&self) -> Vec<BlockKey> {
        self.shared.take_damaged()
    }
}

impl Drop for NvmeStore {
    fn drop(&mut self) {
        if self.engine.is_some() {
            self.close(true);
        }
    }
}

fn start_io(
    config: &NvmeConfig,
    disk: &Disk,
    faults: Faults,
    warnings: &mut Vec<String>,
) -> std::io::Result<Io> {
    if config.io_uring {
        match Ring::new(config.queue_depth, config.segments(), &disk.lock) {
            Ok(ring) => return Ok(Io::Ring(Box::new(ring))),
            Err(error) => {
                warnings.push(format!("io_uring is refused ({error}): system calls on threads are slower"))
            }
        }
    }
    Threads::new(config.queue_depth.min(IO_THREADS) as usize, faults).map(Io::Threads)
}

/// Every segment has a descriptor, and the usual limit of 1,024 is reached soon.
fn raise_descriptor_limit(segments: u32) -> Result<(), OpenError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    /// For everything else that the process has open.
    const OTHERS: u64 = 256;
    let limit = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= u64::from(segments) + OTHERS);
    if enough(limit.current) {
        return Ok(());
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match enough(limit.maximum) && setrlimit(Resource::Nofile, raised).is_ok() {
        true => Ok(()),
        false => Err(OpenError::Descriptors { segments, limit: limit.maximum.unwrap_or(u64::MAX) }),
    }
}
