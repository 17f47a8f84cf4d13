//! A keeper and hosts that follow it, all real but for the way between them.

use super::super::follower::{Follower, Own};
use super::super::keeper::{Error, Keeper, Step as Change};
use super::*;
use crate::policy::{GuardConfig, PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
use std::sync::Arc;
use std::time::Duration;

const SLOT: SlotKind = SlotKind::Evictor;

struct Member {
    policies: Arc<PolicyHost>,
    follower: Follower,
    /// Refuses what it is told.
    refuses: bool,
}

impl Member {
    fn new(name: &str) -> Self {
        Self::watching(name, Duration::ZERO)
    }

    /// What came into service is watched for so long, on the clock of [`PolicyHost::judge`].
    fn watching(name: &str, watch: Duration) -> Self {
        let guard = GuardConfig { watch, every: Duration::ZERO, ..GuardConfig::default() };
        let config = PolicyConfig { guard, ..PolicyConfig::default() };
        let policies = PolicyHost::open(&config, Wanted::default(), None).unwrap();
        Self { policies, follower: Follower::new(name.into()), refuses: false }
    }

    fn round(&mut self, keeper: &Keeper, now_ms: u64) {
        let (policies, refuses) = (&self.policies, self.refuses);
        let load = |request: &[u8]| {
            let name = String::from_utf8(request.into()).unwrap();
            let loaded = policies.load(SLOT, Source::Native(name), Vec::new());
            if refuses { Err("no memory".to_owned()) } else { loaded.map(drop).map_err(|e| e.to_string()) }
        };
        self.follower.round(policies, &mut Own { keeper, now_ms }, load).unwrap();
    }

    fn serves(&self) -> String {
        self.policies.status(SLOT).name
    }
}

fn keeper() -> (tempfile::TempDir, Keeper) {
    let folder = tempfile::tempdir().unwrap();
    let keeper = Keeper::open(&kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, 0).unwrap();
    (folder, keeper)
}

fn start(keeper: &Keeper, policies: &PolicyHost, name: &str) -> Rollout {
    let target = policies.resolve(SLOT, Source::Native(name.into()), Vec::new()).unwrap();
    keeper.start(SLOT, target, name.as_bytes(), "ann".into(), PAUSE, 0).unwrap()
}

/// Rounds of all, a second apart, from when the first may be told; what each serves at the end.
fn rounds(members: &mut [Member], keeper: &Keeper, seconds: std::ops::Range<u64>) -> Vec<String> {
    for second in seconds {
        for member in &mut *members {
            member.round(keeper, GATHER_MS + second * SECOND);
        }
    }
    members.iter().map(Member::serves).collect()
}

#[test]
fn hosts_serve_what_is_wanted_one_after_the_other() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    assert_eq!(rounds(&mut members, &keeper, 0..2), ["workload-aware"; 2], "nothing is wanted");
    start(&keeper, &members[0].policies, "fifo");
    assert_eq!(rounds(&mut members, &keeper, 2..5), ["fifo", "workload-aware"]);
    assert_eq!(rounds(&mut members, &keeper, 5..20), ["fifo", "fifo"]);
    assert!(keeper.list()[0].1.is_done());
    assert_eq!(start(&keeper, &members[0].policies, "lru").id, 2);
    assert_eq!(rounds(&mut members, &keeper, 20..60), ["lru", "lru"]);
}

#[test]
fn the_next_one_is_told_when_the_guards_have_let_the_last_one_pass() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(|name| Member::watching(name, Duration::from_secs(60)));
    start(&keeper, &members[0].policies, "fifo");
    // Before the guards have looked at all, and while they watch.
    assert_eq!(rounds(&mut members, &keeper, 0..20), ["fifo", "workload-aware"]);
    members[0].policies.judge(20 * SECOND);
    assert_eq!(rounds(&mut members, &keeper, 20..50), ["fifo", "workload-aware"]);
    members[0].policies.judge(81 * SECOND);
    assert_eq!(rounds(&mut members, &keeper, 81..95), ["fifo", "fifo"]);
}

#[test]
fn one_that_refuses_takes_the_others_back() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    members[1].refuses = true;
    start(&keeper, &members[0].policies, "fifo");
    rounds(&mut members, &keeper, 0..5);
    assert_eq!(members[0].serves(), "fifo");
    rounds(&mut members, &keeper, 5..30);
    assert_eq!(members[0].serves(), "workload-aware");
    assert_eq!(keeper.list()[0].1.phase, Phase::Stopped { reason: "b: no memory".into() });
    let error = keeper.change(SLOT, Change::Resume, "bob").unwrap_err();
    assert!(matches!(&error, Error::Stopped { reason, .. } if reason == "b: no memory"), "{error}");
}

#[test]
fn what_somebody_loads_on_one_host_stops_it() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    start(&keeper, &members[0].policies, "fifo");
    rounds(&mut members, &keeper, 0..3);
    members[0].policies.load(SLOT, Source::Native("sieve".into()), Vec::new()).unwrap();
    assert_eq!(rounds(&mut members, &keeper, 3..30), ["sieve", "workload-aware"]);
    assert_eq!(
        keeper.list()[0].1.phase,
        Phase::Stopped { reason: "a: `sieve` was brought into service there by hand".into() }
    );
}

