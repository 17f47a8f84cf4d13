//! Continuous batching on one instance: all sequences advance by a token per step, and join and leave between steps.
//!
//! While the batch does not change, the time of many steps is a sum that needs no loop, so the work is in the number of
//! requests and not of their tokens.

use super::chunks::Chunk;
use crate::fleet::DecodeCost;
use std::collections::VecDeque;

/// A shorter step would let virtual time stand still.
const STEP_MIN_MS: f64 = 1e-2;
/// Events happen at whole microseconds, a little after the end of the step that they are about.
const EVENT_MS: f64 = 2e-3;
/// What floats may lose: a step that ends so little after a moment has ended by then.
pub(super) const ROUNDING_MS: f64 = 5e-4;

/// A request in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) request: u64,
    /// Tokens that it still has to decode, 1 or more.
    pub(super) left: u64,
    /// Tokens decoded since somebody was told.
    pub(super) untold: u64,
    context_tokens: u64,
    blocks: u32,
}

/// A sequence whose last token came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) request: u64,
    /// Tokens decoded since somebody was told.
    pub(super) untold: u64,
}

/// A request that waits for the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) request: u64,
    /// Tokens to decode, 1 or more.
    pub(super) tokens: u64,
    pub(super) context_tokens: u64,
    /// Memory that it takes to its end.
    pub(super) blocks: u32,
}

/// The batch of one instance. Times in ms, as fine as a float has them.
#[derive(Debug)]
pub(super) struct Decode {
    cost: DecodeCost,
    capacity_blocks: u32,
    used_blocks: u32,
    batch: Vec<Sequence>,
    /// First come, first served: one that does not fit holds up those behind it.
    waiting: VecDeque<Arrival>,
    context_tokens: u64,
    /// The last end of a step, or when the batch was empty.
    boundary_ms: f64,
    /// Whether it stands still, because the instance computes a prompt.
    halted: bool,
    /// What the step under way computes of prompts.
    beside: Option<Chunk>,
    busy_ms: f64,
}

impl Decode {
    pub(super) fn new(cost: DecodeCost, capacity_blocks: u32) -> Self {
        Self {
            cost,
            capacity_blocks,
            used_blocks: 0,
            batch: Vec::new(),
            waiting: VecDeque::new(),
            context_tokens: 0,
            boundary_ms: 0.0,
            halted: false,
            beside: None,
            busy_ms: 0.0,
        }
    }

    pub(super) fn arrive(&mut self, arrival: Arrival) {
        self.waiting.push_back(arrival);
    }

    /// Takes every step that ends at `now_ms` or before. Appends those whose last token came with the last of them.
    pub(super) fn advance(&mut self, now_ms: f64, finished: &mut Vec<Done>) {
        if self.halted || self.is_idle() {
            self.boundary_ms = self.boundary_ms.max(now_ms);
            return;
        }
        let steps = self.steps_within(now_ms - self.boundary_ms);
        if steps == 0 {
            return;
        }
        let spent_ms = self.time_of(steps);
        self.beside = None;
        self.boundary_ms += spent_ms;
        self.busy_ms += spent_ms;
        self.context_tokens += steps * self.batch.len() as u64;
        for sequence in &mut self.batch {
            sequence.left -= steps;
            sequence.untold += steps;
            sequence.context_tokens += steps;
        }
        let (context_tokens, used_blocks) = (&mut self.context_tokens, &mut self.used_blocks);
        self.batch.retain(|sequence| {
            if sequence.left == 0 {
                *context_tokens -= sequence.context_tokens;
                *used_blocks -= sequence.blocks;
                finished.push(Done { request: sequence.request, untold: sequence.untold });
            }
            sequence.left > 0
        });
    }

    /// Whether the batch may change now, because no step is under way.
    pub(super) fn is_between_steps(&self, now_ms: f64) -> bool {
        self.halted || self.is_idle() || self.boundary_ms >= now_ms - EVENT_MS
    }

    fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.beside.is_none()
    }

    /// Has the step that begins compute parts of prompts as well; between steps only.
    pub(super) fn set_beside(&mut self, chunk: Option<Chunk>) {
        self.beside = chunk;
    }

    /// Whether the step under way computes parts of prompts.
    pub(super) fn has_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Lets in those that wait and fit; between steps only.
    pub(super) fn admit(&mut self) {
        while let Some(arrival) = self.waiting.front().copied().filter(|arrival| self.fits(arrival)) {
            self.waiting.pop_front();
            let Arrival { request, tokens, context_tokens, blocks } = arrival;
            self.used_blocks += blocks;
            self.context_tokens += context_tokens;
            self.batch.push(Sequence { request, left: tokens, untold: 0, context_tokens, blocks });
        }
    }

    /// One that is larger than the memory runs alone.
    fn fits(&self, arrival: &Arrival) -> bool {
        self.batch.is_empty() || self.used_blocks.saturating_add(arrival.blocks) <= self.capacity_blocks
    }

    /// Makes the batch stand still from now on, or go on.
    pub(super) fn set_halted(&mut self, halted: bool, now_ms: f64) {
        self.halted = halted;
        self.boundary_ms = self.boundary_ms.max(now_ms);
    }

    /// When the batch must be looked at next: at the end of this step if somebody waits for that, else when a sequence
    /// ends. `None` means that it is empty, or stands still.
    pub(super) fn next_ms(&self, somebody_waits: bool) -> Option<f64> {
        if self.halted || self.is_idle() {
            return None;
        }
        let could_join = self.waiting.front().is_some_and(|arrival| self.fits(arrival));
        let steps = if somebody_waits || could_join { 1 } else { self.steps_alike() };
        Some(self.boundary_ms + self.time_of(steps))
    }

    /// How long a step would take with everybody that waits, and one more with such a context, ms.
    pub(super) fn step_with_ms(&self, context_tokens: u64) -> f64 {
        let waiting: u64 = self.waiting.iter().map(|arrival| arrival.context_tokens).sum();
        let sequences = self.batch.len() + self.waiting.len() + 1;
        self.cost.step_ms(sequences as u32, self.context_tokens + waiting + context_tokens)
    }

    /// Tokens decoded by each sequence since the last call.
    pub(super) fn tell(&mut self, mut of: impl FnMut(u64, u64)) {
        for sequence in self.batch.iter_mut().filter(|sequence| sequence.untold > 0) {
            of(sequence.request, std::mem::take(&mut sequence.untold));
        }
    }

    pub(super) fn free_blocks(&self) -> u32 {
        self.capacity_blocks.saturating_sub(self.used_blocks)
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How many are in the batch.
    pub(super) fn sequences(&self) -> usize {
        self.batch.len()
    }

    /// Time spent in steps.
    pub(super) fn busy_ms(&self) -> f64 {
        self.busy_ms
    }

    /// Steps until a sequence ends, or prompts get on.
    fn steps_alike(&self) -> u64 {
        let fewest = self.batch.iter().map(|sequence| sequence.left).min();
        if self.beside.is_some() { 1 } else { fewest.unwrap_or(0) }
    }

    /// Each step is longer than the one before by the tokens that came.
    fn time_of(&self, steps: u64) -> f64 {
        let sequences = self.batch.len() as u32;
        let first = self.first_step_ms().max(STEP_MIN_MS);
        let growth = f64::from(self.cost.ms_per_context_token) * f64::from(sequences);
        let steps = steps as f64;
        first * steps + growth * (steps * (steps - 1.0) / 2.0)
    }

    /// Starting to compute, such as reading the weights, is done once for the batch and the prompts beside it.
    fn first_step_ms(&self) -> f64 {
        let batch_ms = self.cost.step_ms(self.batch.len() as u32, self.context_tokens);
        match self.beside {
            None => batch_ms,
            Some(Chunk { fixed_ms, ms }) if self.batch.is_empty() => fixed_ms + ms,
            Some(Chunk { fixed_ms, ms }) => {
                batch_ms + ms + (fixed_ms - f64::from(self.cost.fixed_ms)).max(0.0)
            }
        }
    }

    /// As many steps as end within `ms`, and no more than the shortest sequence needs.
    fn steps_within(&self, ms: f64) -> u64 {
        let (mut low, mut high) = (0, self.steps_alike());
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.time_of(middle) <= ms + ROUNDING_MS { low = middle } else { high = middle - 1 }
        }
        low
    }
}
