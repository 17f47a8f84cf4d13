//! A trace through caches: each of several evictors with each of several capacities, beside each other in threads.

mod page;
mod told;

use super::cache::{self, Report};
use super::optimum::Optimum;
use super::pool;
use super::recorded::Recorded;
use super::tally::{Split, Tally, rounded};
use super::tiers::{self, Tier};
use crate::policy::evictor::{EvictorEngine, EvictorHook, NativeEvictor};
use crate::policy::{Engine, Error as PolicyError, PolicyConfig, Prepared, Source};
use kvasir_default_policies::EVICTORS;
use serde::Serialize;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The evictor that knows the future.
pub const OPTIMUM: &str = "optimum";
/// The evictor from which the gap to the optimum is counted.
const BASELINE: &str = "lru";

/// Why a row of the table cannot be filled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Cache(#[from] cache::Error),
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// The room of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// One pool of this many blocks.
    Blocks(u32),
    /// Several pools below each other.
    Tiers(Vec<Tier>),
}

impl Room {
    fn blocks(&self) -> u32 {
        match self {
            Self::Blocks(blocks) => *blocks,
            Self::Tiers(tiers) => tiers::total(tiers),
        }
    }
}

/// What may keep the blocks of a cache.
pub struct Keeper {
    name: String,
    engine: &'static str,
    kind: Kind,
    /// Whether it has a row, or is there for the gap alone.
    shown: bool,
}

enum Kind {
    /// Makes an evictor that was told nothing yet.
    Evictor(Box<dyn Fn() -> Result<Box<dyn EvictorEngine>, Error> + Send + Sync>),
    Optimum,
}

impl Keeper {
    /// An evictor, compiled once and tried with its settings.
    ///
    /// # Errors
    /// It cannot be found or compiled, or does not start with these settings.
    pub fn evictor(
        engine: &Engine,
        config: &PolicyConfig,
        source: Source,
        settings: Vec<(String, String)>,
    ) -> Result<Self, Error> {
        let (name, native) = (source.name().to_owned(), matches!(source, Source::Native(_)));
        let prepared = Prepared::<EvictorHook>::new(engine, config, source, settings)?;
        prepared.engine()?;
        let engine = if native { "native" } else { "wasm" };
        let make = move || Ok(prepared.engine()?.0);
        Ok(Self { name, engine, kind: Kind::Evictor(Box::new(make)), shown: true })
    }

    /// The optimum, which no evictor can beat.
    pub fn optimum() -> Self {
        Self { name: OPTIMUM.into(), engine: "native", kind: Kind::Optimum, shown: true }
    }

    fn baseline() -> Self {
        let policy = EVICTORS.iter().find(|policy| policy.name == BASELINE);
        let native = policy.expect("lru is a default evictor").native;
        let make = move || Ok(Box::new(NativeEvictor::new(native())) as _);
        Self { name: BASELINE.into(), engine: "native", kind: Kind::Evictor(Box::new(make)), shown: false }
    }

    fn replay(&self, trace: &Recorded, room: &Room, split: Split) -> Result<Report, Error> {
        let report = match (&self.kind, room) {
            // It gains nothing from knowing where a block is, so all its room counts as one.
            (Kind::Optimum, room) => optimum(trace, room.blocks(), split)?,
            (Kind::Evictor(make), Room::Blocks(blocks)) => {
                cache::replay(make()?.as_mut(), trace, *blocks, split)?
            }
            (Kind::Evictor(make), Room::Tiers(tiers)) => {
                let evictors = tiers.iter().map(|_| make());
                tiers::replay(&mut evictors.collect::<Result<Vec<_>, _>>()?, trace, tiers, split)?
            }
        };
        Ok(Report { evictor: self.name.clone(), engine: self.engine, ..report })
    }
}

fn optimum(trace: &Recorded, capacity_blocks: u32, split: Split) -> Result<Report, Error> {
    pool::check_capacity(capacity_blocks).map_err(cache::Error::from)?;
    let (mut optimum, mut tally) = (Optimum::new(trace, capacity_blocks), Tally::new(split));
    for prompt in trace.prompts() {
        tally.add(&prompt, optimum.serve(&prompt));
    }
    Ok(Report { evictions: optimum.evictions(), ..Report::of(capacity_blocks, &tally) })
}

