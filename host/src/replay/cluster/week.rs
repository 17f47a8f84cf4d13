//! A week in virtual time: people by day and agents by night, a policy that places requests where their prefix is not,
//! and the guard that puts the good one back.

use super::*;
use crate::policy::{GuardConfig, Share, SlotKind, Source, Stage};
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
        requests.take_while(|request| request.time_ms() < QUARTER_MS).map(move |request| Request {
            time_us: quarter * QUARTER_MS * 1_000 + request.time_us,
            blocks: request.blocks.iter().map(|id| quarter << 32 | id).collect(),
            ..request
        })
    })
}

/// What happened, and how much was found: before the swap, under the newcomer, and in the day after it went.
struct Week {
    told: Vec<String>,
    hit_rates: Vec<f64>,
    rolled_back_ms: u64,
    /// What serves in the end.
    serves: String,
}

/// How long a newcomer is on trial: too short for a window of the guard, as it is with people in a hurry.
const TRIAL_MS: u64 = 30 * 60_000;

/// With `mooncake`, and `newcomer` beside it for a while and in its place from `promoted_ms` on.
fn live_through(seed: u64, newcomer: &str, promoted_ms: u64) -> Week {
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
    let (mut tried, mut promoted, mut rolled_back_ms, mut marks) = (false, false, 0, vec![(0, 0)]);
    let mut ended = XxHash3_64::default();
    for request in week(seed) {
        let found = (cluster.tally().blocks_found, cluster.tally().blocks_asked);
        if !tried && request.time_ms() >= promoted_ms - TRIAL_MS {
            let source = Source::Builtin(newcomer.into());
            let canary = Stage::Canary(Share::PerMille(50));
            host.load_as(SlotKind::Scheduler, source, Vec::new(), canary).unwrap();
            tried = true;
        }
        if !promoted && request.time_ms() >= promoted_ms {
            marks.push(found);
            host.promote(SlotKind::Scheduler).unwrap();
            promoted = true;
        }
        cluster.offer(&request).unwrap();
        host.judge(request.time_ms());
        let found = (cluster.tally().blocks_found, cluster.tally().blocks_asked);
        if promoted && marks.len() == 2 && host.status(SlotKind::Scheduler).name == "mooncake" {
            marks.push(found);
            rolled_back_ms = request.time_ms();
        }
        if marks.len() == 3 && request.time_ms() >= rolled_back_ms + DAY_MS {
            marks.push(found);
        }
        for end in cluster.take_ended() {
            std::hash::Hash::hash(&(end.request, end.ttft_us), &mut ended);
        }
    }
    cluster.finish().unwrap();
    assert_eq!(cluster.faults(), []);
    let mut told = told.lock().clone();
    told.push(format!("{:?} {:x}", cluster.tally(), std::hash::Hasher::finish(&ended)));
    let share = |pair: &[(u64, u64)]| (pair[1].0 - pair[0].0) as f64 / (pair[1].1 - pair[0].1) as f64;
    let hit_rates = marks.windows(2).map(share).collect();
    Week { told, hit_rates, rolled_back_ms, serves: host.status(SlotKind::Scheduler).name }
}

#[test]
fn a_week_with_a_bad_policy_in_it() {
    let week = live_through(1, "random", PROMOTED_MS);
    let [before, under, after] = week.hit_rates[..] else { panic!("{:?}: {:?}", week.told, week.hit_rates) };
    println!("{:#?}", (&week.told[..4], &week.hit_rates));
    assert!(under < before - 0.05 && after > under + 0.05 && after > 0.9 * before, "{:?}", week.hit_rates);
    let [tried, promoted, doubted, rolled_back, _] = &week.told[..] else { panic!("{:?}", week.told) };
    assert!(tried.starts_with("Tried(Canary(PerMille(50))) by Operator"), "{tried}");
    assert!(promoted.starts_with("Promoted by Operator"), "{promoted}");
    assert!(doubted.starts_with("Tried(Canary(PerMille(500))) by Guard(HitRate)"), "{doubted}");
    assert!(rolled_back.starts_with("RolledBack by Guard(HitRate)"), "{rolled_back}");
    assert!(rolled_back.contains("blocks hit, where at most"), "{rolled_back}");
    let lasted_ms = week.rolled_back_ms - PROMOTED_MS;
    assert!(lasted_ms <= 6 * 3_600_000, "{lasted_ms} ms");
    assert_eq!(live_through(1, "random", PROMOTED_MS).told, week.told, "the same week again");
}

/// Others come an hour after the swap, and less of their prompts is found, whichever policy decides.
#[test]
fn a_week_in_which_a_good_policy_meets_other_requests_and_stays() {
    for (newcomer, hour) in [("overlap-cost", 5), ("score", 17)] {
        let week = live_through(1, newcomer, 3 * DAY_MS + hour * 3_600_000);
        let said = &week.told[..week.told.len() - 1];
        assert_eq!(week.serves, newcomer, "{said:#?}");
        assert!(said[1].starts_with("Promoted by Operator"), "{said:#?}");
        assert!(said[2].contains("by Guard(HitRate)") && said[2].contains("looks worse"), "{said:#?}");
        assert!(
            said[3].starts_with("TrialEnded by Guard(HitRate)") && said[3].contains("stays"),
            "{said:#?}"
        );
    }
}
