//! How near the tier comes to the device: each figure is compared with the same bytes moved by a bare loop
//! over the same ring.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::disk::Disk;
use super::format::PAGE;
use super::io::{Io, Op, OpKind, Piece};
use super::ring::Ring;
use super::{NvmeConfig, NvmeStore, OpenError};
use kvasir_memory::buffer::{Buffer, Source};
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta, checksum};
use kvasir_store::store::{BlockStore, Get, GetDone, Pending, Put, TierError};

/// Block of the sequential figures.
const LARGE: usize = 1 << 20;
/// Gets in one call of the random figure; several calls are under way at once.
const RANDOM_BATCH: usize = 16;
/// How often raw device and tier take turns. The best of each counts: a shared disk is sometimes slow, never too fast.
const TURNS: usize = 3;

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// As in `kvasir bench store`.
    pub name: &'static str,
    pub value: f64,
    /// The raw device in the same run; 0 if there is nothing to compare with.
    pub reference: f64,
    pub unit: &'static str,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Bench<'a> {
    /// A directory for the files, which are removed in the end. Its file system must take `O_DIRECT`.
    pub dir: &'a Path,
    /// Bytes moved by each sequential figure: a multiple of 1 MiB, at least 64 MiB.
    pub bytes: u64,
    /// Random 4 KiB reads.
    pub reads: usize,
    pub queue_depth: u32,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the raw device: {0}")]
    Raw(#[from] io::Error),
    #[error("the tier: {0}")]
    Tier(#[from] TierError),
    #[error("block {0} was stored and is missing")]
    Missing(u64),
}

impl Bench<'_> {
    /// Measures; what is read is compared with what was written.
    ///
    /// # Errors
    /// See [`BenchError`].
    pub fn run(&self) -> Result<Vec<Row>, BenchError> {
        let best = |old: Option<f64>, new: f64| Some(old.map_or(new, |old: f64| old.max(new)));
        let mut rates: [Option<f64>; 6] = [None; 6];
        for _ in 0..TURNS {
            let raw = Raw::create(self)?;
            rates[1] = best(rates[1], raw.write()?);
            rates[3] = best(rates[3], raw.read()?);
            rates[5] = best(rates[5], raw.random()?);
            drop(raw);
            let tier = self.tier()?;
            rates[0] = best(rates[0], self.put(&tier)?);
            rates[2] = best(rates[2], self.get(&tier)?);
            self.put_small(&tier)?;
            rates[4] = best(rates[4], self.get_small(&tier)?);
        }
        let [write, raw_write, read, raw_read, random, raw_random] = rates.map(Option::unwrap_or_default);
        let mut rows = vec![
            Row { name: "nvme/write", value: write, reference: raw_write, unit: "GB/s" },
            Row { name: "nvme/read", value: read, reference: raw_read, unit: "GB/s" },
            Row { name: "nvme/read/4KiB", value: random, reference: raw_random, unit: "ops/s" },
        ];
        rows.extend(self.recoveries()?);
        std::fs::remove_dir_all(self.dir.join("tier"))?;
        Ok(rows)
    }

    /// What the device writes and reads without the tier, GB/s.
    ///
    /// # Errors
    /// The device does not take it.
    pub fn raw(&self) -> Result<(f64, f64), BenchError> {
        let (mut write, mut read) = (0.0, 0.0);
        for _ in 0..TURNS {
            let raw = Raw::create(self)?;
            (write, read) = (raw.write()?.max(write), raw.read()?.max(read));
        }
        Ok((write, read))
    }

    fn config(&self) -> NvmeConfig {
        let segment_bytes = 64 << 20;
        // The blocks fill half of it, so that compaction has nothing to do.
        let capacity_bytes = (2 * self.bytes + 4 * self.small_bytes()).max(16 * segment_bytes);
        NvmeConfig { capacity_bytes, queue_depth: self.queue_depth, ..NvmeConfig::new(self.dir.join("tier")) }
    }

    /// 4 KiB blocks to choose from: as many bytes as the sequential figures, but at most 256 MiB.
    fn small_bytes(&self) -> u64 {
        self.bytes.min(256 << 20)
    }

    /// An empty tier.
    fn tier(&self) -> Result<NvmeStore, BenchError> {
        match std::fs::remove_dir_all(self.dir.join("tier")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(NvmeStore::open(self.config())?),
        }
    }

    fn put(&self, tier: &NvmeStore) -> Result<f64, BenchError> {
        let mut buffers: Vec<Source> =
            (0..self.queue_depth).map(|_| Buffer::copy_of(&noise(LARGE)).into()).collect();
        let sum = checksum(&noise(LARGE));
        let begun = Instant::now();
        let mut window: VecDeque<Pending<Vec<_>>> = VecDeque::new();
        for n in 0..self.bytes / LARGE as u64 {
            let buffer = match buffers.pop() {
                Some(buffer) => buffer,
                None => stored(window.pop_front())?,
            };
            let meta = BlockMeta::single(large(n), LARGE as u32);
            window.push_back(tier.put(vec![Put { meta, checksum: sum, buffer }]));
        }
        while !window.is_empty() {
            stored(window.pop_front())?;
        }
        tier.flush().wait()?;
        Ok(gb_per_s(self.bytes, begun))
    }

    fn get(&self, tier: &NvmeStore) -> Result<f64, BenchError> {
        let blocks = self.bytes / LARGE as u64;
        let begun = Instant::now();
        // Four calls under way share the queue depth.
        let batch = (self.queue_depth as usize / 4).max(1);
        self.get_all(tier, (0..blocks).map(large), LARGE, batch, 4)?;
        Ok(gb_per_s(self.bytes, begun))
    }

    fn put_small(&self, tier: &NvmeStore) -> Result<(), BenchError> {
        let bytes = noise(PAGE);
        let sum = checksum(&bytes);
        let numbers: Vec<u64> = (0..self.small_bytes() / PAGE as u64).collect();
        for batch in numbers.chunks(BATCH_MAX) {
            let put = |&n: &u64| {
                let meta = BlockMeta::single(small(n), PAGE as u32);
                Put { meta, checksum: sum, buffer: Buffer::copy_of(&bytes).into() }
            };
            for done in tier.put(batch.iter().map(put).collect()).wait() {
                done.outcome?;
            }
        }
        Ok(tier.flush().wait()?)
    }

    fn get_small(&self, tier: &NvmeStore) -> Result<f64, BenchError> {
        let pages = self.small_bytes() / PAGE as u64;
        // Twice the queue depth: the raw device has its next read ready when one is done, too.
        let calls = (2 * self.queue_depth as usize).div_ceil(RANDOM_BATCH);
        let keys = (0..self.reads as u64).map(|n| small(scatter(n) % pages));
        let begun = Instant::now();
        self.get_all(tier, keys, PAGE, RANDOM_BATCH.min(self.queue_depth as usize), calls)?;
        Ok(self.reads as f64 / begun.elapsed().as_secs_f64())
    }

    /// Gets blocks of `size`, `batch` in a call and `calls` at once.
    fn get_all(
        &self,
        tier: &NvmeStore,
        keys: impl Iterator<Item = BlockKey>,
        size: usize,
        batch: usize,
        calls: usize,
    ) -> Result<(), BenchError> {
        let mut keys = keys.peekable();
        let mut free: Vec<Buffer> = (0..batch * calls).map(|_| Buffer::zeroed(size)).collect();
        let mut window: VecDeque<Pending<Vec<GetDone>>> = VecDeque::new();
        let mut got = 0;
        while keys.peek().is_some() || !window.is_empty() {
            if keys.peek().is_some() && free.len() >= batch {
                let gets = keys.by_ref().take(batch).zip(free.drain(free.len() - batch..));
                window.push_back(tier.get(gets.map(|(key, buffer)| Get { key, buffer }).collect()));
                continue;
            }
            for done in window.pop_front().map(Pending::wait).unwrap_or_default() {
                done.outcome?.ok_or(BenchError::Missing(got))?;
                got += 1;
                free.push(done.buffer);
            }
            // The last call may have taken fewer; nobody needs these now.
            free.resize_with(free.len().next_multiple_of(batch), || Buffer::zeroed(size));
        }
        Ok(())
    }

    /// Seconds to recover a gigabyte of blocks: from the checkpoint, and without it.
    fn recoveries(&self) -> Result<[Row; 2], BenchError> {
        let config = self.config();
        let open = |name| {
            let tier = NvmeStore::open(config.clone())?;
            let report = tier.report();
            let value = report.took.as_secs_f64() / (report.block_bytes as f64 / 1e9);
            Ok::<_, OpenError>(Row { name, value, reference: 0.0, unit: "s/GB" })
        };
        let with = open("nvme/recover/checkpoint")?;
        std::fs::remove_dir_all(config.dir.join("checkpoint"))?;
        Ok([with, open("nvme/recover/scan")?])
    }
}

/// A file of the same bytes, and a ring of the same depth.
struct Raw<'a> {
    bench: &'a Bench<'a>,
    disk: Disk,
}

