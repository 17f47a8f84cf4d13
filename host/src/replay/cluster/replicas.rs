//! In how many caches the hottest blocks are.

use hashbrown::HashMap;
use serde::Serialize;
use std::cmp::Reverse;

/// How many of the hottest blocks are told of.
const HOTTEST: [usize; 3] = [10, 100, 1_000];

/// How often each block was asked for.
#[derive(Default)]
pub(super) struct Uses(HashMap<u64, u32>);

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
            *self.0.entry(block).or_default() += 1;
        }
    }

    /// `copies`: in how many caches a block is. What a smaller number says already is left out.
    pub(super) fn replicas(&self, copies: impl Fn(u64) -> usize) -> Vec<Replicas> {
        let mut blocks: Vec<_> = self.0.iter().map(|(&block, &uses)| (Reverse(uses), block)).collect();
        blocks.sort_unstable();
        let enough = HOTTEST.iter().filter(|&&hottest| hottest <= blocks.len());
        let told = enough.map(|&hottest| {
            let total: usize = blocks[..hottest].iter().map(|&(_, block)| copies(block)).sum();
            Replicas { hottest, mean: (total as f64 / hottest as f64 * 1e4).round() / 1e4 }
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
}
