//! Evictors beside each other, in caches of several sizes.

use super::super::cache::Prompts;
use super::super::contender::Contender;
use super::super::pool::{self, Pool, Touch};
use super::super::tally::percent;
use super::super::timeline::Timeline;
use super::{Error, Match, Requested, TOLD};
use crate::policy::evictor::{EvictorEngine, EvictorHook};
use crate::policy::{Engine, PolicyConfig, Prepared, SlotKind, Source};
use serde::Serialize;
use std::cmp::Reverse;

/// Sizes of caches where none are given, as parts of the distinct blocks of the trace.
const SHARES: [f64; 4] = [0.02, 0.05, 0.1, 0.2];
/// The smallest of them.
const CAPACITY_MIN: u32 = 16;

/// Both evictors over one trace.
#[derive(Clone, Debug, Serialize)]
pub struct Evictors {
    pub mode: &'static str,
    pub slot: &'static str,
    pub trace: String,
    pub candidate: String,
    pub baseline: String,
    pub requests: u64,
    pub block_references: u64,
    pub capacities: Vec<Capacity>,
}

/// All of them in caches of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Capacity {
    pub capacity_blocks: u32,
    pub candidate: CacheSide,
    pub baseline: CacheSide,
    /// The native `lru`, as a measure for both.
    pub lru: CacheSide,
    /// Requests with another number of hits than with the baseline, and the blocks that these are more and fewer.
    pub differ: u64,
    pub blocks_gained: u64,
    pub blocks_lost: u64,
    pub first: Option<HitDifference>,
    /// The differences that lost most.
    pub costliest: Vec<HitDifference>,
}

/// One evictor in one cache.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CacheSide {
    pub prefix_hits: u64,
    pub hit_rate_percent: f64,
    /// Percentage points above the native `lru`.
    pub above_lru: f64,
    pub evictions: u64,
    pub fallback_evictions: u64,
    pub invalid_victims: u64,
    pub fault: Option<String>,
    #[serde(skip)]
    pub hits: Timeline,
}

/// A request that found another number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct HitDifference {
    /// Its place in the trace, from 0.
    pub request: u64,
    pub time_ms: u64,
    pub blocks: u32,
    pub candidate_hits: u32,
    pub baseline_hits: u32,
}

impl HitDifference {
    fn lost(&self) -> u32 {
        self.baseline_hits.saturating_sub(self.candidate_hits)
    }
}

/// Sizes of caches for a trace with `distinct_blocks` distinct blocks.
pub fn capacities(distinct_blocks: usize) -> Vec<u32> {
    let share = |share: &f64| (distinct_blocks as f64 * share).round() as u32;
    let mut sizes: Vec<u32> = SHARES.iter().map(|of| share(of).max(CAPACITY_MIN)).collect();
    sizes.dedup();
    sizes
}

impl Evictors {
    /// Takes the trace through caches of each of `capacities`.
    ///
    /// # Errors
    /// A policy does not start, a size is out of range, or the trace cannot be read.
    pub fn compare(
        of: &Match<'_>,
        capacities: &[u32],
        trace: impl Iterator<Item = Requested>,
    ) -> Result<Self, Error> {
        let lru = Contender::find("lru", Some(SlotKind::Evictor), Vec::new()).map(Contender::native);
        let lru = lru.expect("lru is a default evictor");
        let slots = capacities.iter().copied().max().unwrap_or(1);
        let config = PolicyConfig { evictor_slots: slots, ..PolicyConfig::unhurried() };
        let engine = Engine::new(&config, None)?;
        let mut engines: Vec<[Box<dyn EvictorEngine>; 3]> = Vec::new();
        let kinds = [of.candidate, of.baseline, &lru].map(|contender| prepared(&engine, &config, contender));
        let [candidate, baseline, lru] = kinds;
        let kinds = [candidate?, baseline?, lru?];
        for &blocks in capacities {
            pool::check_capacity(blocks).map_err(super::cache::Error::Pool)?;
            let [a, b, c] = kinds.each_ref().map(|kind| kind.engine().map(|(engine, _)| engine));
            engines.push([a?, b?, c?]);
        }
        let mut rows = Vec::new();
        for (engines, &blocks) in engines.iter_mut().zip(capacities) {
            rows.push(Row::new(engines, blocks, of.block_size_tokens)?);
        }
        let (mut prompts, mut requests, mut first_ms) = (Prompts::of_blocks(of.block_size_tokens), 0, None);
        for request in trace {
            let request = request?;
            let since_ms = request.time_ms() - *first_ms.get_or_insert(request.time_ms());
            let (chain, class) = prompts.of(&request).map_err(super::cache::Error::from)?;
            let touch = Touch { class, time_ms: request.time_ms() };
            for row in &mut rows {
                row.request(requests, since_ms, chain, touch);
            }
            requests += 1;
        }
        if requests == 0 {
            return Err(Error::Empty(of.trace.to_owned()));
        }
        Ok(Self {
            mode: "compare",
            slot: SlotKind::Evictor.as_str(),
            trace: of.trace.to_owned(),
            candidate: of.candidate.name.clone(),
            baseline: of.baseline.name.clone(),
            requests,
            block_references: rows.first().map_or(0, |row| row.references),
            capacities: rows.into_iter().map(Row::end).collect(),
        })
    }

