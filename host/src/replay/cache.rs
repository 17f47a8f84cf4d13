//! A cache of dense block slots in front of an evictor: hit rates without moving bytes.
//!
//! A request walks its blocks in order. Hits are the longest resident prefix before the request
//! changes anything; resident blocks behind a gap count as misses and are refreshed. Blocks of the
//! request itself are in flight and not evicted. A request longer than the cache inserts only its
//! head. Output blocks are ignored.

use super::chains::{Chains, Node, TooMany};
use super::classes::Classes;
use super::trace::{BLOCK_SIZE_TOKENS, Request};
use crate::policy::Fault;
use crate::policy::evictor::EvictorEngine;
use kvasir_policy::evictor::{
    EVENT, EVENTS_MAX, Event, EventKind, Layout, NO_SLOT, TierRow, VICTIMS_MAX, Victim,
};
use kvasir_policy::list::{Lists, Walk};
use serde::Serialize;
use std::time::Instant;

/// Size that the replay reports for a block: 512 tokens of 320 KiB, a 70B model with grouped queries.
const BLOCK_BYTES: u32 = BLOCK_SIZE_TOKENS * 320 * 1024;
/// How many selections of one request may contain invalid answers before the fallback decides.
const MAX_INVALID_ROUNDS: u32 = 8;
/// The most slots that a policy may be asked to hold (`open` in evictor.wit).
pub const MAX_CAPACITY_BLOCKS: u32 = 1 << 28;

const EMPTY: Node = Node::MAX;

/// Why a replay cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("capacity of {0} blocks is outside 1 to {MAX_CAPACITY_BLOCKS}")]
    Capacity(u32),
    #[error(transparent)]
    TooMany(#[from] TooMany),
    #[error("the evictor failed to open a pool of {slots} slots: {fault}")]
    Open { slots: u32, fault: Fault },
}

/// # Errors
/// [`Error::Capacity`].
pub fn check_capacity(blocks: u32) -> Result<(), Error> {
    if (1..=MAX_CAPACITY_BLOCKS).contains(&blocks) { Ok(()) } else { Err(Error::Capacity(blocks)) }
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

/// The cache; drives one evictor through one trace.
pub struct Cache<'e> {
    evictor: &'e mut dyn EvictorEngine,
    chains: Chains,
    classes: Classes,
    path: Vec<Node>,
    /// By node: the slot that holds it, or `NO_SLOT`.
    slot_of: Vec<u32>,
    /// By slot: the node it holds, or `EMPTY`.
    node_of: Vec<Node>,
    /// By slot: the last request that used it (from 1).
    used_by: Vec<u64>,
    /// By slot: the position of its block in its chain.
    depth_of: Vec<u32>,
    free: Vec<u32>,
    /// Least recently used first: the order in which the fallback takes slots.
    recency: Lists,
    walk: Walk,
    words: Vec<u32>,
    base_ms: u64,
    victims: Vec<Victim>,
    kept: Vec<u32>,
    evictor_ns: u64,
    select_ns: hdrhistogram::Histogram<u64>,
    report: Report,
}

impl<'e> Cache<'e> {
    /// An empty cache of `capacity_blocks`; opens the evictor.
    ///
    /// # Errors
    /// The capacity is out of range, or the evictor fails to open.
    pub fn new(evictor: &'e mut dyn EvictorEngine, capacity_blocks: u32) -> Result<Self, Error> {
        check_capacity(capacity_blocks)?;
        open(evictor, capacity_blocks).map_err(|fault| Error::Open { slots: capacity_blocks, fault })?;
        let histogram = hdrhistogram::Histogram::new_with_bounds(1, 60_000_000_000, 3);
        Ok(Self {
            evictor,
            chains: Chains::default(),
            classes: Classes::default(),
            path: Vec::new(),
            slot_of: Vec::new(),
            node_of: vec![EMPTY; capacity_blocks as usize],
            used_by: vec![0; capacity_blocks as usize],
            depth_of: vec![0; capacity_blocks as usize],
            free: (0..capacity_blocks).rev().collect(),
            recency: Lists::new(capacity_blocks, 1),
            walk: Walk::default(),
            words: Vec::with_capacity(EVENTS_MAX * EVENT),
            base_ms: 0,
            victims: Vec::new(),
            kept: Vec::new(),
            evictor_ns: 0,
            select_ns: histogram.expect("constant bounds of a histogram are valid"),
            report: Report { mode: "cache", capacity_blocks, ..Report::default() },
        })
    }

