//! What came of a replay, in memory that does not grow with it.

use super::super::tally::percent;
use super::super::timeline::Timeline;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Times beyond a day count as a day.
const LONGEST_US: u64 = 86_400_000_000;
/// Points of a curve.
const POINTS: usize = 128;

/// Times of requests: mean and quantiles.
#[derive(Clone, Debug, PartialEq)]
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

/// What a request goes through, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Until the prefix that it was told to fetch is there.
    Fetch,
    /// From then on until it is computed.
    Queue,
    Prefill,
    HandOver,
    /// With the wait for memory.
    Decode,
}

/// Time spent in each [`Part`], µs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts([u128; 5]);

/// The JSON of [`Parts`]: of a request, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    pub fetch: f64,
    pub queue: f64,
    pub prefill: f64,
    pub hand_over: f64,
    pub decode: f64,
}

impl Parts {
    pub(super) fn add(&mut self, part: Part, us: u64) {
        self.0[part as usize] += u128::from(us);
    }

    pub(super) fn add_all(&mut self, others: &Self) {
        for (sum, other) in self.0.iter_mut().zip(others.0) {
            *sum += other;
        }
    }

    /// The mean over so many requests.
    pub fn mean(&self, requests: u64) -> Latency {
        let [fetch, queue, prefill, hand_over, decode] =
            self.0.map(|us| to_seconds(us as f64 / requests.max(1) as f64));
        Latency { fetch, queue, prefill, hand_over, decode }
    }
}

/// Counts of one simulated cluster. Every request ends once: finished or rejected.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub offered: u64,
    pub finished: u64,
    pub rejected: u64,
    /// How many of these when their prompts were computed.
    pub turned_away: u64,
    /// Finished within what they asked for.
    pub within_slo: u64,
    pub blocks_asked: u64,
    pub blocks_found: u64,
    /// How many of these came from another instance.
    pub blocks_fetched: u64,
    /// Blocks that went from where a prompt was computed to where it was decoded.
    pub blocks_handed_over: u64,
    /// How many of both crossed from one rack to another.
    pub blocks_between_racks: u64,
    pub ttft: Spread,
    /// Mean time between the tokens of a request.
    pub tbt: Spread,
    /// Of those that finished.
    pub parts: Parts,
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
