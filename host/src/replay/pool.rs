//! Dense block slots behind an evictor: which blocks are resident, without their bytes.
//!
//! A request uses its blocks in order. Hits are the longest resident prefix before the request changes anything;
//! resident blocks behind a gap count as misses and are refreshed. Blocks of the request itself are in flight and not
//! evicted. A request longer than the pool inserts only its head. A block is known by the hash of its whole prefix.

use super::trace::{BLOCK_SIZE_TOKENS, MAX_BLOCK_SIZE_TOKENS};
use crate::policy::Fault;
use crate::policy::evictor::EvictorEngine;
use hashbrown::HashMap;
use kvasir_policy::evictor::{
    EVENT, EVENTS_MAX, Event, EventKind, Layout, NO_SLOT, TierRow, VICTIMS_MAX, Victim,
};
use kvasir_policy::list::{Lists, Walk};
use std::time::Instant;

/// Size that the evictor is told for a token: 320 KiB, a 70B model with grouped queries.
const TOKEN_BYTES: u32 = 320 * 1024;
/// How many selections of one request may contain invalid answers before the fallback decides.
const MAX_INVALID_ROUNDS: u32 = 8;
/// The most slots that a policy may be asked to hold (`open` in evictor.wit).
pub const MAX_CAPACITY_BLOCKS: u32 = 1 << 28;

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("capacity of {0} blocks is outside 1 to {MAX_CAPACITY_BLOCKS}")]
    Capacity(u32),
    #[error("the evictor failed to open a pool of {slots} slots: {fault}")]
    Open { slots: u32, fault: Fault },
}

/// # Errors
/// [`Error::Capacity`].
pub fn check_capacity(blocks: u32) -> Result<(), Error> {
    if (1..=MAX_CAPACITY_BLOCKS).contains(&blocks) { Ok(()) } else { Err(Error::Capacity(blocks)) }
}

/// What all uses by one request have in common.
#[derive(Clone, Copy, Debug)]
pub struct Touch {
    pub class: u16,
    pub time_ms: u64,
}

/// A block that a pool above dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    pub block: u64,
    /// The block before it in its chain.
    pub parent: Option<u64>,
    /// Its position in its chain.
    pub depth: u32,
    /// Class of the request that used it last.
    pub class: u16,
}

/// What happened in a pool so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub evictions: u64,
    /// Victims that the native fallback chose.
    pub fallback_evictions: u64,
    /// Victims that were free, foreign, named twice or too many; an answer refused as a whole counts as one.
    pub invalid_victims: u64,
    /// The failure after which the fallback decided alone.
    pub fault: Option<Fault>,
}

/// See the module documentation.
pub struct Pool<'e> {
    evictor: &'e mut dyn EvictorEngine,
    block_bytes: u32,
    /// Slots by the hash of a block's prefix.
    slot_of: HashMap<u64, u32>,
    /// The block that each slot holds.
    block_of: Vec<Option<u64>>,
    /// The last request that used each slot (from 1).
    used_by: Vec<u64>,
    /// The position in its chain of the block in each slot.
    depth_of: Vec<u32>,
    free: Vec<u32>,
    /// Least recently used first: the order in which the fallback takes slots.
    recency: Lists,
    walk: Walk,
    words: Vec<u32>,
    base_ms: u64,
    victims: Vec<Victim>,
    kept: Vec<u32>,
    /// Blocks that went since they were last asked for, if anybody asks.
    evicted: Option<Vec<u64>>,
    requests: u64,
    evictor_ns: u64,
    select_ns: hdrhistogram::Histogram<u64>,
    counts: Counts,
}

impl<'e> Pool<'e> {
    /// An empty pool of `capacity_blocks` of 512 tokens; opens the evictor.
    ///
    /// # Errors
    /// The capacity is out of range, or the evictor fails to open.
    pub fn new(evictor: &'e mut dyn EvictorEngine, capacity_blocks: u32) -> Result<Self, Error> {
        Self::of_blocks(evictor, capacity_blocks, BLOCK_SIZE_TOKENS)
    }

