//! A cache of dense block slots in front of an evictor: hit rates without moving bytes.
//!
//! What a request finds and leaves is as [`super::pool`] says. Output blocks are ignored.

use super::chains::{Chains, Node, TooMany};
use super::classes::Classes;
use super::pool::{self, Pool, Touch};
use super::trace::{BLOCK_SIZE_TOKENS, Request};
use crate::policy::evictor::EvictorEngine;
use serde::Serialize;

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
    pub requests: u64,
    pub block_references: u64,
    pub prefix_hits: u64,
    pub hit_rate_percent: f64,
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
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Per cent, to four decimals.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    (100.0 * part as f64 / whole.max(1) as f64 * 1e4).round() / 1e4
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
    /// Of a trace whose blocks have so many tokens; by default 512.
    pub fn of_blocks(block_size_tokens: u32) -> Self {
        Self { classes: Classes::default().of_blocks(block_size_tokens), ..Self::default() }
    }

    /// The next request's blocks, each by the hash of its whole prefix, first block first; and its class.
    ///
    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn of(&mut self, request: &Request) -> Result<(&[u64], u16), TooMany> {
        self.chains.walk_of(request.tenant, &request.blocks, &mut self.path)?;
        self.chain.clear();
        self.chain.extend(self.path.iter().map(|&node| self.chains.identity(node)));
        Ok((&self.chain, self.classes.assign(request, &self.path)))
    }

    /// Distinct prefixes so far.
    pub fn distinct_blocks(&self) -> usize {
        self.chains.len()
    }
}

/// The cache; drives one evictor through one trace.
pub struct Cache<'e> {
    prompts: Prompts,
    pool: Pool<'e>,
    report: Report,
}

impl<'e> Cache<'e> {
    /// An empty cache of `capacity_blocks`; opens the evictor.
    ///
    /// # Errors
    /// The capacity is out of range, or the evictor fails to open.
    pub fn new(evictor: &'e mut dyn EvictorEngine, capacity_blocks: u32) -> Result<Self, Error> {
        Self::of_blocks(evictor, capacity_blocks, BLOCK_SIZE_TOKENS)
    }

