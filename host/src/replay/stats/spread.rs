//! How numbers are spread: quantiles, and the distance to an exponential distribution.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Digits kept of each number.
const DIGITS: u8 = 2;

/// Numbers, kept to two digits; a few KiB, however many there are.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    histogram: Histogram<u64>,
    sum: f64,
    /// Exact, unlike what stands in the histogram.
    max: u64,
}

/// Quantiles of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Default for Spread {
    fn default() -> Self {
        Self { histogram: Histogram::new(DIGITS).expect("two digits can be kept"), sum: 0.0, max: 0 }
    }
}

impl Spread {
    pub(super) fn add(&mut self, number: u64) {
        self.histogram.record(number).expect("a histogram that grows takes every number");
        self.sum += number as f64;
        self.max = self.max.max(number);
    }

    pub(super) fn len(&self) -> u64 {
        self.histogram.len()
    }

    fn mean(&self) -> f64 {
        self.sum / self.len().max(1) as f64
    }

    /// Quantiles in multiples of `unit`.
    pub(super) fn quantiles(&self, unit: f64) -> Quantiles {
        let at = |quantile| self.histogram.value_at_quantile(quantile).min(self.max) as f64 / unit;
        Quantiles { mean: self.mean() / unit, p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }

    /// Points of the cumulative distribution: number in that unit, share of the numbers up to it.
    pub(super) fn cdf(&self, unit: f64) -> Vec<(f64, f64)> {
        let (mut sum, all) = (0, self.len().max(1) as f64);
        let mut point = |value: u64, count: u64| {
            sum += count;
            (value.min(self.max) as f64 / unit, sum as f64 / all)
        };
        self.histogram
            .iter_recorded()
            .map(|step| point(step.value_iterated_to(), step.count_at_value()))
            .collect()
    }

    /// The largest distance, 0 to 1, between the share of the numbers up to any one and that of the exponential distribution
    /// with the same mean (Kolmogorov and Smirnov).
    pub(super) fn exponential_error(&self) -> f64 {
        let mean = self.mean().max(f64::MIN_POSITIVE);
        let mut below = 0.0;
        self.cdf(1.0).into_iter().fold(0.0, |largest: f64, (value, share)| {
            let expected = 1.0 - (-value / mean).exp();
            let distance = (share - expected).abs().max((below - expected).abs());
            below = share;
            largest.max(distance)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(numbers: impl IntoIterator<Item = u64>) -> Spread {
        let mut spread = Spread::default();
        numbers.into_iter().for_each(|number| spread.add(number));
        spread
    }

    #[test]
    fn quantiles_and_the_distribution_of_known_numbers() {
        let spread = spread(1..=100);
        let expected = Quantiles { mean: 5.05, p50: 5.0, p90: 9.0, p99: 9.9, max: 10.0 };
        assert_eq!(spread.quantiles(10.0), expected);
        let cdf = spread.cdf(1.0);
        assert_eq!((cdf.len(), cdf[0], cdf[99]), (100, (1.0, 0.01), (100.0, 1.0)));
        let none = Spread::default();
        assert_eq!((none.quantiles(1.0), none.cdf(1.0).len()), (Quantiles::default(), 0));
    }

    #[test]
    fn what_is_exponential_is_near_to_it_and_what_is_not_is_far() {
        let exponential = (0..10_000).map(|n| {
            let share = (f64::from(n) + 0.5) / 10_000.0;
            (-(1.0 - share).ln() * 1e6) as u64
        });
        assert!(spread(exponential).exponential_error() < 0.02);
        let constant = spread([1_000; 50]).exponential_error();
        assert!((constant - 0.632).abs() < 0.01, "{constant}");
    }
}
