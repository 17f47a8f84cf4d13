//! The policy host against policies that misbehave, files that are no policies, and swaps under load.

use kvasir::fleet::{
    Ask, DecodeCost, DecodeSpec, Fleet, Limits, Outcome as Booked, PrefillCost, PrefillSpec, TransferCost,
};
use kvasir::policy::{
    EvictorWorker, PolicyConfig, PolicyHost, SlotKind, SlotStatus, Source, Subject, Wanted,
};
use kvasir_policy::admitter::{self, Block, Forecast};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::evictor::{Event, EventKind, NO_SLOT, Victim};
use kvasir_policy::scheduler::{Column, Decision, Question, Request};
use kvasir_tests::{bytes_of_100_mb, guest, import_not_granted, several_versions, wrong_version};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a scenario keeps asking before it gives up: not an assertion, only an end.
const PATIENCE: Duration = Duration::from_secs(300);

fn host() -> Arc<PolicyHost> {
    let config = PolicyConfig {
        cold_deadline: Duration::from_millis(500),
        evictor_slots: POOL,
        breaker_window: PATIENCE,
        ..PolicyConfig::unhurried()
    };
    PolicyHost::open(&config, Wanted::default(), None).unwrap()
}

fn settings(mode: &str, after: u32) -> Vec<(String, String)> {
    [("mode", mode.to_owned()), ("after", after.to_string())].map(|(n, v)| (n.to_owned(), v)).into()
}

fn bytes(name: &str, bytes: impl Into<Vec<u8>>) -> Source {
    Source::Bytes { name: name.into(), bytes: bytes.into() }
}

/// Loads the guest of that slot in such a way that it passes its load and then does harm.
fn load_bad(host: &PolicyHost, slot: SlotKind, mode: &str) -> SlotStatus {
    host.load(slot, bytes("bad", guest(slot.as_str())), settings(mode, 20)).unwrap()
}

/// Calls `ask` until the breaker has acted. Returns how many calls that took.
fn until_tripped(host: &PolicyHost, slot: SlotKind, mode: &str, mut ask: impl FnMut()) -> u64 {
    let (start, mut calls) = (Instant::now(), 0);
    while host.status(slot).name == "bad" {
        assert!(
            start.elapsed() < PATIENCE,
            "{slot} `{mode}`: no trip in {calls} calls: {:?}",
            host.status(slot)
        );
        ask();
        calls += 1;
    }
    assert!(host.status(slot).last_trip.is_some(), "{slot} `{mode}`");
    calls
}

#[test]
fn what_is_no_policy_is_refused_by_name_and_the_running_policy_stays() {
    let _process = crate::beside_others();
    use SlotKind::{Admitter, Evictor, Scheduler};
    let host = host();
    let good = guest("scheduler");
    let none = Vec::new;
    let cases = [
        (Scheduler, bytes("script", *b"#!/bin/sh\n"), none(), "not a WebAssembly component"),
        (Scheduler, bytes("empty", []), none(), "empty"),
        (Scheduler, bytes("core", *b"\0asm\x01\0\0\0"), none(), "core module"),
        (Scheduler, bytes("half", &good[..good.len() / 2]), none(), "does not compile"),
        (Scheduler, bytes("world", guest("evictor")), none(), "kvasir:policy/scheduling@0.1.0"),
        (Evictor, bytes("world", good), none(), "kvasir:policy/eviction@0.1.0"),
        (Scheduler, bytes("version", wrong_version()), none(), "@0.9.0"),
        (Scheduler, bytes("big", bytes_of_100_mb()), none(), "more than the"),
        (Scheduler, bytes("import", import_not_granted()), none(), "wasi:sockets/tcp@0.2.10"),
        (Scheduler, bytes("traps", guest("describe-traps")), none(), "describe"),
        (Scheduler, bytes("lies", guest("describe-lies")), none(), "says it is a `evictor`"),
        (Scheduler, bytes("garbles", guest("describe-garbles")), none(), "failed in `describe`"),
        (Scheduler, bytes("settings", good), settings("nonsense", 0), "`nonsense` is none of"),
        (Scheduler, Source::Builtin("moncake".into()), none(), "did you mean `mooncake`"),
        (Scheduler, Source::Builtin("mooncake".into()), settings("x", 0), "unknown setting"),
        (Admitter, Source::File("/nowhere/policy.wasm".into()), none(), "/nowhere/policy.wasm"),
    ];
    let names = |host: &PolicyHost| {
        host.list().into_iter().map(|s| (s.name, s.digest, s.generation)).collect::<Vec<_>>()
    };
    let before: Vec<_> = names(&host).into_iter().map(|(name, digest, _)| (name, digest)).collect();
    for (slot, source, settings, cause) in cases {
        let label = format!("{source:.40?}");
        let error = host.load(slot, source, settings).expect_err(&label).to_string();
        assert!(error.contains(cause), "`{cause}` is not in: {error}");
    }
    let after: Vec<_> = names(&host).into_iter().map(|(name, digest, _)| (name, digest)).collect();
    assert_eq!(before, after);
    assert_eq!(host.scheduler_worker().schedule(&cluster(), &question(1)).fallback, None);
}

