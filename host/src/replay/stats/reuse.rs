//! When blocks are used again: after how long, by what, and how many must be kept for it.

use super::spread::{Quantiles, Spread};
use crate::replay::chains::Node;
use serde::Serialize;
use std::collections::BTreeMap;

const US_PER_S: f64 = 1e6;

/// Uses of the blocks of a class by any request after it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassReuse {
    pub class: u16,
    pub reuses: u64,
    /// Share of the uses by this class that were followed by another of the same block.
    pub reused_share: f64,
    /// Seconds from one use of a block to the next. An exponential distribution with this mean is what `workload-aware` fits.
    pub seconds: Quantiles,
    /// Largest distance between the distribution of the times and that exponential one, 0 to 1.
    pub exponential_error: f64,
}

/// The reuse of all blocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Reuse {
    /// Share of the distinct blocks that were used more than once.
    pub blocks_reused_share: f64,
    /// Uses of a block that was used more than once.
    pub uses: Quantiles,
    /// Seconds from one use of a block to the next.
    pub seconds: Quantiles,
    pub exponential_error: f64,
    /// Seconds from the first use of a block to the last, of those used more than once.
    pub life_seconds: Quantiles,
    /// The most blocks that had been used and would be again, at any one time: a cache of that size could have every hit, if
    /// it knew the future.
    pub ideal_capacity_blocks: u64,
    pub classes: Vec<ClassReuse>,
}

/// A block: the first and the last request that used it, and how many did.
#[derive(Clone, Copy)]
struct Used {
    first: u32,
    last: u32,
    uses: u32,
}

#[derive(Default)]
struct ClassUses {
    uses: u64,
    us: Spread,
}

/// Collects [`Reuse`]: 12 bytes a block, 10 a request.
#[derive(Default)]
pub(super) struct Uses {
    blocks: Vec<Used>,
    times_us: Vec<u64>,
    classes: Vec<u16>,
    us: Spread,
    by_class: BTreeMap<u16, ClassUses>,
}

impl Uses {
    /// The next request uses the blocks of `path`; new nodes are numbered as they come.
    pub(super) fn add(&mut self, time_us: u64, class: u16, path: &[Node]) {
        let request = self.times_us.len() as u32;
        self.times_us.push(time_us);
        self.classes.push(class);
        self.by_class.entry(class).or_default().uses += path.len() as u64;
        for &node in path {
            let Some(used) = self.blocks.get_mut(node as usize) else {
                self.blocks.push(Used { first: request, last: request, uses: 1 });
                continue;
            };
            let after_us = time_us - self.times_us[used.last as usize];
            self.us.add(after_us);
            let before = self.classes[used.last as usize];
            self.by_class.entry(before).or_default().us.add(after_us);
            used.last = request;
            used.uses += 1;
        }
    }

    pub(super) fn report(&self) -> Reuse {
        let (mut uses, mut life) = (Spread::default(), Spread::default());
        let again = || self.blocks.iter().filter(|used| used.uses > 1);
        for used in again() {
            uses.add(used.uses.into());
            life.add(self.times_us[used.last as usize] - self.times_us[used.first as usize]);
        }
        Reuse {
            blocks_reused_share: uses.len() as f64 / self.blocks.len().max(1) as f64,
            uses: uses.quantiles(1.0),
            seconds: self.us.quantiles(US_PER_S),
            exponential_error: self.us.exponential_error(),
            life_seconds: life.quantiles(US_PER_S),
            ideal_capacity_blocks: self.most_alive(),
            classes: self.by_class.iter().map(|(&class, of)| of.report(class)).collect(),
        }
    }

    /// Blocks between their first and their last use, after each request; the most there were.
    fn most_alive(&self) -> u64 {
        let mut change = vec![0_i64; self.times_us.len()];
        for used in self.blocks.iter().filter(|used| used.last > used.first) {
            change[used.first as usize] += 1;
            change[used.last as usize] -= 1;
        }
        let alive = change.into_iter().scan(0, |alive, change| {
            *alive += change;
            Some(*alive)
        });
        alive.max().unwrap_or(0).cast_unsigned()
    }

