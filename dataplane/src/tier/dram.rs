//! The DRAM tier: blocks in a shared pool, found by key, lent by lease, dropped by a policy that runs beside it.
//!
//! **Structure.** Keys fall into [`SHARDS`] shards, each with its own lock, records and index. Free memory is one
//! `Extents` under another lock, access events one buffer under a third, victims a fourth. Lock order: shard,
//! then space, then victims; shard, then events. No call holds two shards, except `exists`, which takes them in
//! order, for reading.
//!
//! **Eviction.** The store never decides. It records what happens ([`DramStore::drain_events`]); a policy thread
//! answers with victims ([`DramStore::offer_victims`]), which the store keeps ready. A put that finds no space
//! takes from these, waits a bounded time for more, and then fails with `PoolFull`. No policy call ever stands in
//! a put or a get.
//!
//! **Files.** `write` brings blocks in, `read` lends them, `leave` drops them; `space` shares out the pool's memory,
//! `feed` is what the policy is told;
//! [`as_store`] is the trait of all tiers on top.
//!
//! **Time** is an argument (`now_ms`, on any clock that does not step back much); only waiting for space looks at
//! a real clock.

pub mod as_store;

mod feed;
mod leave;
mod read;
mod space;
mod write;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

pub use read::Held;
pub use space::Pressure;

use self::space::Space;
use super::events::EventBuffer;
use super::lifecycle::{LifecycleCounts, State};
use super::shard::{Shard, hash_of};
use crate::block::{BATCH_MAX, BlockKey};
use crate::config::{ConfigError, DramConfig};
use crate::error::StoreError;
use crate::memory::host::{HostPool, PoolError};
use crate::metrics::StoreMetrics;

const SHARDS: usize = 32;
/// Records that one [`DramStore::sweep`] checks per shard for their time to live.
const TTL_SCAN: usize = 4096;
/// Milliseconds in one unit of the times in a record.
const TICK_MS: u64 = 10;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Who holds reservations and leases: one per connection, so that all of a dead client's can be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerId(pub u64);

/// A place to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub id: u64,
    pub slot: u32,
    /// Where in the pool.
    pub offset: u64,
    pub size: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserve {
    Reserved(Reservation),
    /// The block is resident. That counts as a use of it.
    AlreadyStored,
    /// Another writer is storing it.
    InProgress,
    Refused(StoreError),
}

/// A block lent for reading, in place, until `expires_ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    pub id: u64,
    pub slot: u32,
    pub offset: u64,
    pub size: u32,
    pub checksum: u64,
    pub expires_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    Hit(Lease),
    Miss,
    /// Resident, but so many leases are held that no other is given.
    Throttled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remove {
    /// Not visible any more; memory that someone still reads comes back when the last lease ends.
    Removed,
    Missing,
    /// Its writer has not committed it yet.
    InProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evict {
    Evicted,
    /// Someone reads it; the policy gets a `Keep`.
    InUse,
    /// It was used after the events that the policy has seen; the policy gets a `Keep`.
    Changed,
    NotResident,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    Intact,
    /// Its bytes no longer matched its checksum: dropped and counted, from now on a miss.
    Dropped,
    Missing,
}

/// What became of victims that a policy chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// In the reserve now.
    pub taken: usize,
    /// In use, used meanwhile, or beyond the bound of the reserve; each got a `Keep`.
    pub kept: usize,
    pub not_resident: usize,
}

/// What is known about one resident block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStat {
    pub key: BlockKey,
    pub slot: u32,
    pub state: State,
    pub size: u32,
    pub checksum: u64,
    pub depth: u32,
    pub class: u16,
    pub uses: u32,
    pub leases: u32,
    /// On the clock of `now_ms`, exact to 10 ms.
    pub inserted_ms: u64,
    pub used_ms: u64,
    /// The block before it in its chain, if that is resident.
    pub parent: Option<BlockKey>,
}

/// Blocks in DRAM. Share it by `Arc`.
pub struct DramStore {
    config: DramConfig,
    pool: HostPool,
    shards: [RwLock<Shard>; SHARDS],
    space: Mutex<Space>,
    /// Woken when memory or a victim becomes available.
    freed: Condvar,
    /// Woken when the pool gets low, a put waits, or events pile up.
    pressed: Condvar,
    victims: Mutex<VecDeque<u32>>,
    events: Mutex<EventBuffer>,
    owners: AtomicU64,
    pool_full: AtomicU64,
    put_waits: AtomicU64,
    hits_dropped: AtomicU64,
}

