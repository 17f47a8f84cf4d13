//! Hits of a replay: in total, of the warm-up, and by class and tenant.

use super::recorded::Prompt;
use super::timeline::Timeline;
use serde::Serialize;
use std::collections::BTreeMap;

/// Hits of some requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Hits {
    pub requests: u64,
    pub block_references: u64,
    /// Blocks.
    pub prefix_hits: u64,
    /// Hits, as a share of the references.
    pub hit_rate_percent: f64,
}

/// Per cent, to four decimals.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    rounded(100.0 * part as f64 / whole.max(1) as f64)
}

/// Rounds to four decimals.
pub(super) fn rounded(percent: f64) -> f64 {
    (percent * 1e4).round() / 1e4
}

impl Hits {
    fn add(&mut self, prompt: &Prompt<'_>, hits: usize) {
        self.requests += 1;
        self.block_references += prompt.nodes.len() as u64;
        self.prefix_hits += hits as u64;
    }

    fn rated(self) -> Self {
        Self { hit_rate_percent: percent(self.prefix_hits, self.block_references), ..self }
    }
}

/// What is counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// How many requests at the beginning warm the cache up, and count nowhere else.
    pub warm_up: usize,
    pub by_class: bool,
    pub by_tenant: bool,
}

/// The hits of one replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    split: Split,
    warm_up: Hits,
    counted: Hits,
    by_class: BTreeMap<u16, Hits>,
    by_tenant: BTreeMap<u16, Hits>,
    first_ms: Option<u64>,
    over_time: Timeline,
}

impl Tally {
    pub fn new(split: Split) -> Self {
        Self { split, ..Self::default() }
    }

    /// Adds the next request of the trace, which found `hits` of its blocks. Returns whether it counts, which one of the warm-up does not.
    pub fn add(&mut self, prompt: &Prompt<'_>, hits: usize) -> bool {
        let since_ms = prompt.time_ms.saturating_sub(*self.first_ms.get_or_insert(prompt.time_ms));
        self.over_time.add(since_ms * 1_000, hits as u64, prompt.nodes.len() as u64);
        if (self.warm_up.requests as usize) < self.split.warm_up {
            self.warm_up.add(prompt, hits);
            return false;
        }
        self.counted.add(prompt, hits);
        if self.split.by_class {
            self.by_class.entry(prompt.class).or_default().add(prompt, hits);
        }
        if self.split.by_tenant {
            self.by_tenant.entry(prompt.tenant).or_default().add(prompt, hits);
        }
        true
    }

    /// All but the warm-up.
    pub fn counted(&self) -> Hits {
        self.counted.rated()
    }

    /// `None` means that none was asked for.
    pub fn warm_up(&self) -> Option<Hits> {
        (self.split.warm_up > 0).then(|| self.warm_up.rated())
    }

    /// All, by the time since the first request.
    pub fn over_time(&self) -> &Timeline {
        &self.over_time
    }

    /// Hits by class, without the warm-up. Returns `None` if that was not asked for.
    pub fn by_class(&self) -> Option<BTreeMap<u16, Hits>> {
        self.split.by_class.then(|| rated(&self.by_class))
    }

    /// As [`Self::by_class`].
    pub fn by_tenant(&self) -> Option<BTreeMap<u16, Hits>> {
        self.split.by_tenant.then(|| rated(&self.by_tenant))
    }
}

fn rated(groups: &BTreeMap<u16, Hits>) -> BTreeMap<u16, Hits> {
    groups.iter().map(|(&group, hits)| (group, hits.rated())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warm_up_counts_apart_and_groups_without_it() {
        let split = Split { warm_up: 1, by_class: true, by_tenant: true };
        let mut tally = Tally::new(split);
        for (class, tenant, hits) in [(1, 0, 2), (1, 0, 1), (5, 0, 2), (5, 3, 0)] {
            tally.add(&Prompt { first: 0, nodes: &[0, 1], class, tenant, time_ms: 0 }, hits);
        }
        let hits = |requests, prefix_hits, hit_rate_percent| Hits {
            requests,
            block_references: 2 * requests,
            prefix_hits,
            hit_rate_percent,
        };
        assert_eq!((tally.warm_up(), tally.counted()), (Some(hits(1, 2, 100.0)), hits(3, 3, 50.0)));
        assert_eq!(tally.by_class().unwrap(), BTreeMap::from([(1, hits(1, 1, 50.0)), (5, hits(2, 2, 50.0))]));
        assert_eq!(tally.by_tenant().unwrap(), BTreeMap::from([(0, hits(2, 3, 75.0)), (3, hits(1, 0, 0.0))]));
        let plain = Tally::new(Split::default());
        assert_eq!((plain.warm_up(), plain.by_class(), plain.by_tenant()), (None, None, None));
        assert_eq!(plain.counted(), Hits::default());
    }
}
