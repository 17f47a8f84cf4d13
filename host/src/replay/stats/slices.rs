//! A trace in parts of the same time, however long it is.

use crate::replay::parts::Parts;
use serde::Serialize;
use std::ops::AddAssign;

/// The most parts.
const MOST: usize = 120;
const US_PER_S: f64 = 1e6;

/// What was asked for in one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Slice {
    /// Where it begins and how long it is, seconds from the first request.
    pub from_s: f64,
    pub seconds: f64,
    pub requests: u64,
    pub block_references: u64,
    /// Prefix hits of a cache that never evicts.
    pub prefix_hits: u64,
}

impl AddAssign for Slice {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.block_references += other.block_references;
        self.prefix_hits += other.prefix_hits;
    }
}

/// Parts of a second each, and longer ones of a long trace.
pub(super) struct Slices(Parts<Slice>);

impl Default for Slices {
    fn default() -> Self {
        Self(Parts::new(MOST, 1_000_000))
    }
}

impl Slices {
    /// A request at that time since the first.
    pub(super) fn add(&mut self, at_us: u64, references: u64, hits: u64) {
        let request =
            Slice { requests: 1, block_references: references, prefix_hits: hits, ..Slice::default() };
        self.0.add(at_us, request);
    }

    pub(super) fn report(&self) -> Vec<Slice> {
        let seconds = self.0.width_us() as f64 / US_PER_S;
        let slices = self.0.sums().iter().enumerate();
        slices.map(|(n, &slice)| Slice { from_s: n as f64 * seconds, seconds, ..slice }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_when_parts_grow() {
        let mut slices = Slices::default();
        assert!(slices.report().is_empty());
        for s in [0, 1, 119, 120, 500, 100_000] {
            slices.add(s * 1_000_000, 3, 2);
        }
        let report = slices.report();
        assert!(report.len() <= MOST && report.len() > MOST / 2 - 1, "{}", report.len());
        assert_eq!(report.iter().map(|of| of.requests).sum::<u64>(), 6);
        assert_eq!(report.iter().map(|of| of.prefix_hits).sum::<u64>(), 12);
        let last = report.last().unwrap();
        assert!(last.from_s <= 100_000.0 && 100_000.0 < last.from_s + last.seconds, "{last:?}");
        assert_eq!((report[0].requests, report[0].from_s), (5, 0.0));
    }
}
