//! Caches below each other: HBM, DRAM, NVMe and remote, without their bytes.
//!
//! A block counts as a hit of the highest tier that has it, and the prefix goes on through all of them. The head of a request
//! is in the first tier afterwards, as [`super::pool`] says; what was found below stays there too, and each tier hears of
//! every use of the blocks that it has. What a tier evicts goes to the tier below, unless that has it already; what the
//! last tier evicts is gone. Each tier has an instance of the evictor; what a victim's policy says of where it should go
//! is not followed, nor is the time that a move takes.

use super::cache::{Error, Report};
use super::pool::{Dropped, Pool, Touch, check_capacity};
use super::recorded::{Prompt, Recorded};
use super::tally::{Split, Tally, percent};
use crate::policy::evictor::EvictorEngine;
use hashbrown::HashMap;
use serde::Serialize;

/// Where blocks are kept, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TierName {
    Hbm,
    Dram,
    Nvme,
    Remote,
}

impl TierName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hbm => "hbm",
            Self::Dram => "dram",
            Self::Nvme => "nvme",
            Self::Remote => "remote",
        }
    }
}

/// One tier of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    pub name: TierName,
    pub capacity_blocks: u32,
}

/// What happened in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TierReport {
    pub tier: TierName,
    pub capacity_blocks: u32,
    /// Without the warm-up. Below the first tier, each was brought up.
    pub prefix_hits: u64,
    /// Hits, as a share of all references.
    pub hit_rate_percent: f64,
    /// Blocks that came from the tier above, in the whole replay.
    pub moved_in: u64,
    /// Blocks that left it, in the whole replay.
    pub evictions: u64,
}

/// See the module documentation.
struct Tiers<'e> {
    pools: Vec<Pool<'e>>,
    moved_in: Vec<u64>,
    /// What is known of each block that was ever used.
    known: HashMap<u64, Dropped>,
    chain: Vec<u64>,
}

/// Takes a trace through empty tiers, each with an evictor of its own; the caller fills in the names.
///
/// # Errors
/// A capacity is out of range, or an evictor fails to open.
pub fn replay(
    evictors: &mut [Box<dyn EvictorEngine>],
    trace: &Recorded,
    tiers: &[Tier],
    split: Split,
) -> Result<Report, Error> {
    let mut cache = Tiers::new(evictors, trace, tiers)?;
    let (mut tally, mut hits) = (Tally::new(split), vec![0; tiers.len()]);
    for prompt in trace.prompts() {
        let found = cache.serve(trace, &prompt);
        if tally.add(&prompt, found.iter().sum()) {
            hits.iter_mut().zip(found).for_each(|(hits, found)| *hits += found as u64);
        }
    }
    Ok(cache.report(tiers, &hits, &tally))
}

impl<'e> Tiers<'e> {
    fn new(
        evictors: &'e mut [Box<dyn EvictorEngine>],
        trace: &Recorded,
        tiers: &[Tier],
    ) -> Result<Self, Error> {
        let pool = |(evictor, tier): (&'e mut Box<dyn EvictorEngine>, &Tier)| {
            let pool = Pool::of_blocks(evictor.as_mut(), tier.capacity_blocks, trace.block_size_tokens())?;
            Ok(pool.telling_evictions())
        };
        let pools = evictors.iter_mut().zip(tiers).map(pool).collect::<Result<Vec<_>, Error>>()?;
        Ok(Self { pools, moved_in: vec![0; tiers.len()], known: HashMap::new(), chain: Vec::new() })
    }

