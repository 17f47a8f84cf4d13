//! The best that any evictor could do if it knew the whole trace.
//!
//! After a request the cache keeps, of what it held and what was asked for, the blocks whose next use is nearest, and
//! among those of one request the ones nearer to its beginning (Belady's rule with bypass: what is not kept was never let
//! in). So the cache holds no block without the blocks before it, every resident block of a request is a prefix hit, and
//! the number of hits is the largest possible: to keep a block from one use to the next is an interval, at most as many
//! may overlap as there are slots, and dropping the interval that ends last is the exact greedy solution. What other
//! evictors may do (letting the head of a request in by force) is one of the choices here.

use super::recorded::{Prompt, Recorded};
use std::collections::BTreeSet;
use std::num::NonZeroU32;

/// See the module documentation. O(log n) a reference.
pub struct Optimum {
    capacity_blocks: usize,
    next_uses: Vec<Option<NonZeroU32>>,
    /// The next reference to each resident block: later means farther, and in one request deeper.
    resident: BTreeSet<u32>,
    evictions: u64,
}

impl Optimum {
    /// An empty cache before the first request of the trace.
    pub fn new(trace: &Recorded, capacity_blocks: u32) -> Self {
        Self {
            capacity_blocks: capacity_blocks as usize,
            next_uses: trace.next_uses(),
            resident: BTreeSet::new(),
            evictions: 0,
        }
    }

    /// Serves the next request of the trace; returns its prefix hits in blocks.
    pub fn serve(&mut self, prompt: &Prompt<'_>) -> usize {
        let references = prompt.first..prompt.first + prompt.nodes.len() as u32;
        let before = self.resident.len();
        let hits = references.clone().take_while(|at| self.resident.remove(at)).count();
        let next = |at: u32| self.next_uses[at as usize].map(NonZeroU32::get);
        self.resident.extend(references.clone().filter_map(next));
        while self.resident.len() > self.capacity_blocks {
            self.resident.pop_last();
        }
        let kept = |at: &u32| next(*at).is_some_and(|next| self.resident.contains(&next));
        let admitted = references.skip(hits).filter(kept).count();
        self.evictions += (before + admitted - self.resident.len()) as u64;
        hits
    }

    /// Blocks that were resident before a request and not after it.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::Request;
    use hashbrown::HashMap;
    use proptest::prelude::*;

    fn recorded(requests: &[Vec<u64>]) -> Recorded {
        let request = |blocks: &Vec<u64>| {
            let input_tokens = blocks.len() as u32 * 16;
            Ok(Request { input_tokens, blocks: blocks.clone(), ..Request::default() })
        };
        Recorded::read(requests.iter().map(request), 16).unwrap()
    }

    fn hits(trace: &Recorded, capacity_blocks: u32) -> usize {
        let mut optimum = Optimum::new(trace, capacity_blocks);
        trace
            .prompts()
            .map(|prompt| {
                let hits = optimum.serve(&prompt);
                assert!(optimum.resident.len() <= capacity_blocks as usize);
                hits
            })
            .sum()
    }

    /// The most prefix hits of any way to fill the cache: after each request it may hold whatever it held and whatever was
    /// asked for, up to its capacity. What it holds is a set of prefixes, as the bits of a number.
    fn best(requests: &[Vec<u64>], capacity: u32) -> usize {
        let mut known: Vec<&[u64]> = Vec::new();
        let mut bit = |prefix| {
            let place = known.iter().position(|other| *other == prefix).unwrap_or_else(|| {
                known.push(prefix);
                known.len() - 1
            });
            1_u32 << place
        };
        let mut reached = HashMap::from([(0, 0)]);
        for blocks in requests {
            let prefixes: Vec<u32> = (1..=blocks.len()).map(|n| bit(&blocks[..n])).collect();
            let mut next = HashMap::new();
            for (content, before) in reached {
                let hits = before + prefixes.iter().take_while(|&prefix| content & prefix != 0).count();
                let there = prefixes.iter().fold(content, |there, prefix| there | prefix);
                let mut chosen = there;
                loop {
                    if chosen.count_ones() <= capacity {
                        let most = next.entry(chosen).or_insert(hits);
                        *most = hits.max(*most);
                    }
                    if chosen == 0 {
                        break;
                    }
                    chosen = (chosen - 1) & there; // the next smaller subset
                }
            }
            reached = next;
        }
        reached.into_values().max().unwrap_or(0)
    }

    #[test]
    fn the_farthest_goes_and_what_never_comes_again_is_not_let_in() {
        let trace = recorded(&[vec![1], vec![2], vec![3], vec![2], vec![1]]);
        assert_eq!((hits(&trace, 1), hits(&trace, 2)), (1, 2));
        let mut optimum = Optimum::new(&trace, 1);
        trace.prompts().for_each(|prompt| _ = optimum.serve(&prompt));
        assert_eq!(optimum.evictions(), 2, "1 for 2, and 2 when it is used for the last time");
    }

    #[test]
    fn of_a_chain_the_end_goes_first() {
        let trace = recorded(&[vec![1, 2, 3], vec![1, 2, 3]]);
        assert_eq!([1, 2, 3].map(|capacity| hits(&trace, capacity)), [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn no_search_finds_more(
            requests in prop::collection::vec(prop::collection::vec(0..2_u64, 1..4), 1..12),
            capacity in 1..6_u32,
        ) {
            prop_assert_eq!(hits(&recorded(&requests), capacity), best(&requests, capacity));
        }

        #[test]
        fn more_room_never_costs_a_hit(
            requests in prop::collection::vec(prop::collection::vec(0..3_u64, 1..8), 1..60),
            capacity in 1..30_u32,
        ) {
            let trace = recorded(&requests);
            prop_assert!(hits(&trace, capacity) <= hits(&trace, capacity + 1));
        }
    }
}
