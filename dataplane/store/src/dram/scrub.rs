//! One step of the search for changed bytes; [`Scrubber`](crate::scrub::Scrubber) goes round.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{DramStore, SHARDS, Verify, split};
use crate::metrics::ScrubMetrics;

const SLOTS_PER_STEP: u32 = 1 << 16;

/// What one step of a scrub did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    pub bytes: u64,
    pub blocks: u64,
    /// Blocks dropped because their bytes no longer matched their checksums.
    pub dropped: u64,
    /// The slot to continue from. `None` means that every block was looked at.
    pub next: Option<u32>,
}

#[derive(Default)]
pub(super) struct ScrubCounts {
    bytes: AtomicU64,
    blocks: AtomicU64,
    dropped: AtomicU64,
    passes: AtomicU64,
    /// When the last full pass ended, + 1; 0 = never.
    last_pass: AtomicU64,
}

impl DramStore {
    /// Compares resident blocks with their checksums, from slot `from` on, until more than `budget` bytes are read or
    /// 65,536 slots are done.
    pub fn scrub(self: &Arc<Self>, from: u32, budget: u64, now_ms: u64) -> Scrubbed {
        let mut done = Scrubbed::default();
        let records = (0..SHARDS).map(|shard| self.read(shard).records.len()).max().unwrap_or(0);
        let end = (records * SHARDS) as u32;
        for slot in from..end {
            if done.bytes > budget || slot - from == SLOTS_PER_STEP {
                done.next = Some(slot);
                break;
            }
            let (local, shard) = split(slot);
            let block = {
                let guard = self.read(shard);
                let record = guard.records.get(local as usize).filter(|record| record.is_resident());
                record.map(|record| (guard.key(local), record.size))
            };
            let Some((key, size)) = block else { continue };
            done.bytes += u64::from(size);
            done.blocks += 1;
            done.dropped += u64::from(self.verify_one(key, now_ms) == Verify::Dropped);
        }
        let counts = &self.scrubs;
        counts.bytes.fetch_add(done.bytes, Ordering::Relaxed);
        counts.blocks.fetch_add(done.blocks, Ordering::Relaxed);
        counts.dropped.fetch_add(done.dropped, Ordering::Relaxed);
        if done.next.is_none() {
            counts.passes.fetch_add(1, Ordering::Relaxed);
            counts.last_pass.store(now_ms + 1, Ordering::Relaxed);
        }
        done
    }

    pub(super) fn scrub_metrics(&self) -> ScrubMetrics {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ScrubMetrics {
            bytes: read(&self.scrubs.bytes),
            blocks: read(&self.scrubs.blocks),
            dropped: read(&self.scrubs.dropped),
            passes: read(&self.scrubs.passes),
            last_pass_ms: read(&self.scrubs.last_pass).checked_sub(1),
        }
    }
}
