//! What is counted per version, and the breaker that reads it.

use super::Fault;
use crate::fleet::Outlook;
use kvasir_dataplane::times::{Times, TimesTaken};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// One call in this many is timed: reading the clock twice costs as much as a short call.
const TIMED: u64 = 16;

/// Counters of one version, all workers together.
#[derive(Default)]
pub struct Counters {
    calls: AtomicU64,
    /// Times of every sixteenth call.
    times: Times,
    traps: AtomicU64,
    deadline_misses: AtomicU64,
    invalid_answers: AtomicU64,
    fallbacks: AtomicU64,
    /// Of all kinds.
    faults: AtomicU64,
    /// What came of its decisions.
    pub decided: Decided,
}

/// What came of decisions, or would have come of them: counts that only grow.
#[derive(Default)]
pub struct Decided {
    requests: AtomicU64,
    rejected: AtomicU64,
    blocks: AtomicU64,
    hit_blocks: AtomicU64,
    forecast: AtomicU64,
    ttft_us: AtomicU64,
    tbt_us: AtomicU64,
    cached_tokens: AtomicU64,
}

/// [`Decided`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecidedValues {
    pub requests: u64,
    pub rejected: u64,
    /// Blocks asked for, and those of them that were found stored.
    pub blocks: u64,
    pub hit_blocks: u64,
    /// Placements with a forecast; the sums below are over them.
    pub forecast: u64,
    pub ttft_us: u64,
    pub tbt_us: u64,
    pub cached_tokens: u64,
}

impl Decided {
    /// A request that is placed; `hit_blocks` of its `blocks` are stored where it goes.
    pub fn placed(&self, blocks: u64, hit_blocks: u64) {
        self.requests.fetch_add(1, Relaxed);
        self.accesses(blocks, hit_blocks);
    }

    pub fn rejected(&self) {
        self.requests.fetch_add(1, Relaxed);
        self.rejected.fetch_add(1, Relaxed);
    }

    /// A request that is let in.
    pub fn accepted(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    pub fn accesses(&self, blocks: u64, hit_blocks: u64) {
        self.blocks.fetch_add(blocks, Relaxed);
        self.hit_blocks.fetch_add(hit_blocks, Relaxed);
    }

    pub fn forecast(&self, outlook: &Outlook) {
        self.forecast.fetch_add(1, Relaxed);
        self.ttft_us.fetch_add((1e3 * outlook.ttft_ms) as u64, Relaxed);
        self.tbt_us.fetch_add((1e3 * outlook.tbt_ms) as u64, Relaxed);
        self.cached_tokens.fetch_add(outlook.cached_tokens, Relaxed);
    }

    pub fn values(&self) -> DecidedValues {
        let Self { requests, rejected, blocks, hit_blocks, forecast, ttft_us, tbt_us, cached_tokens } = self;
        let read = |count: &AtomicU64| count.load(Relaxed);
        DecidedValues {
            requests: read(requests),
            rejected: read(rejected),
            blocks: read(blocks),
            hit_blocks: read(hit_blocks),
            forecast: read(forecast),
            ttft_us: read(ttft_us),
            tbt_us: read(tbt_us),
            cached_tokens: read(cached_tokens),
        }
    }
}

impl DecidedValues {
    /// What was counted after `earlier`.
    pub fn since(self, earlier: &Self) -> Self {
        let less = u64::saturating_sub;
        Self {
            requests: less(self.requests, earlier.requests),
            rejected: less(self.rejected, earlier.rejected),
            blocks: less(self.blocks, earlier.blocks),
            hit_blocks: less(self.hit_blocks, earlier.hit_blocks),
            forecast: less(self.forecast, earlier.forecast),
            ttft_us: less(self.ttft_us, earlier.ttft_us),
            tbt_us: less(self.tbt_us, earlier.tbt_us),
            cached_tokens: less(self.cached_tokens, earlier.cached_tokens),
        }
    }
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct CounterValues {
    pub calls: u64,
    /// Mean over the timed sample of calls; 0 if none was timed.
    pub ns_mean: f64,
    /// The timed sample itself.
    #[serde(skip)]
    pub times: TimesTaken,
    pub traps: u64,
    pub deadline_misses: u64,
    pub invalid_answers: u64,
    /// Decisions the native policy made instead.
    pub fallbacks: u64,
}

impl Counters {
    /// Counts a call and times every sixteenth.
    pub fn measure<R>(&self, f: impl FnOnce() -> R) -> R {
        if !self.calls.fetch_add(1, Relaxed).is_multiple_of(TIMED) {
            return f();
        }
        self.times.measure(f)
    }

    /// Returns which fault of this version it is, from 1; 0 if it is none of the policy's.
    pub fn fault(&self, fault: &Fault) -> u64 {
        let counter = match fault {
            Fault::Trap(_) => &self.traps,
            Fault::Deadline(_) | Fault::Starved(_) => &self.deadline_misses,
            Fault::Invalid(_) => &self.invalid_answers,
            Fault::NotReady | Fault::Overtaken | Fault::Overruled => return 0,
        };
        counter.fetch_add(1, Relaxed);
        self.faults.fetch_add(1, Relaxed) + 1
    }

