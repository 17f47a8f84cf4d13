//! Trials, guards and what is told of them, against real components and in virtual time.

use super::{config as policy_config, fleet, question};
use crate::fleet::Fleet;
use crate::policy::guard::GuardConfig;
use crate::policy::scheduler::{Outcome, Seat};
use crate::policy::*;
use kvasir_policy::admitter::{Forecast, Load, Verdict};
use kvasir_policy::balancer::Snapshot;
use kvasir_policy::evictor::{Event, EventKind, NO_SLOT, TierRow};
use kvasir_policy::scheduler::{Decision, Request};
use parking_lot::Mutex;
use std::path::Path;

const SECOND: u64 = 1_000;
/// Faults that no test reaches: the guards are what acts.
const NEVER: u32 = 1_000_000;

fn config() -> PolicyConfig {
    let guard = GuardConfig { every: Duration::ZERO, calls_min: 20, ..GuardConfig::default() };
    PolicyConfig { breaker_faults: NEVER, guard, ..policy_config() }
}

/// Native policies, but for what a test loads.
fn wanted() -> Wanted {
    Wanted {
        scheduler: (Source::Native("mooncake".into()), Vec::new()),
        evictor: (Source::Native("lru".into()), Vec::new()),
        admitter: (Source::Native("slo".into()), Vec::new()),
        balancer: (Source::Native("static".into()), Vec::new()),
    }
}

type Heard = Arc<Mutex<Vec<Change>>>;

fn listen(host: &PolicyHost) -> Heard {
    let heard = Heard::default();
    let ear = Arc::clone(&heard);
    host.on_change(Box::new(move |change| ear.lock().push(change.clone())));
    heard
}

fn host_with(config: &PolicyConfig, state: Option<(kvasir_state_db::Db, &Path)>) -> (Arc<PolicyHost>, Heard) {
    let host = PolicyHost::open(config, wanted(), state).expect("host");
    let heard = listen(&host);
    (host, heard)
}

fn host() -> (Arc<PolicyHost>, Heard) {
    host_with(&config(), None)
}

fn native(name: &str) -> Source {
    Source::Native(name.into())
}

/// A policy that misbehaves as told.
fn bad(slot: SlotKind, mode: &str) -> (Source, Vec<(String, String)>) {
    let bytes = kvasir_tests::guest(slot.as_str()).to_vec();
    (Source::Bytes { name: "bad".into(), bytes }, vec![("mode".to_owned(), mode.to_owned())])
}

const ALL: Stage = Stage::Canary(Share::PerMille(1_000));

struct Deciding {
    worker: SchedulerWorker,
    fleet: Fleet,
}

impl Deciding {
    fn new(host: &PolicyHost) -> Self {
        Self { worker: host.scheduler_worker(), fleet: fleet(4) }
    }

    /// As a decider of the conductor does, for a prompt of ten blocks; so many of them were found, or it was rejected.
    fn decide(&mut self, session: u64, found: Option<u64>) -> Outcome {
        self.decide_as(session, |_| found)
    }

    fn decide_as(&mut self, session: u64, found: impl Fn(Seat) -> Option<u64>) -> Outcome {
        let question = question(1_000, session, f32::INFINITY, &[0; 4]);
        let subject = Subject { session, ..Subject::default() };
        self.worker.catch_up(&self.fleet, &subject);
        let outcome = self.worker.decide(&question);
        assert!(matches!(outcome.decision, Decision::Run(_)), "{outcome:?}");
        self.worker.decided(&outcome, found(outcome.seat).map(|found| (10, found)), None);
        self.worker.tell_shadow(&question, &outcome, 10);
        outcome
    }
}

fn trial(host: &PolicyHost, slot: SlotKind) -> TrialStatus {
    host.status(slot).trial.expect("a trial")
}

