//! What is counted per version, and the breaker that reads it.

use super::Fault;
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
    /// Of every sixteenth call.
    times: Times,
    traps: AtomicU64,
    deadline_misses: AtomicU64,
    invalid_answers: AtomicU64,
    fallbacks: AtomicU64,
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

    pub fn fault(&self, fault: &Fault) {
        let counter = match fault {
            Fault::Trap(_) => &self.traps,
            Fault::Deadline(_) => &self.deadline_misses,
            Fault::Invalid(_) => &self.invalid_answers,
            Fault::NotReady | Fault::Overtaken => return,
        };
        counter.fetch_add(1, Relaxed);
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

    /// Records a fault; true if this one trips the breaker.
    pub(super) fn fault(&self, now: Instant) -> bool {
        let (recent, tripped) = &mut *self.recent.lock();
        while recent.front().is_some_and(|&at| now.duration_since(at) > self.window) {
            recent.pop_front();
        }
        recent.push_back(now);
        if *tripped || recent.len() < self.faults {
            return false;
        }
        *tripped = true;
        recent.clear();
        true
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
        let trips: Vec<_> = [0, 6, 12, 13, 14].map(at).into();
        assert_eq!(trips, [false, false, false, true, false]);
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
