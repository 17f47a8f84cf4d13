//! Which blocks a tier in memory holds, and where each has its bytes.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::departures::Departures;
use super::store::{Loaded, Stored};
use kvasir_protocol::block::BlockKey;

const SHARDS: usize = 16;

type Shard<T> = HashMap<BlockKey, Arc<Block<T>>>;

/// A block, and where its bytes are. A reader holds it, so that they stay although the block is removed.
pub struct Block<T> {
    pub loaded: Loaded,
    pub bytes: T,
}

/// Blocks by key, in shards with a lock each; no call holds two.
pub struct Resident<T> {
    shards: [RwLock<Shard<T>>; SHARDS],
    block_bytes: AtomicU64,
    /// Where it notes which blocks have left.
    departures: OnceLock<Arc<Departures>>,
}

impl<T> Default for Resident<T> {
    fn default() -> Self {
        let (block_bytes, departures) = (AtomicU64::new(0), OnceLock::new());
        Self { shards: std::array::from_fn(|_| RwLock::default()), block_bytes, departures }
    }
}

impl<T> Resident<T> {
    pub fn find(&self, key: BlockKey) -> Option<Arc<Block<T>>> {
        self.read(shard_of(key)).get(&key).cloned()
    }

    /// Adds a block, unless one of its name is there already: a block is immutable.
    pub fn insert(&self, loaded: Loaded, bytes: T) -> Stored {
        let key = loaded.meta.key;
        match self.write(shard_of(key)).entry(key) {
            Entry::Occupied(_) => return Stored::AlreadyStored,
            Entry::Vacant(entry) => entry.insert(Arc::new(Block { loaded, bytes })),
        };
        self.block_bytes.fetch_add(loaded.meta.size.into(), Ordering::Relaxed);
        Stored::Stored
    }

    pub fn remove(&self, key: BlockKey) -> Option<Arc<Block<T>>> {
        let gone = self.write(shard_of(key)).remove(&key)?;
        self.left(&gone);
        Some(gone)
    }

    /// Removes this very block: not one of its name that was stored since. Returns whether it was there.
    pub fn remove_this(&self, block: &Arc<Block<T>>) -> bool {
        let key = block.loaded.meta.key;
        let mut shard = self.write(shard_of(key));
        let is_there = shard.get(&key).is_some_and(|there| Arc::ptr_eq(there, block));
        if is_there {
            shard.remove(&key);
        }
        drop(shard);
        if is_there {
            self.left(block);
        }
        is_there
    }

    /// Begins to note there which blocks leave.
    pub fn note_departures(&self, departures: &Arc<Departures>) {
        // A second log is not told what leaves here.
        let _ = self.departures.set(Arc::clone(departures));
    }

    fn left(&self, block: &Block<T>) {
        self.block_bytes.fetch_sub(block.loaded.meta.size.into(), Ordering::Relaxed);
        if let Some(departures) = self.departures.get() {
            departures.note(block.loaded.meta.key);
        }
    }

    pub fn blocks(&self) -> u64 {
        (0..SHARDS).map(|shard| self.read(shard).len() as u64).sum()
    }

    pub fn block_bytes(&self) -> u64 {
        self.block_bytes.load(Ordering::Relaxed)
    }

    fn read(&self, shard: usize) -> RwLockReadGuard<'_, Shard<T>> {
        self.shards[shard].read()
    }

    fn write(&self, shard: usize) -> RwLockWriteGuard<'_, Shard<T>> {
        self.shards[shard].write()
    }
}

fn shard_of(key: BlockKey) -> usize {
    key.identity() as usize % SHARDS
}