#[test]
fn a_canary_decides_its_share_until_it_is_promoted() {
    let (host, heard) = host();
    let mut deciding = Deciding::new(&host);
    let share = Share::PerMille(200);
    let status = host
        .load_as(SlotKind::Scheduler, native("random"), Vec::new(), Stage::Canary(share))
        .expect("canary");
    assert_eq!((status.name.as_str(), status.generation), ("mooncake", 1), "what serves is as it was");
    for _ in 0..2 {
        for session in 1..=500 {
            let outcome = deciding.decide(session, Some(5));
            let subject = Subject { session, ..Subject::default() };
            let (seat, policy) = match share.takes(SlotKind::Scheduler, &subject) {
                true => (Seat::Trial, "random"),
                false => (Seat::Active, "mooncake"),
            };
            assert_eq!((outcome.seat, deciding.worker.policy_of(&outcome)), (seat, policy), "{session}");
        }
    }
    host.judge(SECOND);
    let status = trial(&host, SlotKind::Scheduler);
    let (newcomer, compared) = (status.window.newcomer, status.window.compared.expect("the active one"));
    assert_eq!(newcomer.requests + compared.requests, 1_000);
    assert!((100..300).contains(&newcomer.requests), "{newcomer:?}");
    assert_eq!((newcomer.hit_rate, compared.hit_rate), (Some(0.5), Some(0.5)));

    let promoted = host.promote(SlotKind::Scheduler).expect("promoted");
    assert_eq!((promoted.name.as_str(), promoted.previous.as_deref()), ("random", Some("mooncake")));
    assert_eq!((promoted.trial, promoted.last_trip), (None, None));
    let outcome = deciding.decide(1, Some(5));
    assert_eq!((outcome.seat, outcome.generation), (Seat::Active, promoted.generation));
    assert!(matches!(host.promote(SlotKind::Scheduler), Err(Error::NoTrial(SlotKind::Scheduler))));
    let actions: Vec<_> = heard.lock().iter().map(|change| (change.action, change.cause)).collect();
    let operator = Cause::Operator;
    assert_eq!(actions, [(Action::Tried(Stage::Canary(share)), operator), (Action::Promoted, operator)]);
    let names = |id: &Option<PolicyId>| id.as_ref().map(|id| id.name.clone());
    let last = heard.lock().last().cloned().expect("promoted");
    assert_eq!((names(&last.before), names(&last.after)), (Some("mooncake".into()), Some("random".into())));
}

#[test]
fn a_canary_that_traps_costs_no_decision_and_goes() {
    let (host, heard) = host();
    let mut deciding = Deciding::new(&host);
    let (source, settings) = bad(SlotKind::Scheduler, "trap");
    host.load_as(SlotKind::Scheduler, source, settings, ALL).expect("canary");
    let mut session = 0;
    while trial(&host, SlotKind::Scheduler).counters.traps < 30 {
        session += 1;
        let outcome = deciding.decide(session, Some(5));
        assert_eq!((outcome.seat, outcome.fallback), (Seat::Active, None), "the active policy decides");
    }
    let active = host.status(SlotKind::Scheduler);
    assert_eq!((active.counters.traps, active.counters.fallbacks), (0, 0));
    host.judge(SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.trial, status.generation), (None, 1));
    let reason = status.last_trip.expect("why");
    assert!(reason.starts_with("trial of `bad` ended: guard `traps`: 100.0% of "), "{reason}");
    assert_eq!((status.guard_rollbacks, status.breaker_trips), ([1, 0, 0, 0, 0, 0], 0));
    assert!(host.logs(SlotKind::Scheduler).0.iter().any(|line| line.text == reason));
    let last = heard.lock().last().cloned().expect("told");
    assert_eq!((last.action, last.cause), (Action::TrialEnded, Cause::Guard(Guard::Traps)));
    assert_eq!((last.before.map(|id| id.name), last.reason), (Some("bad".into()), Some(reason)));
    assert_eq!(deciding.decide(1, Some(5)).seat, Seat::Active);
}

#[test]
fn the_breaker_ends_a_trial_and_not_what_serves() {
    let (host, heard) = host_with(&PolicyConfig { breaker_faults: 3, ..config() }, None);
    let mut deciding = Deciding::new(&host);
    let (source, settings) = bad(SlotKind::Scheduler, "out-of-range");
    host.load_as(SlotKind::Scheduler, source, settings, ALL).expect("canary");
    while host.status(SlotKind::Scheduler).trial.is_some() {
        assert_eq!(deciding.decide(1, Some(5)).fallback, None);
    }
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.generation, status.breaker_trips), (1, 1));
    while heard.lock().len() < 2 {
        std::thread::yield_now(); // it is told right after
    }
    assert_eq!(heard.lock()[1].cause, Cause::Breaker);
}