    /// The same with blocks of another size.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_blocks(
        evictor: &'e mut dyn EvictorEngine,
        capacity_blocks: u32,
        block_size_tokens: u32,
    ) -> Result<Self, Error> {
        check_capacity(capacity_blocks)?;
        let block_bytes = block_size_tokens.min(MAX_BLOCK_SIZE_TOKENS) * TOKEN_BYTES;
        open(evictor, capacity_blocks, block_bytes)
            .map_err(|fault| Error::Open { slots: capacity_blocks, fault })?;
        let slots = capacity_blocks as usize;
        Ok(Self {
            evictor,
            block_bytes,
            slot_of: HashMap::with_capacity(slots.min(1 << 20)),
            block_of: vec![None; slots],
            used_by: vec![0; slots],
            depth_of: vec![0; slots],
            free: (0..capacity_blocks).rev().collect(),
            recency: Lists::new(capacity_blocks, 1),
            walk: Walk::default(),
            words: Vec::with_capacity(EVENTS_MAX * EVENT),
            base_ms: 0,
            victims: Vec::new(),
            kept: Vec::new(),
            evicted: None,
            requests: 0,
            evictor_ns: 0,
            select_ns: histogram(),
            counts: Counts::default(),
        })
    }

    /// The same, which tells what it evicted: see [`Self::take_evicted`].
    #[must_use]
    pub fn telling_evictions(self) -> Self {
        Self { evicted: Some(Vec::new()), ..self }
    }

    /// Leading blocks of `chain` that are resident.
    pub fn prefix(&self, chain: &[u64]) -> usize {
        chain.iter().take_while(|&&block| self.holds(block)).count()
    }

    pub fn holds(&self, block: u64) -> bool {
        self.slot_of.contains_key(&block)
    }

    pub fn capacity_blocks(&self) -> usize {
        self.block_of.len()
    }

    pub fn resident_blocks(&self) -> usize {
        self.slot_of.len()
    }

    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// One request uses its blocks, first block first, and leaves their head resident; returns its prefix hits.
    pub fn use_chain(&mut self, chain: &[u64], touch: Touch) -> usize {
        self.requests += 1;
        let hits = self.prefix(chain);
        let head = &chain[..chain.len().min(self.block_of.len())];
        let missing = self.refresh(head, touch);
        if missing > self.free.len() {
            self.evict(missing - self.free.len(), touch);
        }
        self.insert(head, touch);
        hits
    }

    /// One request uses those of its blocks that are here. Nothing is let in.
    pub fn use_resident(&mut self, chain: &[u64], touch: Touch) {
        self.requests += 1;
        self.refresh(chain, touch);
    }

    /// Lets in what a pool above dropped, most expendable first, and what is not here already; if that is more than fits,
    /// the least expendable. Returns how many blocks came.
    pub fn take_in(&mut self, mut dropped: Vec<Dropped>, time_ms: u64) -> usize {
        self.requests += 1;
        dropped.retain(|block| !self.holds(block.block));
        dropped.drain(..dropped.len().saturating_sub(self.block_of.len()));
        if dropped.len() > self.free.len() {
            self.evict(dropped.len() - self.free.len(), Touch { class: 0, time_ms });
        }
        dropped.sort_by_key(|block| block.depth); // parents first
        for &Dropped { block, parent, depth, class } in &dropped {
            let parent = parent.and_then(|parent| self.slot_of.get(&parent).copied()).unwrap_or(NO_SLOT);
            self.let_in(block, parent, depth, Touch { class, time_ms });
        }
        dropped.len()
    }

    /// The blocks evicted since the last call; empty if the pool does not tell.
    pub fn take_evicted(&mut self) -> Vec<u64> {
        self.evicted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Time inside the evictor, events and learning included, ns.
    pub fn evictor_ns(&self) -> u64 {
        self.evictor_ns
    }

    /// The same per eviction that it chose itself, ns.
    pub fn evict_ns_mean(&self) -> f64 {
        let its_own = self.counts.evictions - self.counts.fallback_evictions;
        self.evictor_ns as f64 / its_own.max(1) as f64
    }

    /// Time per victim, over the selecting calls, ns.
    pub fn select_ns(&self) -> &hdrhistogram::Histogram<u64> {
        &self.select_ns
    }

    /// Marks the resident blocks as used; returns how many are missing.
    fn refresh(&mut self, head: &[u64], touch: Touch) -> usize {
        let mut missing = 0;
        for block in head {
            match self.slot_of.get(block) {
                None => missing += 1,
                Some(&slot) => {
                    self.used_by[slot as usize] = self.requests;
                    self.event(EventKind::Hit, slot, 1, touch);
                }
            }
        }
        missing
    }

    /// Frees `need` slots: those that the policy gives, and the rest by the fallback.
    ///
    /// There are always that many: a request's blocks do not outnumber the slots.
    fn evict(&mut self, need: usize, touch: Touch) {
        let mut evicted = 0;
        let mut invalid_rounds = 0;
        while evicted < need && invalid_rounds < MAX_INVALID_ROUNDS {
            let want = (need - evicted).min(VICTIMS_MAX as usize) as u32;
            let (kept_before, invalid_before) = (self.kept.len(), self.counts.invalid_victims);
            if !self.select(touch.time_ms, want) {
                break;
            }
            let answered = self.victims.len();
            evicted += self.accept(want as usize);
            if self.counts.invalid_victims > invalid_before {
                invalid_rounds += 1;
            } else if answered < want as usize && self.kept.len() == kept_before {
                break; // it has no more
            }
        }
        self.return_kept(touch);
        while evicted < need {
            evicted += usize::from(self.evict_least_recent(touch));
        }
    }

    /// Hands the events over and asks for victims. Returns false if the policy gave none.
    fn select(&mut self, now_ms: u64, want: u32) -> bool {
        self.flush();
        self.victims.clear();
        if self.counts.fault.is_some() {
            return false;
        }
        let start = Instant::now();
        let answer = self.evictor.select_victims(now_ms, want, &mut self.victims);
        let ns = start.elapsed().as_nanos() as u64;
        self.evictor_ns += ns;
        match answer {
            Ok(()) => {}
            Err(Fault::Invalid(_)) => {
                self.counts.invalid_victims += 1;
                return false;
            }
            Err(fault) => {
                self.counts.fault = Some(fault);
                return false;
            }
        }
        let count = self.victims.len() as u64;
        let Some(ns_each) = ns.checked_div(count) else { return false };
        self.select_ns.saturating_record_n(ns_each.max(1), count);
        true
    }

    /// Evicts the valid victims, at most `limit`; sets aside those in flight.
    fn accept(&mut self, limit: usize) -> usize {
        let mut evicted = 0;
        for i in 0..self.victims.len() {
            let slot = self.victims[i].slot;
            let resident = self.block_of.get(slot as usize).is_some_and(Option::is_some);
            if !resident || self.kept.contains(&slot) || evicted == limit {
                self.counts.invalid_victims += 1;
            } else if self.used_by[slot as usize] == self.requests {
                self.kept.push(slot);
            } else {
                self.vacate(slot);
                evicted += 1;
            }
        }
        evicted
    }

    /// Tells the policy which victims stay, in the order of the request.
    fn return_kept(&mut self, touch: Touch) {
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort_unstable_by_key(|&slot| self.depth_of[slot as usize]);
        for &slot in &kept {
            self.event(EventKind::Keep, slot, 1, touch);
        }
        kept.clear();
        self.kept = kept;
    }

    fn evict_least_recent(&mut self, touch: Touch) -> bool {
        let Some(slot) = self.recency.front(0) else { unreachable!("fewer blocks than slots are in flight") };
        if self.used_by[slot as usize] == self.requests {
            self.recency.push_back(0, slot);
            return false;
        }
        self.event(EventKind::Remove, slot, 0, touch);
        self.vacate(slot);
        self.counts.fallback_evictions += 1;
        true
    }

    fn vacate(&mut self, slot: u32) {
        if let Some(block) = self.block_of[slot as usize].take() {
            self.slot_of.remove(&block);
            if let Some(evicted) = &mut self.evicted {
                evicted.push(block);
            }
        }
        self.recency.remove(slot);
        self.free.push(slot);
        self.counts.evictions += 1;
    }

    fn insert(&mut self, head: &[u64], touch: Touch) {
        let mut parent = NO_SLOT;
        for (depth, &block) in head.iter().enumerate() {
            let slot = match self.slot_of.get(&block) {
                Some(&slot) => slot,
                None => self.let_in(block, parent, depth as u32, touch),
            };
            parent = slot;
        }
    }

    /// Takes a free slot, of which there is one for every missing block.
    fn let_in(&mut self, block: u64, parent: u32, depth: u32, touch: Touch) -> u32 {
        let slot = self.free.pop().expect("evict frees a slot for every missing block");
        self.slot_of.insert(block, slot);
        self.block_of[slot as usize] = Some(block);
        self.used_by[slot as usize] = self.requests;
        self.depth_of[slot as usize] = depth;
        self.event(EventKind::Insert, slot, parent, touch);
        slot
    }

    /// Queues an event for the policy and updates the fallback's order.
    fn event(&mut self, kind: EventKind, slot: u32, parent_or_uses: u32, touch: Touch) {
        if self.words.is_empty() {
            self.base_ms = touch.time_ms;
        }
        let event = Event {
            kind,
            replayed: false,
            class: touch.class,
            slot,
            parent_or_uses,
            depth: self.depth_of[slot as usize],
            size_bytes: self.block_bytes,
            time_ms: touch.time_ms,
            identity: self.block_of[slot as usize].unwrap_or(0),
            tenant: 0,
        };
        event.encode(self.base_ms, &mut self.words);
        if matches!(kind, EventKind::Insert | EventKind::Hit) {
            let at = self.walk.shallower(&event);
            if !at.is_some_and(|at| self.recency.insert_before(at, slot)) {
                self.recency.push_back(0, slot);
            }
        }
        if self.words.len() >= EVENTS_MAX * EVENT {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if !self.words.is_empty() && self.counts.fault.is_none() {
            let start = Instant::now();
            let answer = self.evictor.on_events(self.base_ms, &self.words);
            self.evictor_ns += start.elapsed().as_nanos() as u64;
            self.counts.fault = answer.err();
        }
        self.words.clear();
    }
}

/// For times from 1 ns to a minute.
pub(super) fn histogram() -> hdrhistogram::Histogram<u64> {
    let histogram = hdrhistogram::Histogram::new_with_bounds(1, 60_000_000_000, 3);
    histogram.expect("constant bounds of a histogram are valid")
}

/// The pool that is replayed, full as it is after a while, is all the evictor hears of: there is no tier below.
fn open(evictor: &mut dyn EvictorEngine, slots: u32, block_bytes: u32) -> Result<(), Fault> {
    evictor.open(&Layout::of(slots).encode())?;
    let mib = (u64::from(slots) * u64::from(block_bytes)) as f32 / (1 << 20) as f32;
    let dram = TierRow {
        tier: 2,
        capacity_mib: mib,
        used_mib: mib,
        load_fixed_ms: 0.0,
        load_ms_per_mib: 0.0,
        takes_copies: true,
    };
    evictor.update_tiers(&dram.encode())
}
