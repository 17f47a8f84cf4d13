//! A cache of dense block slots in front of an evictor: hit rates without moving bytes.
//!
//! What a request finds and leaves is as [`super::pool`] says. Output blocks are ignored.

use super::chains::{Chains, Node, TooMany};
use super::classes::Classes;
use super::pool::{self, Pool, Touch};
use super::recorded::{Prompt, Recorded};
use super::tally::{Hits, Split, Tally};
use super::tiers::TierReport;
use super::timeline::Timeline;
use super::trace::Request;
use crate::policy::evictor::EvictorEngine;
use serde::Serialize;
use std::collections::BTreeMap;

/// Why a replay cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Pool(#[from] pool::Error),
    #[error(transparent)]
    TooMany(#[from] TooMany),
}

/// The result of a replay; the JSON of `kvasir replay --mode cache`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub mode: &'static str,
    pub trace: String,
    pub evictor: String,
    pub engine: &'static str,
    pub capacity_blocks: u32,
    /// Without the warm-up, like the next three.
    pub requests: u64,
    pub block_references: u64,
    pub prefix_hits: u64,
    pub hit_rate_percent: f64,
    /// Evictions of the whole replay, like what follows about the evictor.
    pub evictions: u64,
    /// Time inside the evictor, events and learning included, per eviction that it chose itself.
    pub evict_ns_mean: f64,
    /// Per victim, over the selecting calls.
    pub evict_ns_p99: u64,
    /// Victims that the native fallback chose. Absent if 0, like the fields below.
    #[serde(skip_serializing_if = "is_zero")]
    pub fallback_evictions: u64,
    /// Victims that were free, foreign, named twice or too many; an answer refused as a whole counts as one.
    #[serde(skip_serializing_if = "is_zero")]
    pub invalid_victims: u64,
    /// The failure after which the fallback decided alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Where the prefix hits lie between those of `lru` (0) and of `optimum` (100) at this capacity; below 0 if `lru` had more. Absent if
    /// `optimum` was not asked for, or has less than 0.1 % of the references more than `lru`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_closed_percent: Option<f64>,
    /// Absent unless asked for, like the next two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_up: Option<Hits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_class: Option<BTreeMap<u16, Hits>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_tenant: Option<BTreeMap<u16, Hits>>,
    /// Absent in a cache of one pool. With them, `capacity_blocks` and `evictions` are those of all tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Vec<TierReport>>,
    /// Hits over time, with the warm-up.
    #[serde(skip)]
    pub over_time: Timeline,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Report {
    /// The report of a cache of `capacity_blocks` in which the trace had these hits; the caller fills in the rest.
    pub fn of(capacity_blocks: u32, tally: &Tally) -> Self {
        let Hits { requests, block_references, prefix_hits, hit_rate_percent } = tally.counted();
        Self {
            mode: "cache",
            capacity_blocks,
            requests,
            block_references,
            prefix_hits,
            hit_rate_percent,
            warm_up: tally.warm_up(),
            by_class: tally.by_class(),
            by_tenant: tally.by_tenant(),
            over_time: tally.over_time().clone(),
            ..Self::default()
        }
    }

    /// What the evictors of these pools did.
    pub(super) fn with(self, pools: &[Pool<'_>]) -> Self {
        let (mut report, mut ns, mut select_ns) = (self, 0, pool::histogram());
        for pool in pools {
            let counts = pool.counts();
            report.evictions += counts.evictions;
            report.fallback_evictions += counts.fallback_evictions;
            report.invalid_victims += counts.invalid_victims;
            report.fault = report.fault.or_else(|| counts.fault.as_ref().map(ToString::to_string));
            ns += pool.evictor_ns();
            select_ns.add(pool.select_ns()).expect("all have the same bounds");
        }
        let its_own = report.evictions - report.fallback_evictions;
        let mean = ns as f64 / its_own.max(1) as f64;
        Self {
            evict_ns_mean: (mean * 10.0).round() / 10.0,
            evict_ns_p99: select_ns.value_at_quantile(0.99),
            ..report
        }
    }
}

/// The blocks and the class of each request of a trace, in order.
#[derive(Default)]
pub struct Prompts {
    chains: Chains,
    classes: Classes,
    path: Vec<Node>,
    chain: Vec<u64>,
}

impl Prompts {
    /// The prompts of a trace whose blocks have `block_size_tokens` tokens; the default is 512.
    pub fn of_blocks(block_size_tokens: u32) -> Self {
        Self { classes: Classes::default().of_blocks(block_size_tokens), ..Self::default() }
    }

    /// The next request's blocks, each by the hash of its whole prefix, first block first; and its class.
    ///
    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn of(&mut self, request: &Request) -> Result<(&[u64], u16), TooMany> {
        let (_, class) = self.path(request)?;
        self.chain.clear();
        self.chain.extend(self.path.iter().map(|&node| self.chains.identity(node)));
        Ok((&self.chain, class))
    }

    /// The same, with each block named by the number of its prefix.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn path(&mut self, request: &Request) -> Result<(&[Node], u16), TooMany> {
        self.chains.walk_of(request.tenant, &request.blocks, &mut self.path)?;
        let class = self.classes.assign(request, &self.path);
        Ok((&self.path, class))
    }

    /// Distinct prefixes so far.
    pub fn distinct_blocks(&self) -> usize {
        self.chains.len()
    }

    /// The hash of each prefix, by its number.
    pub fn into_identities(self) -> Vec<u64> {
        self.chains.into_identities()
    }
}

