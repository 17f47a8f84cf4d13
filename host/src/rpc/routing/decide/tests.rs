use super::*;
use crate::config;
use crate::policy::{PolicyConfig, Source, Wanted};
use crate::rpc::routing::{Registration, Stage};
use crate::scheduler::{DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use std::collections::HashSet;
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

fn routing(scheduler: &str, workers: u32) -> Routing {
    let config = config::Conductor { workers, ..Default::default() };
    Routing::new(&config, &policies(scheduler), 0)
}

fn registration() -> Registration {
    let prefill = PrefillSpec {
        cost: PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.0 },
        transfer: TransferCost { fixed_ms: 2.0, ms_per_block: 1.0 },
        capacity_blocks: 1 << 20,
    };
    let decode = DecodeSpec {
        cost: DecodeCost { fixed_ms: 20.0, ms_per_sequence: 1.0, ms_per_context_token: 0.0 },
        capacity_blocks: 1 << 20,
    };
    Registration { prefill: Some(prefill), decode: Some(decode) }
}

fn ask(tenant: u32, ttft_slo_ms: f32) -> Ask {
    Ask {
        prompt_tokens: 1_024,
        output_tokens: 76,
        class: 0,
        tenant,
        priority: 0,
        session: 0,
        seed: 1,
        ttft_slo_ms,
        tbt_slo_ms: f32::INFINITY,
        must_run: false,
    }
}

const NO_SLO: f32 = f32::INFINITY;

#[test]
fn an_answer_that_was_overtaken_is_not_booked() {
    type Change = fn(&Routing);
    let drains: Change = |r| {
        let epoch = r.register("b", registration(), 5).unwrap();
        r.report("b", epoch, 1, true, 5).unwrap();
        r.unregister("b").unwrap();
    };
    let changes: [(&str, Change); 3] = [
        ("it left", |r| r.unregister("a").unwrap()),
        ("another has its slot", |r| {
            r.register("a", registration(), 5).unwrap();
        }),
        ("another came, drained and left", drains),
    ];
    for (what, change) in changes {
        let routing = routing("mooncake", 1);
        routing.register("a", registration(), 0).unwrap();
        let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
        let mut decider = routing.deciders.take();
        let request = decider.look(&mut lock(&routing.state), &wish);
        let outcome = decider.scheduler.decide(&request, &[0]);
        assert!(matches!(outcome.decision, Decision::Run { .. }) && outcome.fallback.is_none(), "{what}");
        change(&routing);
        let concluded = conclude(&mut lock(&routing.state), &decider, &wish, &outcome, None, &[]).unwrap();
        assert!(concluded.is_none(), "{what}");
        assert_eq!((routing.counts().placed, routing.counts().in_flight), (0, 0), "{what}");
    }
}

#[test]
fn a_drained_instance_is_noticed_before_the_admitter_is_asked() {
    let routing = routing("mooncake", 1);
    let epoch = routing.register("a", registration(), 0).unwrap();
    let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
    let mut decider = routing.deciders.take();
    let request = decider.look(&mut lock(&routing.state), &wish);
    let outcome = decider.scheduler.decide(&request, &[0]);
    routing.report("a", epoch, 1, true, 5).unwrap();
    let question = decider.question(&lock(&routing.state), &wish, &outcome.decision);
    assert!(matches!(question, Err(scheduler::Error::Invalid(_))), "{question:?}");
    drop(decider);
    let rejected = routing.schedule(wish.ask, &[], false, 6).unwrap().result.err().unwrap();
    assert!(!rejected.by_admitter, "the scheduler finds no instance");
}

