//! Guards: when a newcomer is worse than what it is compared with, over a window.
//!
//! Nothing in here reads a clock: `now_ms` is an argument, on any clock that does not go back, so the guards judge in
//! virtual time as they do on a host.

#[cfg(test)]
mod tests;

use super::CounterValues;
use super::counters::DecidedValues;
use kvasir_dataplane::times::TimesTaken;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// When a policy is taken out of service by itself. A limit of 0 is off.
#[derive(Clone, Debug, PartialEq)]
pub struct GuardConfig {
    /// How far back the numbers that are judged reach.
    pub window: Duration,
    /// Calls within the window before shares and times of calls are judged; the same number of requests before
    /// the share of rejected ones is, and of blocks before the hit rate is.
    pub calls_min: u64,
    /// The largest share of calls that trap, miss their deadline, or are answered outside the contract, each for itself.
    pub faults_share_max: f64,
    /// The longest time of a call that one in a hundred may exceed.
    pub call_p99_max: Duration,
    /// By how much the hit rate (blocks found stored, of those asked for) may be below that of the policy compared with.
    pub hit_rate_fall_max: f64,
    /// By how much the share of rejected requests may be above that of the policy compared with.
    pub rejected_rise_max: f64,
    /// For how long a policy that came into service is watched, and the one before it put back if a guard is broken.
    pub watch: Duration,
    /// How often the guards look. Zero: when [`PolicyHost::judge`](super::PolicyHost::judge) is called, and only then.
    pub every: Duration,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(60),
            calls_min: 200,
            faults_share_max: 0.01,
            call_p99_max: Duration::ZERO,
            hit_rate_fall_max: 0.05,
            rejected_rise_max: 0.05,
            watch: Duration::from_secs(600),
            every: Duration::from_secs(1),
        }
    }
}

/// What can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guard {
    Traps,
    DeadlineMisses,
    InvalidAnswers,
    CallP99,
    HitRate,
    Rejected,
}

impl Guard {
    pub const ALL: [Self; 6] = [
        Self::Traps,
        Self::DeadlineMisses,
        Self::InvalidAnswers,
        Self::CallP99,
        Self::HitRate,
        Self::Rejected,
    ];

    /// Whether it holds a policy against another one, so that other requests may break it.
    pub fn compares(self) -> bool {
        matches!(self, Self::HitRate | Self::Rejected)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Traps => "traps",
            Self::DeadlineMisses => "deadline-misses",
            Self::InvalidAnswers => "invalid-answers",
            Self::CallP99 => "call-p99",
            Self::HitRate => "hit-rate",
            Self::Rejected => "rejected",
        }
    }
}

/// A guard that was broken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Breach {
    pub guard: Guard,
    /// A share, or seconds of [`Guard::CallP99`].
    pub value: f64,
    pub limit: f64,
    /// The same of the policy compared with, where the guard compares.
    pub compared: Option<f64>,
    /// Calls, requests or blocks within the window.
    pub of: u64,
    /// How far back the numbers reach.
    pub window: Duration,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { guard, value, limit, compared, of, window } = *self;
        let (name, percent) = (guard.as_str(), |share: f64| format!("{:.1}%", 100.0 * share));
        write!(f, "guard `{name}`: ")?;
        match guard {
            Guard::Traps | Guard::DeadlineMisses | Guard::InvalidAnswers => {
                write!(f, "{} of {of} calls, where {} is allowed", percent(value), percent(limit))
            }
            Guard::CallP99 => write!(
                f,
                "p99 of a call is {:?}, where {:?} is allowed",
                Duration::from_secs_f64(value),
                Duration::from_secs_f64(limit)
            ),
            Guard::HitRate | Guard::Rejected => {
                let (what, way) = match guard {
                    Guard::HitRate => ("blocks hit", "below"),
                    _ => ("requests rejected", "above"),
                };
                let before = percent(compared.unwrap_or(0.0));
                let (value, limit) = (percent(value), 100.0 * limit);
                write!(
                    f,
                    "{value} of {of} {what}, where at most {limit:.1} points {way} {before} are allowed"
                )
            }
        }?;
        match window.as_millis() {
            0..1_000 => f.write_str(", within its first second"),
            _ => write!(f, ", over {window:?}"),
        }
    }
}

/// What one policy counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    calls: u64,
    traps: u64,
    deadline_misses: u64,
    invalid_answers: u64,
    times: TimesTaken,
    decided: DecidedValues,
}

impl Sample {
    pub fn of(counters: &CounterValues, decided: DecidedValues) -> Self {
        let &CounterValues { calls, traps, deadline_misses, invalid_answers, times, .. } = counters;
        Self { calls, traps, deadline_misses, invalid_answers, times, decided }
    }

