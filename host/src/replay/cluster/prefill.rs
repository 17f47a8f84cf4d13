//! The prefill half of one instance: a queue, a pool of blocks, and the cost of what is computed.

use super::super::pool::{Counts, Pool, Touch};
use super::chunks::Chunks;
use super::{Error, Faults, Setup};
use crate::fleet::PrefillCost;
use crate::policy::evictor::EvictorEngine;
use crate::policy::{Fault, SlotKind};
use std::collections::VecDeque;

/// A prompt in the queue.
struct Queued {
    request: u64,
    /// Its prefix is on its way.
    fetching: bool,
}

pub(super) struct Prefill<'e> {
    cost: PrefillCost,
    block_size_tokens: u32,
    pool: Pool<'e>,
    queue: VecDeque<Queued>,
    /// How many at the head of the queue are being computed.
    begun: usize,
    /// `None` means that prompts are computed one at a time and in one go.
    chunks: Option<Chunks>,
    busy_ms: f64,
    /// When what is computed will be done.
    ends_ms: f64,
}

/// What a prompt whose computation begins finds.
pub(super) struct Start {
    /// Leading blocks that are not computed.
    pub(super) found_blocks: usize,
    /// How many of these were fetched for it.
    pub(super) fetched_blocks: usize,
    /// `None` means that it is computed in chunks.
    pub(super) ms: Option<f64>,
}

impl<'e> Prefill<'e> {
    /// `chunks`: whether the instance computes prompts in those, if the setup says so.
    pub(super) fn new(
        setup: &Setup,
        evictor: &'e mut dyn EvictorEngine,
        chunks: bool,
    ) -> Result<Self, Error> {
        let tokens = Some(setup.chunk_tokens).filter(|&tokens| chunks && tokens > 0);
        let pool = Pool::of_blocks(evictor, setup.pool_blocks, setup.block_size_tokens)?.telling_evictions();
        Ok(Self {
            cost: setup.prefill_cost,
            block_size_tokens: setup.block_size_tokens,
            pool,
            queue: VecDeque::new(),
            begun: 0,
            chunks: tokens.map(|tokens| Chunks::new(setup.prefill_cost, tokens)),
            busy_ms: 0.0,
            ends_ms: 0.0,
        })
    }

    pub(super) fn arrive(&mut self, request: u64, fetching: bool) {
        self.queue.push_back(Queued { request, fetching });
    }

    /// Another instance reads leading blocks of `chain`, which counts as a use here. Returns how many there are, at most `wanted`.
    pub(super) fn lend(&mut self, chain: &[u64], wanted: usize, touch: Touch) -> usize {
        let there = self.pool.prefix(chain).min(wanted);
        self.pool.use_chain(&chain[..there], touch);
        there
    }

    /// Leading blocks of `chain` that are here.
    pub(super) fn prefix(&self, chain: &[u64]) -> usize {
        self.pool.prefix(chain)
    }

    pub(super) fn holds(&self, block: u64) -> bool {
        self.pool.holds(block)
    }

    pub(super) fn fetched(&mut self, request: u64) {
        if let Some(queued) = self.queue.iter_mut().find(|queued| queued.request == request) {
            queued.fetching = false;
        }
    }

    /// The prompt that can be begun now, beside a batch of so many sequences.
    pub(super) fn ready(&self, sequences: usize) -> Option<u64> {
        let room = self.chunks.as_ref().map_or(self.begun == 0, |chunks| chunks.has_room(sequences));
        self.queue.get(self.begun).filter(|next| room && !next.fetching).map(|next| next.request)
    }

    pub(super) fn chunks(&mut self) -> Option<&mut Chunks> {
        self.chunks.as_mut()
    }

    /// Begins to compute the prompt that is ready. What was fetched continues the prefix that was here when it was decided:
    /// if some of that has gone, the rest is of no use.
    pub(super) fn start(
        &mut self,
        chain: &[u64],
        own_blocks: usize,
        fetched_blocks: usize,
        prompt_tokens: u64,
        now_ms: f64,
    ) -> Start {
        self.begun += 1;
        let here = self.pool.prefix(chain);
        let with_fetched = if here >= own_blocks { own_blocks + fetched_blocks } else { 0 };
        let found_blocks = here.max(with_fetched);
        let cached = (found_blocks as u64 * u64::from(self.block_size_tokens)).min(prompt_tokens);
        let ms = match &mut self.chunks {
            Some(chunks) => {
                chunks.begin(cached, prompt_tokens);
                None
            }
            None => {
                let ms = self.cost.prefill_ms(cached, prompt_tokens - cached);
                self.busy_ms += ms;
                self.ends_ms = now_ms + ms;
                Some(ms)
            }
        };
        Start { found_blocks, fetched_blocks: found_blocks - here, ms }
    }

    /// Takes the head of the queue out, once it is computed.
    pub(super) fn end(&mut self) -> u64 {
        self.begun -= 1;
        self.queue.pop_front().expect("what is computed is in the queue").request
    }

    /// Makes a prompt's blocks resident. Returns what was evicted for them, and how many of them fit.
    pub(super) fn keep(&mut self, chain: &[u64], touch: Touch) -> (Vec<u64>, usize) {
        self.pool.use_chain(chain, touch);
        (self.pool.take_evicted(), chain.len().min(self.pool.capacity_blocks()))
    }

    pub(super) fn waiting(&self) -> usize {
        self.queue.len() - self.begun
    }

    /// Time at work, with all of what is computed now in one go.
    pub(super) fn busy_ms(&self) -> f64 {
        self.busy_ms
    }

    /// How much of that is still to come.
    pub(super) fn ahead_ms(&self, now_ms: f64) -> f64 {
        (self.ends_ms - now_ms).max(0.0)
    }
}

/// What the evictor did in all pools together that it must not do.
pub(super) fn faults<'a, 'e: 'a>(name: &str, pools: impl Iterator<Item = &'a Prefill<'e>>) -> Option<Faults> {
    let mut sum = Faults {
        slot: SlotKind::Evictor.as_str(),
        policy: name.to_owned(),
        traps: 0,
        deadline_misses: 0,
        invalid_answers: 0,
        fallbacks: 0,
        learner_faults: 0,
    };
    for Prefill { pool, .. } in pools {
        let Counts { fallback_evictions, invalid_victims, fault, .. } = pool.counts();
        match fault {
            Some(Fault::Deadline(_) | Fault::Starved(_)) => sum.deadline_misses += 1,
            Some(Fault::Invalid(_)) => sum.invalid_answers += 1,
            Some(_) => sum.traps += 1,
            None => {}
        }
        sum.invalid_answers += invalid_victims;
        sum.fallbacks += fallback_evictions;
    }
    sum.any().then_some(sum)
}