    /// The distribution of the times, seconds, and the exponential one with the same mean at the same times.
    pub(super) fn curves(&self) -> [Vec<(f64, f64)>; 2] {
        let measured = self.us.cdf(US_PER_S);
        let mean = self.us.quantiles(US_PER_S).mean.max(f64::MIN_POSITIVE);
        let fitted = measured.iter().map(|&(s, _)| (s, 1.0 - (-s / mean).exp())).collect();
        [measured, fitted]
    }

    /// The distributions of the classes with most reuses, at most `most` of them.
    pub(super) fn class_curves(&self, most: usize) -> Vec<(u16, Vec<(f64, f64)>)> {
        let mut classes: Vec<_> = self.by_class.iter().filter(|(_, of)| of.us.len() > 0).collect();
        classes.sort_by_key(|(_, of)| std::cmp::Reverse(of.us.len()));
        classes.into_iter().take(most).map(|(&class, of)| (class, of.us.cdf(US_PER_S))).collect()
    }
}

impl ClassUses {
    fn report(&self, class: u16) -> ClassReuse {
        ClassReuse {
            class,
            reuses: self.us.len(),
            reused_share: self.us.len() as f64 / self.uses.max(1) as f64,
            seconds: self.us.quantiles(US_PER_S),
            exponential_error: self.us.exponential_error(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_by_hand() {
        let mut uses = Uses::default();
        // Blocks 0 and 1 are used three times and twice, 2 and 3 once, 4 twice at the same time.
        let requests: [(u64, u16, &[Node]); 5] =
            [(0, 1, &[0, 1]), (10, 2, &[0, 1, 2]), (30, 1, &[0, 3]), (40, 3, &[4]), (40, 3, &[4])];
        for (s, class, path) in requests {
            uses.add(s * 1_000_000, class, path);
        }
        let report = uses.report();
        assert_eq!(report.blocks_reused_share, 3.0 / 5.0);
        assert_eq!((report.uses.mean, report.uses.max), (7.0 / 3.0, 3.0));
        // 10, 10, 20 and 0 seconds.
        assert_eq!(report.seconds.mean, 10.0);
        assert_eq!(report.life_seconds.mean, (30.0 + 10.0 + 0.0) / 3.0);
        assert_eq!(report.ideal_capacity_blocks, 2);
        let classes: Vec<_> = report.classes.iter().map(|c| (c.class, c.reuses, c.reused_share)).collect();
        assert_eq!(classes, [(1, 2, 0.5), (2, 1, 1.0 / 3.0), (3, 1, 0.5)]);
        let [measured, fitted] = uses.curves();
        assert_eq!((measured.len(), measured[0]), (3, (0.0, 0.25)));
        assert_eq!(fitted[0], (0.0, 0.0));
        let most: Vec<_> = uses.class_curves(2).into_iter().map(|(class, _)| class).collect();
        assert_eq!(most, [1, 2]);
        assert_eq!(Uses::default().report(), Reuse::default());
    }

    #[test]
    fn a_cache_of_the_ideal_size_that_knows_the_future_has_every_hit() {
        use crate::replay::generate::{Generator, Plan, Workload};
        use crate::replay::{optimum::Optimum, recorded::Recorded};
        let plan = Plan { workload: Workload::Chat, requests: 400, rate_rps: 5.0, seed: 3 };
        let requests: Vec<_> = Generator::new(&plan).unwrap().collect();
        let mut stats = super::super::Stats::default();
        requests.iter().for_each(|request| stats.add(request).unwrap());
        let report = stats.report();
        let trace = Recorded::read(requests.into_iter().map(Ok), 512).unwrap();
        let best_hit_rate_percent = |capacity: u64| {
            let mut optimum = Optimum::new(&trace, capacity as u32);
            let hits: usize = trace.prompts().map(|prompt| optimum.serve(&prompt)).sum();
            100.0 * hits as f64 / report.block_references as f64
        };
        let ideal = report.reuse.ideal_capacity_blocks;
        assert!(ideal > 10, "{ideal}");
        assert_eq!(best_hit_rate_percent(ideal), report.best_hit_rate_percent);
        assert!(best_hit_rate_percent(ideal - 1) < report.best_hit_rate_percent);
    }
}