/// The JSON of `kvasir replay --mode cache` for several evictors or capacities.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    pub mode: &'static str,
    pub trace: String,
    /// By capacity, then by evictor, each in the order in which they were given.
    pub rows: Vec<Report>,
}

impl Table {
    /// Fills the table; `trace_name` and `split` are for all rows. `done` hears of each replay that ends.
    ///
    /// # Errors
    /// A capacity is out of range, or an evictor does not start.
    pub fn fill(
        (trace_name, trace): (&str, &Recorded),
        keepers: &[Keeper],
        rooms: &[Room],
        split: Split,
        done: impl Fn() + Sync,
    ) -> Result<Self, Error> {
        let hidden = baseline_for(keepers);
        let beside: Vec<&Keeper> = keepers.iter().chain(&hidden).collect();
        let jobs: Vec<_> =
            rooms.iter().flat_map(|room| beside.iter().map(move |&keeper| (keeper, room))).collect();
        let reports = in_threads(&jobs, |&(keeper, room)| {
            let report = keeper.replay(trace, room, split);
            done();
            report
        });
        let mut rows = reports.into_iter().collect::<Result<Vec<_>, _>>()?;
        for row in &mut rows {
            row.trace = trace_name.to_owned();
        }
        for rows in rows.chunks_mut(beside.len().max(1)) {
            fill_gaps(rows);
        }
        let shown = rows.into_iter().zip(&jobs).filter(|(_, (keeper, _))| keeper.shown);
        Ok(Self { mode: "cache", trace: trace_name.to_owned(), rows: shown.map(|(row, _)| row).collect() })
    }

    /// How many replays a table takes.
    pub fn replays(keepers: &[Keeper], rooms: &[Room]) -> usize {
        (keepers.len() + usize::from(baseline_for(keepers).is_some())) * rooms.len()
    }

    /// What the policies did that they must not do, one line each. If there are any, the figures are not their own.
    pub fn faults(&self) -> Vec<String> {
        self.rows.iter().filter_map(fault).collect()
    }
}

/// Whether the policy failed, so that the figures are mostly another's.
fn fault(report: &Report) -> Option<String> {
    let Report { evictor, evictions, fallback_evictions, .. } = report;
    let fault = report.fault.as_ref()?;
    Some(format!(
        "evictor `{evictor}` failed after {} evictions ({fault}); the native fallback made the other {fallback_evictions}",
        evictions - fallback_evictions
    ))
}

/// A gap needs its other end, which may not be among what was asked for.
fn baseline_for(keepers: &[Keeper]) -> Option<Keeper> {
    keepers.iter().any(|keeper| matches!(keeper.kind, Kind::Optimum)).then(Keeper::baseline)
}

/// The smallest gap of which a share is told, in hits of a block reference: of less, any policy would have closed thousands of percent, or lost them.
const GAP_MIN: f64 = 1e-3;

/// `rows`: of one capacity; the baseline is the last of them if there is an optimum.
fn fill_gaps(rows: &mut [Report]) {
    let Some(best) = rows.iter().find(|row| row.evictor == OPTIMUM).map(|row| row.prefix_hits) else {
        return;
    };
    let Some(least) = rows.last().map(|row| row.prefix_hits) else { return };
    let gap = best.saturating_sub(least) as f64;
    if gap >= GAP_MIN * rows[0].block_references as f64 {
        for row in rows {
            row.gap_closed_percent = Some(rounded(100.0 * (row.prefix_hits as f64 - least as f64) / gap));
        }
    }
}

/// What `work` makes of each job, in their order; as many at a time as there are cores.
fn in_threads<J: Sync, R: Send>(jobs: &[J], work: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(jobs.len());
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(place) else { return done };
            done.push((place, work(job)));
        }
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a replay does not panic")).collect()
    });
    done.sort_unstable_by_key(|&(place, _)| place);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests;
