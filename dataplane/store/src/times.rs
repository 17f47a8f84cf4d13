//! How long things take, counted in buckets, cheap enough for the path of a get.

use kvasir_os::time::{Duration, Instant};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of buckets. All but the last end at a power of two of nanoseconds, from 1.024 µs to 17.2 s: fine enough to tell a
/// get from the pool from one that went to a disk or a peer, and found from a number by counting its leading zeros.
pub const BUCKETS: usize = 26;

/// The power of two at which the first bucket ends.
const FIRST_POWER: u32 = 10;

/// Counts durations. Threads share it without a lock: one addition to a bucket and one to the sum.
#[derive(Debug, Default)]
pub struct Times {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// What [`Times`] counted, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimesTaken {
    /// Bucket `i` counts what took at most [`TimesTaken::bound_ns`] of `i` and is in no earlier bucket; the last counts
    /// everything longer.
    pub buckets: [u64; BUCKETS],
    pub sum_ns: u64,
}

impl Times {
    pub fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(ns)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
    }

    /// Runs `work` and records how long it took.
    pub fn measure<R>(&self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.record(start.elapsed());
        result
    }

    pub fn taken(&self) -> TimesTaken {
        TimesTaken {
            buckets: std::array::from_fn(|i| self.buckets[i].load(Relaxed)),
            sum_ns: self.sum_ns.load(Relaxed),
        }
    }
}

impl TimesTaken {
    /// The longest duration that bucket `i` counts. `None` for the last, which has no bound.
    pub fn bound_ns(i: usize) -> Option<u64> {
        (i + 1 < BUCKETS).then(|| 1 << (FIRST_POWER as usize + i))
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// 0 if nothing was counted.
    pub fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count().max(1) as f64
    }

    /// Both together.
    pub fn plus(mut self, other: &Self) -> Self {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(mine, theirs)| *mine += theirs);
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        self
    }
}

fn bucket_of(ns: u64) -> usize {
    let power = u64::BITS - ns.saturating_sub(1).leading_zeros();
    (power.saturating_sub(FIRST_POWER) as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_in_the_first_bucket_that_holds_it() {
        let edges =
            [0, 1, 1023, 1024, 1025, 2048, 2049, 1 << 20, (1 << 20) + 1, 1 << 34, (1 << 34) + 1, u64::MAX];
        for ns in edges {
            let holds = |&i: &usize| TimesTaken::bound_ns(i).is_none_or(|bound| ns <= bound);
            assert_eq!(Some(bucket_of(ns)), (0..BUCKETS).find(holds), "{ns} ns");
        }
    }

    #[test]
    fn counts_sums_and_means() {
        let times = Times::default();
        assert_eq!((times.taken().count(), times.taken().mean_ns()), (0, 0.0));
        [1_000, 3_000].into_iter().for_each(|ns| times.record(Duration::from_nanos(ns)));
        let taken = times.taken();
        assert_eq!((taken.count(), taken.sum_ns, taken.mean_ns()), (2, 4_000, 2_000.0));
        let both = taken.plus(&taken);
        assert_eq!((both.count(), both.buckets[0], both.buckets[2]), (4, 2, 2));
        assert_eq!(times.measure(|| 7), 7);
        assert_eq!(times.taken().count(), 3);
    }
}
