use super::*;
use crate::conductor::{Registration, Report, Stage};
use crate::config;
use crate::fleet::{DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use crate::policy::{Outcomes, PolicyConfig, Share, SlotKind, Source, Wanted, trial};
use kvasir_policy::learning::End;
use kvasir_policy::scheduler::{Placement, Reason};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Native policies: what a component does in their place has tests of its own.
fn policies(scheduler: &str) -> Arc<PolicyHost> {
    let wanted = Wanted {
        scheduler: (Source::Native(scheduler.into()), Vec::new()),
        admitter: (Source::Native("slo".into()), Vec::new()),
        ..Wanted::default()
    };
    PolicyHost::open(&PolicyConfig::default(), wanted, None).unwrap()
}

fn conductor(scheduler: &str, workers: u32) -> Conductor {
    let config = config::Conductor { workers, ..Default::default() };
    Conductor::new(&config, &policies(scheduler), 0)
}

fn registration() -> Registration {
    let prefill = PrefillSpec {
        cost: PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.0 },
        transfer: TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 },
        capacity_blocks: 1 << 20,
    };
    let decode = DecodeSpec {
        cost: DecodeCost { fixed_ms: 20.0, ms_per_sequence: 1.0, ms_per_context_token: 0.0 },
        handover: TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 },
        capacity_blocks: 1 << 20,
    };
    Registration { prefill: Some(prefill), decode: Some(decode), ..Registration::default() }
}

/// What the scheduler makes of what was looked at.
fn decide(decider: &mut Decider) -> policy::Outcome {
    decider.scheduler.decide(&decider.question)
}

fn drained() -> Report {
    Report { free_blocks: 1, draining: true, ..Report::default() }
}

fn ask(tenant: u32, ttft_slo_ms: f32) -> Ask {
    Ask { prompt_tokens: 1_024, output_tokens: 76, tenant, seed: 1, ttft_slo_ms, ..Ask::default() }
}

const NO_SLO: f32 = f32::INFINITY;

#[test]
fn an_answer_that_was_overtaken_is_not_booked() {
    type Change = fn(&Conductor);
    let drains: Change = |r| {
        let epoch = r.register("b", registration(), 5).unwrap();
        r.report("b", epoch, &drained(), 5).unwrap();
        r.unregister("b", epoch).unwrap();
    };
    let changes: [(&str, Change); 3] = [
        ("it left", |r| r.unregister("a", 1).unwrap()),
        ("another has its slot", |r| {
            r.register("a", registration(), 5).unwrap();
        }),
        ("another came, drained and left", drains),
    ];
    for (what, change) in changes {
        let conductor = conductor("mooncake", 1);
        conductor.register("a", registration(), 0).unwrap();
        let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
        let mut decider = conductor.deciders.take();
        conductor.look(&mut decider, &wish, 0);
        let outcome = decide(&mut decider);
        assert!(matches!(outcome.decision, Decision::Run { .. }) && outcome.fallback.is_none(), "{what}");
        change(&conductor);
        let concluded = conclude(&mut conductor.state.lock(), &decider, &wish, &outcome, None, &[]).unwrap();
        assert!(concluded.is_none(), "{what}");
        assert_eq!((conductor.counts().placed, conductor.counts().in_flight), (0, 0), "{what}");
    }
}

#[test]
fn a_drained_instance_is_noticed_before_the_admitter_is_asked() {
    let conductor = conductor("mooncake", 1);
    let epoch = conductor.register("a", registration(), 0).unwrap();
    let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
    let mut decider = conductor.deciders.take();
    conductor.look(&mut decider, &wish, 0);
    let outcome = decide(&mut decider);
    conductor.report("a", epoch, &drained(), 5).unwrap();
    let forecast = decider.forecast(&conductor.state.lock(), &wish, &outcome.decision);
    assert!(matches!(forecast, Err(fleet::Error::Invalid(_))), "{forecast:?}");
    drop(decider);
    let rejected = conductor.schedule(wish.ask, &[], false, 6).unwrap().result.err().unwrap();
    assert!(rejected.refused.is_none(), "the scheduler finds no instance");
}