#[test]
fn a_component_of_several_versions_is_called_by_ours() {
    let _process = crate::beside_others();
    let host = host();
    let several = host.load(SlotKind::Scheduler, bytes("several", several_versions()), Vec::new()).unwrap();
    assert_eq!(host.scheduler_worker().schedule(&cluster(), &question(1)).fallback, None);
    let serves = host.status(SlotKind::Scheduler);
    assert_eq!((serves.name, serves.generation), (several.name, several.generation));
}

const INSTANCES: u16 = 4;
const PREFIX: [u32; INSTANCES as usize] = [9, 0, 3, 7];

/// Four pairs of instances; slot 0 of both tables is unavailable.
fn cluster() -> Fleet {
    let mut fleet = Fleet::new(Limits::default(), 512, 0);
    let prefill = PrefillSpec {
        cost: PrefillCost { fixed_ms: 1.0, ms_per_token: 0.1, ms_per_pair: 0.0 },
        transfer: TransferCost { fixed_ms: 0.1, ms_per_block: 0.1 },
        capacity_blocks: 1 << 20,
    };
    let decode = DecodeSpec {
        cost: DecodeCost { fixed_ms: 1.0, ms_per_sequence: 0.1, ms_per_context_token: 0.0 },
        handover: TransferCost { fixed_ms: 0.1, ms_per_block: 0.1 },
        capacity_blocks: 1 << 20,
    };
    for _ in 0..INSTANCES {
        fleet.register_prefill(prefill, 0).unwrap();
        fleet.register_decode(decode, 0).unwrap();
    }
    fleet.set_prefill_available(0, false).unwrap();
    fleet.set_decode_available(0, false).unwrap();
    fleet
}

fn question(seed: u64) -> Question {
    let request = Request { prompt_tokens: 4096, output_tokens: 100, seed, ..Request::default() };
    asked(&request, 1.0)
}

fn asked(request: &Request, now: f32) -> Question {
    Question::new(now, request, PREFIX.len(), PREFIX.len()).with(Column::Prefix, &PREFIX)
}

#[test]
fn a_bad_scheduler_costs_fallbacks_and_never_a_request() {
    let _process = crate::beside_others();
    for mode in
        ["loop", "trap", "grow", "recurse", "out-of-range", "unavailable", "false-transfer", "reason-99"]
    {
        let host = host();
        let (cluster, mut worker) = (cluster(), host.scheduler_worker());
        load_bad(&host, SlotKind::Scheduler, mode);
        let mut fallbacks = 0;
        let calls = until_tripped(&host, SlotKind::Scheduler, mode, || {
            let outcome = worker.schedule(&cluster, &question(1));
            assert!(matches!(outcome.decision, Decision::Run { .. }), "{mode}: {outcome:?}");
            cluster.check(&outcome.decision, question(1).candidates()).unwrap();
            fallbacks += u64::from(outcome.fallback.is_some());
        });
        assert!(fallbacks > 0 && calls > 20, "{mode}: {fallbacks} fallbacks in {calls} calls");
        let after = worker.schedule(&cluster, &question(1));
        assert_eq!(after.fallback, None, "{mode}: the previous policy serves again");
    }
}

#[test]
fn a_scheduler_that_traps_on_its_predecessors_state_starts_cold_and_decides() {
    let _process = crate::beside_others();
    let host = host();
    let (cluster, mut worker) = (cluster(), host.scheduler_worker());
    let mut decide = || {
        let outcome = worker.schedule(&cluster, &question(1));
        assert_eq!(outcome.fallback, None, "{outcome:?}");
    };
    load_bad(&host, SlotKind::Scheduler, "trap-on-import");
    decide();
    let again = load_bad(&host, SlotKind::Scheduler, "trap-on-import");
    let start = Instant::now();
    while host.status(SlotKind::Scheduler).counters.traps == 0 {
        assert!(start.elapsed() < PATIENCE, "the trap is not counted");
        decide();
    }
    (0..100).for_each(|_| decide());
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.generation, status.counters.traps), (again.generation, 1), "{status:?}");
}