#[test]
fn a_shadow_that_loops_for_ever_stops_nobody() {
    let (host, _) = host();
    let mut deciding = Deciding::new(&host);
    let (source, settings) = bad(SlotKind::Scheduler, "loop");
    host.load_as(SlotKind::Scheduler, source, settings, Stage::Shadow).expect("shadow");
    let mut session = 0;
    // It holds the shadow's thread for its whole deadline, again and again, and nobody else.
    loop {
        session += 1;
        let outcome = deciding.decide(session, Some(5));
        assert_eq!((outcome.seat, outcome.fallback), (Seat::Active, None));
        let status = trial(&host, SlotKind::Scheduler);
        if status.dropped > 0 && status.counters.deadline_misses > 1 {
            break;
        }
    }
    assert_eq!(trial(&host, SlotKind::Scheduler).agreement, Agreement::default());
    let ended = host.rollback(SlotKind::Scheduler).expect("ended");
    assert_eq!((ended.trial, ended.name.as_str(), ended.generation), (None, "mooncake", 1));
}

/// Once the shadow has answered all of it.
fn compared(host: &PolicyHost, slot: SlotKind, count: u64) -> Agreement {
    loop {
        let status = trial(host, slot);
        assert_eq!(status.dropped, 0, "as many as wait at most");
        if status.agreement.asked == count {
            return status.agreement;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_shadow_agrees_with_itself_and_not_with_another() {
    for (policy, expected) in [("mooncake", 40..=40), ("round-robin", 1..=39)] {
        let (host, _) = host();
        let mut deciding = Deciding::new(&host);
        host.load_as(SlotKind::Scheduler, Source::Builtin(policy.into()), Vec::new(), Stage::Shadow)
            .expect("shadow");
        host.judge(0);
        for session in 1..=40 {
            assert_eq!(deciding.decide(session, Some(5)).seat, Seat::Active);
        }
        let agreement = compared(&host, SlotKind::Scheduler, 40);
        assert!(expected.contains(&agreement.same), "{policy}: {agreement:?}");
        host.judge(SECOND);
        let Beside { newcomer, compared } = trial(&host, SlotKind::Scheduler).window;
        let compared = compared.expect("the active one");
        assert_eq!((newcomer.requests, compared.requests, newcomer.blocks), (40, 40, 400));
        assert_eq!(newcomer.ttft_ms, compared.ttft_ms, "all instances are alike, and idle");
        assert!(newcomer.ttft_ms.expect("a forecast") > 0.0 && newcomer.tbt_ms.expect("a forecast") > 0.0);
    }
}

/// Blocks of ten requests are a hundred, and yet of ten requests.
#[test]
fn a_canary_goes_for_what_chance_does_not_make() {
    let (host, _) = host();
    let mut deciding = Deciding::new(&host);
    (1..=100).for_each(|session| drop(deciding.decide(session, Some(8))));
    host.judge(SECOND);
    host.load_as(SlotKind::Scheduler, native("random"), Vec::new(), ALL).expect("canary");
    (1..=10).for_each(|session| drop(deciding.decide(session, Some(6))));
    host.judge(2 * SECOND);
    assert_eq!(trial(&host, SlotKind::Scheduler).window.newcomer.hit_rate, Some(0.6));
    (1..=300).for_each(|session| drop(deciding.decide(session, Some(6))));
    host.judge(3 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!(status.trial, None);
    let why = status.last_trip.expect("why");
    assert!(why.contains("guard `hit-rate`: 60.0% of 3100 blocks hit"), "{why}");
}

/// Has a policy with the misbehaviour take over from a good one, and gives why it went.
fn rolled_back(config: &PolicyConfig, mode: &str, decide: impl Fn(&mut Deciding) -> bool) -> (Guard, String) {
    let (host, heard) = host_with(config, None);
    let mut deciding = Deciding::new(&host);
    (1..=100).for_each(|session| drop(deciding.decide(session, Some(8))));
    host.judge(SECOND);
    let (source, settings) = bad(SlotKind::Scheduler, mode);
    host.load_as(SlotKind::Scheduler, source, settings, ALL).expect("canary");
    host.promote(SlotKind::Scheduler).expect("promoted");
    host.judge(2 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).name, "bad");
    assert!(host.status(SlotKind::Scheduler).watch.is_some());
    while !decide(&mut deciding) {}
    host.judge(3 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!(status.name, "mooncake", "the one before it serves again");
    let last = heard.lock().last().cloned().expect("told");
    assert_eq!((last.action, last.reason), (Action::RolledBack, status.last_trip.clone()));
    let Cause::Guard(guard) = last.cause else { panic!("{:?}", last.cause) };
    assert_eq!(status.guard_rollbacks[guard as usize], 1);
    deciding.decide(1, Some(5));
    assert_eq!(deciding.worker.policy(), "mooncake");
    // What was put back is not put back again for the company it is held against.
    host.judge(4 * SECOND);
    let after = host.status(SlotKind::Scheduler);
    assert_eq!((after.name.as_str(), after.watch, &after.last_trip), ("mooncake", None, &status.last_trip));
    // It is told until somebody acts.
    host.load(SlotKind::Scheduler, native("netkv"), Vec::new()).expect("load");
    assert_eq!(host.status(SlotKind::Scheduler).last_trip, None);
    (guard, status.last_trip.expect("why"))
}

/// Decides so often, until the policy in service was called often enough.
fn calls(times: u64, found: Option<u64>) -> impl Fn(&mut Deciding) -> bool {
    move |deciding| {
        (1..=times).for_each(|session| drop(deciding.decide(session, found)));
        deciding.worker.calls() >= 25
    }
}

#[test]
fn a_promoted_policy_that_traps_goes() {
    let (guard, why) = rolled_back(&config(), "trap", calls(1, Some(8)));
    assert_eq!(guard, Guard::Traps);
    let (expected, serves) = ("`bad` taken out of service: guard `traps`: 100.0% of ", "; `mooncake` serves");
    assert!(why.starts_with(expected) && why.ends_with(serves) && why.contains(" allowed, over "), "{why}");
}

#[test]
fn a_promoted_policy_that_is_late_goes() {
    let config = PolicyConfig { hot_deadline: Duration::from_millis(1), ..config() };
    assert_eq!(rolled_back(&config, "loop", calls(1, Some(8))).0, Guard::DeadlineMisses);
}

#[test]
fn a_promoted_policy_that_answers_nonsense_goes() {
    assert_eq!(rolled_back(&config(), "out-of-range", calls(50, Some(8))).0, Guard::InvalidAnswers);
}

#[test]
fn a_promoted_policy_that_is_slow_goes() {
    let guard = GuardConfig { call_p99_max: Duration::from_micros(2), ..config().guard };
    let config = PolicyConfig { guard, hot_deadline: Duration::from_secs(1), ..config() };
    let (guard, why) = rolled_back(&config, "chatter", calls(50, Some(8)));
    assert_eq!(guard, Guard::CallP99);
    assert!(why.contains("where 2µs is allowed"), "{why}");
}

/// `random` follows `mooncake`, which found 8 of 10 blocks, and looks worse at once. From then on both decide, and find so many; or have
/// the request rejected.
fn doubted(newcomer: Option<u64>, before: Option<u64>) -> (Arc<PolicyHost>, Heard, Deciding) {
    let (host, heard) = host();
    let mut deciding = Deciding::new(&host);
    (1..=100).for_each(|session| drop(deciding.decide(session, Some(8))));
    host.judge(SECOND);
    host.load(SlotKind::Scheduler, native("random"), Vec::new()).expect("load");
    host.judge(2 * SECOND);
    (1..=50).for_each(|session| drop(deciding.decide(session, newcomer)));
    host.judge(3 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    let trial = status.trial.expect("the one before it");
    let half = Stage::Canary(Share::PerMille(500));
    assert_eq!((status.name.as_str(), trial.name.as_str(), trial.stage), ("random", "mooncake", half));
    let last = heard.lock().last().cloned().expect("told");
    assert!(matches!((last.action, last.cause), (Action::Tried(_), Cause::Guard(_))), "{last:?}");
    assert!(last.reason.expect("why").starts_with("`random` looks worse than `mooncake` did: guard"));
    for session in 1..=400 {
        deciding.decide_as(session, |seat| if seat == Seat::Trial { before } else { newcomer });
    }
    (host, heard, deciding)
}

#[test]
fn a_policy_that_finds_less_of_the_same_requests_goes() {
    let (host, heard, mut deciding) = doubted(Some(1), Some(8));
    host.judge(5 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.name.as_str(), &status.trial), ("mooncake", &None));
    let why = status.last_trip.expect("why");
    let expected = "blocks hit, where at most 5.0 points below 80.0% are allowed, over 2s, of half of the requests each; `mooncake` serves";
    assert!(why.contains("guard `hit-rate`: 10.0% of ") && why.ends_with(expected), "{why}");
    let last = heard.lock().last().cloned().expect("told");
    assert_eq!((last.action, last.cause), (Action::RolledBack, Cause::Guard(Guard::HitRate)));
    assert_eq!(deciding.decide(1, Some(8)).seat, Seat::Active);
    host.judge(6 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).watch, None);
}

#[test]
fn a_policy_that_has_more_of_the_same_requests_rejected_goes() {
    let (host, _, _) = doubted(None, Some(8));
    host.judge(5 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.name.as_str(), status.trial), ("mooncake", None));
    let why = status.last_trip.expect("why");
    assert!(why.contains("guard `rejected`: 100.0% of ") && why.contains("half of the requests"), "{why}");
}

#[test]
fn a_policy_that_finds_a_little_less_of_the_same_requests_goes_after_a_window() {
    let (host, _, _) = doubted(Some(6), Some(8));
    host.judge(62 * SECOND);
    assert!(host.status(SlotKind::Scheduler).trial.is_some(), "not for so few requests");
    host.judge(63 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).name, "mooncake");
}

#[test]
fn a_policy_that_is_as_good_on_the_requests_that_came_since_stays() {
    let (host, heard, mut deciding) = doubted(Some(1), Some(1));
    host.judge(63 * SECOND);
    assert!(host.status(SlotKind::Scheduler).trial.is_some(), "nothing stands out");
    host.judge(243 * SECOND);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.name.as_str(), &status.trial, &status.last_trip), ("random", &None, &None));
    let last = heard.lock().last().cloned().expect("told");
    assert_eq!((last.action, last.cause), (Action::TrialEnded, Cause::Guard(Guard::HitRate)));
    let why = last.reason.expect("why");
    assert!(why.starts_with("`random` stays: over 240s it hit 10.0% of the blocks"), "{why}");
    // It is held against what was found lately, and may still go.
    (1..=400).for_each(|session| drop(deciding.decide(session, Some(1))));
    host.judge(244 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).trial, None);
    for second in 245..400 {
        (1..=20).for_each(|session| drop(deciding.decide(session, Some(0))));
        host.judge(second * SECOND);
    }
    assert!(host.status(SlotKind::Scheduler).trial.is_some(), "it is doubted again");
}

