//! In how many caches the hottest blocks are.

use crate::replay::tally::rounded;
use hashbrown::HashMap;
use serde::Serialize;
use std::cmp::Reverse;

/// How many of the hottest blocks are told of.
const HOTTEST: [usize; 3] = [10, 100, 1_000];

/// Blocks whose uses are counted; a hundred times those that are told of are enough to find these.
const COUNTED: usize = 1 << 18;

/// How often blocks were asked for. What is cold is forgotten when there are too many (lossy counting: Manku and Motwani, VLDB 2002).
#[derive(Default)]
pub(super) struct Uses {
    counts: HashMap<u64, u32>,
    /// What was forgotten last had been used this often.
    forgotten: u32,
}

/// Copies of the blocks that were asked for most, at the end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Replicas {
    /// Of how many blocks this tells.
    pub hottest: usize,
    /// Caches that hold one of them, on average.
    pub mean: f64,
}

impl Uses {
    pub(super) fn add(&mut self, chain: &[u64]) {
        for &block in chain {
            *self.counts.entry(block).or_default() += 1;
        }
        while self.counts.len() > COUNTED {
            self.forgotten += 1;
            self.counts.retain(|_, uses| *uses > self.forgotten);
        }
    }

    /// `copies`: in how many caches a block is. Tells of no more blocks than are counted.
    pub(super) fn replicas(&self, copies: impl Fn(u64) -> usize) -> Vec<Replicas> {
        let mut blocks: Vec<_> = self.counts.iter().map(|(&block, &uses)| (Reverse(uses), block)).collect();
        blocks.sort_unstable();
        let enough = HOTTEST.iter().filter(|&&hottest| hottest <= blocks.len());
        let told = enough.map(|&hottest| {
            let total: usize = blocks[..hottest].iter().map(|&(_, block)| copies(block)).sum();
            Replicas { hottest, mean: rounded(total as f64 / hottest as f64) }
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_are_those_asked_for_most() {
        let mut uses = Uses::default();
        for n in 0..150_u64 {
            // Block 0 in every chain, block 1 in all but one, …
            uses.add(&(0..n).collect::<Vec<_>>());
        }
        let replicas = uses.replicas(|block| if block < 10 { 4 } else { 1 });
        assert_eq!(replicas, [Replicas { hottest: 10, mean: 4.0 }, Replicas { hottest: 100, mean: 1.3 }]);
        assert_eq!(Uses::default().replicas(|_| 1), []);
    }

    #[test]
    fn what_is_cold_is_forgotten_and_what_is_hot_is_not() {
        let mut uses = Uses::default();
        let cold = |n: u64| (100 + n * 50..100 + n * 50 + 50).collect::<Vec<_>>();
        for n in 0..20_000 {
            uses.add(&cold(n));
            uses.add(&[n % 10]);
        }
        assert!(uses.counts.len() <= COUNTED && uses.forgotten > 0, "{}", uses.counts.len());
        let hot = uses.replicas(|block| usize::from(block < 10))[0];
        assert_eq!(hot, Replicas { hottest: 10, mean: 1.0 });
    }
}
