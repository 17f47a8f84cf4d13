//! What is counted of the sample: by cell when blocks were used again, and by class how often, beside how often that was to be
//! expected of their cells.

use crate::ages::{self, BINS, Curve};
use crate::cells::{BUCKETS, CELLS, CLASSES, bucket_of, cell_of, class_of};
use crate::curve::Counts;

/// Reuses of a class, and those that its cells promised for the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) reused: f64,
    pub(crate) expected: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// By cell.
    pub(crate) counts: Vec<Counts>,
    /// By class.
    pub(crate) seen: [Seen; CLASSES],
    /// By cell: what its hazards are to those of its bucket, as far as is known.
    pub(crate) factors: [f64; CELLS],
    /// By bucket, per ms.
    pub(crate) hazards: [Curve; BUCKETS],
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            counts: vec![Counts::default(); CELLS],
            seen: [Seen::default(); CLASSES],
            factors: [1.0; CELLS],
            hazards: [[0.0; BINS]; BUCKETS],
        }
    }
}

impl Tally {
    /// A block of this queue was used again at this age.
    pub(crate) fn reuse(&mut self, queue: u16, age_ms: u64, weight: f64) {
        self.counts[cell_of(queue)].reuses[ages::bin_of(age_ms)] += weight;
        self.seen[class_of(queue)].reused += weight;
    }

    /// A block of this queue passed the time between two ages.
    pub(crate) fn pass(&mut self, queue: u16, from_ms: u64, to_ms: u64, weight: f64) {
        let cell = cell_of(queue);
        let (exposure_ms, hazards) = (&mut self.counts[cell].exposure_ms, &self.hazards[bucket_of(cell)]);
        let mut expected = 0.0;
        for (bin, time_ms) in ages::spans(from_ms, to_ms) {
            exposure_ms[bin] += time_ms * weight;
            expected += time_ms * hazards[bin];
        }
        self.seen[class_of(queue)].expected += expected * self.factors[cell] * weight;
    }

    pub(crate) fn reused(&self) -> f64 {
        self.counts.iter().map(Counts::reused).sum()
    }

    pub(crate) fn scale(&mut self, factor: f64) {
        self.counts.iter_mut().for_each(|counts| counts.scale(factor));
        for Seen { reused, expected } in &mut self.seen {
            *reused *= factor;
            *expected *= factor;
        }
    }

    /// By class: what its hazards are to those of its cells, drawn to 1 as by so many reuses. Were all cells wrong alike, that would be
    /// no matter of class.
    pub(crate) fn class_factors(&self, drawn_reuses: f64) -> [f64; CLASSES] {
        let sum = |field: fn(&Seen) -> f64| self.seen.iter().map(field).sum::<f64>();
        let (reused, expected) = (sum(|seen| seen.reused), sum(|seen| seen.expected));
        let common = if reused > 0.0 && expected > 0.0 { reused / expected } else { 1.0 };
        self.seen.map(|seen| (seen.reused + drawn_reuses) / (seen.expected * common + drawn_reuses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cells::{Request, queue_of};

    #[test]
    fn a_class_is_measured_by_what_its_cells_promise() {
        let mut tally = Tally { hazards: [[1e-3; BINS]; BUCKETS], ..Tally::default() };
        let [often, seldom] = [1, 2].map(|class| queue_of(class, Request { brought: 0, known: 0 }, 1, false));
        for queue in [often, seldom] {
            tally.pass(queue, 500, 500, 1.0);
            tally.pass(queue, 500, 1_000_500, 1.0);
        }
        (0..1_500).for_each(|_| tally.reuse(often, 10, 1.0));
        (0..500).for_each(|_| tally.reuse(seldom, 10, 1.0));
        let factors = tally.class_factors(1_000.0);
        for (class, factor) in [(1, 1.25), (2, 0.75), (3, 1.0)] {
            assert!((factors[class] - factor).abs() < 1e-9, "{factors:?}");
        }
        let cell = &tally.counts[cell_of(often)];
        assert_eq!((cell.reused(), cell.exposure_ms.iter().sum::<f64>()), (2_000.0, 2e6));
    }
}