    /// Serves one request; returns its prefix hits in blocks.
    ///
    /// # Errors
    /// The trace holds too many distinct prefixes.
    pub fn request(&mut self, request: &Request) -> Result<usize, Error> {
        let mut path = std::mem::take(&mut self.path);
        self.chains.walk(&request.blocks, &mut path)?;
        self.slot_of.resize(self.chains.len(), NO_SLOT);
        let class = self.classes.assign(request, &path);
        self.report.requests += 1;
        let hits = path.iter().take_while(|&&node| self.slot_of[node as usize] != NO_SLOT).count();
        self.report.block_references += path.len() as u64;
        self.report.prefix_hits += hits as u64;

        let head = &path[..path.len().min(self.node_of.len())];
        let touch = Touch { class, time_ms: request.time_ms };
        let missing = self.refresh(head, touch);
        if missing > self.free.len() {
            self.evict(missing - self.free.len(), touch);
        }
        self.insert(head, touch);
        self.path = path;
        Ok(hits)
    }

    /// The nodes of the last request and the slots that hold them now.
    pub fn last_request(&self) -> impl Iterator<Item = (Node, Option<u32>)> + '_ {
        let slot = |node: Node| Some(self.slot_of[node as usize]).filter(|&slot| slot != NO_SLOT);
        self.path.iter().map(move |&node| (node, slot(node)))
    }

    /// The results so far; the caller fills in the names.
    pub fn report(&mut self) -> Report {
        let mut report = self.report.clone();
        let percent = 100.0 * report.prefix_hits as f64 / report.block_references.max(1) as f64;
        report.hit_rate_percent = (percent * 1e4).round() / 1e4;
        let its_own = report.evictions - report.fallback_evictions;
        let mean = self.evictor_ns as f64 / its_own.max(1) as f64;
        report.evict_ns_mean = (mean * 10.0).round() / 10.0;
        report.evict_ns_p99 = self.select_ns.value_at_quantile(0.99);
        report
    }

    /// Marks the resident blocks as used; returns how many are missing.
    fn refresh(&mut self, head: &[Node], touch: Touch) -> usize {
        let mut missing = 0;
        for &node in head {
            let slot = self.slot_of[node as usize];
            if slot == NO_SLOT {
                missing += 1;
            } else {
                self.used_by[slot as usize] = self.report.requests;
                self.event(EventKind::Hit, slot, 1, touch);
            }
        }
        missing
    }

    /// Frees `need` slots: those that the policy gives, and the rest by the fallback.
    ///
    /// There are always that many: a request's blocks do not outnumber the slots.
    fn evict(&mut self, need: usize, touch: Touch) {
        let mut evicted = 0;
        let mut invalid_rounds = 0;
        while evicted < need && invalid_rounds < MAX_INVALID_ROUNDS {
            let want = (need - evicted).min(VICTIMS_MAX as usize) as u32;
            let (kept_before, invalid_before) = (self.kept.len(), self.report.invalid_victims);
            if !self.select(touch.time_ms, want) {
                break;
            }
            let answered = self.victims.len();
            evicted += self.accept(want as usize);
            if self.report.invalid_victims > invalid_before {
                invalid_rounds += 1;
            } else if answered < want as usize && self.kept.len() == kept_before {
                break; // it has no more
            }
        }
        self.return_kept(touch);
        while evicted < need {
            evicted += usize::from(self.evict_least_recent(touch));
        }
    }

    /// Hands the events over and asks for victims. Returns false if the policy gave none.
    fn select(&mut self, now_ms: u64, want: u32) -> bool {
        self.flush();
        self.victims.clear();
        if self.report.fault.is_some() {
            return false;
        }
        let start = Instant::now();
        let answer = self.evictor.select_victims(now_ms, want, &mut self.victims);
        let ns = start.elapsed().as_nanos() as u64;
        self.evictor_ns += ns;
        match answer {
            Ok(()) => {}
            Err(Fault::Invalid(_)) => {
                self.report.invalid_victims += 1;
                return false;
            }
            Err(fault) => {
                self.report.fault = Some(fault.to_string());
                return false;
            }
        }
        let count = self.victims.len() as u64;
        let Some(ns_each) = ns.checked_div(count) else { return false };
        self.select_ns.saturating_record_n(ns_each.max(1), count);
        true
    }

    /// Evicts the valid victims, at most `limit`; sets aside those in flight.
    fn accept(&mut self, limit: usize) -> usize {
        let mut evicted = 0;
        for i in 0..self.victims.len() {
            let slot = self.victims[i].slot;
            let resident = self.node_of.get(slot as usize).is_some_and(|&node| node != EMPTY);
            if !resident || self.kept.contains(&slot) || evicted == limit {
                self.report.invalid_victims += 1;
            } else if self.used_by[slot as usize] == self.report.requests {
                self.kept.push(slot);
            } else {
                self.vacate(slot);
                evicted += 1;
            }
        }
        evicted
    }

    /// Tells the policy which victims stay, in the order of the request.
    fn return_kept(&mut self, touch: Touch) {
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort_unstable_by_key(|&slot| self.depth_of[slot as usize]);
        for &slot in &kept {
            self.event(EventKind::Keep, slot, 1, touch);
        }
        kept.clear();
        self.kept = kept;
    }

    fn evict_least_recent(&mut self, touch: Touch) -> bool {
        let Some(slot) = self.recency.front(0) else { unreachable!("fewer blocks than slots are in flight") };
        if self.used_by[slot as usize] == self.report.requests {
            self.recency.push_back(0, slot);
            return false;
        }
        self.event(EventKind::Remove, slot, 0, touch);
        self.vacate(slot);
        self.report.fallback_evictions += 1;
        true
    }

    fn vacate(&mut self, slot: u32) {
        let node = std::mem::replace(&mut self.node_of[slot as usize], EMPTY);
        self.slot_of[node as usize] = NO_SLOT;
        self.recency.remove(slot);
        self.free.push(slot);
        self.report.evictions += 1;
    }

    fn insert(&mut self, head: &[Node], touch: Touch) {
        let mut parent = NO_SLOT;
        for (depth, &node) in head.iter().enumerate() {
            let mut slot = self.slot_of[node as usize];
            if slot == NO_SLOT {
                slot = self.free.pop().expect("evict frees a slot for every missing block");
                self.slot_of[node as usize] = slot;
                self.node_of[slot as usize] = node;
                self.used_by[slot as usize] = self.report.requests;
                self.depth_of[slot as usize] = depth as u32;
                self.event(EventKind::Insert, slot, parent, touch);
            }
            parent = slot;
        }
    }

    /// Queues an event for the policy and updates the fallback's order.
    fn event(&mut self, kind: EventKind, slot: u32, parent_or_uses: u32, touch: Touch) {
        if self.words.is_empty() {
            self.base_ms = touch.time_ms;
        }
        let event = Event {
            kind,
            replayed: false,
            class: touch.class,
            slot,
            parent_or_uses,
            depth: self.depth_of[slot as usize],
            size_bytes: BLOCK_BYTES,
            time_ms: touch.time_ms,
            identity: self.chains.identity(self.node_of[slot as usize]),
            tenant: 0,
        };
        event.encode(self.base_ms, &mut self.words);
        if matches!(kind, EventKind::Insert | EventKind::Hit) {
            let at = self.walk.shallower(&event);
            if !at.is_some_and(|at| self.recency.insert_before(at, slot)) {
                self.recency.push_back(0, slot);
            }
        }
        if self.words.len() >= EVENTS_MAX * EVENT {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if !self.words.is_empty() && self.report.fault.is_none() {
            let start = Instant::now();
            let answer = self.evictor.on_events(self.base_ms, &self.words);
            self.evictor_ns += start.elapsed().as_nanos() as u64;
            self.report.fault = answer.err().map(|fault| fault.to_string());
        }
        self.words.clear();
    }
}

