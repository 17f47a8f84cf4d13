//! `kvasir policy bench`: one policy beside the default of its slot, as component and as native twin, taking turns.
//!
//! What is timed is what the host does for one decision: encode the question, enter the component, decode the answer.

use super::policy::{Scheduling, Size};
use super::{Machine, Times, short, time_calls};
use crate::policy::admitter::{AdmitterEngine, AdmitterHook};
use crate::policy::balancer::{BalancerEngine, BalancerHook};
use crate::policy::evictor::{EvictorEngine, EvictorHook};
use crate::policy::scheduler::{SchedulerEngine, SchedulerHook};
use crate::policy::slot::Hook;
use crate::policy::{Engine, Fault, PolicyConfig, Prepared, SlotKind};
use crate::replay::cache::Prompts;
use crate::replay::contender::Contender;
use crate::replay::generate::{Generator, Plan, Workload};
use crate::replay::pool::{Pool, Touch};
use comfy_table::{Table, presets};
use kvasir_policy::admitter::{Block, Forecast, Load, Request};
use kvasir_policy::balancer::Snapshot;
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often each policy has its turn: what else the machine does then falls on all of them.
const TURNS: usize = 16;
/// Instances in each table.
const INSTANCES: [u16; 3] = [8, 64, 512];
/// Slots of the pools that evictors keep.
const POOLS: [u32; 3] = [512, 4_096, 16_384];
/// Blocks offered to a tier at once.
const BATCHES: [usize; 3] = [1, 64, 512];
/// Requests between two ticks that tell the load.
const REQUESTS_A_TICK: usize = 64;

/// Why nothing more was measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Policy(#[from] crate::policy::Error),
    #[error(transparent)]
    Pool(#[from] crate::replay::pool::Error),
    #[error("`{name}` failed in {row}: {fault}")]
    Fault { name: String, row: String, fault: Fault },
}

/// Times of one policy in one row, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timing {
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
}

impl From<&Times> for Timing {
    fn from(times: &Times) -> Self {
        Self { mean: (times.mean_ns() * 10.0).round() / 10.0, p50: times.ns(0.5), p99: times.ns(0.99) }
    }
}

/// One size of one call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub unit: &'static str,
    #[serde(flatten)]
    pub policy: Timing,
    pub native_default: Timing,
    pub component_default: Timing,
}

/// Everything one run measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub bench: &'static str,
    pub slot: &'static str,
    pub policy: String,
    pub default: String,
    pub machine: Machine,
    /// Time to check, compile, instantiate and configure it, with nothing taken from a cache.
    pub load_ms: f64,
    /// The most that an instance of it took.
    pub memory_bytes: usize,
    pub rows: Vec<Row>,
    /// The policy that failed after these rows, in which, and how.
    pub failed: Option<String>,
}

/// Measures `contender` beside the default of its slot, within `limits`. What fails on the way ends it, and is in the report.
///
/// # Errors
/// A policy does not start.
pub fn run(contender: &Contender, limits: PolicyConfig, size: Size, seed: u64) -> Result<Report, Error> {
    let evictor_slots = POOLS.into_iter().max().unwrap_or(1);
    let config = &PolicyConfig { evictor_slots, ..limits };
    match contender.slot {
        SlotKind::Scheduler => {
            Contest::<SchedulerHook>::new(contender, config, size, seed)?.report(scheduler)
        }
        SlotKind::Evictor => Contest::<EvictorHook>::new(contender, config, size, seed)?.report(evictor),
        SlotKind::Admitter => Contest::<AdmitterHook>::new(contender, config, size, seed)?.report(admitter),
        SlotKind::Balancer => Contest::<BalancerHook>::new(contender, config, size, seed)?.report(balancer),
    }
}

/// The policy, the native default and the default as a component, compiled.
struct Contest<H: Hook> {
    names: [String; 3],
    policies: [Prepared<H>; 3],
    size: Size,
    seed: u64,
    load: Duration,
    memory_bytes: usize,
    rows: Vec<Row>,
}

impl<H: Hook> Contest<H> {
    fn new(contender: &Contender, config: &PolicyConfig, size: Size, seed: u64) -> Result<Self, Error> {
        let engine = Engine::new(config, None)?;
        let default = Contender::default_of(H::KIND);
        let native = default.clone().native();
        let prepare = |of: &Contender| {
            let choice = of.choice.clone();
            Prepared::<H>::new(&engine, config, choice.source, choice.settings)
        };
        let start = Instant::now();
        let policy = prepare(contender)?;
        drop(policy.engine()?);
        let load = start.elapsed();
        let names = [contender.name.clone(), format!("native {}", default.name), default.name.clone()];
        let policies = [policy, prepare(&native)?, prepare(&default)?];
        Ok(Self { names, policies, size, seed, load, memory_bytes: 0, rows: Vec::new() })
    }

