//! How near the way down to a tier, and the way up, come to the device while puts and gets run: the pool, its eviction thread
//! and the NVMe tier as the daemon has them.

use super::Row;
use crate::explain::Explain;
use crate::lifecycle::eviction::Eviction;
use crate::lifecycle::tiers::PolicyAdmit;
use crate::policy::{PolicyConfig, PolicyHost, Wanted};
use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use kvasir_dataplane::tier::dram::{Lookup, OwnerId, Reserve};
use kvasir_dataplane::tier::nvme::bench::Bench;
use kvasir_dataplane::tier::nvme::{NvmeConfig, NvmeStore};
use kvasir_dataplane::tier::store::BlockStore;
use kvasir_dataplane::tier::tiering::{LevelStats, Tiering, TieringConfig};
use kvasir_dataplane::{BlockKey, BlockMeta, Clock, DramConfig, DramStore};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SIZES: [(u32, &str); 3] = [(16 << 10, "16KiB"), (64 << 10, "64KiB"), (1 << 20, "1MiB")];
/// Bytes of one chain: a long context.
const CHAIN_BYTES: u64 = 64 << 20;
/// Bytes that one call puts or gets.
const CALL_BYTES: u32 = 4 << 20;
/// Longer than the raw device needs for what is measured; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often raw device and tier take turns. The best of each counts, as for the other rows of the disk.
const TURNS: usize = 2;

/// Both ways for each size of block, beside what the raw device writes and reads.
///
/// # Errors
/// The folder has no room, or a part of the host does not start.
pub(super) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (size, name) in SIZES {
        let (mut down, mut up, mut raw) = (Measured::default(), Measured::default(), (0f64, 0f64));
        for _ in 0..TURNS {
            let (write, read) = bench.raw()?;
            raw = (raw.0.max(write), raw.1.max(read));
            let host = Host::start(bench, size)?;
            let measured = host.offload(bench.bytes).and_then(|down| Ok((down, host.onboard()?)));
            host.tiering.close(PATIENCE);
            drop(host);
            // Not before the tier is closed: it saves its checkpoint there.
            std::fs::remove_dir_all(bench.dir.join("below"))?;
            let (better_down, better_up) = measured?;
            (down, up) = (down.or_better(better_down), up.or_better(better_up));
        }
        rows.push(down.row(format!("tier/offload/{name}")).beside(raw.0));
        rows.push(up.row(format!("tier/onboard/{name}")).beside(raw.1));
    }
    Ok(rows)
}

/// A rate, and how long the calls took that ran meanwhile.
#[derive(Default)]
struct Measured {
    gb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
}

