//! `kvasir bench policy`: the default policies as components, compared with their native twins.

use super::{Row, Times, beside_events, evictor_swap, time_calls};
use crate::fleet::{Ask, DecodeCost, DecodeSpec, Fleet, PrefillCost, PrefillSpec, TransferCost, Version};
use crate::policy::evictor::EvictorHook;
use crate::policy::scheduler::{SchedulerEngine, SchedulerHook};
use crate::policy::{
    Engine, Error, Fault, PolicyConfig, PolicyHost, SchedulerWorker, SlotKind, Source, Wanted, standalone,
};
use crate::replay::cache::{self, Report as CacheReport};
use crate::replay::generate::{Generator, Plan, Workload};
use crate::replay::recorded::Recorded;
use crate::replay::tally::Split;
use crate::replay::trace::Request as TraceRequest;
use hdrhistogram::Histogram;
use kvasir_policy::scheduler::{Column, Decision, Question};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Calls timed per row.
    pub calls: usize,
    /// Requests of the generated trace behind `evict/…`.
    pub requests: u64,
    /// Swaps behind `swap/stall`.
    pub swaps: u32,
    /// Blocks resident while the evictor is swapped.
    pub resident: u32,
}

impl Size {
    pub const FULL: Self = Self { calls: 50_000, requests: 20_000, swaps: 2_000, resident: 1_000_000 };
    /// For tests: every row, no meaning in the numbers.
    pub const SMOKE: Self = Self { calls: 200, requests: 300, swaps: 20, resident: 2_000 };
}

/// Prompts that a bench takes in turn.
const PROMPTS: usize = 64;
const BLOCK_SIZE_TOKENS: u32 = 512;

/// The rows of the report; instances, prompts and the trace follow from `seed`.
///
/// # Errors
/// A default policy does not start, or a put failed while the evictor was swapped.
pub fn rows(size: Size, seed: u64) -> Result<Vec<Row>, Error> {
    let config = PolicyConfig { evictor_slots: 1 << 16, ..PolicyConfig::unhurried() };
    let engine = Engine::new(&config, None)?;
    let scheduler =
        |source| standalone::<SchedulerHook>(&engine, &config, source, Vec::new()).map(|(s, _)| s);
    let mut rows = vec![empty_call(scheduler(Source::Builtin("mooncake".into()))?, size)];
    for instances in [8, 64, 512] {
        let wasm = schedule(scheduler(Source::Builtin("mooncake".into()))?, instances, size, seed);
        let native = schedule(scheduler(Source::Native("mooncake".into()))?, instances, size, seed);
        let row = Row::of_times(format!("schedule/mooncake/{instances}"), &wasm);
        rows.push(row.beside(native.ns(0.5)));
    }
    for instances in [8, 64, 512] {
        let times = decide(&config, instances, size, seed)?;
        rows.push(Row::of_times(format!("decide/mooncake/{instances}"), &times));
    }
    rows.push(beside_events::row(&config, size.calls)?);
    let evict = |policy: &str, source: fn(String) -> Source| -> Result<CacheReport, Error> {
        let (mut evictor, _) =
            standalone::<EvictorHook>(&engine, &config, source(policy.into()), Vec::new())?;
        let report = evict(evictor.as_mut(), size, seed);
        // What serves from then on is the fallback, and its figures would pass for the policy's.
        match report.fault {
            Some(fault) => Err(Error::Engine(format!("bench: evictor `{policy}` failed: {fault}"))),
            None => Ok(report),
        }
    };
    for policy in ["workload-aware", "kvasir"] {
        let wasm = evict(policy, Source::Builtin)?;
        let native = evict(policy, Source::Native)?;
        let row = Row::new(format!("evict/{policy}"), wasm.evict_ns_mean, "ns").beside(native.evict_ns_mean);
        rows.push(Row { p99: Some(wasm.evict_ns_p99 as f64), ..row });
    }
    rows.push(swap(&config, size)?);
    rows.extend(evictor_swap::rows(size.resident)?);
    Ok(rows)
}

/// The cost of the boundary itself: a call with one empty list.
fn empty_call(mut engine: Box<dyn SchedulerEngine>, size: Size) -> Row {
    let times = time_calls(size.calls, |_| {
        let _ = std::hint::black_box(engine.set_thresholds(&[]));
    });
    Row::of_times("call/empty", &times)
}