    pub(super) fn faults(&self, side: impl Fn(&Capacity) -> &CacheSide) -> Vec<String> {
        let told = |capacity: &Capacity| {
            let CacheSide { fallback_evictions, invalid_victims, fault, .. } = side(capacity);
            if *fallback_evictions + *invalid_victims == 0 && fault.is_none() {
                return None;
            }
            let why = fault.as_ref().map(|fault| format!(" ({fault})")).unwrap_or_default();
            Some(format!(
                "{} blocks: {invalid_victims} invalid victims; the native fallback chose {fallback_evictions}{why}",
                capacity.capacity_blocks
            ))
        };
        self.capacities.iter().filter_map(told).collect()
    }
}

fn prepared(
    engine: &Engine,
    config: &PolicyConfig,
    contender: &Contender,
) -> Result<Prepared<EvictorHook>, Error> {
    let choice = contender.choice.clone();
    let source: Source = choice.source;
    Ok(Prepared::new(engine, config, source, choice.settings)?)
}

/// The three caches of one size.
struct Row<'e> {
    pools: [Pool<'e>; 3],
    hits: [u64; 3],
    curves: [Timeline; 3],
    references: u64,
    differ: u64,
    gained: u64,
    lost: u64,
    first: Option<HitDifference>,
    costliest: Vec<HitDifference>,
}

impl<'e> Row<'e> {
    fn new(
        engines: &'e mut [Box<dyn EvictorEngine>; 3],
        blocks: u32,
        block_size_tokens: u32,
    ) -> Result<Self, Error> {
        let [a, b, c] =
            engines.each_mut().map(|engine| Pool::of_blocks(engine.as_mut(), blocks, block_size_tokens));
        let open = super::cache::Error::Pool;
        Ok(Self {
            pools: [a.map_err(open)?, b.map_err(open)?, c.map_err(open)?],
            hits: [0; 3],
            curves: Default::default(),
            references: 0,
            differ: 0,
            gained: 0,
            lost: 0,
            first: None,
            costliest: Vec::new(),
        })
    }

    fn request(&mut self, request: u64, since_ms: u64, chain: &[u64], touch: Touch) {
        let asked = chain.len() as u64;
        self.references += asked;
        let mut found = [0; 3];
        for (side, pool) in self.pools.iter_mut().enumerate() {
            found[side] = pool.use_chain(chain, touch) as u32;
            self.hits[side] += u64::from(found[side]);
            self.curves[side].add(since_ms * 1_000, found[side].into(), asked);
        }
        let [candidate_hits, baseline_hits, _] = found;
        if candidate_hits == baseline_hits {
            return;
        }
        let (blocks, time_ms) = (chain.len() as u32, touch.time_ms);
        let differs = HitDifference { request, time_ms, blocks, candidate_hits, baseline_hits };
        self.differ += 1;
        self.gained += u64::from(candidate_hits.saturating_sub(baseline_hits));
        self.lost += u64::from(differs.lost());
        self.first.get_or_insert(differs);
        if differs.lost() > 0 {
            self.costliest.push(differs);
            self.costliest.sort_by_key(|differs| (Reverse(differs.lost()), differs.request));
            self.costliest.truncate(TOLD);
        }
    }

    fn end(self) -> Capacity {
        let Self { pools, hits, curves, references, .. } = self;
        let rate = |side: usize| percent(hits[side], references);
        let sides = pools.iter().zip(curves).enumerate().map(|(side, (pool, curve))| {
            let counts = pool.counts();
            CacheSide {
                prefix_hits: hits[side],
                hit_rate_percent: rate(side),
                above_lru: ((rate(side) - rate(2)) * 1e4).round() / 1e4,
                evictions: counts.evictions,
                fallback_evictions: counts.fallback_evictions,
                invalid_victims: counts.invalid_victims,
                fault: counts.fault.as_ref().map(ToString::to_string),
                hits: curve,
            }
        });
        let [candidate, baseline, lru] =
            <[CacheSide; 3]>::try_from(sides.collect::<Vec<_>>()).expect("three pools have three sides");
        Capacity {
            capacity_blocks: pools[0].capacity_blocks() as u32,
            candidate,
            baseline,
            lru,
            differ: self.differ,
            blocks_gained: self.gained,
            blocks_lost: self.lost,
            first: self.first,
            costliest: self.costliest,
        }
    }
}