    fn report(mut self, measure: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<Report, Error> {
        let failed = match measure(&mut self) {
            Ok(()) => None,
            Err(error @ Error::Fault { .. }) => Some(error.to_string()),
            Err(error) => return Err(error),
        };
        let [policy, _, default] = self.names;
        Ok(Report {
            bench: "policy",
            slot: H::KIND.as_str(),
            policy,
            default,
            machine: Machine::here(),
            load_ms: (self.load.as_secs_f64() * 1e5).round() / 1e2,
            memory_bytes: self.memory_bytes,
            rows: self.rows,
            failed,
        })
    }

    /// A fresh engine of each.
    fn engines(&self) -> Result<[Box<H::Engine>; 3], Error> {
        let [a, b, c] = self.policies.each_ref().map(|policy| policy.engine().map(|(engine, _)| engine));
        Ok([a?, b?, c?])
    }

    fn note_memory(&mut self) {
        self.memory_bytes = self.memory_bytes.max(self.policies[0].memory_in_use());
    }

    /// Times a call of each, turn by turn.
    fn timed<S>(
        &mut self,
        name: String,
        mut sides: [S; 3],
        mut call: impl FnMut(&mut S, usize) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let calls = self.size.calls.div_ceil(TURNS);
        let mut times: [Option<Times>; 3] = [const { None }; 3];
        for turn in 0..TURNS {
            for (at, side) in sides.iter_mut().enumerate() {
                let mut failed = None;
                let taken = time_calls(calls, |n| {
                    if failed.is_none() {
                        failed = call(side, turn * calls + n).err();
                    }
                });
                if let Some(fault) = failed {
                    return Err(Error::Fault { name: self.names[at].clone(), row: name, fault });
                }
                match &mut times[at] {
                    Some(times) => times.add(&taken),
                    none => *none = Some(taken),
                }
            }
        }
        self.note_memory();
        let [policy, native_default, component_default] =
            times.map(|times| times.as_ref().map_or(Timing::default(), Timing::from));
        self.rows.push(Row { name, unit: "ns", policy, native_default, component_default });
        Ok(())
    }
}

/// What is answered must not be left out because nobody looks at it.
fn used<T>(answer: T) {
    let _ = std::hint::black_box(answer);
}

fn scheduler(contest: &mut Contest<SchedulerHook>) -> Result<(), Error> {
    for instances in INSTANCES {
        let seed = contest.seed;
        let sides = contest.engines()?.map(|e: Box<dyn SchedulerEngine>| Scheduling::new(e, instances, seed));
        contest.timed(format!("schedule/{instances}"), sides, |side, _| side.one().map(used))?;
    }
    Ok(())
}

/// Events and learning included, for each victim. The quantiles are over the calls that select.
fn evictor(contest: &mut Contest<EvictorHook>) -> Result<(), Error> {
    let plan =
        Plan { workload: Workload::Chat, requests: contest.size.requests, rate_rps: 4.0, seed: contest.seed };
    for slots in POOLS {
        let mut engines = contest.engines()?;
        let [a, b, c] = engines.each_mut().map(|e: &mut Box<dyn EvictorEngine>| Pool::new(e.as_mut(), slots));
        let mut pools = [a?, b?, c?];
        let mut prompts = Prompts::default();
        let requests = Generator::new(&plan).expect("the plan is within bounds");
        // Each takes the whole request in turn, so that they stay together.
        for request in requests {
            let (chain, class) = prompts.of(&request).expect("a generated trace is not that long");
            let touch = Touch { class, time_ms: request.time_ms() };
            for pool in &mut pools {
                pool.use_chain(chain, touch);
            }
        }
        let name = format!("evict/{slots}");
        for (pool, name_of) in pools.iter().zip(&contest.names) {
            let counts = pool.counts();
            let invalid = || Fault::Invalid(format!("{} invalid victims", counts.invalid_victims));
            let fault = counts.fault.clone().or_else(|| (counts.invalid_victims > 0).then(invalid));
            if let Some(fault) = fault {
                return Err(Error::Fault { name: name_of.clone(), row: name, fault });
            }
        }
        // Nothing was measured of a pool that so few requests did not fill.
        if pools.iter().any(|pool| pool.counts().evictions == 0) {
            continue;
        }
        let [policy, native_default, component_default] = pools.each_ref().map(|pool| Timing {
            mean: (pool.evict_ns_mean() * 10.0).round() / 10.0,
            p50: pool.select_ns().value_at_quantile(0.5) as f64,
            p99: pool.select_ns().value_at_quantile(0.99) as f64,
        });
        contest.note_memory();
        contest.rows.push(Row { name, unit: "ns", policy, native_default, component_default });
    }
    Ok(())
}

fn admitter(contest: &mut Contest<AdmitterHook>) -> Result<(), Error> {
    let request = Request { prompt_tokens: 4_096, ttft_slo: 30_000.0, tbt_slo: 300.0, ..Request::default() };
    let words = request.encode();
    let sides = contest.engines()?;
    let ask = |engine: &mut Box<dyn AdmitterEngine>, n: usize| {
        let some = n as f32;
        if n.is_multiple_of(REQUESTS_A_TICK) {
            engine.update_load(&Load { prefill_queue_mean_ms: some, ..Load::default() })?;
        }
        let forecast = Forecast { ttft: some, tbt: 20.0, ..Forecast::default() };
        engine.admit_request(&words, &forecast).map(used)
    };
    contest.timed("admit-request".into(), sides, ask)?;
    for blocks in BATCHES {
        let block = |n: usize| Block {
            class: (n % 16) as u16,
            uses: 1,
            depth: n as u32,
            size_bytes: 1 << 20,
            last_offer_ms: None,
            tenant: 0,
        };
        let words: Vec<u32> = (0..blocks).flat_map(|n| block(n).encode()).collect();
        let sides = contest.engines()?;
        let offer = |engine: &mut Box<dyn AdmitterEngine>, _: usize| engine.admit_blocks(3, &words).map(used);
        contest.timed(format!("admit-blocks/{blocks}"), sides, offer)?;
    }
    Ok(())
}

fn balancer(contest: &mut Contest<BalancerHook>) -> Result<(), Error> {
    for instances in INSTANCES {
        let column = |unit: f32| (0..instances).map(|n| f32::from(n) * unit).collect();
        let mut state = Snapshot {
            prefill_queue_ms: column(10.0),
            decode_step_ms: column(0.1),
            hit_rate_percent: 40.0,
            accepted: 100,
            ..Snapshot::default()
        };
        let sides = contest.engines()?;
        contest.timed(format!("tick/{instances}"), sides, |engine: &mut Box<dyn BalancerEngine>, n| {
            state.now_ms = n as u64 * 1_000;
            engine.tick(&state).map(used)
        })?;
    }
    Ok(())
}

/// What a call may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    of: Quantity,
    ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    Mean,
    P50,
    P99,
}