#[test]
fn under_the_lock_the_native_twins_decide() {
    let conductor = conductor("mooncake", 1);
    conductor.register("a", registration(), 0).unwrap();
    let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
    let scheduled = conductor.decide_locked(&mut conductor.deciders.take(), &wish).unwrap();
    assert_eq!(scheduled.result.ok().unwrap().prefill, "a");
    assert_eq!(scheduled.fallback.unwrap(), "overtaken by changes of the tables");
    let late = Wish { ask: &ask(0, 1.0), ..wish };
    assert!(conductor.decide_locked(&mut conductor.deciders.take(), &late).unwrap().result.is_err());
    assert_eq!(conductor.counts().in_flight, 1);
}

#[test]
fn the_admitter_is_asked_before_the_booking_so_a_refusal_leaves_no_trace() {
    let conductor = conductor("round-robin", 1);
    conductor.register("a", registration(), 0).unwrap();
    let tables = || conductor.state.lock().fleet.rows();
    let before = tables();
    let refused = conductor.schedule(&ask(0, 1_033.0), &[], false, 0).unwrap();
    let rejected = refused.result.err().unwrap();
    assert!(rejected.refused.is_some(), "10 + 1024 ms are over 1033");
    assert_eq!((refused.request_id, rejected.reason, rejected.retry_after_ms), (0, 1, 1));
    assert_eq!(tables(), before);
    let accepted = conductor.schedule(&ask(0, 1_034.0), &[], false, 0).unwrap();
    assert_eq!(accepted.result.ok().unwrap().admission.ttft_ms, 1_034.0);
    assert_ne!(tables(), before);
    let counts = conductor.counts();
    assert_eq!((counts.placed, counts.rejected, counts.in_flight), (1, 1, 1));
    let must_run = Ask { must_run: true, ..ask(0, 1.0) };
    assert!(conductor.schedule(&must_run, &[], false, 0).unwrap().result.is_ok());
}

/// A component that rejects everything, with a reason that the contract knows.
fn rejecting() -> (Conductor, Arc<PolicyHost>) {
    let bytes = kvasir_tests::guest("scheduler").to_vec();
    let wanted = Wanted {
        scheduler: (Source::Bytes { name: "bad".into(), bytes }, vec![("mode".into(), "reject".into())]),
        ..Wanted::default()
    };
    let policies = PolicyHost::open(&PolicyConfig::default(), wanted, None).unwrap();
    let config = config::Conductor { workers: 1, ..Default::default() };
    (Conductor::new(&config, &policies, 0), policies)
}

#[test]
fn a_request_that_must_run_runs_where_the_native_twin_finds_room() {
    let (conductor, policies) = rejecting();
    let epoch = conductor.register("a", registration(), 0).unwrap();
    let must_run = Ask { must_run: true, ..ask(0, NO_SLO) };
    let refused = conductor.schedule(&ask(0, NO_SLO), &[], false, 0).unwrap();
    let rejected = refused.result.err().unwrap();
    assert_eq!((rejected.reason, rejected.retry_after_ms, refused.fallback), (5, 7, None));
    let ran = conductor.schedule(&must_run, &[], false, 0).unwrap();
    assert_eq!(ran.result.ok().unwrap().prefill, "a");
    assert_eq!(ran.fallback.unwrap(), "overruled: it rejected a request that must run");
    // Where there is no room for it, the policy's own answer stands.
    conductor.report("a", epoch, &drained(), 0).unwrap();
    let nowhere = conductor.schedule(&must_run, &[], false, 0).unwrap();
    let rejected = nowhere.result.err().unwrap();
    assert_eq!((rejected.reason, rejected.retry_after_ms, nowhere.fallback), (5, 7, None));
    let counters = policies.status(SlotKind::Scheduler).counters;
    assert_eq!((counters.invalid_answers, counters.traps), (0, 0), "no fault of the policy");
}

#[test]
fn the_admitter_is_told_the_times_of_the_placement_and_the_share_of_the_tenant() {
    let conductor = conductor("round-robin", 1);
    conductor.register("a", registration(), 0).unwrap();
    let forecast = |tenant| {
        let wish = Wish { ask: &ask(tenant, NO_SLO), chain: &[], explain: false, now_ms: 0 };
        let mut decider = conductor.deciders.take();
        conductor.look(&mut decider, &wish, 0);
        let forecast = decider.forecast(&conductor.state.lock(), &wish, &Decision::run(0, 0));
        let (told, admission) = forecast.unwrap().unwrap();
        assert_eq!((f64::from(told.ttft), f64::from(told.tbt)), (admission.ttft_ms, admission.tbt_ms));
        assert_eq!((told.ttft, told.transfer, told.cached_tokens), (told.queue + told.prefill, 0.0, 0.0));
        assert_eq!(Request::decode(decider.question.request_words()).tenant, tenant);
        (told.ttft, told.tbt, told.tenant_share)
    };
    assert_eq!(forecast(7), (1_034.0, 21.0, 0.0));
    for tenant in [7, 8, 8, 8] {
        conductor.schedule(&ask(tenant, NO_SLO), &[], false, 0).unwrap();
    }
    assert_eq!(forecast(7), (5.0 * 1_034.0, 25.0, 0.25));
    assert_eq!(forecast(8).2, 0.75);
    assert_eq!(forecast(9).2, 0.0);
}