#[test]
fn a_bad_explanation_is_no_fault_of_the_decision() {
    let _process = crate::beside_others();
    let host = host();
    load_bad(&host, SlotKind::Scheduler, "none");
    let (cluster, mut worker) = (cluster(), host.scheduler_worker());
    worker.catch_up(&cluster, &Subject::default());
    worker.explain(&question(1));
    assert_eq!(worker.schedule(&cluster, &question(1)).fallback, None);
}

#[test]
fn a_policy_that_talks_without_end_is_heard_a_little_and_decides() {
    let _process = crate::beside_others();
    let host = host();
    load_bad(&host, SlotKind::Scheduler, "chatter");
    let (cluster, mut worker) = (cluster(), host.scheduler_worker());
    for seed in 0..60 {
        let outcome = worker.schedule(&cluster, &question(seed));
        assert!(matches!(outcome.decision, Decision::Run(_)), "{outcome:?}");
    }
    let (lines, dropped) = host.logs(SlotKind::Scheduler);
    assert!(lines.len() <= 1_100 && dropped > 0, "{} lines, {dropped} dropped", lines.len());
}

/// A hundred loads come at once, each of a component that is not yet compiled, and requests go on being decided.
#[test]
fn a_hundred_loads_at_once_hold_no_decision_up() {
    let _process = crate::beside_others();
    let host = host();
    let (cluster, mut worker) = (cluster(), host.scheduler_worker());
    let answered = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for n in 0..100u8 {
            let (host, answered) = (&host, &answered);
            scope.spawn(move || {
                // A custom section makes each another component.
                let component = [guest("scheduler"), &[0, 3, 1, b'n', n]].concat();
                let loaded = host.load(SlotKind::Scheduler, bytes("many", component), settings("none", 0));
                match loaded {
                    Ok(status) => assert_eq!(status.slot, "scheduler"),
                    Err(error) => assert!(error.to_string().contains("try again"), "{error}"),
                }
                answered.fetch_add(1, Ordering::Relaxed);
            });
        }
        while answered.load(Ordering::Relaxed) < 100 {
            let outcome = worker.schedule(&cluster, &question(1));
            assert_eq!(outcome.fallback, None, "{outcome:?}");
        }
    });
    assert_eq!(host.status(SlotKind::Scheduler).name, "bad", "one at least was loaded");
}

const POOL: u32 = 256;

/// The owner of a full pool: evicts what it is told, if allowed, and fills the place again.
struct Owner {
    worker: EvictorWorker,
    resident: BTreeSet<u32>,
    now_ms: u64,
}

impl Owner {
    fn new(worker: EvictorWorker) -> Self {
        let mut owner = Self { worker, resident: (0..POOL - 32).collect(), now_ms: 0 };
        let words = owner.inserts(owner.resident.iter().copied());
        owner.tell(&words);
        owner
    }

    fn inserts(&self, slots: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut words = Vec::new();
        for slot in slots {
            let event = Event {
                kind: EventKind::Insert,
                replayed: false,
                class: 0,
                slot,
                parent_or_uses: NO_SLOT,
                depth: 0,
                size_bytes: 4096,
                time_ms: self.now_ms,
                identity: u64::from(slot),
                tenant: 0,
            };
            event.encode(0, &mut words);
        }
        words
    }

    /// Takes up what is new, and tells it what is resident.
    fn refresh(&mut self) {
        let words = self.inserts(self.resident.iter().copied());
        if self.worker.refresh() && self.worker.tell_next(0, &words) {
            self.worker.promote();
        }
    }

    fn tell(&mut self, words: &[u32]) {
        if self.worker.on_events(0, words).is_err() {
            self.tell_all();
        }
    }

    /// The native twin has just taken over, and does not fail.
    fn tell_all(&mut self) {
        let words = self.inserts(self.resident.iter().copied());
        self.worker.on_events(0, &words).unwrap();
    }