    /// The same for a trace whose blocks have so many tokens.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_blocks(
        evictor: &'e mut dyn EvictorEngine,
        capacity_blocks: u32,
        block_size_tokens: u32,
    ) -> Result<Self, Error> {
        let report = Report { mode: "cache", capacity_blocks, ..Report::default() };
        let pool = Pool::of_blocks(evictor, capacity_blocks, block_size_tokens)?;
        Ok(Self { prompts: Prompts::of_blocks(block_size_tokens), pool, report })
    }

    /// Serves one request; returns its prefix hits in blocks.
    ///
    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn request(&mut self, request: &Request) -> Result<usize, Error> {
        let (chain, class) = self.prompts.of(request)?;
        let hits = self.pool.use_chain(chain, Touch { class, time_ms: request.time_ms() });
        self.report.requests += 1;
        self.report.block_references += chain.len() as u64;
        self.report.prefix_hits += hits as u64;
        Ok(hits)
    }

    pub fn pool(&self) -> &Pool<'e> {
        &self.pool
    }

    /// The results so far; the caller fills in the names.
    pub fn report(&self) -> Report {
        let counts = self.pool.counts();
        Report {
            hit_rate_percent: percent(self.report.prefix_hits, self.report.block_references),
            evictions: counts.evictions,
            evict_ns_mean: (self.pool.evict_ns_mean() * 10.0).round() / 10.0,
            evict_ns_p99: self.pool.select_ns().value_at_quantile(0.99),
            fallback_evictions: counts.fallback_evictions,
            invalid_victims: counts.invalid_victims,
            fault: counts.fault.as_ref().map(ToString::to_string),
            ..self.report.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::MAX_CAPACITY_BLOCKS;
    use super::super::trace::Reader;
    use super::*;
    use crate::policy::Fault;
    use crate::policy::evictor::{EvictorHook, NativeEvictor};
    use crate::policy::slot::Policy;
    use crate::policy::{Engine, PolicyConfig, Source, standalone};
    use kvasir_policy::Description;
    use kvasir_policy::evictor::Victim;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::path::PathBuf;

    fn native(name: &str) -> NativeEvictor {
        let policy = kvasir_default_policies::EVICTORS.iter().find(|p| p.name == name).unwrap();
        NativeEvictor::new((policy.native)())
    }

    /// The named trace, or `None` (and a note about it) if the traces are not there.
    fn trace(name: &str) -> Option<Vec<Request>> {
        let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces"));
        let path = std::env::var_os("KVASIR_TRACES").map_or_else(beside, PathBuf::from).join(name);
        if !path.exists() {
            eprintln!("skipped: no trace at {}; set KVASIR_TRACES to its folder", path.display());
            return None;
        }
        Some(Reader::open(&path).unwrap().collect::<Result<_, _>>().unwrap())
    }

    fn hit_rate(evictor: &str, requests: &[Request], capacity_blocks: u32) -> Report {
        let mut evictor = native(evictor);
        let mut cache = Cache::new(&mut evictor, capacity_blocks).unwrap();
        for request in requests {
            cache.request(request).unwrap();
        }
        cache.report()
    }

    #[test]
    fn hit_rates_on_the_public_traces() {
        let rows = [
            ("conversation.jsonl.gz", "lru", 3_655, 7.85, 7.95),
            ("conversation.jsonl.gz", "lru", 18_279, 27.8, 27.9),
            ("conversation.jsonl.gz", "workload-aware", 3_655, 12.9, 13.5),
            ("synthetic.jsonl.gz", "workload-aware", 8_784, 41.5, 42.5),
        ];
        for (name, evictor, capacity, low, high) in rows {
            let Some(requests) = trace(name) else { return };
            let report = hit_rate(evictor, &requests, capacity);
            assert!((low..=high).contains(&report.hit_rate_percent), "{name} {report:?}");
            assert_eq!((report.fallback_evictions, report.invalid_victims), (0, 0), "{report:?}");
        }
    }

    #[test]
    fn wasm_and_native_agree_on_every_request() {
        let Some(requests) = trace("conversation.jsonl.gz") else { return };
        let requests = &requests[..2_000];
        let config = PolicyConfig { evictor_slots: 3_655, ..PolicyConfig::default() };
        let engine = Engine::new(&config, None).unwrap();
        for policy in kvasir_default_policies::EVICTORS {
            let sources = [Source::Builtin(policy.name.into()), Source::Native(policy.name.into())];
            let [wasm, native] = sources.map(|source| {
                let (mut evictor, _) = standalone::<EvictorHook>(&engine, &config, source, vec![]).unwrap();
                let mut cache = Cache::new(evictor.as_mut(), 3_655).unwrap();
                let hits: Vec<_> = requests.iter().map(|r| cache.request(r).unwrap()).collect();
                let report = cache.report();
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
            let mut cache = Cache::new(&mut evictor, capacity).unwrap();
            let mut model = Model { capacity: capacity as usize, ..Model::default() };
            for (i, blocks) in requests.iter().enumerate() {
                prop_assert_eq!(cache.request(&request(i, blocks)).unwrap(), model.request(blocks), "request {}", i);
            }
        }

        /// Whatever the policy answers, the cache holds at most its capacity, each request's head is
        /// resident afterwards, and the fallback gave what the policy did not give.
        #[test]
        fn no_answer_breaks_the_cache(requests in requests(), capacity in 1..20_u32, seed in any::<u64>()) {
            let mut evictor = Liar { state: seed, slots: 0 };
            let mut cache = Cache::new(&mut evictor, capacity).unwrap();
            for (i, blocks) in requests.iter().enumerate() {
                cache.request(&request(i, blocks)).unwrap();
                let head = blocks.len().min(capacity as usize);
                let pool = cache.pool();
                prop_assert!(cache.prompts.chain[..head].iter().all(|&block| pool.holds(block)));
                prop_assert_eq!(pool.resident_blocks() + pool.free_blocks(), capacity as usize);
            }
        }

        #[test]
        fn every_default_leaves_nothing_to_the_fallback(requests in requests(), capacity in 1..20_u32) {
            for policy in kvasir_default_policies::EVICTORS {
                let mut evictor = native(policy.name);
                let mut cache = Cache::new(&mut evictor, capacity).unwrap();
                for (i, blocks) in requests.iter().enumerate() {
                    cache.request(&request(i, blocks)).unwrap();
                }
                let report = cache.report();
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
            let error = Cache::new(&mut native("lru"), capacity).err().unwrap().to_string();
            assert!(error.contains("outside 1 to 268435456"), "{error}");
        }
    }
}