#[test]
fn a_rollback_in_doubt_puts_the_one_before_back_at_once() {
    let (host, heard, _) = doubted(Some(1), Some(1));
    let status = host.rollback(SlotKind::Scheduler).expect("rollback");
    assert_eq!((status.name.as_str(), status.trial), ("mooncake", None));
    let actions: Vec<_> =
        heard.lock().iter().rev().take(2).map(|change| (change.action, change.cause)).collect();
    assert!(actions.contains(&(Action::RolledBack, Cause::Operator)), "{actions:?}");
    host.judge(63 * SECOND);
    host.judge(64 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).name, "mooncake");
}

#[test]
fn where_the_seat_of_trials_is_taken_the_last_window_decides() {
    let (host, _) = host();
    let mut deciding = Deciding::new(&host);
    (1..=100).for_each(|session| drop(deciding.decide(session, Some(8))));
    host.judge(SECOND);
    host.load(SlotKind::Scheduler, native("random"), Vec::new()).expect("load");
    host.load_as(SlotKind::Scheduler, native("netkv"), Vec::new(), Stage::Canary(Share::Tenant(9)))
        .expect("canary");
    host.judge(2 * SECOND);
    (1..=50).for_each(|session| drop(deciding.decide(session, Some(1))));
    host.judge(3 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).name, "random", "a second is no window");
    (4..=61).for_each(|second| host.judge(second * SECOND));
    assert_eq!(host.status(SlotKind::Scheduler).name, "random");
    host.judge(62 * SECOND);
    assert_eq!(host.status(SlotKind::Scheduler).name, "mooncake");
}