impl<'a> Raw<'a> {
    fn create(bench: &'a Bench<'a>) -> Result<Self, BenchError> {
        let dir = bench.dir.join("raw");
        Ok(Self { bench, disk: Disk::open(&dir, bench.bytes, true)? })
    }

    /// From an empty file to all bytes durable, in gigabytes a second: what a flushed tier has done.
    fn write(&self) -> io::Result<f64> {
        let begun = Instant::now();
        let file = Arc::new(self.disk.segment(0)?);
        let offsets = (0..self.bench.bytes).step_by(LARGE);
        self.pump(OpKind::Write, &file, offsets, LARGE)?;
        file.sync_data()?;
        Ok(gb_per_s(self.bench.bytes, begun))
    }

    fn read(&self) -> io::Result<f64> {
        let file = Arc::new(self.disk.segment(0)?);
        let begun = Instant::now();
        self.pump(OpKind::Read, &file, (0..self.bench.bytes).step_by(LARGE), LARGE)?;
        Ok(gb_per_s(self.bench.bytes, begun))
    }

    fn random(&self) -> io::Result<f64> {
        let file = Arc::new(self.disk.segment(0)?);
        let pages = self.bench.small_bytes() / PAGE as u64;
        let offsets = (0..self.bench.reads as u64).map(|n| scatter(n) % pages * PAGE as u64);
        let begun = Instant::now();
        self.pump(OpKind::Read, &file, offsets, PAGE)?;
        Ok(self.bench.reads as f64 / begun.elapsed().as_secs_f64())
    }

