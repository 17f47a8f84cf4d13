//! Decisions of the default policies, as components and as native twins.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvasir::bench::policy::Scheduling;
use kvasir::policy::evictor::{EvictorEngine, EvictorHook};
use kvasir::policy::scheduler::SchedulerHook;
use kvasir::policy::{Engine, PolicyConfig, Source, standalone};
use kvasir_policy::evictor::{Event, EventKind, Layout, NO_SLOT, Victim};
use std::hint::black_box;

const SEED: u64 = 1;
/// Victims asked for at once.
const WANT: u32 = 32;

type From = fn(String) -> Source;
const ENGINES: [(&str, From); 2] = [("wasm", Source::Builtin), ("native", Source::Native)];

fn schedule(criterion: &mut Criterion) {
    let config = PolicyConfig::default();
    let engine = Engine::new(&config, None).expect("an engine starts");
    let mut group = criterion.benchmark_group("schedule/mooncake");
    for instances in [8, 64, 512] {
        for (name, source) in ENGINES {
            let source = source("mooncake".into());
            let (policy, _) = standalone::<SchedulerHook>(&engine, &config, source, Vec::new())
                .expect("a default policy starts");
            let mut scheduling = Scheduling::new(policy, instances, SEED);
            group.bench_function(BenchmarkId::new(name, instances), |bencher| {
                bencher.iter(|| scheduling.one().expect("a default policy decides"));
            });
        }
    }
}

/// A full pool: some victims are chosen, and blocks inserted where they were.
fn evict(criterion: &mut Criterion) {
    let slots: u32 = if kvasir_benches::measuring() { 1 << 16 } else { 1 << 8 };
    let config = PolicyConfig { evictor_slots: slots, ..PolicyConfig::default() };
    let engine = Engine::new(&config, None).expect("an engine starts");
    let mut group = criterion.benchmark_group(format!("select-and-insert-{WANT}"));
    for policy in ["lru", "sieve", "workload-aware"] {
        for (name, source) in ENGINES {
            let source = source(policy.into());
            let (evictor, _) = standalone::<EvictorHook>(&engine, &config, source, Vec::new())
                .expect("a default policy starts");
            let mut pool = Pool::full(evictor, slots);
            group.bench_function(BenchmarkId::new(policy, name), |bencher| {
                bencher.iter(|| pool.turn_over());
            });
        }
    }
}

struct Pool {
    evictor: Box<dyn EvictorEngine>,
    now_ms: u64,
    victims: Vec<Victim>,
    words: Vec<u32>,
}

impl Pool {
    fn full(mut evictor: Box<dyn EvictorEngine>, slots: u32) -> Self {
        evictor.open(&Layout::of(slots).encode()).expect("the pool is within limits");
        let mut pool = Self { evictor, now_ms: 0, victims: Vec::new(), words: Vec::new() };
        for first in (0..slots).step_by(WANT as usize) {
            pool.insert(first..slots.min(first + WANT));
        }
        pool
    }

    fn insert(&mut self, slots: impl Iterator<Item = u32>) {
        self.now_ms += 1;
        let (base_ms, time_ms) = (self.now_ms, self.now_ms);
        self.words.clear();
        for slot in slots {
            let event = Event {
                kind: EventKind::Insert,
                replayed: false,
                class: (slot % 16) as u16,
                slot,
                parent_or_uses: NO_SLOT,
                depth: slot % 64,
                size_bytes: 1 << 20,
                time_ms,
                identity: time_ms << 32 | u64::from(slot),
                tenant: 0,
            };
            event.encode(base_ms, &mut self.words);
        }
        self.evictor.on_events(base_ms, &self.words).expect("a default policy takes events");
    }

    fn turn_over(&mut self) {
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        self.evictor.select_victims(self.now_ms, WANT, &mut victims).expect("a default policy chooses");
        assert_eq!(victims.len(), WANT as usize, "a full pool has victims");
        self.insert(victims.iter().map(|victim| victim.slot));
        self.victims = black_box(victims);
    }
}

criterion_group!(benches, schedule, evict);
criterion_main!(benches);