/// The cache was warm for a while, and is cold from here on, for both.
#[test]
fn a_canary_is_held_against_what_the_others_had_in_the_same_time() {
    let (host, _) = host();
    let mut deciding = Deciding::new(&host);
    (1..=2_000).for_each(|session| drop(deciding.decide(session, Some(9))));
    host.judge(SECOND);
    let half = Stage::Canary(Share::PerMille(500));
    host.load_as(SlotKind::Scheduler, native("random"), Vec::new(), half).expect("canary");
    for second in 2..=100 {
        (1..=50).for_each(|session| drop(deciding.decide(session, Some(1))));
        host.judge(second * SECOND);
    }
    let Beside { newcomer, compared } = trial(&host, SlotKind::Scheduler).window;
    assert_eq!((newcomer.hit_rate, compared.expect("the others").hit_rate), (Some(0.1), Some(0.1)));
    for second in 101..=200 {
        (1..=50).for_each(|session| {
            deciding.decide_as(session, |seat| Some(if seat == Seat::Trial { 1 } else { 3 }));
        });
        host.judge(second * SECOND);
    }
    assert_eq!(host.status(SlotKind::Scheduler).trial, None);
}

#[test]
fn a_good_policy_passes_its_watch() {
    let (host, _) = host();
    let mut deciding = Deciding::new(&host);
    let mut session = 0;
    let mut second = |host: &PolicyHost, deciding: &mut Deciding, now: u64| {
        (0..50).for_each(|_| {
            session += 1;
            deciding.decide(session, Some(8));
        });
        host.judge(now * SECOND);
    };
    (1..=5).for_each(|now| second(&host, &mut deciding, now));
    host.load(SlotKind::Scheduler, native("random"), Vec::new()).expect("load");
    (6..=604).for_each(|now| second(&host, &mut deciding, now));
    assert_eq!(host.status(SlotKind::Scheduler).watch.expect("still").seconds_left, 2);
    second(&host, &mut deciding, 606);
    let status = host.status(SlotKind::Scheduler);
    assert_eq!((status.name.as_str(), status.watch), ("random", None));
}