    pub fn fallback(&self) {
        self.fallbacks.fetch_add(1, Relaxed);
    }

    pub fn values(&self) -> CounterValues {
        let times = self.times.taken();
        CounterValues {
            calls: self.calls.load(Relaxed),
            ns_mean: times.mean_ns(),
            times,
            traps: self.traps.load(Relaxed),
            deadline_misses: self.deadline_misses.load(Relaxed),
            invalid_answers: self.invalid_answers.load(Relaxed),
            fallbacks: self.fallbacks.load(Relaxed),
        }
    }
}

/// What all versions of one slot counted together since the start; it never goes back.
///
/// A version that was replaced is counted on while a worker still calls it, so there are no more of
/// these than workers.
#[derive(Default)]
pub(super) struct Totals {
    ended: CounterValues,
    leaving: Vec<Arc<Counters>>,
}

impl Totals {
    /// Takes the counts of a version that no worker takes up any more.
    pub(super) fn retire(&mut self, counters: Arc<Counters>) {
        self.leaving.push(counters);
        self.settle();
    }

    /// With those of the version in service, whose mean time it is.
    pub(super) fn with(&mut self, current: &Counters) -> CounterValues {
        self.settle();
        let current = current.values();
        let leaving = self.leaving.iter().map(|counters| counters.values());
        let sum = leaving.fold(self.ended, CounterValues::plus).plus(current);
        CounterValues { ns_mean: current.ns_mean, ..sum }
    }

    /// What nobody else holds counts no more.
    fn settle(&mut self) {
        let ended = &mut self.ended;
        self.leaving.retain_mut(|counters| {
            let gone = Arc::get_mut(counters).is_some();
            if gone {
                *ended = ended.plus(counters.values());
            }
            !gone
        });
    }
}

impl CounterValues {
    /// Counts add up; means do not.
    fn plus(self, other: Self) -> Self {
        Self {
            calls: self.calls + other.calls,
            ns_mean: 0.0,
            times: self.times.plus(&other.times),
            traps: self.traps + other.traps,
            deadline_misses: self.deadline_misses + other.deadline_misses,
            invalid_answers: self.invalid_answers + other.invalid_answers,
            fallbacks: self.fallbacks + other.fallbacks,
        }
    }
}

/// Trips once, on the n-th fault within the window.
pub(super) struct Breaker {
    faults: usize,
    window: Duration,
    recent: Mutex<(VecDeque<Instant>, bool)>,
}

impl Breaker {
    pub(super) fn new(faults: u32, window: Duration) -> Self {
        Self { faults: faults.max(1) as usize, window, recent: Mutex::default() }
    }

    /// Records a fault. Returns how many there were in which time if this one trips the breaker.
    pub(super) fn fault(&self, now: Instant) -> Option<String> {
        let (recent, tripped) = &mut *self.recent.lock();
        while recent.front().is_some_and(|&at| now.duration_since(at) > self.window) {
            recent.pop_front();
        }
        recent.push_back(now);
        if *tripped || recent.len() < self.faults {
            return None;
        }
        *tripped = true;
        let (faults, within) = (recent.len(), self.window.as_secs());
        recent.clear();
        Some(format!("{faults} {} within {within} s", if faults == 1 { "fault" } else { "faults" }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trips_once_on_faults_within_the_window() {
        let breaker = Breaker::new(3, Duration::from_secs(10));
        let start = Instant::now();
        let at = |s| breaker.fault(start + Duration::from_secs(s));
        assert_eq!([0, 6, 12].map(at), [None, None, None]);
        assert_eq!([13, 14].map(at), [Some("3 faults within 10 s".to_owned()), None]);
    }

    #[test]
    fn counts_what_happened() {
        let counters = Counters::default();
        for _ in 0..20 {
            counters.measure(|| ());
        }
        counters.fault(&Fault::Trap("x".into()));
        counters.fault(&Fault::NotReady);
        counters.fallback();
        let values = counters.values();
        assert_eq!((values.calls, values.traps, values.fallbacks), (20, 1, 1));
    }

    #[test]
    fn totals_never_go_back() {
        let (mut totals, first, second) =
            (Totals::default(), Arc::new(Counters::default()), Counters::default());
        let call = |counters: &Counters| counters.measure(|| ());
        call(&first);
        assert_eq!(totals.with(&first).calls, 1);
        let worker = first.clone();
        totals.retire(first);
        call(&worker); // it has not seen the swap yet
        call(&second);
        assert_eq!(totals.with(&second).calls, 3);
        call(&worker);
        drop(worker);
        assert_eq!(totals.with(&second).calls, 4);
        assert!(totals.leaving.is_empty());
        assert_eq!(totals.with(&second).calls, 4);
    }
}
