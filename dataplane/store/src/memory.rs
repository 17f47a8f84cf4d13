//! Blocks in ordinary memory: the reference that other tiers are compared with, and the tier of tests.
//!
//! Every call is complete when it returns, so there is nothing to cancel. Bytes are copied outside the locks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::counters::Counters;
use super::departures::Departures;
use super::resident::Resident;
use super::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Stored, Tier, TierError, TierStats,
};
use kvasir_protocol::block::{BlockKey, checksum};

const NAME: &str = "memory";

/// A tier in memory that refuses what does not fit.
pub struct MemoryStore {
    tier: Tier,
    capacity_bytes: u64,
    /// Bytes of the blocks, and of those being stored at this moment.
    taken_bytes: AtomicU64,
    resident: Resident<Box<[u8]>>,
    counters: Counters,
}

impl MemoryStore {
    /// An empty store for `capacity_bytes` bytes of blocks, standing in for `tier`.
    pub fn new(tier: Tier, capacity_bytes: u64) -> Self {
        Self {
            tier,
            capacity_bytes,
            taken_bytes: AtomicU64::new(0),
            resident: Resident::default(),
            counters: Counters::default(),
        }
    }

    fn put_one(&self, put: &Put) -> Result<Stored, TierError> {
        put.check(NAME, self.capacity_bytes)?;
        let (key, size) = (put.meta.key, u64::from(put.meta.size));
        if self.resident.find(key).is_some() {
            return Ok(Stored::AlreadyStored);
        }
        let grown = |taken: u64| taken.checked_add(size).filter(|&taken| taken <= self.capacity_bytes);
        self.taken_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown)
            .map_err(|_| TierError::Full { tier: NAME, key, size })?;
        let loaded = Loaded { meta: put.meta, checksum: put.checksum };
        let stored = self.resident.insert(loaded, put.bytes()?.to_vec().into());
        match stored {
            Stored::Stored => self.counters.written(put.meta.size),
            // Someone else was faster.
            Stored::AlreadyStored => drop(self.taken_bytes.fetch_sub(size, Ordering::Relaxed)),
        }
        Ok(stored)
    }

    fn get_one(&self, get: &mut Get) -> Result<Option<Loaded>, TierError> {
        let Some(block) = self.resident.find(get.key) else {
            self.counters.miss();
            return Ok(None);
        };
        let target = get.target(block.loaded.meta.size)?;
        target.copy_from_slice(&block.bytes);
        if checksum(target) != block.loaded.checksum {
            self.counters.corrupt();
            self.remove_one(get.key);
            return Ok(None);
        }
        self.counters.hit(block.loaded.meta.size);
        Ok(Some(block.loaded))
    }

    fn remove_one(&self, key: BlockKey) -> bool {
        let gone = self.resident.remove(key);
        let size = gone.as_ref().map_or(0, |block| u64::from(block.loaded.meta.size));
        self.taken_bytes.fetch_sub(size, Ordering::Relaxed);
        gone.is_some()
    }
}

impl BlockStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: self.tier,
            name: NAME,
            durable: false,
            block_bytes_max: self.capacity_bytes,
            capacity_bytes: Some(self.capacity_bytes),
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        let done = |put: Put| PutDone { outcome: self.put_one(&put), buffer: put.buffer };
        Pending::ready(batch.into_iter().map(done).collect())
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        let done = |mut get: Get| GetDone { outcome: self.get_one(&mut get), buffer: get.buffer };
        Pending::ready(batch.into_iter().map(done).collect())
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        keys.iter().map(|&key| Some(self.resident.find(key)?.loaded.meta.size)).collect()
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        Pending::ready(keys.into_iter().map(|key| Ok(self.remove_one(key))).collect())
    }

    fn note_departures(&self, departures: &Arc<Departures>) {
        self.resident.note_departures(departures);
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        let (blocks, block_bytes) = (self.resident.blocks(), self.resident.block_bytes());
        TierStats { blocks, block_bytes, used_bytes: block_bytes, ..self.counters.totals() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::conformance;

    #[test]
    fn conforms() {
        conformance::check(|| Arc::new(MemoryStore::new(Tier::Dram, 32 << 20)));
    }
}