#[test]
fn a_paused_trial_is_not_asked_and_nothing_is_swapped_by_itself() {
    let (host, heard) = host();
    let mut deciding = Deciding::new(&host);
    host.load_as(SlotKind::Scheduler, native("random"), Vec::new(), ALL).expect("canary");
    assert_eq!(deciding.decide(1, Some(5)).seat, Seat::Trial);
    assert!(host.pause(SlotKind::Scheduler).expect("paused").paused);
    assert_eq!(deciding.decide(1, Some(5)).seat, Seat::Active);
    let refused = host.load_watched(SlotKind::Scheduler, native("random"));
    assert!(matches!(refused, Err(Error::Paused(SlotKind::Scheduler))));
    assert!(!host.resume(SlotKind::Scheduler).expect("resumed").paused);
    assert_eq!(deciding.decide(1, Some(5)).seat, Seat::Trial);
    let actions: Vec<_> = heard.lock().iter().map(|change| change.action).collect();
    assert_eq!(actions, [Action::Tried(ALL), Action::Paused, Action::Resumed]);
}

#[test]
fn loading_a_policy_ends_the_trial_and_a_second_trial_takes_the_place_of_the_first() {
    let (host, heard) = host();
    host.load_as(SlotKind::Scheduler, native("random"), Vec::new(), Stage::Shadow).expect("shadow");
    let first = trial(&host, SlotKind::Scheduler).generation;
    host.load_as(SlotKind::Scheduler, native("netkv"), Vec::new(), ALL).expect("canary");
    let second = trial(&host, SlotKind::Scheduler);
    assert_eq!((second.name.as_str(), second.stage), ("netkv", ALL));
    assert!(second.generation > first);
    assert_eq!(heard.lock()[1].before.as_ref().map(|id| id.name.as_str()), Some("random"));
    host.load(SlotKind::Scheduler, native("round-robin"), Vec::new()).expect("load");
    assert_eq!(host.status(SlotKind::Scheduler).trial, None);
    let actions: Vec<_> = heard.lock().iter().skip(2).map(|change| change.action).collect();
    assert_eq!(actions, [Action::TrialEnded, Action::Loaded]);
    // One that is refused leaves the trial as it is.
    host.load_as(SlotKind::Scheduler, native("random"), Vec::new(), Stage::Shadow).expect("shadow");
    let refused = host.load_as(SlotKind::Scheduler, native("no-such"), Vec::new(), Stage::Shadow);
    assert!(refused.is_err());
    assert_eq!(trial(&host, SlotKind::Scheduler).name, "random");
}

/// The database of a host that is gone: what its builder still had under way may hold it a little longer.
fn database(folder: &Path) -> kvasir_state_db::Db {
    loop {
        match kvasir_state_db::open(folder, 1 << 20) {
            Ok(opened) => return opened.db,
            Err(_) => std::thread::yield_now(), // the test runner's time limit ends this
        }
    }
}