fn schedule(engine: Box<dyn SchedulerEngine>, instances: u16, size: Size, seed: u64) -> Times {
    let mut scheduling = Scheduling::new(engine, instances, seed);
    time_calls(size.calls, |_| {
        let _ = std::hint::black_box(scheduling.one());
    })
}

/// Decisions over `instances` prefill and as many decode instances, pushed beforehand.
pub struct Scheduling {
    engine: Box<dyn SchedulerEngine>,
    questions: Vec<Question>,
    done: usize,
}

impl Scheduling {
    pub fn new(mut engine: Box<dyn SchedulerEngine>, instances: u16, seed: u64) -> Self {
        let fleet = fleet(instances, seed);
        if let Some(changes) = fleet.changes_since(&mut Version::default()) {
            let _ = changes.open.map(|layout| engine.open(&layout.encode()));
            let _ = engine.update_prefill(&changes.prefill);
            let _ = engine.update_decode(&changes.decode);
        }
        let question = |(ask, prefix): (Ask, Vec<u32>)| {
            let mut question = Question::default();
            ask_into(&mut question, &fleet, &ask, &prefix);
            question
        };
        let questions = prompts(instances, seed).into_iter().map(question).collect();
        Self { engine, questions, done: 0 }
    }

    /// The answer to the next prompt.
    ///
    /// # Errors
    /// As [`SchedulerEngine::schedule`].
    pub fn one(&mut self) -> Result<Decision, Fault> {
        let question = &self.questions[self.done % PROMPTS];
        self.done += 1;
        self.engine.schedule(question)
    }
}

/// The question about a prompt that finds `prefix`, as the conductor builds it.
fn ask_into(question: &mut Question, fleet: &Fleet, ask: &Ask, prefix: &[u32]) {
    let request = fleet.request(ask);
    question.begin(fleet.table_time(1_000), &request, fleet.prefill_slots(), fleet.decode_slots());
    question.add(Column::Prefix, |_, slots| {
        slots.copy_from_slice(prefix);
        true
    });
}

/// The same as the daemon does it: changed rows pushed, answer checked, work booked and released.
fn decide(config: &PolicyConfig, instances: u16, size: Size, seed: u64) -> Result<Times, Error> {
    let host = PolicyHost::open(config, Wanted::default(), None)?;
    let mut worker = host.scheduler_worker();
    let mut fleet = fleet(instances, seed);
    let prompts = prompts(instances, seed);
    let mut question = Question::default();
    Ok(time_calls(size.calls, |i| {
        let (ask, prefix) = &prompts[i % PROMPTS];
        ask_into(&mut question, &fleet, ask, prefix);
        let outcome = worker.schedule(&fleet, &question);
        let booked = fleet.admit(i as u64, ask, &outcome.decision, question.candidates(), 1_000);
        let _ = std::hint::black_box(booked);
        let _ = fleet.prefill_done(i as u64, None, 1_000);
        let _ = fleet.finished(i as u64, 1_000);
    }))
}

fn fleet(instances: u16, seed: u64) -> Fleet {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut fleet = Fleet::new(Default::default(), BLOCK_SIZE_TOKENS, 0);
    let transfer = TransferCost { fixed_ms: 1.0, ms_per_block: 0.4 };
    for _ in 0..instances {
        let spread = 1.0 + (random.next_u32() % 64) as f32 / 64.0;
        let cost = PrefillCost { fixed_ms: 5.0 * spread, ms_per_token: 0.05 * spread, ms_per_pair: 1e-6 };
        let prefill = PrefillSpec { cost, transfer, capacity_blocks: 10_000 };
        let cost = DecodeCost { fixed_ms: 10.0, ms_per_sequence: 0.1 * spread, ms_per_context_token: 1e-4 };
        let decode = DecodeSpec { cost, handover: transfer, capacity_blocks: 10_000 };
        // Far below the limit of instances, so neither can be refused.
        let _ = (fleet.register_prefill(prefill, 0), fleet.register_decode(decode, 0));
    }
    fleet
}

