//! A week in virtual time: people by day and agents by night, a policy that places requests where their prefix is not,
//! and the guard that puts the good one back.

use super::*;
use crate::policy::{GuardConfig, SlotKind, Source, Stage};
use crate::replay::generate::{Generator, Plan, Workload};
use parking_lot::Mutex;
use std::time::Duration;

const DAY_MS: u64 = 86_400_000;
const QUARTER_MS: u64 = DAY_MS / 4;
/// The fourth day at ten: the middle of a quarter, with many people about.
const PROMOTED_MS: u64 = 3 * DAY_MS + 10 * 3_600_000;

/// Every six hours others come, with other prompts: chat by day, agents by night.
fn week(seed: u64) -> impl Iterator<Item = Request> {
    (0..28_u64).flat_map(move |quarter| {
        let night = [0, 3].contains(&(quarter % 4));
        let (workload, rate_rps) = if night { (Workload::Agent, 0.01) } else { (Workload::Chat, 0.04) };
        let plan = Plan { workload, requests: 2_000, rate_rps, seed: seed << 8 | quarter };
        let requests = Generator::new(&plan).expect("the plan is within bounds");
        requests.take_while(|request| request.time_ms < QUARTER_MS).map(move |request| Request {
            time_ms: quarter * QUARTER_MS + request.time_ms,
            blocks: request.blocks.iter().map(|id| quarter << 32 | id).collect(),
            ..request
        })
    })
}

/// What happened, and how much was found before the bad policy, under it, and in the day after it.
struct Week {
    told: Vec<String>,
    hit_rates: [f64; 3],
    rolled_back_ms: u64,
}

fn live_through(seed: u64) -> Week {
    let setup =
        Setup { prefill: 6, decode: 2, pool_blocks: 2_000, tick_ms: 60_000, seed, ..Setup::default() };
    let guard = GuardConfig {
        window: Duration::from_secs(3_600),
        watch: Duration::from_secs(24 * 3_600),
        every: Duration::ZERO,
        ..GuardConfig::default()
    };
    let good = Choice { source: Source::Builtin("mooncake".into()), settings: Vec::new() };
    let choices = Choices::default().with(SlotKind::Scheduler, good);
    let mut policies = Policies::guarded(&setup, &choices, guard).unwrap();
    let host = Arc::clone(policies.host());
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&told);
    host.on_change(Box::new(move |change| {
        listener.lock().push(format!("{:?} by {:?}: {:?}", change.action, change.cause, change.reason));
    }));
    let mut cluster = Cluster::new(&setup, &mut policies).unwrap();
    let (mut promoted, mut rolled_back_ms, mut marks) = (false, 0, Vec::new());
    let mut ended = XxHash3_64::default();
    for request in week(seed) {
        if !promoted && request.time_ms >= PROMOTED_MS {
            marks.push((cluster.tally().blocks_found, cluster.tally().blocks_asked));
            host.load_as(SlotKind::Scheduler, Source::Builtin("random".into()), Vec::new(), Stage::Active)
                .unwrap();
            promoted = true;
        }
        cluster.offer(&request).unwrap();
        host.judge(request.time_ms);
        let serves_again = promoted && host.status(SlotKind::Scheduler).name == "mooncake";
        let a_day_after = rolled_back_ms > 0 && request.time_ms >= rolled_back_ms + DAY_MS;
        if (serves_again && marks.len() == 1) || (a_day_after && marks.len() == 2) {
            marks.push((cluster.tally().blocks_found, cluster.tally().blocks_asked));
            rolled_back_ms = if rolled_back_ms == 0 { request.time_ms } else { rolled_back_ms };
        }
        for end in cluster.take_ended() {
            std::hash::Hash::hash(&(end.request, end.ttft_us), &mut ended);
        }
    }
    cluster.finish().unwrap();
    assert_eq!(cluster.faults(), []);
    let mut told = told.lock().clone();
    told.push(format!("{:?} {:x}", cluster.tally(), std::hash::Hasher::finish(&ended)));
    let between = |n: usize| {
        let (from, to) = (if n == 0 { (0, 0) } else { marks[n - 1] }, marks[n]);
        (to.0 - from.0) as f64 / (to.1 - from.1) as f64
    };
    Week { told, hit_rates: [0, 1, 2].map(between), rolled_back_ms }
}

#[test]
fn a_week_with_a_bad_policy_in_it() {
    let week = live_through(1);
    let [before, under, after] = week.hit_rates;
    assert!(under < before - 0.05 && after > under + 0.05 && after > 0.9 * before, "{:?}", week.hit_rates);
    let [loaded, rolled_back, _] = &week.told[..] else { panic!("{:?}", week.told) };
    assert!(loaded.starts_with("Loaded by Operator"), "{loaded}");
    assert!(rolled_back.starts_with("RolledBack by Guard(HitRate)"), "{rolled_back}");
    assert!(rolled_back.contains("blocks hit, where at most"), "{rolled_back}");
    let lasted_ms = week.rolled_back_ms - PROMOTED_MS;
    assert!(lasted_ms <= 2 * 3_600_000, "{lasted_ms} ms");
    assert_eq!(live_through(1).told, week.told, "the same week again");
}