#[test]
fn a_trial_survives_a_restart_or_says_why_not() {
    let folder = tempfile::tempdir().expect("folder");
    let open = || host_with(&config(), Some((database(folder.path()), folder.path())));
    let (host, _) = open();
    let (source, settings) = bad(SlotKind::Scheduler, "none");
    let tenant = Stage::Canary(Share::Tenant(3));
    host.load_as(SlotKind::Scheduler, source, settings.clone(), tenant).expect("canary");
    host.load_as(SlotKind::Balancer, native("static"), Vec::new(), Stage::Shadow).expect("shadow");
    host.pause(SlotKind::Balancer).expect("paused");
    drop(host);
    let (host, _) = open();
    let status = trial(&host, SlotKind::Scheduler);
    assert_eq!((status.name.as_str(), status.stage, status.settings), ("bad", tenant, settings));
    let mut deciding = Deciding::new(&host);
    let subject = Subject { tenant: 3, ..Subject::default() };
    let seat = |deciding: &mut Deciding| {
        deciding.worker.catch_up(&deciding.fleet, &subject);
        deciding.worker.decide(&question(1_000, 1, f32::INFINITY, &[0; 4])).seat
    };
    while seat(&mut deciding) != Seat::Trial {} // its instance is being built
    assert_eq!(trial(&host, SlotKind::Balancer).stage, Stage::Shadow);
    assert!(host.status(SlotKind::Balancer).paused);
    host.rollback(SlotKind::Scheduler).expect("ended");
    drop((host, deciding));

    // A trial of which the component is gone.
    let db = database(folder.path());
    let catalog = catalog::Catalog::open(db.clone(), folder.path()).expect("catalog");
    let mut stored = catalog.stored(SlotKind::Balancer).expect("read").expect("stored");
    let origin = Origin::Module { name: "gone".into(), digest: "00".into(), signatures: Vec::new() };
    let assignment = Assignment { origin, settings: Vec::new() };
    stored.trial = Some(catalog::StoredTrial { assignment, stage: Stage::Shadow });
    catalog.assign(SlotKind::Balancer, &stored, &[]).expect("written");
    drop((catalog, db));
    let (host, heard) = open();
    assert_eq!(host.status(SlotKind::Balancer).trial, None);
    let change = heard.lock().first().cloned().expect("told to a listener who comes later");
    assert_eq!((change.slot, change.cause), (SlotKind::Balancer, Cause::Restart));
    assert!(change.reason.expect("why").contains("trial of `gone` ended, for it could not be restored"));
    drop(host);
    assert!(open().1.lock().is_empty(), "it is told once");
}

#[test]
fn what_decides_for_all_has_no_canary() {
    let (host, _) = host();
    for (slot, policy, why) in [
        (SlotKind::Evictor, "fifo", "one evictor chooses for the whole pool"),
        (SlotKind::Balancer, "static", "one balancer sets the thresholds of the whole cluster"),
    ] {
        let refused = host.load_as(slot, native(policy), Vec::new(), ALL).expect_err("canary").to_string();
        let expected = format!("no canary in {slot}: {why}; load it with --shadow, then promote it");
        assert_eq!(refused, expected);
    }
    let none = Stage::Canary(Share::PerMille(0));
    let refused = host.load_as(SlotKind::Admitter, native("slo"), Vec::new(), none).expect_err("share");
    assert!(refused.to_string().contains("takes 0.1% to 100% of the sessions"), "{refused}");
}

#[test]
fn an_admitter_is_tried_on_requests() {
    let (host, _) = host();
    let mut worker = host.admitter_worker();
    worker.update_load(Load::default());
    let late = Forecast { ttft: 2.0, ..Forecast::default() };
    let words = Request { ttft_slo: 1.0, tbt_slo: 1.0, ..Request::default() }.encode();
    let slack = vec![("slack".to_owned(), "3".to_owned())];
    host.load_as(SlotKind::Admitter, native("slo"), slack.clone(), Stage::Shadow).expect("shadow");
    host.judge(0);
    for forecast in [late, late, Forecast::default()] {
        worker.choose(&Subject::default());
        let verdict = worker.admit_request(&words, &forecast);
        assert_eq!(verdict == Verdict::Accept, forecast == Forecast::default());
    }
    assert_eq!(compared(&host, SlotKind::Admitter, 3), Agreement { asked: 3, same: 1 });
    host.judge(SECOND);
    let Beside { newcomer, compared } = trial(&host, SlotKind::Admitter).window;
    assert_eq!(
        (newcomer.rejected_share, compared.and_then(|c| c.rejected_share)),
        (Some(0.0), Some(2.0 / 3.0))
    );
    host.load_as(SlotKind::Admitter, native("slo"), slack, Stage::Canary(Share::Tenant(7))).expect("canary");
    for (tenant, accepted) in [(7, true), (0, false)] {
        worker.choose(&Subject { tenant, ..Subject::default() });
        assert_eq!(worker.admit_request(&words, &late) == Verdict::Accept, accepted);
    }
}