impl DramStore {
    /// An empty store.
    pub fn open(config: DramConfig) -> Result<Self, OpenError> {
        config.validate()?;
        let pool = HostPool::new(config.pool_bytes, config.prefault)?;
        // Keys spread evenly, not perfectly: an eighth and a few more slots than an even share.
        let per_shard = (config.blocks_max as usize).div_ceil(SHARDS);
        let per_shard = per_shard + per_shard / 8 + 8;
        let seed = config.hash_seed;
        Ok(Self {
            shards: std::array::from_fn(|_| RwLock::new(Shard::new(per_shard, seed))),
            space: Mutex::new(Space::new(pool.bytes())),
            freed: Condvar::new(),
            pressed: Condvar::new(),
            victims: Mutex::new(VecDeque::new()),
            events: Mutex::new(EventBuffer::new(config.events_max, SHARDS as u32)),
            owners: AtomicU64::new(1),
            pool_full: AtomicU64::new(0),
            put_waits: AtomicU64::new(0),
            hits_dropped: AtomicU64::new(0),
            config,
            pool,
        })
    }

    pub fn config(&self) -> &DramConfig {
        &self.config
    }

    pub fn pool(&self) -> &HostPool {
        &self.pool
    }

    /// Slots are below this.
    pub fn slots(&self) -> u32 {
        let per_shard = (self.config.blocks_max as usize).div_ceil(SHARDS);
        ((per_shard + per_shard / 8 + 8) * SHARDS) as u32
    }

    /// A new holder of reservations and leases.
    pub fn new_owner(&self) -> OwnerId {
        OwnerId(self.owners.fetch_add(1, Ordering::Relaxed))
    }

    /// Everything countable, at one moment per shard.
    pub fn metrics(&self) -> StoreMetrics {
        let mut metrics = StoreMetrics { lifecycle: LifecycleCounts::default(), ..StoreMetrics::default() };
        for shard in 0..SHARDS {
            let guard = self.read(shard);
            metrics.lifecycle.add(&guard.lifecycle);
            let counters = guard.counters;
            metrics.hits += counters.hits;
            metrics.misses += counters.misses;
            metrics.hit_bytes += counters.hit_bytes;
            metrics.stored_bytes += counters.stored_bytes;
            metrics.evicted_bytes += counters.evicted_bytes;
            metrics.checksum_failures += counters.corrupt;
            metrics.already_stored += counters.already_stored;
            metrics.leases += guard.leases.held() as u64;
            metrics.leases_expired += counters.leases_expired;
            metrics.reservations += guard.reservations.len() as u64;
            metrics.reservations_reclaimed += counters.reservations_reclaimed;
        }
        {
            let space = lock(&self.space);
            metrics.pool_bytes = self.pool.bytes();
            metrics.free_bytes = space.extents.free_bytes();
            metrics.largest_free_bytes = space.extents.largest_free();
            metrics.free_extents = space.extents.free_extents() as u64;
        }
        metrics.victims_ready = lock(&self.victims).len() as u64;
        metrics.events_waiting = self.lock_events().len() as u64;
        metrics.hits_dropped = self.hits_dropped.load(Ordering::Relaxed);
        metrics.pool_full = self.pool_full.load(Ordering::Relaxed);
        metrics.put_waits = self.put_waits.load(Ordering::Relaxed);
        metrics
    }

    fn place(&self, key: BlockKey) -> (u64, usize) {
        let hash = hash_of(key, self.config.hash_seed);
        (hash, (hash >> 32) as usize % SHARDS)
    }

    /// The (local, shard) of the slot in a reservation's id.
    fn home(&self, id: u64) -> Option<(u32, usize)> {
        let slot = id as u32;
        (slot < self.slots()).then(|| split(slot))
    }

    fn read(&self, shard: usize) -> RwLockReadGuard<'_, Shard> {
        self.shards[shard].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, shard: usize) -> RwLockWriteGuard<'_, Shard> {
        self.shards[shard].write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_batch(len: usize) -> Result<(), StoreError> {
    if len > BATCH_MAX { Err(StoreError::BatchTooLarge { len }) } else { Ok(()) }
}

fn slot_of(local: u32, shard: usize) -> u32 {
    local * SHARDS as u32 + shard as u32
}

fn split(slot: u32) -> (u32, usize) {
    (slot / SHARDS as u32, slot as usize % SHARDS)
}

fn ticks(now_ms: u64) -> u32 {
    u32::try_from(now_ms / TICK_MS).unwrap_or(u32::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
