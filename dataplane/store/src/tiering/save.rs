//! What a host does with its pool before it stops: blocks that only the pool has go to a tier that outlives it.
//!
//! Most of them were never offered to a tier, because room in the pool is what kept them. The most valuable go first: by
//! uses, and of equally used ones those nearer to the root of their chain, without which the others are worth nothing,
//! then by their last use. No block of the tier makes way for them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::moves::Moving;
use super::{Level, Reach, Tiering};
use crate::dram::BlockStat;
use crate::store::{Put, Stored};
use kvasir_memory::buffer::Source;
use kvasir_os::time::Instant;
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta};

/// The most blocks considered, about 48 B each while it lasts.
const BLOCKS_MAX: usize = 1 << 20;
/// Blocks listed at once.
const LIST_STEP: usize = 1024;
/// Bytes of one put: enough for any device to run at full speed.
const BATCH_BYTES: u64 = 32 << 20;

/// What became of blocks that only the pool had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    pub blocks: u64,
    pub bytes: u64,
    /// Blocks for which there was no time or no room, or which the tier refused.
    pub left: u64,
}

/// Larger is worth more.
type Worth = (u32, Reverse<u32>, u64);

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    worth: Worth,
    key: BlockKey,
    size: u32,
}

impl Tiering {
    /// Copies blocks that would end with this process to the nearest tier of this host that outlives it, until it is full or
    /// `until` passes. They are durable after the next [`close`](Self::close).
    pub fn save(&self, until: Instant, now_ms: u64) -> Saved {
        let lasting = |level: &&Level| level.store.capabilities().durable && level.tier.takes_victims();
        let Some(level) = self.reach(Reach::Own).find(lasting) else { return Saved::default() };
        let (capabilities, stats) = (level.store.capabilities(), level.store.stats());
        let mut room =
            capabilities.capacity_bytes.map_or(u64::MAX, |max| max.saturating_sub(stats.block_bytes));
        let (candidates, mut left) = self.only_in_the_pool(until);
        let (mut saved, mut batch, mut bytes) = (Saved::default(), Vec::new(), 0);
        for candidate in candidates {
            let size = u64::from(candidate.size);
            if size > room || Instant::now() >= until {
                left += 1;
                continue;
            }
            (room, bytes) = (room - size, bytes + size);
            batch.push(candidate.key);
            if bytes >= BATCH_BYTES || batch.len() == BATCH_MAX {
                left += self.save_batch(level, &batch, until, now_ms, &mut saved);
                (batch, bytes) = (Vec::new(), 0);
            }
        }
        left += self.save_batch(level, &batch, until, now_ms, &mut saved);
        Saved { left, ..saved }
    }

    /// Blocks that no tier has that outlives this host, the most valuable first, and how many more there are.
    fn only_in_the_pool(&self, until: Instant) -> (Vec<Candidate>, u64) {
        let (mut best, mut left) = (BinaryHeap::new(), 0);
        let mut from = Some(0);
        while let Some(slot) = from.filter(|_| Instant::now() < until) {
            let (found, next) = self.dram.list(slot, LIST_STEP);
            from = next;
            for stat in self.not_below(found) {
                let worth = (stat.uses, Reverse(stat.depth), stat.used_ms);
                best.push(Reverse(Candidate { worth, key: stat.key, size: stat.size }));
                if best.len() > BLOCKS_MAX {
                    best.pop();
                    left += 1;
                }
            }
        }
        // In the order of `Reverse`, which is the most valuable first.
        (best.into_sorted_vec().into_iter().map(|Reverse(candidate)| candidate).collect(), left)
    }

    /// Leaves out what a lasting tier has, and what has a time to live of its own: nobody would end it there.
    fn not_below(&self, found: Vec<BlockStat>) -> impl Iterator<Item = BlockStat> {
        let keys: Vec<BlockKey> = found.iter().map(|stat| stat.key).collect();
        let mut below = vec![false; keys.len()];
        for level in self.reach(Reach::Here).filter(|level| level.store.capabilities().durable) {
            below.iter_mut().zip(level.store.exists(&keys)).for_each(|(below, there)| *below |= there);
        }
        let only = found.into_iter().zip(below).filter(|(stat, below)| !below && stat.expires_ms.is_none());
        only.map(|(stat, _)| stat)
    }

    /// Puts some blocks into the tier. Returns how many of them are not there.
    fn save_batch(
        &self,
        level: &Level,
        keys: &[BlockKey],
        until: Instant,
        now_ms: u64,
        saved: &mut Saved,
    ) -> u64 {
        // Before the hold: a caller that removes the block from here on finds either it or the move.
        let mut moving: Vec<Moving> = keys.iter().map(|&key| self.moves.begin(key)).collect();
        let stats = self.dram.stat(keys).unwrap_or_default();
        let put = |(stat, moving): (&Option<BlockStat>, &mut Moving)| {
            let stat = stat.as_ref()?;
            let BlockStat { key, parent, depth, class, tenant, .. } = *stat;
            let held = self.dram.hold(key, class, now_ms).filter(|_| moving.goes_down())?;
            let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms: 0, size: held.size };
            Some(Put { meta, checksum: held.checksum, buffer: Source::from(held) })
        };
        let puts: Vec<Put> = stats.iter().zip(&mut moving).filter_map(put).collect();
        let sizes: Vec<u32> = puts.iter().map(|put| put.meta.size).collect();
        let pending = level.store.put(puts);
        let done = match pending.wait_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(done) => done,
            Err(pending) => {
                // What is under way goes on, and keeps its memory until it is done.
                pending.cancel();
                return keys.len() as u64;
            }
        };
        let stored = done.iter().zip(sizes).filter(|(done, _)| done.outcome == Ok(Stored::Stored));
        let (mut blocks, mut bytes) = (0, 0);
        stored.for_each(|(_, size)| (blocks, bytes) = (blocks + 1, bytes + u64::from(size)));
        (saved.blocks, saved.bytes) = (saved.blocks + blocks, saved.bytes + bytes);
        let mut removed: Vec<&mut Moving> =
            moving.iter_mut().filter_map(|moving| (!moving.has_come_down()).then_some(moving)).collect();
        if !removed.is_empty() {
            let pending = level.store.remove(removed.iter().map(|moving| moving.key()).collect());
            let gone = pending.wait_timeout(until.saturating_duration_since(Instant::now()));
            let taken_back =
                removed.iter_mut().zip(gone.unwrap_or_default()).filter(|(_, gone)| gone.is_ok());
            taken_back.for_each(|(moving, _)| moving.is_taken_back());
        }
        keys.len() as u64 - blocks
    }
}