/// Text that is no [`Budget`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no budget; give the time of a call, as 2us, or of a quantile: p50=2us, p99=5us, mean=2us")]
pub struct NoBudget(String);

impl std::str::FromStr for Budget {
    type Err = NoBudget;

    fn from_str(text: &str) -> Result<Self, NoBudget> {
        let (of, time) = match text.split_once('=') {
            None | Some(("p50", _)) => (Quantity::P50, text.trim_start_matches("p50=")),
            Some(("p99", time)) => (Quantity::P99, time),
            Some(("mean", time)) => (Quantity::Mean, time),
            Some(_) => return Err(NoBudget(text.to_owned())),
        };
        let time = humantime::parse_duration(time).map_err(|_| NoBudget(text.to_owned()))?;
        Ok(Self { of, ns: time.as_nanos() as f64 })
    }
}

impl Budget {
    /// The rows that cost more, one line each.
    pub fn exceeded(&self, rows: &[Row]) -> Vec<String> {
        let over = |row: &Row| {
            let (word, ns) = match self.of {
                Quantity::Mean => ("mean", row.policy.mean),
                Quantity::P50 => ("p50", row.policy.p50),
                Quantity::P99 => ("p99", row.policy.p99),
            };
            (ns > self.ns).then(|| format!("{}: {word} {} ns, budget {} ns", row.name, short(ns), self.ns))
        };
        rows.iter().filter_map(over).collect()
    }
}

