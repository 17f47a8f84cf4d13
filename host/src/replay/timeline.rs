//! Hits over time.

use super::parts::Parts;
use super::tally::percent;
use std::ops::AddAssign;

/// Points of a curve.
const POINTS: usize = 128;
/// Width of a point at the start, µs.
const POINT_US: u64 = 1_000_000;

/// Blocks found and asked for, over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline(Parts<Hits>);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Hits {
    found: u64,
    asked: u64,
}

impl AddAssign for Hits {
    fn add_assign(&mut self, other: Self) {
        self.found += other.found;
        self.asked += other.asked;
    }
}

impl Default for Timeline {
    fn default() -> Self {
        Self(Parts::new(POINTS, POINT_US))
    }
}

impl Timeline {
    pub fn add(&mut self, at_us: u64, found: u64, asked: u64) {
        self.0.add(at_us, Hits { found, asked });
    }

    /// Per cent found over time, where anything was asked: (seconds, per cent).
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let middle_s = |at: usize| (at as f64 + 0.5) * self.0.width_us() as f64 / 1e6;
        let asked = self.0.sums().iter().enumerate().filter(|(_, hits)| hits.asked > 0);
        asked.map(|(at, hits)| (middle_s(at), percent(hits.found, hits.asked))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_drawn_where_something_was_asked() {
        let mut timeline = Timeline::default();
        timeline.add(500_000, 1, 4);
        timeline.add(1_500_000, 0, 0);
        timeline.add(2_000_000, 1, 1);
        timeline.add(2_999_999, 0, 1);
        assert_eq!(timeline.curve(), [(0.5, 25.0), (2.5, 50.0)]);
    }
}