#[test]
fn under_the_lock_the_native_twins_decide() {
    let routing = routing("mooncake", 1);
    routing.register("a", registration(), 0).unwrap();
    let wish = Wish { ask: &ask(0, NO_SLO), chain: &[], explain: false, now_ms: 5 };
    let scheduled = routing.decide_locked(&mut routing.deciders.take(), &wish).unwrap();
    assert_eq!(scheduled.result.ok().unwrap().prefill, "a");
    assert_eq!(scheduled.fallback.unwrap(), "overtaken by changes of the tables");
    let late = Wish { ask: &ask(0, 1.0), ..wish };
    assert!(routing.decide_locked(&mut routing.deciders.take(), &late).unwrap().result.is_err());
    assert_eq!(routing.counts().in_flight, 1);
}

#[test]
fn the_admitter_is_asked_before_the_booking_so_a_refusal_leaves_no_trace() {
    let routing = routing("round-robin", 1);
    routing.register("a", registration(), 0).unwrap();
    let tables = || lock(&routing.state).conductor.rows();
    let before = tables();
    let refused = routing.schedule(&ask(0, 1_033.0), &[], false, 0).unwrap();
    let rejected = refused.result.err().unwrap();
    assert!(rejected.by_admitter, "10 + 1024 ms are over 1033");
    assert_eq!((refused.request_id, rejected.reason, rejected.retry_after_ms), (0, 1, 1));
    assert_eq!(tables(), before);
    let accepted = routing.schedule(&ask(0, 1_034.0), &[], false, 0).unwrap();
    assert_eq!(accepted.result.ok().unwrap().admission.ttft_ms, 1_034.0);
    assert_ne!(tables(), before);
    let counts = routing.counts();
    assert_eq!((counts.placed, counts.rejected, counts.in_flight), (1, 1, 1));
    let must_run = Ask { must_run: true, ..ask(0, 1.0) };
    assert!(routing.schedule(&must_run, &[], false, 0).unwrap().result.is_ok());
}

#[test]
fn the_admitter_is_told_the_times_of_the_placement_and_the_share_of_the_tenant() {
    let routing = routing("round-robin", 1);
    routing.register("a", registration(), 0).unwrap();
    let question = |tenant| {
        let wish = Wish { ask: &ask(tenant, NO_SLO), chain: &[], explain: false, now_ms: 0 };
        let mut decider = routing.deciders.take();
        decider.look(&mut lock(&routing.state), &wish);
        let question = decider.question(&lock(&routing.state), &wish, &Decision::run(0, 0));
        let (asked, admission) = question.unwrap().unwrap();
        assert_eq!((f64::from(asked.ttft), f64::from(asked.tbt)), (admission.ttft_ms, admission.tbt_ms));
        (asked.ttft, asked.tbt, asked.tenant_share)
    };
    assert_eq!(question(7), (1_034.0, 21.0, 0.0));
    for tenant in [7, 8, 8, 8] {
        routing.schedule(&ask(tenant, NO_SLO), &[], false, 0).unwrap();
    }
    assert_eq!(question(7), (5.0 * 1_034.0, 25.0, 0.25));
    assert_eq!(question(8).2, 0.75);
    assert_eq!(question(9).2, 0.0);
}

/// Instances come, go and drain while four threads decide with three workers.
#[test]
fn every_request_is_booked_exactly_once_whatever_happens_meanwhile() {
    const EACH: usize = 200;
    let routing = routing("mooncake", 3);
    routing.register("stays", registration(), 0).unwrap();
    let stop = AtomicBool::new(false);
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let churn = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let epoch = routing.register("goes", registration(), 0).unwrap();
                routing.report("goes", epoch, 1, true, 0).unwrap();
                routing.unregister("goes").unwrap();
                std::thread::yield_now();
            }
        });
        let deciding = [0, 1, 2, 3].map(|_| {
            scope.spawn(|| {
                let decide = |_| routing.schedule(&ask(0, NO_SLO), &[1, 2], false, 0).unwrap();
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
    let counts = routing.counts();
    assert_eq!((counts.placed, counts.in_flight), (4 * EACH as u64, 4 * EACH));
    for &id in &ids {
        routing.complete(id, Stage::Finished, 0).unwrap();
    }
    assert_eq!(routing.counts().in_flight, 0);
}
