//! Hits over time, in memory that does not grow with it.

use super::tally::percent;

/// Points of a curve.
const POINTS: usize = 128;
/// Width of a point at the start, µs; it doubles when the points are used up.
const POINT_US: u64 = 1_000_000;

/// Blocks found and asked for, over time.
#[derive(Clone, Debug, PartialEq)]
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
}