    /// Serves one request; returns its prefix hits by tier.
    fn serve(&mut self, trace: &Recorded, prompt: &Prompt<'_>) -> Vec<usize> {
        let touch = Touch { class: prompt.class, time_ms: prompt.time_ms };
        self.chain.clear();
        self.chain.extend(prompt.nodes.iter().map(|&node| trace.identity(node)));
        let mut parent = None;
        for (&block, depth) in self.chain.iter().zip(0..) {
            self.known.insert(block, Dropped { block, parent, depth, class: touch.class });
            parent = Some(block);
        }
        let found = self.find();
        let Some((first, below)) = self.pools.split_first_mut() else { return found };
        below.iter_mut().for_each(|pool| pool.use_resident(&self.chain, touch));
        first.use_chain(&self.chain, touch);
        let mut dropped = first.take_evicted();
        for (pool, moved_in) in below.iter_mut().zip(&mut self.moved_in[1..]) {
            let blocks: Vec<_> = dropped.iter().map(|block| self.known[block]).collect();
            *moved_in += pool.take_in(blocks, touch.time_ms) as u64;
            dropped = pool.take_evicted();
        }
        found
    }

    fn find(&self) -> Vec<usize> {
        let mut found = vec![0; self.pools.len()];
        for &block in &self.chain {
            let Some(tier) = self.pools.iter().position(|pool| pool.holds(block)) else { break };
            found[tier] += 1;
        }
        found
    }

    fn report(&self, tiers: &[Tier], hits: &[u64], tally: &Tally) -> Report {
        let references = tally.counted().block_references;
        let rows = tiers.iter().zip(hits).zip(self.pools.iter().zip(&self.moved_in));
        let rows = rows.map(|((tier, &prefix_hits), (pool, &moved_in))| TierReport {
            tier: tier.name,
            capacity_blocks: tier.capacity_blocks,
            prefix_hits,
            hit_rate_percent: percent(prefix_hits, references),
            moved_in,
            evictions: pool.counts().evictions,
        });
        Report { tiers: Some(rows.collect()), ..Report::of(total(tiers), tally).with(&self.pools) }
    }
}

/// Blocks of all tiers.
pub fn total(tiers: &[Tier]) -> u32 {
    tiers.iter().map(|tier| tier.capacity_blocks).fold(0, u32::saturating_add)
}

/// # Errors
/// There are none, they are not in the order of their speed, or hold too little or too much.
pub fn check(tiers: &[Tier]) -> Result<(), TiersError> {
    if tiers.is_empty() || !tiers.windows(2).all(|pair| pair[0].name < pair[1].name) {
        return Err(TiersError::Order);
    }
    let capacities = tiers.iter().map(|tier| tier.capacity_blocks).chain([total(tiers)]);
    for capacity in capacities {
        check_capacity(capacity)?;
    }
    Ok(())
}

/// Why there are no such tiers.
#[derive(Debug, thiserror::Error)]
pub enum TiersError {
    #[error("name each tier once, fastest first: hbm, dram, nvme, remote")]
    Order,
    #[error("tiers: {0}")]
    Capacity(#[from] super::pool::Error),
}

#[cfg(test)]
mod tests {
    use super::super::cache;
    use super::super::optimum::Optimum;
    use super::super::trace::Request;
    use super::*;
    use crate::policy::evictor::NativeEvictor;
    use proptest::prelude::*;

    fn native(name: &str) -> Box<dyn EvictorEngine> {
        let policy = kvasir_default_policies::EVICTORS.iter().find(|p| p.name == name).unwrap();
        Box::new(NativeEvictor::new((policy.native)()))
    }

    fn recorded(requests: &[Vec<u64>]) -> Recorded {
        let request = |(time_us, blocks): (u64, &Vec<u64>)| {
            let input_tokens = blocks.len() as u32 * 16;
            Ok(Request { time_us, input_tokens, blocks: blocks.clone(), ..Request::default() })
        };
        Recorded::read((0..).step_by(700).zip(requests).map(request), 16).unwrap()
    }

    fn tiers(capacities: &[u32]) -> Vec<Tier> {
        let names = [TierName::Hbm, TierName::Dram, TierName::Nvme];
        names
            .into_iter()
            .zip(capacities)
            .map(|(name, &capacity_blocks)| Tier { name, capacity_blocks })
            .collect()
    }

    fn of(evictor: &str, trace: &Recorded, capacities: &[u32]) -> (Report, Vec<TierReport>) {
        let mut evictors: Vec<_> = capacities.iter().map(|_| native(evictor)).collect();
        let mut report = replay(&mut evictors, trace, &tiers(capacities), Split::default()).unwrap();
        let told = report.tiers.take().unwrap();
        (Report { evict_ns_mean: 0.0, evict_ns_p99: 0, ..report }, told)
    }