    /// Wants 8 victims and gets them, whatever the component does.
    fn turn(&mut self) {
        const WANT: u32 = 8;
        self.now_ms += 10;
        let mut evicted = BTreeSet::new();
        for _ in 0..4 {
            self.refresh();
            let mut victims: Vec<Victim> = Vec::new();
            let missing = WANT - evicted.len() as u32;
            if self.worker.select_victims(self.now_ms, missing, &mut victims).is_err() {
                self.tell_all();
                continue;
            }
            // A block goes when it is named first: a slot that is free, foreign or named again holds none.
            let good: Vec<u32> =
                victims.iter().map(|v| v.slot).filter(|slot| self.resident.remove(slot)).collect();
            let bad = victims.len() - good.len();
            evicted.extend(good);
            if bad > 0 || evicted.len() < WANT as usize {
                self.worker.invalid(format!("{bad} bad victims, {} of {WANT} good ones", evicted.len()));
                self.tell_all();
            }
            if evicted.len() == WANT as usize {
                break;
            }
        }
        assert_eq!(evicted.len(), WANT as usize, "the native twin chooses what the component does not");
        // The same blocks come back: the pool stays full.
        let words = self.inserts(evicted.iter().copied());
        self.resident.extend(evicted);
        self.tell(&words);
    }
}

#[test]
fn a_bad_evictor_costs_fallbacks_and_the_pool_keeps_its_reserve() {
    let _process = crate::beside_others();
    for mode in
        ["loop", "trap", "grow", "recurse", "free", "out-of-range", "repeat", "too-few", "too-many", "huge"]
    {
        let host = host();
        let mut owner = Owner::new(host.evictor_worker(POOL));
        load_bad(&host, SlotKind::Evictor, mode);
        let turns = until_tripped(&host, SlotKind::Evictor, mode, || owner.turn());
        assert!(turns > 20, "{mode}");
        owner.turn();
        assert!(!owner.worker.on_fallback(), "{mode}: the previous policy serves again");
    }
}

#[test]
fn a_bad_admitter_costs_fallbacks_and_never_an_answer() {
    let _process = crate::beside_others();
    let request = admitter::Request { prompt_tokens: 10, ttft_slo: 10.0, ..Default::default() }.encode();
    let forecast = Forecast { ttft: 1.0, tbt: 1.0, ..Forecast::default() };
    let block = Block { class: 0, uses: 1, depth: 0, size_bytes: 4096, last_offer_ms: None, tenant: 0 };
    for mode in ["loop", "trap", "grow", "recurse", "unknown", "reason-99", "short", "huge"] {
        let host = host();
        let mut worker = host.admitter_worker();
        load_bad(&host, SlotKind::Admitter, mode);
        until_tripped(&host, SlotKind::Admitter, mode, || {
            worker.admit_request(&request, &forecast);
            assert_eq!(worker.admit_blocks(2, &[block; 5]).len(), 5, "{mode}");
        });
    }
}

#[test]
fn a_bad_balancer_never_sets_a_threshold_that_is_not_finite() {
    let _process = crate::beside_others();
    for mode in ["trap", "grow", "recurse", "nan", "infinite", "flood", "loop"] {
        let host = host();
        let mut worker = host.balancer_worker();
        load_bad(&host, SlotKind::Balancer, mode);
        let fallbacks = || host.status(SlotKind::Balancer).totals.fallbacks;
        until_tripped(&host, SlotKind::Balancer, mode, || {
            let before = fallbacks();
            let thresholds = worker.tick(&Snapshot::default());
            let failed = fallbacks() > before;
            assert!(!failed || thresholds.is_empty(), "{mode}: thresholds in force are kept: {thresholds:?}");
            assert!(thresholds.iter().all(|t| t.is_finite()), "{mode}: {thresholds:?}");
        });
    }
}

/// Pages of this process in memory, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Decisions by how long they took, in µs; the last count is of all that took longer. The size is
/// fixed, so that it does not look like a leak.
type Times = Vec<u64>;

const TIMES: usize = 2_000_000;

/// The time within which `share` of the decisions were made, in µs.
fn quantile(times: &Times, share: f64) -> usize {
    let wanted = (times.iter().sum::<u64>() as f64 * share) as u64;
    let mut seen = 0;
    let within = |count: &u64| {
        seen += count;
        seen >= wanted
    };
    times.iter().position(within).unwrap_or(TIMES)
}

