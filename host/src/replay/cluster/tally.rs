//! What came of a replay, in memory that does not grow with it.

use super::super::tally::percent;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Times beyond a day count as a day.
const LONGEST_US: u64 = 86_400_000_000;
/// Points of a curve over time.
const POINTS: usize = 128;
/// Width of a point at the start, µs; it doubles when the points are used up.
const POINT_US: u64 = 1_000_000;

/// Times of requests: mean and quantiles.
#[derive(Clone, Debug)]
pub struct Spread {
    histogram: Histogram<u64>,
    sum_us: u128,
}

impl Default for Spread {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_US, 3);
        Self { histogram: histogram.expect("constant bounds of a histogram are valid"), sum_us: 0 }
    }
}

/// The JSON of a [`Spread`], seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

impl Spread {
    pub(super) fn add(&mut self, us: u64) {
        self.histogram.saturating_record(us.max(1));
        self.sum_us += u128::from(us);
    }

    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub fn seconds(&self) -> Seconds {
        let mean = self.sum_us as f64 / self.count().max(1) as f64;
        let at = |quantile| to_seconds(self.histogram.value_at_quantile(quantile) as f64);
        Seconds { mean: to_seconds(mean), p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }

    /// Seconds below which each share of the requests lies, for a curve: (seconds, share).
    pub fn curve(&self) -> Vec<(f64, f64)> {
        if self.count() == 0 {
            return Vec::new();
        }
        let point = |n: usize| {
            let share = n as f64 / POINTS as f64;
            (to_seconds(self.histogram.value_at_quantile(share) as f64), share)
        };
        (0..=POINTS).map(point).collect()
    }
}

fn to_seconds(us: f64) -> f64 {
    us.round() / 1e6
}

/// Blocks found and asked for, over time.
#[derive(Clone, Debug)]
pub struct Timeline {
    width_us: u64,
    /// (found, asked) by point.
    points: Vec<(u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { width_us: POINT_US, points: Vec::new() }
    }
}

impl Timeline {
    pub fn add(&mut self, at_us: u64, found: u64, asked: u64) {
        while at_us / self.width_us >= POINTS as u64 {
            self.width_us *= 2;
            let pairs = self.points.chunks(2);
            self.points = pairs.map(|pair| pair.iter().fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))).collect();
        }
        let at = (at_us / self.width_us) as usize;
        if self.points.len() <= at {
            self.points.resize(at + 1, (0, 0));
        }
        self.points[at] = (self.points[at].0 + found, self.points[at].1 + asked);
    }

    /// Per cent found over time, where anything was asked: (seconds, per cent).
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let middle = |at: usize| (at as f64 + 0.5) * self.width_us as f64 / 1e6;
        let asked = self.points.iter().enumerate().filter(|(_, (_, asked))| *asked > 0);
        asked.map(|(at, &(found, asked))| (middle(at), percent(found, asked))).collect()
    }
}

/// Counts of one simulated cluster. Every request ends once: finished or rejected.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub offered: u64,
    pub finished: u64,
    pub rejected: u64,
    /// Finished within what they asked for.
    pub within_slo: u64,
    pub blocks_asked: u64,
    pub blocks_found: u64,
    /// How many of these came from another instance.
    pub blocks_fetched: u64,
    pub ttft: Spread,
    /// Mean time between the tokens of a request.
    pub tbt: Spread,
    pub hits: Timeline,
}

impl Tally {
    pub(super) fn found(&mut self, at_us: u64, found: u64, fetched: u64, asked: u64) {
        self.blocks_asked += asked;
        self.blocks_found += found;
        self.blocks_fetched += fetched;
        self.hits.add(at_us, found, asked);
    }

    /// # Panics
    /// A request was lost, or ended twice.
    pub(super) fn check(&self, in_flight: usize) {
        let ended = self.finished + self.rejected;
        assert_eq!(self.offered, ended + in_flight as u64, "every request ends once");
    }

    pub fn hit_rate_percent(&self) -> f64 {
        percent(self.blocks_found, self.blocks_asked)
    }

    pub fn fetched_percent(&self) -> f64 {
        percent(self.blocks_fetched, self.blocks_asked)
    }

    pub fn slo_attainment_percent(&self) -> f64 {
        percent(self.within_slo, self.offered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_keeps_its_sums_while_it_is_drawn_coarser() {
        let mut timeline = Timeline::default();
        for second in 0..100_000 {
            timeline.add(second * 1_000_000, 1, 4);
        }
        assert!(timeline.points.len() <= POINTS, "{}", timeline.points.len());
        assert_eq!(timeline.points.iter().fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)), (100_000, 400_000));
        assert!(timeline.curve().iter().all(|&(_, percent)| percent == 25.0));
    }

    #[test]
    fn times_by_hand() {
        let mut spread = Spread::default();
        assert_eq!((spread.seconds(), spread.curve().len()), (Seconds::default(), 0));
        (1..=100).for_each(|n| spread.add(n * 10_000));
        let Seconds { mean, p50, p90, p99 } = spread.seconds();
        assert_eq!(mean, 0.505);
        for (value, expected) in [(p50, 0.5), (p90, 0.9), (p99, 0.99)] {
            assert!((value / expected - 1.0).abs() < 2e-3, "{value} {expected}");
        }
        let curve = spread.curve();
        assert!(curve.is_sorted() && curve.last().is_some_and(|last| last.1 == 1.0), "{curve:?}");
    }
}
