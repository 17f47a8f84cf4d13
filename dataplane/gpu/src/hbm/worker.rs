//! The thread that reads from the HBM tier, and what both have: batches in, completions out.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use super::{NAME, Shared};
use crate::memory::{CudaError, DeviceRange, Download, Lane};
use kvasir_protocol::block::{BlockKey, checksum};
use kvasir_store::resident::Block;
use kvasir_store::store::{Cancelled, Completion, Get, GetDone, Loaded, TierError};

/// Bytes that are copied between two checks whether the caller changed its mind.
const STEP_BYTES: u64 = 64 << 20;

/// A batch, and who waits for it.
pub(super) struct Job<T, D> {
    pub(super) batch: Vec<T>,
    pub(super) completion: Completion<Vec<D>>,
}

/// What works one direction off.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) lane: Lane,
}

impl Worker {
    /// Runs until nobody can send any more.
    pub(super) fn get_all(mut self, jobs: Receiver<Job<Get, GetDone>>) {
        for Job { mut batch, completion } in jobs {
            let mut done = Vec::with_capacity(batch.len());
            while !batch.is_empty() {
                let rest = batch.split_off(step(batch.iter().map(|get| get.buffer.len() as u64)));
                let outcomes = self.get_step(&mut batch, &completion.cancelled);
                let buffers = batch.into_iter().map(|get| get.buffer);
                done.extend(buffers.zip(outcomes).map(|(buffer, outcome)| GetDone { buffer, outcome }));
                batch = rest;
            }
            completion.done(done);
        }
    }

    fn get_step(
        &mut self,
        gets: &mut [Get],
        cancelled: &Cancelled,
    ) -> Vec<Result<Option<Loaded>, TierError>> {
        if cancelled.is_set() {
            return vec![Err(TierError::Cancelled); gets.len()];
        }
        let blocks: Vec<_> = gets.iter().map(|get| self.shared.resident.find(get.key)).collect();
        let mut outcomes = Vec::with_capacity(gets.len());
        let mut downloads = Vec::new();
        for (get, block) in gets.iter_mut().zip(&blocks) {
            outcomes.push(match block {
                None => Ok(None),
                Some(block) => get.target(block.loaded.meta.size).map(|to| {
                    downloads.push(Download { from: &block.bytes, to });
                    Some(block.loaded)
                }),
            });
        }
        let copied = self.lane.download(&mut downloads);
        for ((outcome, get), block) in outcomes.iter_mut().zip(gets).zip(blocks) {
            match (&*outcome, block, &copied) {
                (Ok(None), ..) => self.shared.counters.miss(),
                (Ok(Some(_)), Some(block), Ok(())) => *outcome = Ok(self.verify(get, &block)),
                (Ok(Some(_)), _, Err(error)) => *outcome = Err(self.failed("read", get.key, error)),
                _ => {}
            }
        }
        outcomes
    }

    /// A block as it was stored, or none, and it leaves the tier.
    fn verify(&self, get: &Get, block: &Arc<Block<DeviceRange>>) -> Option<Loaded> {
        let Loaded { meta, checksum: expected } = block.loaded;
        let intact = get.buffer.bytes().get(..meta.size as usize).map(checksum) == Some(expected);
        if intact {
            self.shared.counters.hit(meta.size);
        } else {
            self.shared.counters.corrupt();
            self.shared.resident.remove_this(block);
        }
        intact.then_some(block.loaded)
    }

    pub(super) fn failed(&self, step: &'static str, key: BlockKey, error: &CudaError) -> TierError {
        self.shared.counters.io_error();
        TierError::Io { tier: NAME, step, key, reason: error.to_string(), retryable: false }
    }
}

/// How many blocks of these sizes make a step: at least one.
pub(super) fn step(sizes: impl Iterator<Item = u64>) -> usize {
    let mut left = STEP_BYTES;
    let fitting = sizes.take_while(|&size| {
        let fits = left >= size;
        left = left.saturating_sub(size);
        fits
    });
    fitting.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_one_block_or_as_many_as_fit() {
        for (sizes, expected) in [
            (vec![1, 2, 3], 3),
            (vec![STEP_BYTES, 1], 1),
            (vec![STEP_BYTES + 1, 1], 1),
            (vec![STEP_BYTES / 2, STEP_BYTES / 2, 1], 2),
            (vec![0, u64::MAX], 1),
        ] {
            assert_eq!(step(sizes.iter().copied()), expected, "{sizes:?}");
        }
    }
}