#[test]
fn what_came_of_every_request_is_told_once() {
    let conductor = conductor("round-robin", 1);
    let outcomes = Outcomes::listened_to();
    conductor.state.lock().outcomes = outcomes.clone();
    conductor.schedule(&ask(3, NO_SLO), &[], false, 0).unwrap();
    let [unplaced] = outcomes.heard()[..] else { panic!("one request was rejected") };
    assert_eq!((unplaced.end, unplaced.tenant, unplaced.decision), (End::Rejected, 3, 0));
    assert_eq!((unplaced.reason, unplaced.prefill, unplaced.ttft_ms), (3, 0, Default::default()));

    conductor.register("a", registration(), 0).unwrap();
    conductor.schedule(&ask(4, 1_033.0), &[], false, 0).unwrap();
    let [refused] = outcomes.heard()[..] else { panic!("one request was refused") };
    assert_eq!((refused.end, refused.tenant, refused.decision), (End::Refused, 4, 0));
    assert_eq!(
        (refused.reason, refused.ttft_ms.predicted, refused.ttft_ms.measured),
        (1, Some(1_034.0), None)
    );

    let lived = Ask { class: 7, session: 1 << 40, ..ask(5, NO_SLO) };
    let id = conductor.schedule(&lived, &[], false, 100).unwrap().request_id;
    let lost = conductor.schedule(&ask(6, NO_SLO), &[], false, 100).unwrap().request_id;
    for (stage, now_ms) in [
        (Stage::Prefill { took_ms: Some(90.0) }, 1_300),
        (Stage::Progress(10), 1_400),
        (Stage::Finished, 1_500),
    ] {
        assert!(outcomes.heard().is_empty(), "before it ended");
        conductor.complete(id, stage, now_ms).unwrap();
    }
    let [finished] = outcomes.heard()[..] else { panic!("one request was finished") };
    assert_eq!((finished.end, finished.decision, finished.tenant, finished.class), (End::Finished, id, 5, 7));
    assert_eq!((finished.session, finished.prompt_tokens, finished.decoded_tokens), (1 << 40, 1_024, 10));
    assert_eq!((finished.ttft_ms.predicted, finished.ttft_ms.measured), (Some(1_034.0), Some(1_200.0)));
    assert_eq!((finished.tbt_ms.predicted, finished.tbt_ms.measured), (Some(21.0), Some(20.0)));
    assert_eq!((finished.queue_ms, finished.prefill_ms.predicted), (Some(0.0), Some(1_034.0)));
    assert_eq!((finished.prefill_ms.measured, refused.prefill_ms.measured), (Some(90.0), None));
    assert!(finished.prefill > 0 && finished.decode > 0 && finished.prefill == refused.prefill);

    conductor.tick(100_000_000);
    let [given_up] = outcomes.heard()[..] else { panic!("one request was given up") };
    assert_eq!((given_up.end, given_up.decision, given_up.ttft_ms.measured), (End::GivenUp, lost, None));
}

