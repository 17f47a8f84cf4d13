//! How busy each instance was, over time.

use crate::replay::parts::Parts;

/// Parts of the time that are told apart.
const PARTS: usize = 64;
/// The least width of a part, µs.
const PART_US: u64 = 1_000_000;

/// Time at work of each instance in equal parts of the time.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMap {
    until_us: u64,
    instances: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq)]
struct Row {
    /// At work until the last time that it was told of.
    known_ms: f64,
    busy_ms: Parts<f64>,
}

impl LoadMap {
    /// `every_us`: how often it will be told.
    pub(super) fn new(instances: usize, every_us: u64) -> Self {
        let row = Row { known_ms: 0.0, busy_ms: Parts::new(PARTS, every_us.max(PART_US)) };
        Self { until_us: 0, instances: vec![row; instances] }
    }

    /// Adds the time until `now_us`. `busy_ms`: of each instance, how long it was at work so far.
    pub(super) fn add(&mut self, now_us: u64, busy_ms: impl Iterator<Item = f64>) {
        self.until_us = now_us;
        for (row, busy_ms) in self.instances.iter_mut().zip(busy_ms) {
            row.busy_ms.add(now_us.saturating_sub(1), busy_ms - row.known_ms);
            row.known_ms = busy_ms;
        }
    }

    fn width_us(&self) -> u64 {
        self.instances.first().map_or(PART_US, |row| row.busy_ms.width_us())
    }

    /// Width of a part, seconds.
    pub fn part_s(&self) -> f64 {
        self.width_us() as f64 / 1e6
    }

    /// Per cent of each part that each instance was at work; the last part may be short.
    pub fn percent(&self) -> Vec<Vec<f64>> {
        let part_ms = |at: usize| {
            let from_us = at as u64 * self.width_us();
            self.until_us.saturating_sub(from_us).min(self.width_us()) as f64 / 1e3
        };
        let of = |(at, busy_ms): (usize, &f64)| (100.0 * busy_ms / part_ms(at).max(1e-3)).clamp(0.0, 100.0);
        self.instances.iter().map(|row| row.busy_ms.sums().iter().enumerate().map(of).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_and_lose_nothing() {
        let mut load = LoadMap::new(2, 250_000);
        // The first is at work half of the time, the other in every second hour.
        let (mut busy, hour_us) = (0.0, 3_600_000_000);
        for tick in 1..=4 * 7 * 3_600_u64 {
            let now_us = tick * 250_000;
            busy += if (now_us - 1) / hour_us % 2 == 1 { 250.0 } else { 0.0 };
            load.add(now_us, [tick as f64 * 125.0, busy].into_iter());
        }
        let percent = load.percent();
        assert!((PARTS / 2..=PARTS).contains(&percent[0].len()), "{}", percent[0].len());
        assert!(percent[0].iter().all(|part| (part - 50.0).abs() < 1e-6), "{percent:?}");
        let kept = percent[1].iter().map(|part| part * load.part_s()).sum::<f64>() / 100.0;
        // The last part is short, and idle.
        assert!((kept - busy / 1e3).abs() < 1e-6 * busy, "{kept} {busy}");
        assert_eq!((percent[1][0], percent[1].contains(&100.0)), (0.0, true));
    }

    #[test]
    fn no_time_is_no_parts() {
        let load = LoadMap::new(1, 1_000_000);
        assert_eq!(load.percent(), [Vec::<f64>::new()]);
    }
}