    #[test]
    fn what_leaves_one_tier_is_found_in_the_next() {
        let trace = recorded(&[vec![1], vec![2], vec![3], vec![1], vec![2], vec![9], vec![1]]);
        let (report, told) = of("lru", &trace, &[1, 3]);
        let row = |told: &TierReport| (told.prefix_hits, told.moved_in, told.evictions);
        // 1, 2 and 3 go down once each and stay there; 3, which nobody wants again, makes way for 9.
        assert_eq!(told.iter().map(row).collect::<Vec<_>>(), [(0, 0, 6), (3, 4, 1)]);
        assert_eq!((report.prefix_hits, report.capacity_blocks), (3, 4));
    }

    #[test]
    fn tiers_have_an_order_and_bounds() {
        let named = |names: &[TierName]| -> Vec<_> {
            names.iter().map(|&name| Tier { name, capacity_blocks: 1 << 27 }).collect()
        };
        check(&named(&[TierName::Dram, TierName::Remote])).unwrap();
        let order = "fastest first";
        for (bad, expected) in [
            (named(&[]), order),
            (named(&[TierName::Dram, TierName::Hbm]), order),
            (named(&[TierName::Dram, TierName::Dram]), order),
            (named(&[TierName::Hbm, TierName::Dram, TierName::Nvme]), "402653184 blocks is outside"),
            (tiers(&[4, 0]), "0 blocks is outside"),
        ] {
            let error = check(&bad).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    fn requests() -> impl Strategy<Value = Vec<Vec<u64>>> {
        prop::collection::vec(prop::collection::vec(0..3_u64, 1..7), 1..60)
    }

    proptest! {
        #[test]
        fn one_tier_is_a_cache(requests in requests(), capacity in 1..20_u32) {
            let trace = recorded(&requests);
            let (report, told) = of("workload-aware", &trace, &[capacity]);
            let mut alone = native("workload-aware");
            let alone = cache::replay(alone.as_mut(), &trace, capacity, Split::default()).unwrap();
            prop_assert_eq!(&report, &Report { evict_ns_mean: 0.0, evict_ns_p99: 0, ..alone });
            prop_assert_eq!((told[0].prefix_hits, told[0].evictions), (report.prefix_hits, report.evictions));
        }

        #[test]
        fn nothing_is_lost_where_the_last_tier_holds_all(requests in requests(), capacity in 6..20_u32) {
            let trace = recorded(&requests);
            let (unlimited, _) = of("lru", &trace, &[10_000]);
            for name in ["lru", "arc", "workload-aware"] {
                prop_assert_eq!(of(name, &trace, &[capacity, 10_000]).0.prefix_hits, unlimited.prefix_hits);
            }
        }

        /// Whatever the evictor, and however small the tiers are.
        #[test]
        fn tiers_add_up(requests in requests(), capacities in prop::collection::vec(1..9_u32, 2..4)) {
            let trace = recorded(&requests);
            let mut optimum = Optimum::new(&trace, capacities.iter().sum());
            let best: usize = trace.prompts().map(|prompt| optimum.serve(&prompt)).sum();
            for policy in kvasir_default_policies::EVICTORS {
                let (report, told) = of(policy.name, &trace, &capacities);
                prop_assert_eq!((report.fallback_evictions, report.invalid_victims), (0, 0), "{}", policy.name);
                prop_assert_eq!(report.prefix_hits, told.iter().map(|tier| tier.prefix_hits).sum::<u64>());
                prop_assert!(report.prefix_hits as usize <= best, "{}", policy.name);
                for pair in told.windows(2) {
                    prop_assert!(pair[1].moved_in <= pair[0].evictions);
                    let there = pair[1].moved_in - pair[1].evictions;
                    prop_assert!(there <= pair[1].capacity_blocks.into());
                }
            }
        }
    }
}