/// Takes a trace through an empty cache of `capacity_blocks`; the caller fills in the names.
///
/// # Errors
/// As [`Cache::new`].
pub fn replay(
    evictor: &mut dyn EvictorEngine,
    trace: &Recorded,
    capacity_blocks: u32,
    split: Split,
) -> Result<Report, Error> {
    let mut cache = Cache::new(evictor, capacity_blocks, trace.block_size_tokens())?;
    let mut tally = Tally::new(split);
    for prompt in trace.prompts() {
        tally.add(&prompt, cache.serve(trace, &prompt));
    }
    Ok(cache.report(&tally))
}

/// The cache; drives one evictor through one trace.
pub struct Cache<'e> {
    pool: Pool<'e>,
    chain: Vec<u64>,
}

impl<'e> Cache<'e> {
    /// An empty cache of `capacity_blocks` for a trace with blocks of `block_size_tokens`; opens the evictor.
    ///
    /// # Errors
    /// The capacity is out of range, or the evictor fails to open.
    pub fn new(
        evictor: &'e mut dyn EvictorEngine,
        capacity_blocks: u32,
        block_size_tokens: u32,
    ) -> Result<Self, Error> {
        let pool = Pool::of_blocks(evictor, capacity_blocks, block_size_tokens)?;
        Ok(Self { pool, chain: Vec::new() })
    }

    /// Serves one request of the trace; returns its prefix hits in blocks.
    pub fn serve(&mut self, trace: &Recorded, prompt: &Prompt<'_>) -> usize {
        self.chain.clear();
        self.chain.extend(prompt.nodes.iter().map(|&node| trace.identity(node)));
        self.pool.use_chain(&self.chain, Touch { class: prompt.class, time_ms: prompt.time_ms })
    }

    pub fn pool(&self) -> &Pool<'e> {
        &self.pool
    }

    /// The results of a replay with these hits; the caller fills in the names.
    pub fn report(&self, tally: &Tally) -> Report {
        Report::of(self.pool.capacity_blocks() as u32, tally).with(std::slice::from_ref(&self.pool))
    }
}

#[cfg(test)]
mod tests {
    use super::super::optimum::Optimum;
    use super::super::pool::MAX_CAPACITY_BLOCKS;
    use super::super::tally::percent;
    use super::super::trace::{BLOCK_SIZE_TOKENS, Reader};
    use super::*;
    use crate::policy::Fault;
    use crate::policy::evictor::{EvictorHook, NativeEvictor};
    use crate::policy::slot::Policy;
    use crate::policy::{Engine, PolicyConfig, Source, standalone};
    use kvasir_policy::Description;
    use kvasir_policy::evictor::Victim;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn native(name: &str) -> NativeEvictor {
        let policy = kvasir_default_policies::EVICTORS.iter().find(|p| p.name == name).unwrap();
        NativeEvictor::new((policy.native)())
    }

    /// The named trace, or `None` (and a note about it) if the traces are not there.
    fn trace(name: &str) -> Option<Recorded> {
        let reader = Reader::open(&kvasir_tests::public_trace(name)?).unwrap();
        Some(Recorded::read(reader, BLOCK_SIZE_TOKENS).unwrap())
    }

    fn recorded(requests: impl IntoIterator<Item = Request>) -> Recorded {
        Recorded::read(requests.into_iter().map(Ok), BLOCK_SIZE_TOKENS).unwrap()
    }

