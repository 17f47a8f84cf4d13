//! Hot calls of the templates in every language, beside a native default policy of their slot.
//!
//! `cargo xtask bench --languages` builds the templates, names their folder in `KVASIR_TEMPLATES` and runs this.

use kvasir::bench::policy::Scheduling;
use kvasir::bench::{Times, time_calls};
use kvasir::policy::admitter::AdmitterHook;
use kvasir::policy::balancer::BalancerHook;
use kvasir::policy::evictor::EvictorHook;
use kvasir::policy::scheduler::SchedulerHook;
use kvasir::policy::slot::Hook;
use kvasir::policy::{Engine, PolicyConfig, Source, standalone};
use kvasir_benches::{Pool, WANT, measuring};
use kvasir_policy::admitter::Forecast;
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::scheduler::Request;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SEED: u64 = 1;
const CALLS: usize = 20_000;
/// Block slots of the evictors' pool.
const POOL: u32 = 1 << 16;
/// Prefill and as many decode instances that a balancer watches.
const INSTANCES: usize = 64;

fn main() {
    let Some(folder) = std::env::var_os("KVASIR_TEMPLATES").map(PathBuf::from) else {
        println!("no KVASIR_TEMPLATES; `cargo xtask bench --languages` makes that folder");
        return;
    };
    let bench = Bench::new(if measuring() { CALLS } else { CALLS / 100 });
    println!(
        "{:<30} {:<18} {:>10} {:>9} {:>9} {:>9}",
        "call", "language", "bytes", "load ms", "p50 ns", "p99 ns"
    );
    for instances in [8, 64] {
        let call = format!("schedule, {instances} + {instances} instances");
        bench
            .rows(&folder, "scheduler", "mooncake", &call, |bench, source| bench.schedule(source, instances));
    }
    let call = format!("{WANT} victims, {WANT} inserts");
    bench.rows(&folder, "evictor", "lru", &call, Bench::evict);
    bench.rows(&folder, "admitter", "slo", "admit-request", Bench::admit);
    bench.rows(
        &folder,
        "balancer",
        "static",
        &format!("tick, {INSTANCES} + {INSTANCES} instances"),
        Bench::tick,
    );
}

/// Times of a call, and how long the policy took to load.
type Measured = (Times, Duration);

struct Bench {
    config: PolicyConfig,
    engine: Engine,
    calls: usize,
}

impl Bench {
    fn new(calls: usize) -> Self {
        let config = PolicyConfig {
            evictor_slots: POOL,
            // Enough for every language; what each needs stands in docs/policy-languages.md.
            memory_bytes: 64 << 20,
            hot_deadline: Duration::from_secs(1),
            cold_deadline: Duration::from_secs(60),
            ..PolicyConfig::unhurried()
        };
        let engine = Engine::new(&config, None).expect("an engine starts");
        Self { config, engine, calls }
    }

    /// One row for the native policy, and one for each language.
    fn rows(
        &self,
        folder: &Path,
        slot: &str,
        native: &str,
        call: &str,
        measure: impl Fn(&Self, Source) -> Measured,
    ) {
        let row = |language: &str, bytes: usize, source| {
            let (times, load) = measure(self, source);
            let (p50, p99) = (times.ns(0.5), times.ns(0.99));
            println!("{call:<30} {language:<18} {bytes:>10} {:>9} {p50:>9} {p99:>9}", load.as_millis());
        };
        row(&format!("native {native}"), 0, Source::Native(native.into()));
        for (language, bytes) in components(folder, slot) {
            row(&language, bytes.len(), Source::Bytes { name: language.clone(), bytes });
        }
    }

    fn start<H: Hook>(&self, source: Source) -> (Box<H::Engine>, Duration) {
        let start = Instant::now();
        let started = standalone::<H>(&self.engine, &self.config, source, Vec::new());
        (started.unwrap_or_else(|e| panic!("{e}")).0, start.elapsed())
    }

    fn schedule(&self, source: Source, instances: u16) -> Measured {
        let (engine, load) = self.start::<SchedulerHook>(source);
        let mut scheduling = Scheduling::new(engine, instances, SEED);
        let times = time_calls(self.calls, |_| {
            let _ = black_box(scheduling.one().expect("a template decides"));
        });
        (times, load)
    }

    fn evict(&self, source: Source) -> Measured {
        let (engine, load) = self.start::<EvictorHook>(source);
        let mut pool = Pool::full(engine, POOL);
        (time_calls(self.calls, |_| pool.turn_over()), load)
    }

    fn admit(&self, source: Source) -> Measured {
        let (mut engine, load) = self.start::<AdmitterHook>(source);
        let request = Request { ttft_slo: 200.0, tbt_slo: 50.0, ..Request::default() }.encode();
        let forecast = Forecast { ttft: 150.0, tbt: 40.0, ..Forecast::default() };
        let times = time_calls(self.calls, |_| {
            let _ = black_box(engine.admit_request(&request, &forecast).expect("a template decides"));
        });
        (times, load)
    }

    fn tick(&self, source: Source) -> Measured {
        let (mut engine, load) = self.start::<BalancerHook>(source);
        let state = Snapshot {
            prefill_queue_ms: vec![10.0; INSTANCES],
            decode_step_ms: vec![20.0; INSTANCES],
            ..Snapshot::default()
        };
        let times = time_calls(self.calls, |_| {
            let _ = black_box(engine.tick(&state).expect("a template answers"));
        });
        (times, load)
    }
}

/// `LANGUAGE-SLOT.wasm` of that slot, as language and bytes.
fn components(folder: &Path, slot: &str) -> Vec<(String, Vec<u8>)> {
    let entries = folder.read_dir().unwrap_or_else(|e| panic!("cannot list {}: {e}", folder.display()));
    let component = |path: PathBuf| {
        let (language, of) = path.file_stem()?.to_str()?.rsplit_once('-')?;
        let read = || std::fs::read(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
        (of == slot).then(|| (language.to_owned(), read()))
    };
    let mut found: Vec<_> = entries.flatten().filter_map(|entry| component(entry.path())).collect();
    found.sort();
    found
}