    /// Keeps `queue_depth` ops of `len` bytes under way.
    fn pump(
        &self,
        kind: OpKind,
        file: &Arc<File>,
        offsets: impl Iterator<Item = u64>,
        len: usize,
    ) -> io::Result<()> {
        let depth = self.bench.queue_depth;
        let mut buffers: Vec<Buffer> = (0..depth).map(|_| Buffer::copy_of(&noise(len))).collect();
        let op = |buffer: &mut Buffer| {
            let pieces = vec![Piece::of_mut(buffer.bytes_mut())];
            Op { kind, file: file.clone(), slot: Some(0), offset: 0, pieces }
        };
        let mut ops: Vec<Op> = buffers.iter_mut().map(op).collect();
        let mut io = Io::Ring(Box::new(Ring::new(depth, 1, &self.disk.lock)?));
        let mut free: Vec<usize> = (0..ops.len()).collect();
        let (mut offsets, mut done, mut under_way) = (offsets.peekable(), Vec::new(), 0);
        while under_way > 0 || offsets.peek().is_some() {
            while !free.is_empty()
                && let Some(offset) = offsets.next()
                && let Some(at) = free.pop()
            {
                ops[at].offset = offset;
                // SAFETY: `ops` and `buffers` are declared before `io`, which waits for what is under way when it is
                // dropped, and an op is used again only after its completion.
                unsafe { io.submit(at as u64, &ops[at]) }?;
                under_way += 1;
            }
            io.wait(true, &mut done)?;
            for (at, moved) in done.drain(..) {
                if moved? != len {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                free.push(at as usize);
                under_way -= 1;
            }
        }
        Ok(())
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // If this fails, only a file is left behind.
        let _ = std::fs::remove_dir_all(self.bench.dir.join("raw"));
    }
}

fn stored(pending: Option<Pending<Vec<kvasir_store::store::PutDone>>>) -> Result<Source, TierError> {
    let done = pending.and_then(|pending| pending.wait().pop());
    let done = done.ok_or(TierError::Cancelled)?;
    done.outcome.map(|_| done.buffer)
}

fn large(n: u64) -> BlockKey {
    BlockKey(u128::from(scatter(n)) << 64 | u128::from(n))
}

fn small(n: u64) -> BlockKey {
    BlockKey(u128::from(scatter(!n)) << 64 | u128::from(n))
}

fn noise(len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|n| scatter(n).to_le_bytes()).collect()
}

fn scatter(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n ^ n >> 27
}

fn gb_per_s(bytes: u64, begun: Instant) -> f64 {
    bytes as f64 / 1e9 / begun.elapsed().as_secs_f64()
}