    /// What came of it, and the hits of each request.
    fn hits_of(
        evictor: &mut dyn EvictorEngine,
        trace: &Recorded,
        capacity_blocks: u32,
    ) -> (Report, Vec<usize>) {
        let mut cache = Cache::new(evictor, capacity_blocks, BLOCK_SIZE_TOKENS).unwrap();
        let (mut tally, mut found) = (Tally::new(Split::default()), Vec::new());
        for prompt in trace.prompts() {
            let hits = cache.serve(trace, &prompt);
            tally.add(&prompt, hits);
            found.push(hits);
        }
        (cache.report(&tally), found)
    }

    #[test]
    fn hit_rates_on_the_public_traces() {
        let lru_and_best = [
            ("conversation.jsonl.gz", 3_655, 7.9, 31.4),
            ("conversation.jsonl.gz", 9_139, 19.6, 36.6),
            ("conversation.jsonl.gz", 18_279, 27.9, 36.6),
            ("conversation.jsonl.gz", 36_558, 34.5, 36.6),
            ("synthetic.jsonl.gz", 878, 7.8, 26.1),
            ("synthetic.jsonl.gz", 4_392, 26.2, 50.6),
            ("synthetic.jsonl.gz", 8_784, 39.3, 60.8),
            ("synthetic.jsonl.gz", 17_569, 54.5, 64.0),
        ];
        let ours = [("conversation.jsonl.gz", 3_655, 13.15), ("synthetic.jsonl.gz", 8_784, 41.70)];
        let near = |found: f64, expected: f64, within: f64| {
            assert!((found - expected).abs() <= within, "{found} instead of {expected}");
        };
        let [Some(conversation), Some(synthetic)] =
            ["conversation.jsonl.gz", "synthetic.jsonl.gz"].map(trace)
        else {
            return;
        };
        let named = |name| if name == "synthetic.jsonl.gz" { &synthetic } else { &conversation };
        let rate = |evictor, name, capacity| {
            let report = replay(&mut native(evictor), named(name), capacity, Split::default()).unwrap();
            assert_eq!((report.fallback_evictions, report.invalid_victims), (0, 0), "{report:?}");
            report.hit_rate_percent
        };
        for (name, capacity, lru, best) in lru_and_best {
            near(rate("lru", name, capacity), lru, 0.05);
            let mut optimum = Optimum::new(named(name), capacity);
            let hits: usize = named(name).prompts().map(|prompt| optimum.serve(&prompt)).sum();
            let references: usize = named(name).prompts().map(|prompt| prompt.nodes.len()).sum();
            near(percent(hits as u64, references as u64), best, 0.05);
        }
        for (name, capacity, expected) in ours {
            near(rate("workload-aware", name, capacity), expected, 0.5);
        }
    }

    #[test]
    fn wasm_and_native_agree_on_every_request() {
        use super::super::generate::{Generator, Plan, Workload};
        let plan = Plan { workload: Workload::Chat, requests: 10_000, rate_rps: 5.0, seed: 6 };
        let requests = recorded(Generator::new(&plan).unwrap());
        let config = PolicyConfig { evictor_slots: 3_655, ..PolicyConfig::unhurried() };
        let engine = Engine::new(&config, None).unwrap();
        for policy in kvasir_default_policies::EVICTORS {
            let sources = [Source::Builtin(policy.name.into()), Source::Native(policy.name.into())];
            let [wasm, native] = sources.map(|source| {
                let (mut evictor, _) = standalone::<EvictorHook>(&engine, &config, source, vec![]).unwrap();
                let (report, hits) = hits_of(evictor.as_mut(), &requests, 3_655);
                assert_eq!((report.fault, report.fallback_evictions), (None, 0), "{}", policy.name);
                (hits, report.evictions)
            });
            assert!(wasm.1 > 10_000, "{} evictions", wasm.1);
            assert!(wasm == native, "{}: wasm and native differ", policy.name);
        }
    }

    /// The cache semantics in the plainest form, with a recency list that is a plain list.
    #[derive(Default)]
    struct Model {
        capacity: usize,
        /// Whole prefixes, least recently used first.
        recency: VecDeque<Vec<u64>>,
    }

    impl Model {
        fn request(&mut self, blocks: &[u64]) -> usize {
            let prefixes: Vec<_> = (1..=blocks.len()).map(|n| blocks[..n].to_vec()).collect();
            let hits = prefixes.iter().take_while(|p| self.recency.contains(p)).count();
            let head = &prefixes[..prefixes.len().min(self.capacity)];
            self.recency.retain(|block| !head.contains(block));
            self.recency.drain(..(self.recency.len() + head.len()).saturating_sub(self.capacity));
            self.recency.extend(head.iter().rev().cloned());
            hits
        }
    }

