//! Prompts that are computed a part at a time, beside the tokens of the batch: chunked prefill (Sarathi, arXiv 2308.16369).
//!
//! A step has a budget of tokens. Every sequence of the batch takes one of them; the others are for prompts, first come, first
//! served. There is one for a prompt at any time, so that none waits for the end of a large batch.

use crate::fleet::PrefillCost;
use std::collections::VecDeque;

/// What prompts add to one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chunk {
    /// What a step that computes anything takes; a batch beside it has that in common with it.
    pub(super) fixed_ms: f64,
    /// Beyond that.
    pub(super) ms: f64,
}

struct Prompt {
    /// Tokens that are in the cache, or computed.
    there: u64,
    left: u64,
    /// How many of these the present step computes.
    in_step: u64,
}

/// The prompts that one instance has begun.
pub(super) struct Chunks {
    cost: PrefillCost,
    budget_tokens: u64,
    prompts: VecDeque<Prompt>,
}

impl Chunks {
    pub(super) fn new(cost: PrefillCost, budget_tokens: u32) -> Self {
        Self { cost, budget_tokens: budget_tokens.into(), prompts: VecDeque::new() }
    }

    /// Takes a prompt on. The last token is computed always: the first of the answer comes out of it.
    pub(super) fn begin(&mut self, cached: u64, tokens: u64) {
        let there = cached.min(tokens.saturating_sub(1));
        self.prompts.push_back(Prompt { there, left: tokens.max(1) - there, in_step: 0 });
    }

    /// Whether the budget leaves tokens to prompts that have not begun, beside a batch of so many sequences.
    pub(super) fn has_room(&self, sequences: usize) -> bool {
        self.for_prompts(sequences) > self.prompts.iter().map(|prompt| prompt.left).sum()
    }

    fn for_prompts(&self, sequences: usize) -> u64 {
        self.budget_tokens.saturating_sub(sequences as u64).max(1)
    }

    /// What the step that begins now computes of prompts; asked again before time goes on, it may compute more.
    pub(super) fn step(&mut self, sequences: usize) -> Option<Chunk> {
        let mut left = self.for_prompts(sequences);
        let (fixed_ms, mut ms) = (f64::from(self.cost.fixed_ms), 0.0);
        for prompt in &mut self.prompts {
            prompt.in_step = prompt.left.min(left);
            left -= prompt.in_step;
            if prompt.in_step > 0 {
                ms += self.cost.prefill_ms(prompt.there, prompt.in_step) - fixed_ms;
            }
        }
        self.is_under_way().then_some(Chunk { fixed_ms, ms })
    }

    /// Whether a step that computes something has not ended. The first prompt has a part in each.
    pub(super) fn is_under_way(&self) -> bool {
        self.prompts.front().is_some_and(|prompt| prompt.in_step > 0)
    }

    /// The step is done. Returns how many prompts at the head of the queue are computed with it.
    pub(super) fn end_step(&mut self) -> usize {
        for prompt in &mut self.prompts {
            prompt.there += prompt.in_step;
            prompt.left -= std::mem::take(&mut prompt.in_step);
        }
        let computed = self.prompts.iter().take_while(|prompt| prompt.left == 0).count();
        self.prompts.drain(..computed);
        computed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: PrefillCost = PrefillCost { fixed_ms: 10.0, ms_per_token: 1.0, ms_per_pair: 0.01 };

    #[test]
    fn a_prompt_in_parts_costs_what_it_costs_in_one() {
        for (cached, tokens) in [(0, 1_000), (512, 1_000), (1_000, 1_000), (0, 1), (7, 100)] {
            let mut chunks = Chunks::new(COST, 64);
            chunks.begin(cached, tokens);
            let (mut ms, mut steps) = (0.0, 0);
            loop {
                ms += chunks.step(0).unwrap().ms;
                steps += 1;
                if chunks.end_step() == 1 {
                    break;
                }
            }
            let computed = (tokens - cached).max(1);
            assert_eq!(steps, computed.div_ceil(64), "{cached} of {tokens}");
            let whole = COST.prefill_ms(tokens - computed, computed) - 10.0;
            assert!((ms - whole).abs() < 1e-6, "{ms} {whole}");
        }
    }

    #[test]
    fn the_batch_comes_first_and_short_prompts_share_a_step() {
        let mut chunks = Chunks::new(COST, 100);
        assert_eq!((chunks.step(7), chunks.has_room(99), chunks.is_under_way()), (None, true, false));
        (0..3).for_each(|_| chunks.begin(0, 30));
        assert!(chunks.has_room(9) && !chunks.has_room(10) && !chunks.has_room(1_000));
        // 60 tokens: the first two.
        let two = 2.0 * (30.0 + 0.01 * 30.0 * 15.0);
        let chunk = chunks.step(40).unwrap();
        assert!((chunk.ms - two).abs() < 1e-6 && chunk.fixed_ms == 10.0, "{chunk:?}");
        assert_eq!(chunks.end_step(), 2);
        assert_eq!(chunks.end_step(), 0, "no step is under way");
        // However large the batch is, it goes on, a token at a time.
        let steps = (0..30).filter(|_| chunks.step(1_000).is_some() && chunks.end_step() == 1).count();
        assert_eq!((steps, chunks.step(0)), (1, None));
    }
}
