//! What it costs to bring blocks up from a tier, as measured lately.

use parking_lot::Mutex;
use std::time::Duration;

/// The factor by which a load counts less after each further one: the last few hundred make the figure.
const KEPT: f64 = 1.0 - 1.0 / 256.0;
/// If sizes vary by less than this part of their mean, they do not tell how much time each byte takes.
const SPREAD: f64 = 0.05;

const MIB: f64 = (1 << 20) as f64;

/// The time of a load of `n` MiB is about `fixed_ms + ms_per_mib · n`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadCost {
    /// 0 = nothing was loaded yet.
    pub fixed_ms: f64,
    pub ms_per_mib: f64,
}

/// Sums over loads, older ones counting less: all that a line through them needs.
#[derive(Clone, Copy, Default)]
struct Sums {
    weight: f64,
    mib: f64,
    ms: f64,
    mib_mib: f64,
    mib_ms: f64,
}

/// Learns [`LoadCost`] from loads.
#[derive(Default)]
pub(super) struct LoadCosts(Mutex<Sums>);

impl LoadCosts {
    /// Learns how long a load of `bytes` took.
    pub(super) fn record(&self, bytes: u64, took: Duration) {
        let (mib, ms) = (bytes as f64 / MIB, took.as_secs_f64() * 1e3);
        let mut sums = self.0.lock();
        let Sums { weight, mib: m, ms: t, mib_mib, mib_ms } = *sums;
        *sums = Sums {
            weight: weight * KEPT + 1.0,
            mib: m * KEPT + mib,
            ms: t * KEPT + ms,
            mib_mib: mib_mib * KEPT + mib * mib,
            mib_ms: mib_ms * KEPT + mib * ms,
        };
    }

    /// The line that fits the loads best (least squares). Loads of one size say nothing of what a byte costs: all their time is
    /// then the fixed part, as it is where larger loads were not slower.
    pub(super) fn cost(&self) -> LoadCost {
        let Sums { weight, mib, ms, mib_mib, mib_ms } = *self.0.lock();
        if weight == 0.0 {
            return LoadCost::default();
        }
        let (mean_mib, mean_ms) = (mib / weight, ms / weight);
        let variance = mib_mib / weight - mean_mib * mean_mib;
        let varied = variance > (SPREAD * mean_mib).powi(2);
        let slope = if varied { (mib_ms / weight - mean_mib * mean_ms) / variance } else { 0.0 };
        // No part of the time is negative.
        let ms_per_mib = slope.clamp(0.0, mean_ms / mean_mib.max(f64::MIN_POSITIVE));
        LoadCost { fixed_ms: (mean_ms - ms_per_mib * mean_mib).max(0.0), ms_per_mib }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(loads: impl IntoIterator<Item = (f64, f64)>) -> LoadCost {
        let costs = LoadCosts::default();
        for (mib, ms) in loads {
            costs.record((mib * MIB) as u64, Duration::from_secs_f64(ms / 1e3));
        }
        costs.cost()
    }

    #[track_caller]
    fn assert_near(cost: LoadCost, fixed_ms: f64, ms_per_mib: f64) {
        let near = |a: f64, b: f64| (a - b).abs() < 0.01; // older loads count a little less
        assert!(near(cost.fixed_ms, fixed_ms) && near(cost.ms_per_mib, ms_per_mib), "{cost:?}");
    }

    #[test]
    fn what_loads_take_is_parted_into_fixed_and_per_byte() {
        assert_eq!(costs([]), LoadCost::default());
        let sizes = [1.0, 2.0, 8.0, 0.5];
        assert_near(costs(sizes.map(|mib| (mib, 3.0 + 0.5 * mib))), 3.0, 0.5);
        assert_near(costs([(2.0, 7.0); 9]), 7.0, 0.0); // one size
        assert_near(costs([(1.0, 5.0), (9.0, 3.0)]), 4.0, 0.0); // larger is not slower
        assert_near(costs([(1.0, 0.0), (2.0, 6.0)]), 0.0, 2.0); // a line through a negative time
    }

    #[test]
    fn a_tier_that_becomes_slower_is_known_to_be() {
        let loads = |count: usize, fixed: f64| {
            (0..count).map(move |i| ((i % 4 + 1) as f64, fixed + (i % 4 + 1) as f64))
        };
        let cost = costs(loads(1_000, 1.0).chain(loads(3_000, 9.0)));
        assert!((cost.fixed_ms - 9.0).abs() < 0.1 && (cost.ms_per_mib - 1.0).abs() < 0.1, "{cost:?}");
    }
}
