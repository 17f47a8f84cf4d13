//! Decisions by several workers at once, while the policy of one of them never returns.

use kvasir::conductor::{Conductor, Registration, Stage};
use kvasir::config;
use kvasir::fleet::{Ask, DecodeCost, DecodeSpec, PrefillCost, PrefillSpec, TransferCost};
use kvasir::policy::{PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
use kvasir_tests::guest;
use std::collections::HashSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const WORKERS: u32 = 3;
/// The request that the guest loops on.
const LOOPS: u32 = 13;

fn ask(class: u32) -> Ask {
    Ask { prompt_tokens: 1_024, output_tokens: 100, class, seed: 1, must_run: true, ..Ask::default() }
}

fn pair() -> Registration {
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
    Registration { prefill: Some(prefill), decode: Some(decode), ..Registration::default() }
}

/// CPU seconds that the loop burns: time for the others even if they get little of the machine.
const DEADLINE: Duration = Duration::from_secs(2);

#[test]
fn a_policy_that_loops_holds_up_its_own_worker_only() {
    let _process = crate::beside_others();
    const EACH: usize = 20;
    let limits = PolicyConfig { hot_deadline: DEADLINE, ..PolicyConfig::default() };
    let policies = PolicyHost::open(&limits, Wanted::default(), None).unwrap();
    let component = Source::Bytes { name: "bad".into(), bytes: guest("scheduler").into() };
    let mode = ("mode".to_owned(), "loop-on-class-13".to_owned());
    policies.load(SlotKind::Scheduler, component, vec![mode]).unwrap();
    let config = config::Conductor { workers: WORKERS, ..Default::default() };
    let conductor = Conductor::new(&config, &policies, 0);
    conductor.register("a", pair(), 0).unwrap();

    let (start, returned) = (Barrier::new(WORKERS as usize), AtomicBool::new(false));
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let looping = scope.spawn(|| {
            start.wait();
            let scheduled = conductor.schedule(&ask(LOOPS), &[], false, 0).unwrap();
            returned.store(true, Ordering::SeqCst);
            assert!(scheduled.fallback.unwrap().contains("past its deadline"));
            assert!(scheduled.result.is_ok(), "the native twin decided");
            scheduled.request_id
        });
        let others = [(); WORKERS as usize - 1].map(|()| {
            scope.spawn(|| {
                start.wait();
                let decide = |_| {
                    let scheduled = conductor.schedule(&ask(0), &[], false, 0).unwrap();
                    assert_eq!(scheduled.fallback, None);
                    scheduled.request_id
                };
                let ids: Vec<u64> = (0..EACH).map(decide).collect();
                assert!(!returned.load(Ordering::SeqCst), "they waited for the policy that loops");
                ids
            })
        });
        let others = others.map(|thread| thread.join().unwrap());
        others.into_iter().flatten().chain([looping.join().unwrap()]).collect()
    });
    let decided = ids.len();
    assert_eq!(decided, (WORKERS as usize - 1) * EACH + 1);
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), decided, "each is booked under its own id");
    assert_eq!((conductor.counts().placed, conductor.counts().in_flight), (decided as u64, decided));
    for id in ids {
        conductor.complete(id, Stage::Finished, 0).unwrap();
    }
    assert_eq!(conductor.counts().in_flight, 0);
}