    fn requests() -> impl Strategy<Value = Vec<Vec<u64>>> {
        proptest::collection::vec(proptest::collection::vec(0..3_u64, 1..7), 1..60)
    }

    fn request(i: usize, blocks: &[u64]) -> Request {
        let input_tokens = blocks.len() as u32 * BLOCK_SIZE_TOKENS;
        Request { time_us: i as u64 / 3 * 1_000, input_tokens, blocks: blocks.to_vec(), ..Request::default() }
    }

    proptest! {
        #[test]
        fn lru_replay_equals_the_model(requests in requests(), capacity in 1..20_u32) {
            let mut evictor = native("lru");
            let trace = recorded(requests.iter().enumerate().map(|(i, blocks)| request(i, blocks)));
            let (_, hits) = hits_of(&mut evictor, &trace, capacity);
            let mut model = Model { capacity: capacity as usize, ..Model::default() };
            let expected: Vec<_> = requests.iter().map(|blocks| model.request(blocks)).collect();
            prop_assert_eq!(hits, expected);
        }

        /// Whatever the policy answers, the cache holds at most its capacity, each request's head is
        /// resident afterwards, and the fallback gave what the policy did not give.
        #[test]
        fn no_answer_breaks_the_cache(requests in requests(), capacity in 1..20_u32, seed in any::<u64>()) {
            let mut evictor = Liar { state: seed, slots: 0 };
            let trace = recorded(requests.iter().enumerate().map(|(i, blocks)| request(i, blocks)));
            let mut cache = Cache::new(&mut evictor, capacity, BLOCK_SIZE_TOKENS).unwrap();
            for prompt in trace.prompts() {
                cache.serve(&trace, &prompt);
                let head = prompt.nodes.len().min(capacity as usize);
                let pool = cache.pool();
                prop_assert!(cache.chain[..head].iter().all(|&block| pool.holds(block)));
                prop_assert_eq!(pool.resident_blocks() + pool.free_blocks(), capacity as usize);
            }
        }

        #[test]
        fn every_default_leaves_nothing_to_the_fallback(requests in requests(), capacity in 1..20_u32) {
            let trace = recorded(requests.iter().enumerate().map(|(i, blocks)| request(i, blocks)));
            for policy in kvasir_default_policies::EVICTORS {
                let report = replay(&mut native(policy.name), &trace, capacity, Split::default()).unwrap();
                prop_assert_eq!((report.fallback_evictions, report.invalid_victims), (0, 0), "{}", policy.name);
            }
        }
    }

    /// Answers random slots, too few and too many, and fails after a while.
    struct Liar {
        state: u64,
        slots: u32,
    }

    impl Liar {
        fn next(&mut self, below: u32) -> u32 {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 33) as u32 % below
        }
    }

    impl Policy for Liar {
        fn describe(&mut self) -> Result<Description, Fault> {
            Ok(Description::evictor("liar", "0.0.0"))
        }

        fn configure(&mut self, _: &[(String, String)]) -> Result<Result<(), String>, Fault> {
            Ok(Ok(()))
        }

        fn export_state(&mut self) -> Result<Vec<u8>, Fault> {
            Ok(Vec::new())
        }

        fn import_state(&mut self, _: &[u8]) -> Result<Result<(), String>, Fault> {
            Ok(Ok(()))
        }
    }

    impl EvictorEngine for Liar {
        fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
            self.slots = layout[0];
            Ok(())
        }

        fn update_tiers(&mut self, _: &[f32]) -> Result<(), Fault> {
            Ok(())
        }

        fn on_events(&mut self, _: u64, _: &[u32]) -> Result<(), Fault> {
            Ok(())
        }

        fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
            if self.next(40) == 0 {
                return Err(Fault::Trap("out of lies".into()));
            }
            for _ in 0..self.next(want + 3) {
                let slot = self.next(self.slots + 2);
                victims.push(Victim::new(slot));
            }
            Ok(())
        }
    }

    #[test]
    fn capacity_is_checked() {
        for capacity in [0, MAX_CAPACITY_BLOCKS + 1] {
            let error =
                Cache::new(&mut native("lru"), capacity, BLOCK_SIZE_TOKENS).err().unwrap().to_string();
            assert!(error.contains("outside 1 to 268435456"), "{error}");
        }
    }
}