    fn since(mut self, earlier: &Self) -> Self {
        for (count, before) in self.times.buckets.iter_mut().zip(earlier.times.buckets) {
            *count = count.saturating_sub(before);
        }
        self.times.sum_ns = self.times.sum_ns.wrapping_sub(earlier.times.sum_ns);
        let less = u64::saturating_sub;
        Self {
            calls: less(self.calls, earlier.calls),
            traps: less(self.traps, earlier.traps),
            deadline_misses: less(self.deadline_misses, earlier.deadline_misses),
            invalid_answers: less(self.invalid_answers, earlier.invalid_answers),
            decided: self.decided.since(&earlier.decided),
            ..self
        }
    }
}

/// The samples of one policy over the last while.
#[derive(Clone, Debug)]
pub struct Window {
    span_ms: u64,
    /// Oldest first. The first one is as old as the window, or the policy.
    samples: VecDeque<(u64, Sample)>,
}

/// How many samples cover a window; those between are forgotten.
const SAMPLES: u64 = 60;

impl Window {
    /// The window of a policy that has counted nothing at `now_ms`.
    pub fn new(span: Duration, now_ms: u64) -> Self {
        Self::since(span, now_ms, Sample::default())
    }

    /// The window of a policy that had `counted` this at `now_ms`, which is left out.
    pub fn since(span: Duration, now_ms: u64, counted: Sample) -> Self {
        let span_ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX).max(1);
        Self { span_ms, samples: VecDeque::from([(now_ms, counted)]) }
    }

    /// What the policy counted until `now_ms`.
    pub fn push(&mut self, now_ms: u64, sample: Sample) {
        let close = |samples: &VecDeque<(u64, Sample)>| {
            let before = samples.len().checked_sub(2).map(|i| samples[i].0);
            before.is_some_and(|at| now_ms.saturating_sub(at) < self.span_ms / SAMPLES)
        };
        if close(&self.samples) {
            self.samples.pop_back();
        }
        self.samples.push_back((now_ms, sample));
        while self.samples.get(1).is_some_and(|&(at, _)| now_ms.saturating_sub(at) >= self.span_ms) {
            self.samples.pop_front();
        }
    }

    /// What was counted within the window.
    pub fn sum(&self) -> (Sample, Duration) {
        match (self.samples.front(), self.samples.back()) {
            (Some((from, first)), Some((to, last))) => {
                (last.since(first), Duration::from_millis(to.saturating_sub(*from)))
            }
            _ => Default::default(),
        }
    }

    /// Whether it reaches as far back as it may.
    pub fn is_whole(&self) -> bool {
        self.sum().1 >= Duration::from_millis(self.span_ms)
    }

    pub fn values(&self) -> WindowValues {
        let (sum, span) = self.sum();
        WindowValues::of(&sum, span)
    }
}

/// A window in numbers; what was not counted is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct WindowValues {
    /// How far back the numbers reach.
    pub seconds: f64,
    pub calls: u64,
    /// Shares of the calls.
    pub trap_share: Option<f64>,
    pub deadline_miss_share: Option<f64>,
    pub invalid_share: Option<f64>,
    /// No more than one timed call in a hundred took longer; a power of two of nanoseconds.
    pub call_ns_p99: Option<u64>,
    /// Requests decided, and the share of them that was rejected.
    pub requests: u64,
    pub rejected_share: Option<f64>,
    /// Blocks asked for, and the share of them that was found stored.
    pub blocks: u64,
    pub hit_rate: Option<f64>,
    /// Means of what the host forecast for the placements.
    pub ttft_ms: Option<f64>,
    pub tbt_ms: Option<f64>,
    pub cached_tokens: Option<f64>,
}

impl WindowValues {
    fn of(sum: &Sample, span: Duration) -> Self {
        let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
        let Sample { calls, traps, deadline_misses, invalid_answers, times, decided } = *sum;
        let DecidedValues {
            requests,
            rejected,
            blocks,
            hit_blocks,
            forecast,
            ttft_us,
            tbt_us,
            cached_tokens,
        } = decided;
        Self {
            seconds: span.as_secs_f64(),
            calls,
            trap_share: share(traps, calls),
            deadline_miss_share: share(deadline_misses, calls),
            invalid_share: share(invalid_answers, calls),
            call_ns_p99: p99_bound(&times),
            requests,
            rejected_share: share(rejected, requests),
            blocks,
            hit_rate: share(hit_blocks, blocks),
            ttft_ms: share(ttft_us, forecast).map(|us| us / 1e3),
            tbt_ms: share(tbt_us, forecast).map(|us| us / 1e3),
            cached_tokens: share(cached_tokens, forecast),
        }
    }
}

