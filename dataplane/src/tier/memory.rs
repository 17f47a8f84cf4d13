//! Blocks in ordinary memory: the reference that other tiers are compared with, and the tier of tests.
//!
//! Every call is complete when it returns, so there is nothing to cancel. Keys fall into shards with a lock each;
//! bytes are copied outside the locks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::counters::Counters;
use super::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Stored, Tier, TierError, TierStats,
};
use crate::block::{BlockKey, checksum};

const NAME: &str = "memory";
const SHARDS: usize = 16;

type Shard = RwLock<HashMap<BlockKey, Arc<Block>>>;

struct Block {
    loaded: Loaded,
    bytes: Box<[u8]>,
}

/// A tier in memory that refuses what does not fit.
pub struct MemoryStore {
    tier: Tier,
    capacity_bytes: u64,
    block_bytes: AtomicU64,
    shards: [Shard; SHARDS],
    counters: Counters,
}

impl MemoryStore {
    /// An empty store for `capacity_bytes` bytes of blocks, standing in for `tier`.
    pub fn new(tier: Tier, capacity_bytes: u64) -> Self {
        Self {
            tier,
            capacity_bytes,
            block_bytes: AtomicU64::new(0),
            shards: std::array::from_fn(|_| Shard::default()),
            counters: Counters::default(),
        }
    }

    fn shard(&self, key: BlockKey) -> &Shard {
        &self.shards[key.identity() as usize % SHARDS]
    }

    fn find(&self, key: BlockKey) -> Option<Arc<Block>> {
        self.shard(key).read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    fn put_one(&self, put: &Put) -> Result<Stored, TierError> {
        put.check(NAME, self.capacity_bytes)?;
        let (key, size) = (put.meta.key, u64::from(put.meta.size));
        if self.find(key).is_some() {
            return Ok(Stored::AlreadyStored);
        }
        let loaded = Loaded { meta: put.meta, checksum: put.checksum };
        let block = Arc::new(Block { loaded, bytes: put.bytes()?.into() });
        let mut shard = self.shard(key).write().unwrap_or_else(PoisonError::into_inner);
        let Entry::Vacant(entry) = shard.entry(key) else { return Ok(Stored::AlreadyStored) };
        let grown = |held: u64| held.checked_add(size).filter(|&held| held <= self.capacity_bytes);
        self.block_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown)
            .map_err(|_| TierError::Full { tier: NAME, key, size })?;
        entry.insert(block);
        self.counters.written(put.meta.size);
        Ok(Stored::Stored)
    }

    fn get_one(&self, get: &mut Get) -> Result<Option<Loaded>, TierError> {
        let Some(block) = self.find(get.key) else {
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
        let gone = self.shard(key).write().unwrap_or_else(PoisonError::into_inner).remove(&key);
        let size = gone.as_ref().map_or(0, |block| u64::from(block.loaded.meta.size));
        self.block_bytes.fetch_sub(size, Ordering::Relaxed);
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
        keys.iter().map(|&key| Some(self.find(key)?.loaded.meta.size)).collect()
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        Pending::ready(keys.into_iter().map(|key| Ok(self.remove_one(key))).collect())
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    fn stats(&self) -> TierStats {
        let count = |shard: &Shard| shard.read().unwrap_or_else(PoisonError::into_inner).len() as u64;
        let block_bytes = self.block_bytes.load(Ordering::Relaxed);
        let blocks = self.shards.iter().map(count).sum();
        TierStats { blocks, block_bytes, used_bytes: block_bytes, ..self.counters.totals() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::conformance;

    #[test]
    fn conforms() {
        conformance::check(|| Arc::new(MemoryStore::new(Tier::Dram, 32 << 20)));
    }
}