#[test]
fn a_balancer_in_shadow_ticks_too() {
    let (host, _) = host();
    let mut worker = host.balancer_worker();
    host.load_as(SlotKind::Balancer, native("static"), Vec::new(), Stage::Shadow).expect("shadow");
    let thresholds = worker.tick(&Snapshot::default());
    assert_eq!(compared(&host, SlotKind::Balancer, 1), Agreement { asked: 1, same: 1 });
    let other = vec![("kvcache-balancing-threshold".to_owned(), "3.5".to_owned())];
    host.load_as(SlotKind::Balancer, native("static"), other, Stage::Shadow).expect("shadow");
    assert_eq!(worker.tick(&Snapshot::default()), thresholds, "a shadow sets none");
    assert_eq!(compared(&host, SlotKind::Balancer, 1), Agreement { asked: 1, same: 0 });
}

/// A working set that is used again and again, and a scan of blocks that are used once.
fn events(turn: u64) -> Vec<u32> {
    let event = |kind, identity: u64, at: u64| Event {
        kind,
        replayed: false,
        class: 0,
        slot: identity as u32,
        parent_or_uses: if kind == EventKind::Insert { NO_SLOT } else { 1 },
        depth: 0,
        size_bytes: 1 << 20,
        time_ms: 1_000 * turn + at,
        identity,
        tenant: 0,
    };
    let hot = if turn == 0 { EventKind::Insert } else { EventKind::Hit };
    let mut words = Vec::new();
    for at in 0..50 {
        event(hot, at, at).encode(0, &mut words);
        event(EventKind::Insert, 100 + (50 * turn + at) % 3_000, at).encode(0, &mut words);
    }
    words
}

#[test]
fn an_evictor_in_shadow_runs_a_ghost_and_one_that_hits_less_goes() {
    let (host, _) = host();
    let mut worker = host.evictor_worker(4_000);
    let dram = TierRow {
        tier: 2,
        capacity_mib: 150.0,
        used_mib: 0.0,
        load_fixed_ms: 0.0,
        load_ms_per_mib: 0.0,
        takes_copies: false,
    };
    worker.update_tiers(&[dram]).expect("told");
    // Without regard to uses, the working set goes with the scan.
    host.load_as(SlotKind::Evictor, native("fifo"), Vec::new(), Stage::Shadow).expect("shadow");
    host.judge(0);
    for turn in 0..40 {
        worker.on_events(0, &events(turn)).expect("told");
    }
    // However clear it is, a second of requests is unlike a minute.
    host.judge(1);
    assert!(host.status(SlotKind::Evictor).trial.is_some());
    let blocks = |host: &PolicyHost| {
        host.judge(60_000);
        let window = host.status(SlotKind::Evictor).trial.map(|trial| trial.window);
        window.map(|window| (window.newcomer, window.compared.expect("the active one")))
    };
    // Until both ghosts have seen all, or the guard has seen enough.
    let mut last = None;
    while let Some((newcomer, active)) = blocks(&host) {
        last = Some((newcomer, active));
        std::thread::yield_now();
    }
    let status = host.status(SlotKind::Evictor);
    assert_eq!((status.name.as_str(), status.generation), ("lru", 1), "what serves is as it was: {last:?}");
    let why = status.last_trip.expect("why");
    assert!(why.starts_with("trial of `fifo` ended: guard `hit-rate`"), "{why}");
}

#[test]
fn settings_change_and_one_that_is_unknown_is_named() {
    let (host, heard) = host();
    let (source, settings) = bad(SlotKind::Scheduler, "none");
    let loaded = host.load(SlotKind::Scheduler, source, settings).expect("load");
    let set = |name: &str, value: &str| {
        host.configure(SlotKind::Scheduler, vec![(name.to_owned(), value.to_owned())])
    };
    let refused = set("moed", "none").expect_err("misspelt").to_string();
    let expected = "policy `bad` refused its settings: unknown setting `moed` (did you mean `mode`?); its settings: mode, after";
    assert_eq!(refused, expected);
    let refused = set("mode", "nonsense").expect_err("its own check").to_string();
    assert!(refused.contains("refused its settings: setting `mode`: `nonsense` is none of"), "{refused}");
    let changed = set("after", "5").expect("changed");
    assert_eq!((changed.digest, changed.settings), (loaded.digest, vec![("after".into(), "5".into())]));
    assert!(changed.generation > loaded.generation);
    assert_eq!(heard.lock().len(), 2, "a refusal is no change");
}