/// The shortest bound of a bucket that no more than one call in a hundred exceeds. What took longer than all buckets counts as
/// long as the last bound.
fn p99_bound(times: &TimesTaken) -> Option<u64> {
    let (count, mut seen) = (times.count(), 0);
    let longest = (0..times.buckets.len()).rev().find(|&i| {
        seen += times.buckets[i];
        seen > count / 100
    })?;
    (0..=longest).rev().find_map(TimesTaken::bound_ns)
}

/// How many of the timed calls certainly took longer than `limit`.
fn longer(times: &TimesTaken, limit: Duration) -> u64 {
    let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    // What is in a bucket took longer than the bound of the one before it.
    let over = |i: usize| i > 0 && TimesTaken::bound_ns(i - 1).is_some_and(|bound| bound >= limit);
    (0..times.buckets.len()).filter(|&i| over(i)).map(|i| times.buckets[i]).sum()
}

/// The first guard that the newcomer breaks. `compared` is what it is held against, if there is anything.
pub fn judge(config: &GuardConfig, newcomer: &Window, compared: Option<&Window>) -> Option<Breach> {
    let alone = judge_alone(config, newcomer);
    alone.or_else(|| compare(config, newcomer, compared?).next())
}

impl GuardConfig {
    fn is_enough(&self, of: u64) -> bool {
        of >= self.calls_min.max(1)
    }
}

/// The guards that need nothing to compare with.
fn judge_alone(config: &GuardConfig, newcomer: &Window) -> Option<Breach> {
    let (now, window) = newcomer.sum();
    let enough = |of| config.is_enough(of);
    let breach = |guard, value, limit, of| Breach { guard, value, limit, compared: None, of, window };
    let faults = [
        (Guard::Traps, now.traps),
        (Guard::DeadlineMisses, now.deadline_misses),
        (Guard::InvalidAnswers, now.invalid_answers),
    ];
    let limit = config.faults_share_max;
    if limit > 0.0 && enough(now.calls) {
        for (guard, count) in faults {
            let share = count as f64 / now.calls as f64;
            if share > limit {
                return Some(breach(guard, share, limit, now.calls));
            }
        }
    }
    let timed = now.times.count();
    if !config.call_p99_max.is_zero()
        && enough(now.calls)
        && 100 * longer(&now.times, config.call_p99_max) > timed
    {
        let p99 = p99_bound(&now.times).unwrap_or(0);
        let seconds = Duration::from_nanos(p99).as_secs_f64();
        return Some(breach(Guard::CallP99, seconds, config.call_p99_max.as_secs_f64(), now.calls));
    }
    None
}

/// Whether both were asked often enough for that guard.
pub fn is_comparable(config: &GuardConfig, guard: Guard, newcomer: &Window, compared: &Window) -> bool {
    let [now, before] = [newcomer, compared].map(|window| window.sum().0.decided);
    let of =
        |decided: &DecidedValues| if guard == Guard::HitRate { decided.blocks } else { decided.requests };
    config.is_enough(of(&now)) && config.is_enough(of(&before))
}

/// The guards that hold the newcomer against `compared` and are broken.
pub fn compare(config: &GuardConfig, newcomer: &Window, compared: &Window) -> impl Iterator<Item = Breach> {
    let [now, before] = [newcomer, compared].map(|window| window.sum().0.decided);
    let breach = |guard, value, limit, was, of| Breach {
        guard,
        value,
        limit,
        compared: Some(was),
        of,
        window: newcomer.sum().1,
    };
    let share = |part: u64, of: u64| part as f64 / of as f64;
    let worse_by = |guard, limit: f64, by: f64| {
        limit > 0.0 && by > limit && is_comparable(config, guard, newcomer, compared)
    };
    let (value, was) = (share(now.hit_blocks, now.blocks), share(before.hit_blocks, before.blocks));
    let limit = config.hit_rate_fall_max;
    let hit_rate = worse_by(Guard::HitRate, limit, was - value)
        .then(|| breach(Guard::HitRate, value, limit, was, now.blocks));
    let (value, was) = (share(now.rejected, now.requests), share(before.rejected, before.requests));
    let limit = config.rejected_rise_max;
    let rejected = worse_by(Guard::Rejected, limit, value - was)
        .then(|| breach(Guard::Rejected, value, limit, was, now.requests));
    hit_rate.into_iter().chain(rejected)
}