/// Decides, books and finishes one request after the other until `stop`. A decision that is lost or made twice does not
/// fit the conductor's books.
fn requests_until(host: &PolicyHost, stop: &AtomicBool, done: &AtomicU64) -> Times {
    let (mut cluster, mut worker) = (cluster(), host.scheduler_worker());
    let ask = Ask { prompt_tokens: 4096, output_tokens: 100, seed: 7, ..Ask::default() };
    let mut times = vec![0; TIMES];
    times.fill(1); // touches every page now
    times.fill(0);
    for id in 1.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let question = asked(&cluster.request(&ask), cluster.table_time(id));
        let start = Instant::now();
        let outcome = worker.schedule(&cluster, &question);
        times[(start.elapsed().as_micros() as usize).min(TIMES - 1)] += 1;
        assert_eq!(outcome.fallback, None, "request {id}");
        let booked = cluster.admit(id, &ask, &outcome.decision, question.candidates(), id);
        assert!(matches!(booked, Ok(Booked::Admitted(_))), "request {id}: {booked:?}");
        assert_eq!(cluster.in_flight(), 1);
        cluster.finished(id, id).unwrap();
        done.fetch_add(1, Ordering::Relaxed);
    }
    times
}

/// Evicts until `stop`, counting `turns`. Each turn checks that it got its victims, each of them once.
fn evictions_until(host: &PolicyHost, stop: &AtomicBool, turns: &AtomicU64) {
    let mut owner = Owner::new(host.evictor_worker(POOL));
    while !stop.load(Ordering::Relaxed) {
        owner.turn();
        assert!(!owner.worker.on_fallback(), "after {turns:?} turns");
        turns.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until each thread has begun and finished something after now.
fn until_all_moved(done: &[AtomicU64; 3]) {
    let start = Instant::now();
    for count in done {
        let before = count.load(Ordering::Relaxed);
        while count.load(Ordering::Relaxed) < before + 2 {
            assert!(start.elapsed() < PATIENCE, "a thread stands still: {done:?}");
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

#[test]
fn ten_thousand_swaps_under_load_lose_no_decision_and_no_memory() {
    let _process = crate::alone();
    const PAIRS: u32 = 5_000;
    const GROWTH: u64 = 32 << 20;
    let host = host();
    host.load(SlotKind::Scheduler, Source::Builtin("round-robin".into()), Vec::new()).unwrap();
    host.load(SlotKind::Evictor, Source::Builtin("lru".into()), Vec::new()).unwrap();
    let (stop, done) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 3]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let (host, stop, done) = (&host, &stop, &done);
        let schedulers = [0, 1].map(|i| scope.spawn(move || requests_until(host, stop, &done[i])));
        let evictor = scope.spawn(move || evictions_until(host, stop, &done[2]));
        // To the other one of the two, and back. Every second time all threads have used what they
        // were given before it is swapped again; otherwise it may go unused, or be swapped while they take it up.
        let swapped = (0..PAIRS).try_fold(0, |after_warm_up, pair| {
            host.rollback(SlotKind::Scheduler)?;
            host.rollback(SlotKind::Evictor)?;
            if pair % 2 == 0 {
                until_all_moved(done);
            }
            Ok::<_, kvasir::policy::Error>(if pair == PAIRS / 5 { resident_bytes() } else { after_warm_up })
        });
        let resident = resident_bytes();
        let elapsed = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let mut times = vec![0; TIMES];
        for thread in schedulers {
            times.iter_mut().zip(thread.join().unwrap()).for_each(|(sum, count)| *sum += count);
        }
        evictor.join().unwrap();
        let turns = done[2].load(Ordering::Relaxed);
        let growth = resident.saturating_sub(swapped.unwrap());
        let decisions: u64 = times.iter().sum();
        println!(
            "{} swaps in {elapsed:.1?}: {decisions} decisions, p99.9 {} us, longest {} us; {turns} evictions of 8; {growth} B more",
            2 * PAIRS,
            quantile(&times, 0.999),
            quantile(&times, 1.0),
        );
        assert_eq!(decisions, done[0].load(Ordering::Relaxed) + done[1].load(Ordering::Relaxed));
        assert!(decisions > 0 && turns > 0);
        assert!(growth < GROWTH, "resident memory grew by {growth} B over the last four fifths of the swaps");
    });
    for slot in [SlotKind::Scheduler, SlotKind::Evictor] {
        let status = host.status(slot);
        assert!(status.generation > u64::from(PAIRS), "{status:?}");
        assert_eq!(
            (status.counters.fallbacks, status.counters.traps, status.last_trip),
            (0, 0, None),
            "{slot}"
        );
    }
}
