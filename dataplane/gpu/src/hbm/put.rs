//! The thread that stores into the HBM tier, and which blocks make room for others.

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};

use super::worker::{Job, Worker, step};
use super::{NAME, Shared};
use crate::memory::{DeviceRange, Upload};
use kvasir_memory::extents::{Extents, PAGE};
use kvasir_store::config::OnFull;
use kvasir_store::resident::Block;
use kvasir_store::store::{Cancelled, Loaded, Put, PutDone, Stored, TierError};

pub(super) struct Putter {
    worker: Worker,
    /// The blocks in the order in which they were stored, if they make room for others.
    oldest: Option<Oldest>,
}

impl Putter {
    pub(super) fn new(worker: Worker, on_full: OnFull) -> Self {
        Self { worker, oldest: (on_full == OnFull::Evict).then(Oldest::default) }
    }

    /// Runs until nobody can send any more.
    pub(super) fn run(mut self, jobs: Receiver<Job<Put, PutDone>>) {
        for Job { mut batch, completion } in jobs {
            let mut done = Vec::with_capacity(batch.len());
            while !batch.is_empty() {
                let rest = batch.split_off(step(batch.iter().map(|put| put.meta.size.into())));
                let outcomes = self.put_step(&batch, &completion.cancelled);
                let buffers = batch.into_iter().map(|put| put.buffer);
                done.extend(buffers.zip(outcomes).map(|(buffer, outcome)| PutDone { buffer, outcome }));
                batch = rest;
            }
            completion.done(done);
        }
    }

    fn put_step(&mut self, puts: &[Put], cancelled: &Cancelled) -> Vec<Result<Stored, TierError>> {
        if cancelled.is_set() {
            return vec![Err(TierError::Cancelled); puts.len()];
        }
        let mut outcomes = Vec::with_capacity(puts.len());
        let mut placed = Vec::new();
        for put in puts {
            outcomes.push(match self.place(put) {
                Ok(Some(range)) => {
                    placed.push((outcomes.len(), range));
                    Ok(Stored::Stored)
                }
                Ok(None) => Ok(Stored::AlreadyStored),
                Err(error) => Err(error),
            });
        }
        let uploads: Vec<_> = placed
            .iter()
            .filter_map(|(n, to)| puts[*n].bytes().ok().map(|from| Upload { from, to }))
            .collect();
        let copied = self.worker.lane.upload(&uploads);
        drop(uploads);
        for (n, range) in placed {
            outcomes[n] = match &copied {
                Ok(()) => Ok(self.publish(&puts[n], range)),
                Err(error) => Err(self.worker.failed("write", puts[n].meta.key, error)),
            };
        }
        outcomes
    }

    /// Memory for a block, or `None` if the tier holds it already.
    fn place(&mut self, put: &Put) -> Result<Option<DeviceRange>, TierError> {
        let shared = &self.worker.shared;
        put.check(NAME, shared.block_bytes_max())?;
        let (key, size) = (put.meta.key, u64::from(put.meta.size));
        if shared.resident.find(key).is_some() {
            return Ok(None);
        }
        if let Some(range) = shared.pool.allocate(size) {
            return Ok(Some(range));
        }
        let range = self.oldest.as_mut().and_then(|oldest| oldest.make_room(shared, size));
        range.map(Some).ok_or(TierError::Full { tier: NAME, key, size })
    }

    fn publish(&mut self, put: &Put, range: DeviceRange) -> Stored {
        let shared = &self.worker.shared;
        // A batch may name a block twice; the second finds it here.
        let stored = shared.resident.insert(Loaded { meta: put.meta, checksum: put.checksum }, range);
        if stored == Stored::Stored {
            shared.counters.written(put.meta.size);
            if let (Some(oldest), Some(block)) = (&mut self.oldest, shared.resident.find(put.meta.key)) {
                oldest.add(&block);
            }
        }
        stored
    }
}

/// References to a block that nobody reads: the tier's, and that of the code that looks at it.
const HOLDERS: usize = 2;

/// Blocks in the order in which they were stored; also some that have left since.
#[derive(Default)]
struct Oldest {
    blocks: VecDeque<Weak<Block<DeviceRange>>>,
    /// When those that have left are dropped.
    len_max: usize,
}

impl Oldest {
    fn add(&mut self, block: &Arc<Block<DeviceRange>>) {
        if self.blocks.len() >= self.len_max {
            self.blocks.retain(|block| block.strong_count() > 0);
            self.len_max = 2 * self.blocks.len() + 1024;
        }
        self.blocks.push_back(Arc::downgrade(block));
    }

    /// Memory for `size` bytes in place of the oldest blocks. None of them goes before as many bytes would be
    /// free; then more may have to, if what they leave lies in pieces.
    fn make_room(&mut self, shared: &Shared, size: u64) -> Option<DeviceRange> {
        let mut free = shared.pool.free_bytes();
        let (mut leaving, mut staying) = (Vec::new(), Vec::new());
        let mut range = None;
        while range.is_none() {
            let Some(block) = self.next() else { break };
            // One that is being read would keep its memory although it goes.
            if Arc::strong_count(&block) > HOLDERS {
                staying.push(block);
                continue;
            }
            // The rest of a page that is split may be free.
            free += Extents::rounded(block.loaded.meta.size.into()).max(PAGE);
            leaving.push(block);
            if free >= Extents::rounded(size) {
                for block in leaving.drain(..) {
                    if shared.resident.remove_this(&block) {
                        shared.counters.evicted();
                    }
                }
                range = shared.pool.allocate(size);
            }
        }
        let back = staying.iter().chain(&leaving).rev();
        back.for_each(|block| self.blocks.push_front(Arc::downgrade(block)));
        range
    }

    fn next(&mut self) -> Option<Arc<Block<DeviceRange>>> {
        std::iter::from_fn(|| self.blocks.pop_front()).find_map(|block| block.upgrade())
    }
}
