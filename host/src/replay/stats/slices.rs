//! A trace in parts of the same time, however long it is.

use serde::Serialize;

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

/// Parts of a second each. When there would be too many, every two become one.
pub(super) struct Slices {
    width_us: u64,
    slices: Vec<Slice>,
}

impl Default for Slices {
    fn default() -> Self {
        Self { width_us: 1_000_000, slices: Vec::new() }
    }
}

impl Slices {
    /// A request at that time since the first.
    pub(super) fn add(&mut self, at_us: u64, references: u64, hits: u64) {
        while at_us / self.width_us >= MOST as u64 {
            self.widen();
        }
        let index = (at_us / self.width_us) as usize;
        if index >= self.slices.len() {
            self.slices.resize(index + 1, Slice::default());
        }
        self.slices[index].count(1, references, hits);
    }

    fn widen(&mut self) {
        self.width_us *= 2;
        let sum = |pair: &[Slice]| {
            let mut sum = Slice::default();
            pair.iter().for_each(|of| sum.count(of.requests, of.block_references, of.prefix_hits));
            sum
        };
        self.slices = self.slices.chunks(2).map(sum).collect();
    }

    pub(super) fn report(&self) -> Vec<Slice> {
        let seconds = self.width_us as f64 / US_PER_S;
        let slices = self.slices.iter().enumerate();
        slices.map(|(n, &slice)| Slice { from_s: n as f64 * seconds, seconds, ..slice }).collect()
    }
}

impl Slice {
    fn count(&mut self, requests: u64, references: u64, hits: u64) {
        self.requests += requests;
        self.block_references += references;
        self.prefix_hits += hits;
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
