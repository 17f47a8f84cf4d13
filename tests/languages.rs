//! The templates of `sdk/templates`, as components, under the host: loaded, asked what their own tests ask, and then many
//! times more. Those of one slot say the same in every language, so each answer is known.
//!
//! `cargo xtask test --languages` builds them and names their folder in `KVASIR_TEMPLATES`; it holds `LANGUAGE-SLOT.wasm`, and
//! `LANGUAGE-learner.wasm` of `learners`.

use kvasir::fleet::{DecodeCost, DecodeSpec, Fleet, Limits, PrefillCost, PrefillSpec, TransferCost};
use kvasir::policy::{EvictorWorker, PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
use kvasir_policy::admitter::{Block, Forecast, Store, Verdict};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::evictor::{Event, EventKind, HOST_DECIDES, NO_SLOT, TierRow};
use kvasir_policy::learning::{End, Outcome, Times};
use kvasir_policy::scheduler::{Column, Decision, Question, Reason, Request};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls after the known ones: a component that keeps the host's lists runs out of memory on the way.
const CALLS: u32 = 20_000;
/// A runtime in the component takes its time, most of all while others use the processor.
const DEADLINE: Duration = Duration::from_secs(60);

/// Every component of that slot or other name, as language and bytes.
fn components(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = std::env::var_os("KVASIR_TEMPLATES").map(PathBuf::from);
    let folder = folder.expect("KVASIR_TEMPLATES names the folder that `cargo xtask test --languages` made");
    let mut found = Vec::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if let Some((language, of)) = stem.rsplit_once('-')
            && of == name
        {
            found.push((language.to_owned(), std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no {name} in {}", folder.display());
    found
}

/// A host with that policy in service, in as much memory as the README of its language says.
fn host(slot: SlotKind, language: &str, component: &[u8], settings: &[(&str, &str)]) -> Arc<PolicyHost> {
    let defaults = PolicyConfig::unhurried();
    let config = PolicyConfig {
        hot_deadline: DEADLINE,
        cold_deadline: DEADLINE,
        memory_bytes: if language == "python" { 32 << 20 } else { defaults.memory_bytes },
        evictor_slots: POOL,
        learn_every: Duration::ZERO,
        ..defaults
    };
    let host = PolicyHost::open(&config, Wanted::default(), None).unwrap();
    let source = || Source::Bytes { name: language.into(), bytes: component.into() };
    let pairs = |settings: &[(&str, &str)]| -> Vec<(String, String)> {
        settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let refused = host.load(slot, source(), pairs(&[("no-such-setting", "1")])).unwrap_err().to_string();
    assert!(refused.contains("no-such-setting"), "{language}: {refused}");
    let start = Instant::now();
    let status = host.load(slot, source(), pairs(settings)).unwrap_or_else(|e| panic!("{language}: {e}"));
    println!("{language:<15} {slot:<10} {:>9} B, loaded in {:?}", component.len(), start.elapsed());
    assert_eq!((status.engine, status.version.as_str()), ("wasm", "0.1.0"), "{language}");
    assert!(status.name.starts_with("my-"), "{language}: {}", status.name);
    host
}

/// It decided everything itself.
fn check_faultless(host: &PolicyHost, slot: SlotKind, language: &str) {
    let status = host.status(slot);
    let counters = &status.counters;
    assert!(status.name.starts_with("my-"), "{language}: {status:?}");
    assert_eq!((counters.traps, counters.fallbacks), (0, 0), "{language}: {status:?}");
    println!("{language:<15} {slot:<10} {:>9.0} ns for one of {} calls", counters.ns_mean, counters.calls);
}

#[test]
#[ignore = "`cargo xtask test --languages` builds the templates and runs it"]
fn schedulers() {
    for (language, component) in components("scheduler") {
        let host = host(SlotKind::Scheduler, &language, &component, &[]);
        let (mut fleet, mut worker) = (Fleet::new(Limits::default(), 16, 0), host.scheduler_worker());
        let request = Request { prompt_tokens: 1_000, ..Request::default() };
        let mut ask = |fleet: &Fleet, prefix: [u32; 2], fit: [u32; 2]| {
            let slots = (fleet.prefill_slots(), fleet.decode_slots());
            let question = Question::new(50.0, &request, slots.0, slots.1);
            let question = question.with(Column::Prefix, &prefix).with(Column::EligiblePrefill, &fit);
            let outcome = worker.schedule(fleet, &question);
            assert_eq!(outcome.fallback, None, "{language}: {outcome:?}");
            outcome.decision
        };
        register(&mut fleet, 0.125);
        register(&mut fleet, 0.25);
        assert_eq!(ask(&fleet, [0, 0], [1, 1]), Decision::run(0, 0), "{language}");
        assert_eq!(
            ask(&fleet, [0, 50], [1, 1]),
            Decision::run(1, 0),
            "{language}: a prefix is worth its time"
        );
        assert_eq!(ask(&fleet, [0, 50], [1, 0]), Decision::run(0, 0), "{language}: 1 cannot serve it");
        let nowhere = Decision::reject(Reason::NoInstance, 1_000);
        assert_eq!(ask(&fleet, [0, 0], [0, 0]), nowhere, "{language}");
        fleet.set_decode_available(0, false).unwrap();
        for call in 0..CALLS {
            assert_eq!(ask(&fleet, [call % 8, 0], [1, 1]), Decision::run(0, 1), "{language}");
        }
        let scores = worker.explain(&Question::new(50.0, &request, 2, 2));
        assert_eq!(scores, [135.0, 260.0], "{language}");
        check_faultless(&host, SlotKind::Scheduler, &language);
    }
}

fn register(fleet: &mut Fleet, ms_per_token: f32) {
    let cost = PrefillCost { fixed_ms: 10.0, ms_per_token, ms_per_pair: 0.0 };
    let transfer = TransferCost { fixed_ms: 0.1, ms_per_block: 0.1 };
    fleet.register_prefill(PrefillSpec { cost, transfer, capacity_blocks: 1 << 20 }, 0).unwrap();
    let cost = DecodeCost { fixed_ms: 1.0, ms_per_sequence: 0.1, ms_per_context_token: 0.0 };
    let decode = DecodeSpec { cost, handover: transfer, capacity_blocks: 1 << 20 };
    fleet.register_decode(decode, 0).unwrap();
}

const POOL: u32 = 64;

#[test]
#[ignore = "`cargo xtask test --languages` builds the templates and runs it"]
fn evictors() {
    use EventKind::{Hit, Insert, Keep, Pin, Remove, Unpin};
    for (language, component) in components("evictor") {
        let host = host(SlotKind::Evictor, &language, &component, &[]);
        let mut worker = host.evictor_worker(POOL);
        assert!(!worker.on_fallback(), "{language}");
        let tier = |tier| TierRow {
            tier,
            capacity_mib: 64.0,
            used_mib: 1.0,
            load_fixed_ms: 0.5,
            load_ms_per_mib: 0.25,
            takes_copies: true,
        };
        worker.update_tiers(&[tier(2), tier(3)]).unwrap();
        assert_eq!(victims(&mut worker, 1), [0; 0], "{language}");
        // A prompt of two blocks, 0 and 1, and another, 2.
        tell(
            &mut worker,
            &[(Insert, 0, NO_SLOT), (Insert, 1, 0), (Insert, 2, NO_SLOT), (Hit, 0, 1), (Hit, 1, 1)],
        );
        assert_eq!(victims(&mut worker, 1), [2], "{language}: used longest ago");
        tell(&mut worker, &[(Keep, 2, 0)]);
        assert_eq!(victims(&mut worker, 1), [1], "{language}: the leaf before its parent");
        tell(&mut worker, &[(Pin, 0, 0), (Hit, 0, 1)]);
        assert_eq!(victims(&mut worker, 2), [2], "{language}: 0 is pinned");
        tell(&mut worker, &[(Unpin, 0, 0), (Insert, 3, NO_SLOT), (Remove, 3, 0)]);
        assert_eq!(victims(&mut worker, 2), [0], "{language}");
        let prompt: Vec<_> =
            (0..POOL).map(|slot| (Insert, slot, slot.checked_sub(1).unwrap_or(NO_SLOT))).collect();
        let deepest_first: Vec<_> = (0..POOL).rev().collect();
        for _ in 0..CALLS / POOL {
            tell(&mut worker, &prompt);
            assert_eq!(victims(&mut worker, POOL), deepest_first, "{language}");
        }
        check_faultless(&host, SlotKind::Evictor, &language);
    }
}

fn tell(worker: &mut EvictorWorker, events: &[(EventKind, u32, u32)]) {
    let mut words = Vec::new();
    for &(kind, slot, parent_or_uses) in events {
        let event = Event {
            kind,
            replayed: false,
            class: 1,
            slot,
            parent_or_uses,
            depth: 0,
            size_bytes: 4096,
            time_ms: 5,
            identity: u64::MAX - u64::from(slot),
            tenant: 2,
        };
        event.encode(0, &mut words);
    }
    worker.on_events(0, &words).unwrap();
}

fn victims(worker: &mut EvictorWorker, want: u32) -> Vec<u32> {
    let mut victims = Vec::new();
    worker.select_victims(10, want, &mut victims).unwrap();
    assert!(victims.iter().all(|victim| victim.demote_to == HOST_DECIDES), "{victims:?}");
    victims.iter().map(|victim| victim.slot).collect()
}

#[test]
#[ignore = "`cargo xtask test --languages` builds the templates and runs it"]
fn admitters() {
    let block = |uses| Block { class: 9, uses, depth: 3, size_bytes: 4096, last_offer_ms: None, tenant: 1 };
    for (language, component) in components("admitter") {
        let host = host(SlotKind::Admitter, &language, &component, &[("min-uses", "3"), ("slack", "1.5")]);
        let mut worker = host.admitter_worker();
        let mut admit = |ttft, tbt, hints| {
            let request = Request { hints, ttft_slo: 200.0, tbt_slo: 50.0, ..Request::default() };
            worker.admit_request(&request.encode(), &Forecast { ttft, tbt, ..Forecast::default() })
        };
        let refused = |reason: Reason| Verdict::Reject { reason: reason as u32, retry_after_ms: 1_000 };
        for _ in 0..CALLS / 4 {
            assert_eq!(admit(300.0, 75.0, 0), Verdict::Accept, "{language}");
            assert_eq!(admit(301.0, 75.0, 0), refused(Reason::Ttft), "{language}");
            assert_eq!(admit(300.0, 76.0, 0), refused(Reason::Tbt), "{language}");
            assert_eq!(admit(301.0, 76.0, 1), Verdict::Accept, "{language}: it must run");
        }
        let answers = worker.admit_blocks(3, &[block(2), block(3)]);
        assert_eq!(answers, [Store::Skip, Store::Store], "{language}");
        assert_eq!(worker.admit_blocks(3, &[]), [], "{language}");
        check_faultless(&host, SlotKind::Admitter, &language);
    }
}

#[test]
#[ignore = "`cargo xtask test --languages` builds the templates and runs it"]
fn balancers() {
    for (language, component) in components("balancer") {
        let host = host(SlotKind::Balancer, &language, &component, &[("even", "8")]);
        let mut worker = host.balancer_worker();
        let mut tick = |queues: &[f32]| {
            worker.tick(&Snapshot { prefill_queue_ms: queues.into(), ..Snapshot::default() })
        };
        for _ in 0..CALLS / 10 {
            assert_eq!(tick(&[10.0, 10.0, 10.0]), [8.0], "{language}");
            assert_eq!(tick(&[1.0, 1.0, 100.0]), [1.5], "{language}");
            assert_eq!(tick(&[5.0, 20.0, -1.0]), [8.0], "{language}: 20 is less than twice 12.5");
            assert_eq!(tick(&[-1.0]), [0.0; 0], "{language}: keep");
        }
        check_faultless(&host, SlotKind::Balancer, &language);
    }
}

#[test]
#[ignore = "`cargo xtask test --languages` builds the templates and runs it"]
fn learners() {
    for (language, component) in components("learner") {
        let host = host(SlotKind::Admitter, &language, &component, &[]);
        let mut worker = host.admitter_worker();
        let mut knows = || worker.admit_request(&Request::default().encode(), &Forecast::default());
        let wait = |number| Verdict::Reject { reason: Reason::Policy as u32, retry_after_ms: number };
        host.learn(0);
        assert_eq!(knows(), wait(0), "{language}");
        let outcomes = [outcome(End::Finished, 0), outcome(End::Rejected, 100), outcome(End::GivenUp, 200)];
        outcomes.iter().for_each(|outcome| host.outcomes().tell(outcome));
        host.learn(2_000);
        assert_eq!(knows(), wait(folded(&outcomes)), "{language}");
        let status = host.status(SlotKind::Admitter).learning;
        assert_eq!((status.outcomes, status.dropped, status.faults), (3, 0, 0), "{language}: {status:?}");
        check_faultless(&host, SlotKind::Admitter, &language);
    }
}

/// Values that are all different, from `base` on.
fn outcome(end: End, base: u32) -> Outcome {
    let times =
        |n: u32| Times { predicted: Some((base + n) as f32 + 0.5), measured: Some((base + n) as f32) };
    Outcome {
        end,
        reason: base + 1,
        decision: (7 << 32) + (u64::from(base) << 20),
        tenant: base + 2,
        class: base + 3,
        model: base + 4,
        adapter: base + 5,
        session: (9 << 32) + (u64::from(base) << 20),
        prefill: base + 6,
        decode: base + 7,
        prompt_tokens: base + 8,
        cached_tokens: base + 9,
        fetched_blocks: base + 10,
        decoded_tokens: base + 11,
        ttft_ms: times(20),
        tbt_ms: times(30),
        queue_ms: Some((base + 40) as f32),
        prefill_ms: times(50),
        run: base + 12,
    }
}

/// What a learner of `learners` makes of them.
fn folded(outcomes: &[Outcome]) -> u32 {
    let mut known = 0_u32;
    for word in outcomes.iter().flat_map(|o| {
        let double = |ms: Option<f32>| (2.0 * ms.unwrap()) as u32;
        let ids = [o.end as u32, o.reason, (o.decision >> 20) as u32, o.tenant, o.class, o.model, o.adapter];
        let counts = [o.prompt_tokens, o.cached_tokens, o.fetched_blocks, o.decoded_tokens];
        let times = [
            double(o.ttft_ms.predicted),
            double(o.ttft_ms.measured),
            double(o.tbt_ms.predicted),
            double(o.tbt_ms.measured),
            double(o.queue_ms),
            double(o.prefill_ms.predicted),
            double(o.prefill_ms.measured),
        ];
        let session = (o.session >> 20) as u32;
        [&ids[..], &[session, o.prefill, o.decode], &counts, &times, &[o.run]].concat()
    }) {
        known = known.wrapping_mul(31).wrapping_add(word) & 0xf_ffff;
    }
    known
}