#[test]
fn pauses_goes_on_and_is_stopped_by_a_person() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    assert!(matches!(keeper.change(SLOT, Change::Pause, "bob"), Err(Error::None(SLOT))));
    start(&keeper, &members[0].policies, "fifo");
    rounds(&mut members, &keeper, 0..3);
    keeper.change(SLOT, Change::Pause, "bob").unwrap();
    assert_eq!(rounds(&mut members, &keeper, 3..30), ["fifo", "workload-aware"]);
    keeper.change(SLOT, Change::Resume, "bob").unwrap();
    assert_eq!(rounds(&mut members, &keeper, 30..33), ["fifo", "fifo"]);
    keeper.change(SLOT, Change::Stop, "bob").unwrap();
    assert_eq!(rounds(&mut members, &keeper, 33..36), ["workload-aware"; 2]);
    assert!(keeper.list()[0].1.hosts().all(|(_, step, _)| *step == Step::Back));
}

#[test]
fn a_host_whose_slot_is_paused_says_so_and_is_waited_for() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    let steps = || -> Vec<Step> { keeper.list()[0].1.hosts().map(|(_, step, _)| step.clone()).collect() };
    members[0].policies.pause(SLOT).unwrap();
    start(&keeper, &members[0].policies, "fifo");
    assert_eq!(rounds(&mut members, &keeper, 0..30), ["workload-aware"; 2]);
    assert_eq!(steps(), [Step::Paused, Step::Waiting]);
    members[0].policies.resume(SLOT).unwrap();
    assert_eq!(rounds(&mut members, &keeper, 30..50), ["fifo"; 2]);
    // One that never had it waits no more for anything when it is over.
    members[1].policies.pause(SLOT).unwrap();
    start(&keeper, &members[0].policies, "lru");
    assert_eq!(rounds(&mut members, &keeper, 50..70), ["lru", "fifo"]);
    assert_eq!(steps(), [Step::Settled, Step::Paused]);
    keeper.change(SLOT, Change::Stop, "bob").unwrap();
    assert_eq!(rounds(&mut members, &keeper, 70..73), ["fifo"; 2]);
    assert_eq!(steps(), [Step::Back, Step::Waiting]);
}

#[test]
fn goes_on_after_the_keeper_and_a_host_were_started_again() {
    let (folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    start(&keeper, &members[0].policies, "fifo");
    rounds(&mut members, &keeper, 0..3);
    drop(keeper);
    let long_after = 10 * SILENT_MS;
    let keeper =
        Keeper::open(&kvasir_state_db::open(folder.path(), 1 << 20).unwrap().db, long_after).unwrap();
    // A host's own memory of it is gone, and what serves there was stored.
    members[0].follower = Follower::new("a".into());
    let from = long_after / SECOND;
    assert_eq!(rounds(&mut members, &keeper, from..from + 30), ["fifo", "fifo"]);
    assert!(keeper.list()[0].1.is_done());
}

#[test]
fn none_is_started_while_the_last_one_is_on_its_way_or_back() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(Member::new);
    let target = |name: &str, host: &Member| {
        host.policies.resolve(SLOT, Source::Native(name.into()), Vec::new()).unwrap()
    };
    let lru = target("lru", &members[0]);
    let start_lru = |second: u64| {
        let now = GATHER_MS + second * SECOND;
        keeper.start(SLOT, lru.clone(), b"lru", "ann".into(), PAUSE, now).map(|rollout| rollout.id)
    };
    start(&keeper, &members[0].policies, "fifo");
    assert_eq!(rounds(&mut members, &keeper, 0..5), ["fifo", "workload-aware"]);
    let error = start_lru(5).unwrap_err();
    assert!(matches!(&error, Error::OnItsWay { id: 1, name, .. } if name == "fifo"), "{error}");
    keeper.change(SLOT, Change::Stop, "bob").unwrap();
    assert!(start_lru(5).is_err(), "`a` has not heard of it");
    assert_eq!(rounds(&mut members, &keeper, 5..8), ["workload-aware"; 2]);
    assert_eq!(start_lru(8).unwrap(), 2);
}

/// A policy that ends its host has not passed.
#[test]
fn a_host_that_was_started_again_while_it_was_watched_is_watched_once_more() {
    let (_folder, keeper) = keeper();
    let mut members = ["a", "b"].map(|name| Member::watching(name, Duration::from_secs(3_600)));
    start(&keeper, &members[0].policies, "fifo");
    assert_eq!(rounds(&mut members, &keeper, 0..5), ["fifo", "workload-aware"]);
    // What served is stored; the guards know nothing of it.
    members[0] = Member::watching("a", Duration::from_secs(3_600));
    members[0].policies.load(SLOT, Source::Native("fifo".into()), Vec::new()).unwrap();
    members[0].policies.judge(0);
    members[0].policies.judge(4_000 * SECOND);
    assert!(!members[0].policies.status(SLOT).watched);
    assert_eq!(rounds(&mut members, &keeper, 5..50), ["fifo", "workload-aware"]);
    assert_eq!(keeper.list()[0].1.hosts().next().unwrap().1, &Step::Watched);
}

#[test]
fn a_rollout_that_was_replaced_is_not_fetched() {
    let (_folder, keeper) = keeper();
    let member = Member::new("a");
    start(&keeper, &member.policies, "fifo");
    start(&keeper, &member.policies, "lru");
    assert!(matches!(keeper.request(SLOT, 1), Err(Error::Gone { id: 1, now: 2, .. })));
    assert_eq!(keeper.request(SLOT, 2).unwrap(), b"lru");
    assert!(matches!(keeper.request(SlotKind::Admitter, 1), Err(Error::None(_))));
}