/// The pool that is replayed, full as it is after a while, is all the evictor hears of: there is no tier below.
fn open(evictor: &mut dyn EvictorEngine, slots: u32) -> Result<(), Fault> {
    evictor.open(&Layout::of(slots).encode())?;
    let mib = (u64::from(slots) * u64::from(BLOCK_BYTES)) as f32 / (1 << 20) as f32;
    let dram = TierRow {
        tier: 2,
        capacity_mib: mib,
        used_mib: mib,
        load_fixed_ms: 0.0,
        load_ms_per_mib: 0.0,
        takes_copies: true,
    };
    evictor.update_tiers(&dram.encode())
}

/// What the events of one request have in common.
#[derive(Clone, Copy)]
struct Touch {
    class: u16,
    time_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::super::trace::Reader;
    use super::*;
    use crate::policy::evictor::{EvictorHook, NativeEvictor};
    use crate::policy::slot::Policy;
    use crate::policy::{Engine, PolicyConfig, Source, standalone};
    use kvasir_policy::Description;
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
        Request { time_ms: i as u64 / 3, input_tokens, output_tokens: 1, blocks: blocks.to_vec() }
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
                prop_assert!(cache.last_request().take(head).all(|(_, slot)| slot.is_some()));
                let resident = cache.slot_of.iter().filter(|&&slot| slot != NO_SLOT).count();
                prop_assert_eq!(resident + cache.free.len(), capacity as usize);
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
