//! What puts notice of a swap of the evictor while the pool is full. The aim is: nothing.

use super::Row;
use crate::explain::Explain;
use crate::lifecycle::chooser::PolicyChooser;
use crate::lifecycle::tiers::PolicyAdmit;
use crate::policy::{Error, PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
use hdrhistogram::Histogram;
use kvasir_dataplane::tier::dram::{OwnerId, Reserve};
use kvasir_dataplane::tier::tiering::{Tiering, TieringConfig};
use kvasir_dataplane::{BlockKey, BlockMeta, Clock, DramConfig, DramStore};
use kvasir_eviction::Eviction;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Bytes of a block: the smallest, since it is their number that counts.
const BYTES: u32 = 64;
/// How long puts are measured without a swap.
const UNDISTURBED: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(600);

/// A full pool of `resident` blocks, and a caller that puts and is never told to wait.
struct Load {
    store: Arc<DramStore>,
    eviction: Eviction,
    policies: Arc<PolicyHost>,
    clock: Clock,
    stored: u64,
    _tiering: Arc<Tiering>,
}

/// One phase: how long puts took, in nanoseconds, and the turns of the thread during which no victim could be chosen, in microseconds.
struct Phase {
    puts: Histogram<u64>,
    turns: Histogram<u64>,
    time: Duration,
}

/// # Errors
/// A policy does not start, or a put failed for good.
pub(super) fn rows(resident: u32) -> Result<Vec<Row>, Error> {
    let mut load = Load::start(resident)?;
    while load.store.metrics().evicted_bytes == 0 {
        load.put()?;
    }
    let start = Instant::now();
    let before = load.phase(|_| start.elapsed() >= UNDISTURBED)?;
    load.policies.load(SlotKind::Evictor, Source::Builtin("lru".into()), Vec::new())?;
    let start = Instant::now();
    let during =
        load.phase(|load| load.eviction.counts().promotions.load(Relaxed) > 0 || start.elapsed() > PATIENCE)?;
    let longest = |phase: &Phase| phase.puts.max() as f64 / 1e3;
    let put = Row::new("swap/evictor/put", longest(&during), "us").beside(longest(&before));
    let quantile = |at| Some(during.puts.value_at_quantile(at) as f64 / 1e3);
    let turn = |phase: &Phase, at| phase.turns.value_at_quantile(at).max(1) as f64;
    let stall = |name: &str, at| Row::new(name, turn(&during, at), "us").beside(turn(&before, at));
    Ok(vec![
        stall("swap/evictor/stall", 1.0),
        stall("swap/evictor/stall/p99.9", 0.999),
        Row { p50: quantile(0.5), p99: quantile(0.99), ..put },
        Row::new("swap/evictor/time", during.time.as_secs_f64() * 1e3, "ms"),
    ])
}

impl Load {
    fn start(resident: u32) -> Result<Self, Error> {
        let failed = |error: &dyn std::fmt::Display| Error::Engine(format!("bench: {error}"));
        // Full at the watermark below which blocks are evicted.
        let pool_bytes = (u64::from(resident) * u64::from(BYTES) * 100 / 95).next_multiple_of(2 << 20);
        // Bytes run out, never slots: twice as many as there is room for.
        let blocks_max = u32::try_from(2 * pool_bytes / u64::from(BYTES)).unwrap_or(u32::MAX);
        let config = DramConfig { pool_bytes, blocks_max, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(config).map_err(|e| failed(&e))?);
        let config = PolicyConfig { evictor_slots: store.slots(), ..PolicyConfig::default() };
        let policies = PolicyHost::open(&config, Wanted::default(), None)?;
        let clock = Clock::start();
        let admit = Box::new(PolicyAdmit::new(policies.admitter_worker(), Explain::off()));
        let tiering = Tiering::start(Arc::clone(&store), Vec::new(), admit, TieringConfig::default(), clock);
        let tiering = Arc::new(tiering.map_err(|e| failed(&e))?);
        let chooser = PolicyChooser::new(policies.evictor_worker(store.slots()));
        let eviction = Eviction::start(Arc::clone(&tiering), chooser, clock).map_err(|e| failed(&e))?;
        Ok(Self { store, eviction, policies, clock, stored: 0, _tiering: tiering })
    }

    /// Puts a block, again while there is no room, as an engine does: a put that took less than `store.put_wait` was
    /// not refused.
    ///
    /// # Errors
    /// It was refused for another reason, or for too long.
    fn put(&mut self) -> Result<(), Error> {
        let key = BlockKey::from_engine_hash("swap", &self.stored.to_le_bytes());
        let (meta, start) = (BlockMeta::single(key, BYTES), Instant::now());
        self.stored += 1;
        loop {
            match self.store.put(OwnerId(0), &meta, &[7; BYTES as usize], self.clock.now_ms()) {
                Ok(Reserve::Reserved(_)) => return Ok(()),
                Ok(Reserve::Refused(error)) if error.retryable() && start.elapsed() < PATIENCE => {}
                other => return Err(Error::Engine(format!("bench: put {} failed: {other:?}", self.stored))),
            }
        }
    }

    fn phase(&mut self, ended: impl Fn(&Self) -> bool) -> Result<Phase, Error> {
        let counts = Arc::clone(self.eviction.counts());
        counts.stall_us.store(0, Relaxed);
        let times =
            || Histogram::new_with_bounds(1, PATIENCE.as_nanos() as u64, 3).expect("bounds are valid");
        let (mut puts, mut turns) = (times(), times());
        let start = Instant::now();
        while puts.is_empty() || !ended(self) {
            let before = Instant::now();
            self.put()?;
            puts.saturating_record(before.elapsed().as_nanos() as u64);
            // A put is much shorter than a turn that counts, so each of these is seen.
            match counts.stall_us.swap(0, Relaxed) {
                0 => {}
                turn_us => turns.saturating_record(turn_us),
            }
        }
        Ok(Phase { puts, turns, time: start.elapsed() })
    }
}