impl Measured {
    fn new(bytes: u64, took: Duration, calls: &Histogram<u64>) -> Self {
        let quantile = |at| calls.value_at_quantile(at) as f64 / 1e3;
        Self {
            gb_per_s: bytes as f64 / 1e9 / took.as_secs_f64(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
        }
    }

    fn or_better(self, other: Self) -> Self {
        if other.gb_per_s > self.gb_per_s { other } else { self }
    }

    fn row(self, name: String) -> Row {
        Row { p50: Some(self.p50_us), p99: Some(self.p99_us), ..Row::new(name, self.gb_per_s, "GB/s") }
    }
}

struct Host {
    tiering: Arc<Tiering>,
    owner: OwnerId,
    size: u32,
    bytes: Vec<u8>,
    /// Blocks stored so far, from the first on.
    stored: AtomicU64,
    clock: Clock,
    /// Ends before the rest, in this order.
    _eviction: Eviction,
    _policies: Arc<PolicyHost>,
}

impl Host {
    fn start(bench: &Bench, size: u32) -> Result<Self> {
        let config = NvmeConfig {
            capacity_bytes: 4 * bench.bytes.max(256 << 20),
            ..NvmeConfig::new(bench.dir.join("below"))
        };
        let below: Arc<dyn BlockStore> = Arc::new(NvmeStore::open(config)?);
        let pool_bytes = bench.bytes / 2;
        let blocks_max = u32::try_from(2 * pool_bytes / u64::from(size))?.max(1024);
        let dram = DramConfig { pool_bytes, blocks_max, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(dram)?);
        let config = PolicyConfig { evictor_slots: store.slots(), ..PolicyConfig::default() };
        let policies = PolicyHost::open(&config, Wanted::default(), None)?;
        let clock = Clock::start();
        let admit = Box::new(PolicyAdmit::new(policies.admitter_worker(), Explain::off()));
        // Every victim is offered: it is the way down that is measured.
        let config = TieringConfig { min_uses: 0, ..TieringConfig::default() };
        let tiering = Arc::new(Tiering::start(Arc::clone(&store), vec![below], admit, config, clock)?);
        let eviction = Eviction::start(Arc::clone(&tiering), policies.evictor_worker(store.slots()), clock)?;
        Ok(Self {
            owner: store.new_owner(),
            tiering,
            size,
            bytes: (0..size).map(|n| (n.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect(),
            stored: AtomicU64::new(0),
            clock,
            _eviction: eviction,
            _policies: policies,
        })
    }

    fn key(n: u64) -> BlockKey {
        BlockKey::from_engine_hash("tiers", &n.to_le_bytes())
    }

    fn chain(&self) -> u64 {
        CHAIN_BYTES / u64::from(self.size)
    }

    fn per_call(&self) -> u64 {
        u64::from(CALL_BYTES / self.size)
    }

    /// Stores the next block of its chain, again while there is no room.
    fn put(&self, n: u64) -> Result<()> {
        let depth = n % self.chain();
        let parent = (depth > 0).then(|| Self::key(n - 1));
        let meta = BlockMeta { parent, depth: depth as u32, ..BlockMeta::single(Self::key(n), self.size) };
        let start = Instant::now();
        loop {
            match self.tiering.dram().put(self.owner, &meta, &self.bytes, self.clock.now_ms())? {
                Reserve::Reserved(_) => break,
                Reserve::Refused(error) if error.retryable() && start.elapsed() < PATIENCE => {}
                other => anyhow::bail!("put {n} failed: {other:?}"),
            }
        }
        self.stored.store(n + 1, Relaxed);
        Ok(())
    }

    fn put_call(&self) -> Result<()> {
        let next = self.stored.load(Relaxed);
        (next..next + self.per_call()).try_for_each(|n| self.put(n))
    }

    /// Leases on some blocks, given back at once. Returns how many there were.
    fn get_call(&self, keys: &[BlockKey]) -> Result<usize> {
        let lookups = self.tiering.get(self.owner, keys, 0, self.clock.now_ms())?;
        let lease = |lookup: &Lookup| match lookup {
            Lookup::Hit(lease) => Some(lease.id),
            _ => None,
        };
        let leases: Vec<u64> = lookups.iter().filter_map(lease).collect();
        self.tiering.dram().release(self.owner, &leases)?;
        Ok(leases.len())
    }

    fn level(&self) -> Result<LevelStats> {
        self.tiering.stats().levels.pop().context("the tier below is missing")
    }

    /// What goes down a second while puts fill a full pool and gets read the newest blocks.
    fn offload(&self, bytes: u64) -> Result<Measured> {
        while self.tiering.dram().metrics().evicted_bytes == 0 {
            self.put_call()?;
        }
        // What is queued by now is not of the time that is measured.
        ensure!(self.tiering.drain(Instant::now() + PATIENCE), "the tier hangs");
        let (before, start, end) =
            (self.level()?.offload.stored_bytes, Instant::now(), AtomicBool::new(false));
        let calls = std::thread::scope(|scope| {
            let reader = scope.spawn(|| self.read_newest(&end));
            let calls = self.put_for(bytes);
            end.store(true, Relaxed);
            reader.join().expect("a reader does not panic")?;
            calls
        })?;
        let drained = self.tiering.drain(Instant::now() + PATIENCE);
        ensure!(drained && self.tiering.flush(PATIENCE), "the tier hangs");
        Ok(Measured::new(self.level()?.offload.stored_bytes - before, start.elapsed(), &calls))
    }

    fn put_for(&self, bytes: u64) -> Result<Histogram<u64>> {
        let mut calls = histogram();
        for _ in 0..bytes / u64::from(CALL_BYTES) {
            let call = Instant::now();
            self.put_call()?;
            calls.saturating_record(call.elapsed().as_nanos() as u64);
        }
        Ok(calls)
    }

    fn read_newest(&self, end: &AtomicBool) -> Result<()> {
        while !end.load(Relaxed) {
            let newest = self.stored.load(Relaxed);
            let keys: Vec<BlockKey> =
                (newest.saturating_sub(self.per_call())..newest).map(Self::key).collect();
            self.get_call(&keys)?;
            std::thread::sleep(Duration::from_millis(1)); // as a reader that also does something with them
        }
        Ok(())
    }

    /// What comes up a second for a reader that walks along the chains, the oldest first.
    fn onboard(&self) -> Result<Measured> {
        let (mut calls, mut left) = (histogram(), 3 * self.tiering.dram().pool().bytes() / 2);
        let (before, start) = (self.level()?.onboard.loaded_bytes, Instant::now());
        let mut at = 0;
        while left > 0 && at < self.stored.load(Relaxed) {
            let keys: Vec<BlockKey> = (at..at + self.per_call()).map(Self::key).collect();
            let call = Instant::now();
            self.get_call(&keys)?;
            calls.saturating_record(call.elapsed().as_nanos() as u64);
            (at, left) = (at + self.per_call(), left.saturating_sub(CALL_BYTES.into()));
        }
        Ok(Measured::new(self.level()?.onboard.loaded_bytes - before, start.elapsed(), &calls))
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, PATIENCE.as_nanos() as u64, 3).expect("bounds are valid")
}
