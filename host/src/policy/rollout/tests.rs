mod hosts;

use super::*;
use crate::policy::catalog::Origin;
use proptest::prelude::*;

const SECOND: u64 = 1_000;
const PAUSE: u64 = 10 * SECOND;

fn rollout() -> Rollout {
    let origin = Origin::Builtin { name: "netkv".into() };
    Rollout::new(1, Assignment { origin, settings: Vec::new() }, "ann".into(), PAUSE, 0)
}

/// A host as it behaves: serves what it is told, is on watch for a while, then passes or goes back.
struct Host {
    name: String,
    /// Since when it serves the target.
    since: Option<u64>,
    watch: u64,
    /// Goes back when it served it so long.
    bad_after: Option<u64>,
    away: bool,
    failed: bool,
}

fn host(name: &str) -> Host {
    Host { name: name.into(), since: None, watch: 5 * SECOND, bad_after: None, away: false, failed: false }
}

impl Host {
    fn poll(&mut self, rollout: &mut Rollout, now: u64) {
        if self.away {
            return;
        }
        if let (Some(since), Some(bad)) = (self.since, self.bad_after)
            && now >= since + bad
        {
            (self.since, self.failed) = (None, true);
        }
        let said = match self.since {
            _ if self.failed => Said::Failed("guard: p99".into()),
            Some(since) if now < since + self.watch => Said::Watched,
            Some(_) => Said::Settled,
            None => Said::Other,
        };
        match rollout.hear(&self.name, Some(said), now).unwrap() {
            Order::Serve => self.since = self.since.or(Some(now)),
            Order::Return => self.since = None,
            Order::Keep => {}
        }
    }
}

/// Polls all every second from when the first may be told, and gives how many served the target at the end of each second.
fn run(rollout: &mut Rollout, hosts: &mut [Host], seconds: std::ops::Range<u64>) -> Vec<usize> {
    let mut serving = Vec::new();
    for second in seconds {
        for host in &mut *hosts {
            host.poll(rollout, GATHER_MS + second * SECOND);
        }
        serving.push(hosts.iter().filter(|host| host.since.is_some()).count());
    }
    serving
}

fn steps(rollout: &Rollout) -> Vec<Step> {
    rollout.hosts().map(|(_, step, _)| step.clone()).collect()
}

#[test]
fn goes_host_by_host_with_a_pause() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b"), host("c")]);
    let serving = run(&mut rollout, &mut hosts, 0..60);
    assert!(serving.is_sorted() && rollout.is_done());
    let since: Vec<_> = hosts.iter().map(|host| (host.since.unwrap() - GATHER_MS) / SECOND).collect();
    // `a` is told at once, watched for 5 s; then the pause of 10 s.
    assert_eq!(since, [0, 15, 30]);
}

#[test]
fn the_first_name_is_told_first_though_it_asks_last() {
    let (mut rollout, mut hosts) = (rollout(), [host("c"), host("b"), host("a")]);
    for now in (0..GATHER_MS).step_by(SECOND as usize) {
        hosts.iter_mut().for_each(|host| host.poll(&mut rollout, now));
    }
    assert!(hosts.iter().all(|host| host.since.is_none()));
    run(&mut rollout, &mut hosts, 0..60);
    let since: Vec<_> = hosts.iter().map(|host| (host.since.unwrap() - GATHER_MS) / SECOND).collect();
    assert_eq!(since, [30, 15, 0]);
}

#[test]
fn one_that_goes_back_takes_all_back() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b"), host("c")]);
    hosts[1].bad_after = Some(2 * SECOND);
    run(&mut rollout, &mut hosts, 0..60);
    assert!(hosts.iter().all(|host| host.since.is_none()));
    assert_eq!(rollout.phase, Phase::Stopped { reason: "b: guard: p99".into() });
    let failed = Step::Failed { reason: "guard: p99".into() };
    assert_eq!(steps(&rollout), [Step::Back, failed, Step::Waiting]);
    assert!(!rollout.resume() && !rollout.pause());
}

#[test]
fn one_that_was_told_and_is_silent_stops_it() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b")]);
    run(&mut rollout, &mut hosts, 0..2);
    hosts[0].away = true;
    let serving = run(&mut rollout, &mut hosts, 2..70);
    assert_eq!(serving.last(), Some(&1), "only the one that is away");
    assert!(
        matches!(&rollout.phase, Phase::Stopped { reason } if reason.starts_with("a: not heard of for 61 s"))
    );
    // It goes back when it is there again.
    hosts[0].away = false;
    run(&mut rollout, &mut hosts, 70..73);
    assert_eq!((hosts[0].since, &steps(&rollout)[0]), (None, &Step::Back));
}