#[test]
fn only_instances_that_serve_the_model_are_chosen() {
    for policy in kvasir_default_policies::SCHEDULERS.iter().map(|policy| policy.name) {
        let conductor = conductor(policy, 1);
        let serving = |models: &[&str], adapters: &[&str]| Registration {
            models: models.iter().map(|m| (*m).to_owned()).collect(),
            adapters: adapters.iter().map(|a| (*a).to_owned()).collect(),
            ..registration()
        };
        conductor.register("llama", serving(&["llama"], &[]), 0).unwrap();
        let epoch = conductor.register("qwen", serving(&["qwen"], &["sql"]), 0).unwrap();
        let placed = |model: &str, adapter: &str| {
            let ask = Ask { needs: conductor.needs(model, adapter), ..ask(0, NO_SLO) };
            let scheduled = conductor.schedule(&ask, &[], false, 0).unwrap();
            assert_eq!(scheduled.fallback, None, "{policy}");
            scheduled.result.map(|placed| (placed.prefill, placed.decode)).map_err(|rejected| rejected.reason)
        };
        for model in ["llama", "qwen", "llama", "qwen"] {
            assert_eq!(placed(model, "sql"), Ok((model.to_owned(), model.to_owned())), "{policy}");
        }
        assert_eq!(placed("gemma", ""), Err(3), "{policy}: no instance");
        assert!(placed("", "").is_ok(), "{policy}");
        conductor.register("any", registration(), 0).unwrap();
        assert_eq!(placed("gemma", ""), Ok(("any".to_owned(), "any".to_owned())), "{policy}");

        let sql = conductor.needs("", "sql");
        let loaded = |decode: bool| {
            let wish =
                Wish { ask: &Ask { needs: sql, ..ask(0, NO_SLO) }, chain: &[], explain: false, now_ms: 0 };
            let mut decider = conductor.deciders.take();
            conductor.look(&mut decider, &wish, 0);
            let candidates = decider.question.candidates();
            [0, 1, 2].map(|slot| {
                if decode {
                    candidates.decode_has_adapter(slot)
                } else {
                    candidates.prefill_has_adapter(slot)
                }
            })
        };
        assert_eq!((loaded(false), loaded(true)), ([false, true, false], [false, true, false]), "{policy}");
        let unloaded = Report { adapters: Some(Vec::new()), ..Report::default() };
        conductor.report("qwen", epoch, &unloaded, 0).unwrap();
        conductor.report("qwen", epoch, &Report::default(), 0).unwrap();
        assert_eq!(loaded(false), [false; 3], "{policy}");
    }
}

/// One request and what becomes of it.
#[derive(Clone, Copy, Debug)]
struct Step {
    tenant: u32,
    session: u64,
    memo: u64,
    charge: u64,
    /// 0 booked, 1 refused by the admitter, 2 overtaken by a registration, 3 overtaken by a drain, 4 rejected by the
    /// scheduler.
    end: u8,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let charge = prop_oneof![Just(0), Just(7), Just(u64::MAX)];
    let step = (0..3u32, 0..3u64, 0..4u64, charge, 0..5u8);
    let step =
        step.prop_map(|(tenant, session, memo, charge, end)| Step { tenant, session, memo, charge, end });
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// What a decision leaves is there if and only if it was booked.
    #[test]
    fn memos_are_written_by_bookings_alone(steps in steps()) {
        let conductor = conductor("round-robin", 1);
        let mut epoch = conductor.register("a", registration(), 0).unwrap();
        let (mut sessions, mut tenants) = (HashMap::new(), HashMap::new());
        for Step { tenant, session, memo, charge, end } in steps {
            let ask = Ask { session, ..ask(tenant, NO_SLO) };
            let wish = Wish { ask: &ask, chain: &[], explain: false, now_ms: 0 };
            let mut decider = conductor.deciders.take();
            conductor.look(&mut decider, &wish, 0);
            let told = Request::decode(decider.question.request_words());
            let known = sessions.get(&(tenant, session)).copied().unwrap_or(0);
            prop_assert_eq!(told.session_memo, known);
            prop_assert_eq!(told.tenant_memo, tenants.get(&tenant).copied().unwrap_or(0));

            let placement = Placement { session_memo: memo, tenant_charge: charge, ..Placement::default() };
            let decision =
                if end == 4 { Decision::reject(Reason::Policy, 1) } else { Decision::Run(placement) };
            let outcome = policy::Outcome {
                decision,
                fallback: None,
                generation: 1,
                seat: policy::Seat::Active,
            };
            let refused = (end == 1).then_some(Rejected { refused: None, reason: 0, retry_after_ms: 1 });
            if end == 2 {
                epoch = conductor.register("a", registration(), 0).unwrap();
            }
            conductor.report("a", epoch, &Report { draining: end == 3, ..Report::default() }, 0).unwrap();
            let concluded = conclude(&mut conductor.state.lock(), &decider, &wish, &outcome, refused, &[]).unwrap();
            conductor.report("a", epoch, &Report::default(), 0).unwrap();
            let booked = concluded.is_some_and(|scheduled| scheduled.result.is_ok());
            prop_assert_eq!(booked, end == 0);
            if booked {
                let sum: &mut u64 = tenants.entry(tenant).or_default();
                *sum = sum.wrapping_add(charge);
                if session != 0 {
                    sessions.insert((tenant, session), memo);
                }
            }
        }
    }
}

