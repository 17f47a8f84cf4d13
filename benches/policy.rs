//! Decisions of the default policies, as components and as native twins.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvasir::bench::policy::Scheduling;
use kvasir::policy::evictor::EvictorHook;
use kvasir::policy::scheduler::SchedulerHook;
use kvasir::policy::{Engine, PolicyConfig, Source, standalone};
use kvasir_benches::{Pool, WANT};

const SEED: u64 = 1;
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

criterion_group!(benches, schedule, evict);
criterion_main!(benches);