#[test]
fn one_that_is_away_before_its_turn_is_passed_over_and_gets_it_later() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b"), host("c")]);
    run(&mut rollout, &mut hosts, 0..2);
    hosts[1].away = true;
    run(&mut rollout, &mut hosts, 2..100);
    assert_eq!(steps(&rollout), [Step::Settled, Step::Waiting, Step::Settled]);
    hosts[1].away = false;
    run(&mut rollout, &mut hosts, 100..110);
    assert!(rollout.is_done());
    // And so does one that comes anew.
    let mut late = [host("d")];
    run(&mut rollout, &mut late, 110..150);
    assert!(rollout.is_done() && late[0].since.is_some());
}

#[test]
fn pauses_and_goes_on() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b")]);
    run(&mut rollout, &mut hosts, 0..3);
    assert!(rollout.pause());
    assert_eq!(run(&mut rollout, &mut hosts, 3..100).last(), Some(&1));
    assert!(rollout.resume());
    run(&mut rollout, &mut hosts, 100..110);
    assert!(rollout.is_done());
}

#[test]
fn what_is_changed_by_hand_on_a_host_stops_it() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b")]);
    run(&mut rollout, &mut hosts, 0..3);
    hosts[0].since = None;
    run(&mut rollout, &mut hosts, 3..5);
    assert!(
        matches!(&rollout.phase, Phase::Stopped { reason } if reason == "a: it serves another policy now")
    );
}

#[test]
fn is_the_same_after_a_restart() {
    let (mut rollout, mut hosts) = (rollout(), [host("a"), host("b")]);
    run(&mut rollout, &mut hosts, 0..3);
    let text = serde_json::to_string(&rollout).unwrap();
    let mut again: Rollout = serde_json::from_str(&text).unwrap();
    assert_eq!(again, rollout);
    run(&mut again, &mut hosts, 3..60);
    assert!(again.is_done());
}

#[test]
fn hosts_have_a_limit() {
    let mut rollout = rollout();
    for i in 0..HOSTS_MAX {
        rollout.hear(&format!("host-{i:05}"), None, 0).unwrap();
    }
    assert_eq!(rollout.hear("one-more", None, 0), Err(TooManyHosts));
    assert!(rollout.hear("host-00001", None, 0).is_ok());
}

proptest! {
    /// Whatever fails, is lost or is slow: never two hosts at once before the first has passed, and once it stopped no host is
    /// told any more, and all that can be reached go back.
    #[test]
    fn at_most_one_host_is_unsure_and_stopping_is_for_good(
        kinds in prop::collection::vec((0u64..20, prop::option::weighted(0.2, 0u64..20), any::<bool>()), 1..8),
        away in prop::collection::vec((0usize..8, 0u64..200), 0..12),
    ) {
        let mut rollout = rollout();
        let mut hosts: Vec<_> = kinds.iter().enumerate().map(|(i, &(watch, bad, reverse))| {
            let name = format!("{}{i}", if reverse { "a" } else { "b" });
            Host { watch: watch * SECOND, bad_after: bad.map(|s| s * SECOND), ..host(&name) }
        }).collect();
        let mut served_when_stopped = None;
        for second in 0..400u64 {
            for &(index, at) in &away {
                if let Some(host) = hosts.get_mut(index) {
                    host.away = (at..at + 30).contains(&second);
                }
            }
            let before = hosts.iter().filter(|host| host.since.is_some()).count();
            run(&mut rollout, &mut hosts, second..second + 1);
            let unsure = rollout.hosts().filter(|(_, step, _)| matches!(step, Step::Told | Step::Watched)).count();
            prop_assert!(unsure <= 1, "{unsure} at once");
            let serving = hosts.iter().filter(|host| host.since.is_some()).count();
            if matches!(rollout.phase, Phase::Stopped { .. }) {
                let limit = served_when_stopped.get_or_insert(before);
                prop_assert!(serving <= *limit);
                *limit = serving;
            }
        }
        match rollout.phase {
            Phase::Stopped { .. } => prop_assert!(hosts.iter().all(|host| host.since.is_none())),
            _ => prop_assert!(rollout.is_done()),
        }
    }
}