/// Instances come, go and drain while four threads decide with three workers.
#[test]
fn every_request_is_booked_exactly_once_whatever_happens_meanwhile() {
    const EACH: usize = 200;
    let conductor = conductor("mooncake", 3);
    conductor.register("stays", registration(), 0).unwrap();
    let stop = AtomicBool::new(false);
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let churn = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let epoch = conductor.register("goes", registration(), 0).unwrap();
                conductor.report("goes", epoch, &drained(), 0).unwrap();
                conductor.unregister("goes", epoch).unwrap();
                std::thread::yield_now();
            }
        });
        let deciding = [0, 1, 2, 3].map(|_| {
            scope.spawn(|| {
                let decide = |_| conductor.schedule(&ask(0, NO_SLO), &[1, 2], false, 0).unwrap();
                let scheduled: Vec<_> = (0..EACH).map(decide).collect();
                assert!(scheduled.iter().all(|s| s.result.as_ref().is_ok_and(|p| !p.prefill.is_empty())));
                scheduled.into_iter().map(|s| s.request_id).collect::<Vec<_>>()
            })
        });
        let ids = deciding.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        churn.join().unwrap();
        ids
    });
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4 * EACH);
    let counts = conductor.counts();
    assert_eq!((counts.placed, counts.in_flight), (4 * EACH as u64, 4 * EACH));
    for &id in &ids {
        conductor.complete(id, Stage::Finished, 0).unwrap();
    }
    assert_eq!(conductor.counts().in_flight, 0);
}

/// A conductor of two idle instances beside its policies.
fn conductor_of(policies: &PolicyHost) -> Conductor {
    let config = config::Conductor { workers: 2, ..Default::default() };
    let conductor = Conductor::new(&config, policies, 0);
    conductor.register("a", registration(), 0).unwrap();
    conductor.register("b", registration(), 0).unwrap();
    conductor
}

fn try_out(policies: &PolicyHost, scheduler: &str, stage: trial::Stage) {
    policies.load_as(SlotKind::Scheduler, Source::Native(scheduler.into()), Vec::new(), stage).unwrap();
}

#[test]
fn a_request_goes_to_the_policy_that_its_tenant_or_session_is_given() {
    let policies = policies("mooncake");
    let conductor = conductor_of(&policies);
    let policy = |tenant, session| {
        let ask = Ask { session, ..ask(tenant, NO_SLO) };
        conductor.schedule(&ask, &[1, 2], false, 5).unwrap().policy
    };
    try_out(&policies, "random", trial::Stage::Canary(Share::Tenant(3)));
    for session in 0..20 {
        assert_eq!((policy(3, session).as_str(), policy(2, session).as_str()), ("random", "mooncake"));
    }
    try_out(&policies, "round-robin", trial::Stage::Canary(Share::PerMille(500)));
    let chosen: Vec<_> = (1..=100).map(|session| policy(0, session)).collect();
    let canary = chosen.iter().filter(|policy| *policy == "round-robin").count();
    assert!((25..=75).contains(&canary), "{canary}");
    assert_eq!((1..=100).map(|session| policy(0, session)).collect::<Vec<_>>(), chosen);
    policies.rollback(SlotKind::Scheduler).unwrap();
    assert!((1..=100).all(|session| policy(0, session) == "mooncake"));
    conductor.refresh_idle(); // nobody keeps an instance of what is over
}

#[test]
fn a_shadow_hears_of_what_was_decided() {
    let policies = policies("mooncake");
    let conductor = conductor_of(&policies);
    try_out(&policies, "mooncake", trial::Stage::Shadow);
    for session in 1..=50 {
        let ask = Ask { session, ..ask(0, NO_SLO) };
        assert!(conductor.schedule(&ask, &[session, 2], false, 5 + session).unwrap().result.is_ok());
    }
    let status = || policies.status(SlotKind::Scheduler).trial.unwrap();
    while status().agreement.asked < 50 {
        std::thread::yield_now();
    }
    assert_eq!((status().agreement.same, status().dropped), (50, 0), "on the tables of each decision");
}
