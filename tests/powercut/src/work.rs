//! What is recorded: a process that opens the tier and a database, uses both with several threads, and ends at once or in order.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvasir_memory::buffer::Buffer;
use kvasir_nvme::NvmeStore;
use rustix::fs::OFlags;

use crate::blocks::{self, Settings};
use crate::chance::Chance;
use crate::database::Database;
use crate::model::{BLOCKS, Expected, Mark, Outcome};

const CLIENTS: u32 = 3;
/// A mark is one write of this size, all at one place.
pub(crate) const MARK_BYTES: usize = 4096;

#[derive(Args)]
pub(crate) struct WorkArgs {
    /// The file system that is recorded.
    #[arg(long)]
    folder: PathBuf,
    /// The recorded device.
    #[arg(long)]
    device: PathBuf,
    /// Where on it marks go.
    #[arg(long)]
    marks_at: u64,
    /// What must be found, as JSON.
    #[arg(long, value_parser = crate::expected)]
    expected: Expected,
    #[arg(long)]
    seed: u64,
    /// Of each client.
    #[arg(long)]
    calls: u32,
}

/// Writes marks: past the page cache, so that each has ended when it is told, and without a flush, which would make all else
/// durable.
struct Marks {
    device: File,
    at: u64,
    /// How many there are. Held while one is written, so that they end in the order of their numbers.
    count: Mutex<u64>,
}

impl Marks {
    fn open(device: &Path, at: u64) -> Result<Self> {
        let mut options = OpenOptions::new();
        let device = options.write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(device);
        Ok(Self { device: device.context("the recorded device")?, at, count: Mutex::default() })
    }

    fn tell(&self, mark: &Mark) -> Result<()> {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let text = serde_json::to_vec(&(*count, mark))?;
        *count += 1;
        let mut page = Buffer::zeroed(MARK_BYTES);
        page.bytes_mut().get_mut(..text.len()).context("a long mark")?.copy_from_slice(&text);
        self.device.write_all_at(page.bytes(), self.at).context("a mark")
    }
}

struct Work {
    marks: Marks,
    store: NvmeStore,
    /// Little is made durable, so that much can be lost.
    quiet: bool,
    flushes: AtomicU64,
}

/// Returns whether it ends in order: the caller ends the process at once otherwise.
pub(crate) fn run(args: &WorkArgs) -> Result<()> {
    let mut chance = Chance::new(args.seed);
    let settings = Settings { io_uring: chance.below(2) == 0, batch: chance.below(4) == 0 };
    let (in_order, quiet) = (chance.below(3) == 0, !settings.batch && chance.below(3) > 0);
    let marks = Marks::open(&args.device, args.marks_at)?;
    let store = blocks::open(&args.folder, settings)?;
    let (database, version) = Database::open(&args.folder, args.expected.versions)?;
    marks.tell(&Mark::Opened { batch: settings.batch })?;
    marks.tell(&Mark::DatabaseFound { version })?;
    for block in 0..BLOCKS {
        marks.tell(&Mark::Found { block, there: blocks::get(&store, block)? })?;
    }
    let work = Work { marks, store, quiet, flushes: AtomicU64::new(0) };
    let seeds: Vec<u64> = (0..CLIENTS).map(|_| chance.any()).collect();
    thread::scope(|scope| {
        let client = |(number, seed): (u32, u64)| {
            let work = &work;
            scope.spawn(move || work.client(number, Chance::new(seed), args.calls))
        };
        let clients: Vec<_> = (0..).zip(seeds).map(client).collect();
        let small = work.small_state(&database, version, args.calls / if quiet { 16 } else { 4 });
        let joined =
            clients.into_iter().map(|client| client.join().unwrap_or_else(|_| bail!("a client panicked")));
        joined.chain([small]).collect::<Result<()>>()
    })?;
    println!(
        "worked as {settings:?}, {}, ends {}",
        if quiet { "quiet" } else { "busy" },
        if in_order { "in order" } else { "at once" }
    );
    if !in_order {
        // As a kill does: no destructor runs.
        std::process::exit(0);
    }
    Ok(())
}

impl Work {
    /// Each block is one client's to change.
    fn client(&self, number: u32, mut chance: Chance, calls: u32) -> Result<()> {
        for _ in 0..calls {
            let each = u64::from(BLOCKS / CLIENTS);
            let count = 1 + chance.below(4);
            let mut own: Vec<u32> =
                (0..count).map(|_| chance.below(each) as u32 * CLIENTS + number).collect();
            own.sort_unstable();
            own.dedup();
            match (chance.below(20), self.quiet) {
                (0..10, false) | (0..17, true) => self.change(&own, blocks::put)?,
                (10..18, false) => self.change(&own, blocks::remove)?,
                // All at once, so that it takes one sync to make much space.
                (17..19, true) => {
                    let all: Vec<u32> = (0..BLOCKS).filter(|block| block % CLIENTS == number).collect();
                    self.change(&all, blocks::remove)?;
                }
                _ => self.flush()?,
            }
        }
        Ok(())
    }

    fn change(&self, own: &[u32], call: fn(&NvmeStore, &[u32]) -> Vec<Outcome>) -> Result<()> {
        for &block in own {
            self.marks.tell(&Mark::Begins { block })?;
        }
        for (&block, outcome) in own.iter().zip(call(&self.store, own)) {
            self.marks.tell(&Mark::Ended { block, outcome })?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        let number = self.flushes.fetch_add(1, Ordering::Relaxed);
        self.marks.tell(&Mark::FlushBegins { number })?;
        ensure!(blocks::flush(&self.store), "a flush failed");
        self.marks.tell(&Mark::FlushEnded { number })
    }

    fn small_state(&self, database: &Database, version: u64, count: u32) -> Result<()> {
        for version in (version + 1..).take(count as usize) {
            self.marks.tell(&Mark::DatabaseBegins { version })?;
            database.write(version).context("a write of the database")?;
            self.marks.tell(&Mark::DatabaseEnded { version })?;
        }
        Ok(())
    }
}
