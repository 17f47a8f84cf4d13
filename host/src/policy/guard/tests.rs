use super::*;

const SECOND: u64 = 1_000;

fn config() -> GuardConfig {
    GuardConfig { calls_min: 100, ..GuardConfig::default() }
}

/// A window in which that was counted, evenly over a minute.
fn window(sample: Sample) -> Window {
    let mut window = Window::new(config().window, 0);
    window.push(30 * SECOND, sample);
    window
}

fn requests(requests: u64, rejected: u64, blocks: u64, hit_blocks: u64) -> Sample {
    let decided = DecidedValues { requests, rejected, blocks, hit_blocks, ..DecidedValues::default() };
    Sample { decided, calls: requests, ..Sample::default() }
}

fn timed(took: Duration, calls: u64) -> TimesTaken {
    let times = kvasir_dataplane::times::Times::default();
    (0..calls).for_each(|_| times.record(took));
    times.taken()
}

#[test]
fn each_guard_is_broken_by_its_own_numbers_alone() {
    let good = requests(1_000, 50, 1_000, 500);
    let slow = timed(Duration::from_millis(3), 10).plus(&timed(Duration::from_micros(3), 90));
    let cases = [
        (None, Sample { traps: 10, ..good }),
        (Some(Guard::Traps), Sample { traps: 11, ..good }),
        (Some(Guard::DeadlineMisses), Sample { deadline_misses: 11, ..good }),
        (Some(Guard::InvalidAnswers), Sample { invalid_answers: 11, ..good }),
        (Some(Guard::CallP99), Sample { times: slow, ..good }),
        (None, requests(1_000, 100, 1_000, 450)),
        (Some(Guard::HitRate), requests(1_000, 100, 1_000, 449)),
        (Some(Guard::Rejected), requests(1_000, 101, 1_000, 450)),
    ];
    let config = GuardConfig { call_p99_max: Duration::from_millis(2), ..config() };
    for (expected, newcomer) in cases {
        let breach = judge(&config, &window(newcomer), Some(&window(good)));
        assert_eq!(breach.map(|breach| breach.guard), expected, "{breach:?}");
    }
}

#[test]
fn too_little_is_not_judged_and_a_limit_of_zero_is_off() {
    let good = requests(1_000, 0, 1_000, 500);
    let few = Sample { traps: 99, ..requests(99, 99, 99, 0) };
    assert_eq!(judge(&config(), &window(few), Some(&window(good))), None);
    let bad = Sample { traps: 1_000, ..requests(1_000, 1_000, 1_000, 0) };
    assert!(judge(&config(), &window(bad), None).is_some());
    let off = GuardConfig {
        faults_share_max: 0.0,
        hit_rate_fall_max: 0.0,
        rejected_rise_max: 0.0,
        call_p99_max: Duration::ZERO,
        ..config()
    };
    assert_eq!(judge(&off, &window(bad), Some(&window(good))), None);
    // What compares needs enough to compare with.
    let worse = requests(1_000, 1_000, 1_000, 0);
    assert_eq!(judge(&config(), &window(worse), Some(&window(requests(99, 0, 99, 99)))), None);
}

#[test]
fn what_is_older_than_the_window_is_forgotten() {
    let mut window = Window::new(Duration::from_secs(60), 0);
    let trapped = |traps, calls| Sample { traps, calls, ..Sample::default() };
    window.push(SECOND, trapped(100, 100));
    assert_eq!(window.values().trap_share, Some(1.0));
    for second in 2..=200 {
        window.push(second * SECOND, trapped(100, 100 + second));
        assert!(window.samples.len() as u64 <= SAMPLES + 3, "{}", window.samples.len());
    }
    let values = window.values();
    assert_eq!((values.calls, values.trap_share, values.seconds), (60, Some(0.0), 60.0));
    // Looked at much more often than needed, it keeps no more.
    for ms in 0..10_000 {
        window.push(200 * SECOND + ms, trapped(100, 300 + ms));
        assert!(window.samples.len() as u64 <= SAMPLES + 3, "{}", window.samples.len());
    }
}

#[test]
fn the_p99_is_the_bound_that_one_in_a_hundred_exceeds() {
    let of = |fast: u64, slow: u64| {
        let times = timed(Duration::from_micros(3), fast).plus(&timed(Duration::from_millis(3), slow));
        p99_bound(&times)
    };
    assert_eq!(of(0, 0), None);
    assert_eq!(of(1, 0), Some(4_096));
    assert_eq!(of(990, 10), Some(4_096), "no more than one in a hundred");
    assert_eq!(of(989, 11), Some(1 << 22));
    assert_eq!(of(9_999, 0), Some(4_096));
    assert_eq!(longer(&timed(Duration::from_millis(3), 5), Duration::from_millis(2)), 5);
    assert_eq!(longer(&timed(Duration::from_millis(3), 5), Duration::from_millis(4)), 0, "perhaps not");
}

#[test]
fn a_breach_says_what_was_broken_by_how_much() {
    let check = |breach: Breach, expected: &str| assert_eq!(breach.to_string(), expected);
    let window = Duration::from_secs(60);
    let breach = Breach { guard: Guard::Traps, value: 0.12, limit: 0.01, compared: None, of: 300, window };
    check(breach, "guard `traps`: 12.0% of 300 calls, where 1.0% is allowed, over 60s");
    let hit = Breach { guard: Guard::HitRate, value: 0.3, limit: 0.05, compared: Some(0.5), ..breach };
    check(
        hit,
        "guard `hit-rate`: 30.0% of 300 blocks hit, where at most 5.0 points below 50.0% are allowed, over 60s",
    );
    let p99 = Breach { guard: Guard::CallP99, value: 0.004, limit: 0.002, ..breach };
    check(p99, "guard `call-p99`: p99 of a call is 4ms, where 2ms is allowed, over 60s");
}