impl Report {
    /// For a terminal.
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let native = format!("native {}", self.default);
        table.set_header(["ns", "p50", "p99", "mean", &native, &self.default]);
        let both = |timing: &Timing| format!("{} / {}", short(timing.p50), short(timing.p99));
        for Row { name, policy, native_default, component_default, .. } in &self.rows {
            let [p50, p99, mean] = [policy.p50, policy.p99, policy.mean].map(short);
            table.add_row([name.clone(), p50, p99, mean, both(native_default), both(component_default)]);
        }
        let Self { slot, policy, load_ms, memory_bytes, machine, .. } = self;
        let memory = *memory_bytes as f64 / f64::from(1 << 20);
        let build = if machine.optimized { "" } else { ", debug build: not a measurement" };
        format!(
            "{slot} {policy}: loaded in {load_ms:.1} ms, {memory:.1} MiB an instance\n{table}\nof the defaults: p50 / p99; {} × \
             {}, Linux {}{build}\n",
            machine.cores, machine.cpu, machine.kernel
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contender(name: &str) -> Contender {
        Contender::find(name, None, Vec::new()).unwrap()
    }

    #[test]
    fn every_slot_is_measured_beside_its_defaults() {
        let rows = [
            ("round-robin", ["schedule/8", "schedule/64", "schedule/512"].as_slice()),
            // The largest pool of an evictor is not full after so few requests.
            ("lru", &["evict/512", "evict/4096"]),
            ("slo", &["admit-request", "admit-blocks/1", "admit-blocks/64", "admit-blocks/512"]),
            ("static", &["tick/8", "tick/64", "tick/512"]),
        ];
        for (name, expected) in rows {
            let size = Size { requests: 2_000, ..Size::SMOKE };
            let report = run(&contender(name), PolicyConfig::unhurried(), size, 1).unwrap();
            let names: Vec<_> = report.rows.iter().map(|row| row.name.as_str()).collect();
            assert_eq!(names, expected, "{name}");
            assert!(report.memory_bytes > 0 && report.load_ms > 0.0, "{report:?}");
            let measured = |row: &Row| [row.policy, row.native_default, row.component_default].map(|t| t.p50);
            assert!(report.rows.iter().flat_map(measured).all(|ns| ns > 0.0), "{report:?}");
            assert!(report.text().contains("an instance"), "{}", report.text());
            let json = serde_json::to_value(&report).unwrap();
            assert!(
                json["rows"][0]["p99"].is_number() && json["rows"][0]["native_default"]["mean"].is_number()
            );
        }
    }

    #[test]
    fn a_policy_that_fails_is_not_measured_any_more() {
        let bad = |slot: SlotKind, mode: &str| {
            let bytes = kvasir_tests::guest(slot.as_str()).to_vec();
            let source = crate::policy::Source::Bytes { name: "bad".into(), bytes };
            let settings = [("mode", mode), ("after", "5")].map(|(n, v)| (n.to_owned(), v.to_owned()));
            let choice = crate::replay::cluster::Choice { source, settings: settings.into() };
            let contender = Contender { slot, name: "bad".into(), choice };
            let size = Size { requests: 2_000, ..Size::SMOKE };
            let report = run(&contender, PolicyConfig::unhurried(), size, 1).unwrap();
            (report.rows.into_iter().map(|row| row.name).collect::<Vec<_>>(), report.failed.unwrap())
        };
        for slot in SlotKind::ALL {
            let (rows, failed) = bad(slot, "trap");
            assert!(failed.contains("`bad` failed in ") && failed.contains("trapped"), "{failed}");
            assert!(rows.is_empty(), "{rows:?}");
        }
        let (rows, failed) = bad(SlotKind::Admitter, "short");
        assert!(failed.contains("`bad` failed in admit-blocks/1: "), "{failed}");
        assert_eq!(rows, ["admit-request"], "what was measured before is told");
    }

    #[test]
    fn budgets_name_the_rows_that_exceed_them() {
        let timing = Timing { mean: 900.0, p50: 800.0, p99: 5_000.0 };
        let row = |name: &str, policy| Row {
            name: name.into(),
            unit: "ns",
            policy,
            native_default: Timing::default(),
            component_default: Timing::default(),
        };
        let rows = [row("a", timing), row("b", Timing { p50: 2_500.0, ..timing })];
        let over = |text: &str| text.parse::<Budget>().unwrap().exceeded(&rows);
        assert_eq!(over("2us"), ["b: p50 2500 ns, budget 2000 ns"]);
        assert_eq!(over("p50=2us"), over("2us"));
        assert_eq!((over("p99=1us").len(), over("mean=1us").len(), over("p99=5us").len()), (2, 0, 0));
        for bad in ["", "2", "p90=2us", "p99=", "fast"] {
            assert!(bad.parse::<Budget>().is_err(), "{bad}");
        }
    }
}