/// Requests, each with the prefix column that it finds.
fn prompts(instances: u16, seed: u64) -> Vec<(Ask, Vec<u32>)> {
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ 1);
    let prompt = |_| {
        let blocks = 1 + random.next_u32() % 64;
        let ask = Ask {
            prompt_tokens: blocks * BLOCK_SIZE_TOKENS,
            output_tokens: 200,
            class: 1,
            seed: random.next_u64(),
            ttft_slo_ms: 30_000.0,
            tbt_slo_ms: 300.0,
            ..Ask::default()
        };
        let prefix = (0..instances).map(|_| random.next_u32() % (blocks + 1)).collect();
        (ask, prefix)
    };
    (0..PROMPTS).map(prompt).collect()
}

/// A chat-like trace through a cache that holds a tenth of its blocks.
fn evict(evictor: &mut dyn crate::policy::evictor::EvictorEngine, size: Size, seed: u64) -> CacheReport {
    let plan = Plan { workload: Workload::Chat, requests: size.requests, rate_rps: 4.0, seed };
    let trace: Vec<TraceRequest> = Generator::new(&plan).expect("the plan is within bounds").collect();
    let blocks: usize = trace.iter().map(|r| r.blocks.len()).sum();
    let trace = Recorded::read(trace.into_iter().map(Ok), BLOCK_SIZE_TOKENS);
    let trace = trace.expect("generated requests are well formed");
    let capacity_blocks = (blocks as u32 / 20).max(64);
    cache::replay(evictor, &trace, capacity_blocks, Split::default()).expect("capacity is within bounds")
}

/// What a worker that decides without pause loses when the policy under it is swapped: the time of
/// the calls that met a new generation.
fn swap(config: &PolicyConfig, size: Size) -> Result<Row, Error> {
    let host = PolicyHost::open(config, Wanted::default(), None)?;
    host.load(SlotKind::Scheduler, Source::Builtin("round-robin".into()), Vec::new())?;
    let fleet = fleet(64, 7);
    let prompts = prompts(64, 7);
    let (done, met) = (AtomicBool::new(false), AtomicU64::new(0));
    let longest = Duration::from_secs(10).as_nanos() as u64;
    let mut stalls = Histogram::<u64>::new_with_bounds(1, longest, 3).expect("bounds are valid");
    let mut worker = host.scheduler_worker();
    let swapped = std::thread::scope(|scope| {
        let deciding = scope.spawn(|| {
            let (mut call, mut question) = (0, Question::default());
            let mut decide = |worker: &mut SchedulerWorker| {
                let (ask, prefix) = &prompts[call % PROMPTS];
                call += 1;
                ask_into(&mut question, &fleet, ask, prefix);
                worker.schedule(&fleet, &question).generation
            };
            let mut generation = decide(&mut worker);
            met.store(generation, Ordering::Release);
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                let now = decide(&mut worker);
                if now != generation {
                    generation = now;
                    stalls.saturating_record(start.elapsed().as_nanos() as u64);
                    met.store(generation, Ordering::Release);
                }
            }
        });
        // However busy the machine, each version is met, and so each swap measured.
        let until_met = |known: &dyn Fn(u64) -> bool| {
            while !known(met.load(Ordering::Acquire)) && !deciding.is_finished() {
                std::thread::yield_now();
            }
        };
        until_met(&|met| met != 0);
        let swapped = (0..size.swaps).try_for_each(|_| {
            std::thread::sleep(Duration::from_micros(500)); // let the worker settle on each version
            let back = host.rollback(SlotKind::Scheduler)?;
            until_met(&|met| met == back.generation);
            Ok::<(), Error>(())
        });
        done.store(true, Ordering::Relaxed);
        swapped
    });
    swapped?;
    let at = |quantile| Some(stalls.value_at_quantile(quantile) as f64);
    let row = Row::new("swap/stall", stalls.value_at_quantile(0.999) as f64, "ns");
    Ok(Row { p50: at(0.5), p99: at(0.99), ..row })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_contract_is_measured() {
        let rows = rows(Size::SMOKE, 1).expect("rows");
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        let published = [
            "call/empty",
            "schedule/mooncake/8",
            "schedule/mooncake/512",
            "decide/beside-events",
            "evict/workload-aware",
            "evict/kvasir",
            "swap/stall",
            "swap/evictor/stall",
            "swap/evictor/put",
        ];
        assert!(published.iter().all(|p| names.contains(p)), "{names:?}");
        assert!(rows.iter().all(|r| r.value > 0.0), "{rows:?}");
    }
}
