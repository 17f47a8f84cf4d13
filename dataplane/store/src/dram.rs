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
//! **Tenants.** Bytes are charged to a tenant when they are reserved and refunded when they are free. A tenant at its
//! quota loses blocks of its own; one at or below its floor loses none while another is above its own floor. Both are
//! the store's to keep, because a policy does not know of tenants.
//!
//! **Files.** `write` brings blocks in, `read` lends them, `leave` drops them, `pins` keeps them; `space` shares out
//! the pool's memory, `feed` is what the policy is told, `victims` what becomes of its answers; `quarantine`
//! keeps places that another process may still be writing to; `as_store` lets the tests of all tiers run on it.
//!
//! **Time** is an argument (`now_ms`, on any clock that does not step back much); only waiting for space looks at
//! a real clock.

#[cfg(test)]
mod as_store;

mod ahead;
mod feed;
mod leave;
mod pins;
mod quarantine;
mod read;
mod scrub;
mod space;
mod victims;
mod write;

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

pub use feed::{History, Past, Resident};
pub use pins::Pinning;
pub use read::Held;
pub use scrub::Scrubbed;
pub use space::Pressure;

use self::ahead::Ahead;
use self::quarantine::Quarantine;
use self::scrub::ScrubCounts;
use self::space::Space;
use super::departures::Departures;
use super::events::EventBuffer;
use super::index::Index;
use super::lifecycle::{LifecycleCounts, State};
use super::shard::{Shard, hash_of};
use super::tenants::Tenants;
use crate::config::{ConfigError, DramConfig};
use crate::error::StoreError;
use crate::metrics::StoreMetrics;
use kvasir_memory::host::{HostPool, PoolError};
use kvasir_memory::placing::Placing;
use kvasir_protocol::block::{BATCH_MAX, BlockKey, checksum};

const SHARDS: usize = 32;
/// Records that one [`DramStore::sweep`] checks per shard for their time to live.
const TTL_SCAN: usize = 4096;
/// Damaged blocks remembered for [`DramStore::take_damaged`].
const DAMAGED_MAX: usize = 4096;
/// Milliseconds in one unit of the times in a record.
pub(super) const TICK_MS: u64 = 10;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// The holder of reservations and leases: one per connection, so that all of a dead client's can be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(pub u64);

/// One owner has at most one in this many of the leases, and of the holds: a client that keeps all it gets stops no other's
/// reads.
const OWNER_SHARE: usize = 4;
/// One client reserves at most a third of the pool without committing, so that it cannot fill the quarantine alone, and one peer at
/// most a quarter.
const RESERVED_SHARE: u64 = 3;
const PEER_SHARE: u64 = 4;
/// All connections of one caller together have at most half of the leases, of the holds, and of the pool without committing: a
/// caller that connects many times leaves as much to the others.
const CALLER_SHARE: usize = 2;

impl OwnerId {
    /// Clients on this machine, which write to their places by themselves.
    const CLIENT: u64 = 1 << 63;
    /// Transfers of this process.
    const TRANSFERS: u64 = 1 << 62;
    /// Transfers of this process from one peer, which asks for them.
    const PEER: u64 = 1 << 60;
    /// Brings blocks that were put before: from a tier below, or from another host.
    const BRINGS: u64 = 1 << 61;
    /// Clients that send their blocks, to places which this process fills.
    const SENDS: u64 = 1 << 59;
    /// The caller whose connection it is, as a number; 0 for none.
    const CALLER: u64 = 0x7_ffff << Self::CALLER_SHIFT;
    const CALLER_SHIFT: u32 = 40;

    /// The same holder, as one of the connections of `caller`. Two callers whose names fall on one number, one pair in half a
    /// million, share what one may have.
    #[must_use]
    pub fn of_caller(self, caller: &str) -> Self {
        let number = 1 + checksum(caller.as_bytes()) % (Self::CALLER >> Self::CALLER_SHIFT);
        Self(self.0 & !Self::CALLER | number << Self::CALLER_SHIFT)
    }

    fn is_of_a_caller(self) -> bool {
        self.0 & Self::CALLER != 0
    }

    /// Whether both are connections of the same caller.
    pub(super) fn has_caller_of(self, other: Self) -> bool {
        self.is_of_a_caller() && (self.0 ^ other.0) & Self::CALLER == 0
    }

    /// Adds what belongs to `holder` to the sums of this one, and of all connections of its caller.
    fn add_if_own(self, [own, of_caller]: &mut [u64; 2], holder: Self, bytes: u64) {
        *own += if holder == self { bytes } else { 0 };
        *of_caller += if self.has_caller_of(holder) { bytes } else { 0 };
    }

    /// Whether it fills its places from another process, which nobody here can stop.
    pub(super) fn is_client(self) -> bool {
        self.0 & Self::CLIENT != 0
    }

    /// Whether this process gives its places back by itself, in any case, and not before transfers to them have ended.
    pub(super) fn is_transfers(self) -> bool {
        self.0 & Self::TRANSFERS != 0
    }

    /// The part of the pool that it may reserve without committing, one in this many. `None` means all of it.
    fn reserved_share(self) -> Option<u64> {
        if self.0 & (Self::CLIENT | Self::SENDS) != 0 {
            return Some(RESERVED_SHARE);
        }
        (self.0 & Self::PEER != 0).then_some(PEER_SHARE)
    }

    /// Whether what it commits was put before, into another tier or on another host.
    pub(super) fn brings(self) -> bool {
        self.0 & Self::BRINGS != 0
    }
}

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
    /// Resident, but no further lease is given: too many are held already.
    Throttled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remove {
    /// Not visible any more; memory that someone still reads comes back when the last lease ends.
    Removed,
    Missing,
    /// Its writer has not committed it yet.
    InProgress,
    /// A tier below could not remove it, or has not answered.
    Unfinished,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evict {
    Evicted,
    /// It is being read; the policy gets a `Keep`.
    InUse,
    /// It was used after the events that the policy has seen; the policy gets a `Keep`.
    Changed,
    /// The policy gets a `Keep`.
    Pinned,
    /// Its tenant uses no more than its floor and another uses more than its own; the policy gets a `Keep`.
    Floor,
    NotResident,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    Intact,
    /// Its bytes no longer matched its checksum: dropped and counted, from now on a miss.
    Dropped,
    Missing,
}

/// What happened to victims that a policy chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// In the reserve now.
    pub taken: usize,
    /// In use, used meanwhile, pinned, under its tenant's floor, or beyond the bound of the reserve; each got a `Keep`.
    pub kept: usize,
    /// Evicted by the store in place of victims that a floor kept.
    pub replaced: usize,
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
    pub tenant: u16,
    pub uses: u32,
    pub leases: u32,
    /// When its own time to live ends, and when its last pin does.
    pub expires_ms: Option<u64>,
    pub pinned_until_ms: Option<u64>,
    /// On the clock of `now_ms`, rounded down to 10 ms.
    pub inserted_ms: u64,
    /// It came from another tier or host, so that it was put earlier than it was inserted.
    pub was_brought: bool,
    pub used_ms: u64,
    /// The block before it in its chain, if that is resident.
    pub parent: Option<BlockKey>,
}

/// Memory that a store takes besides the pool, in bytes that are touched (memory set aside for later is not resident).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    pub blocks: u64,
    pub records_bytes: u64,
    pub index_bytes: u64,
    /// Free slots, free memory, reservations, leases, pins, times to live.
    pub other_bytes: u64,
}

impl Metadata {
    pub fn bytes(&self) -> u64 {
        self.records_bytes + self.index_bytes + self.other_bytes
    }

    pub fn bytes_per_block(&self) -> f64 {
        self.bytes() as f64 / self.blocks.max(1) as f64
    }
}

/// Blocks in DRAM. Share it by `Arc`.
pub struct DramStore {
    config: DramConfig,
    pool: Arc<HostPool>,
    /// `None` if the pool has all its pages, or is small.
    ahead: Option<Ahead>,
    shards: [RwLock<Shard>; SHARDS],
    /// Of each shard; read without its lock.
    indexes: [Arc<Index>; SHARDS],
    departures: Arc<Departures>,
    space: Mutex<Space>,
    /// Woken when memory or a victim becomes available.
    freed: Condvar,
    /// Woken when the pool gets low, a put waits, or events pile up.
    pressed: Condvar,
    victims: Mutex<VecDeque<u32>>,
    tenants: Tenants,
    scrubs: ScrubCounts,
    /// Where the store looks next when it must choose a victim itself.
    scan_shard: AtomicUsize,
    events: Mutex<EventBuffer>,
    owners: AtomicU64,
    quarantine: Quarantine,
    pool_full: AtomicU64,
    put_waits: AtomicU64,
    hits_dropped: AtomicU64,
    /// Blocks dropped because their bytes had changed, for a caller that can fetch them again.
    damaged: Mutex<VecDeque<BlockKey>>,
}

impl DramStore {
    /// An empty store.
    pub fn open(config: DramConfig) -> Result<Self, OpenError> {
        config.validate()?;
        let placing = Placing {
            huge_pages: config.huge_pages,
            numa_node: u32::try_from(config.numa_node).ok(),
            lock: config.lock_memory,
            prefault: config.prefault,
        };
        let pool = Arc::new(HostPool::open(config.pool_bytes, &placing)?);
        // Keys spread evenly, not perfectly: an eighth and a few more slots than an even share.
        let per_shard = (config.blocks_max as usize).div_ceil(SHARDS);
        let per_shard = per_shard + per_shard / 8 + 8;
        let seed = config.hash_seed;
        let departures = Arc::new(Departures::default());
        let indexes: [Arc<Index>; SHARDS] = std::array::from_fn(|_| Arc::new(Index::new(per_shard)));
        let shard = |index: &Arc<Index>| {
            let (index, departures) = (Arc::clone(index), Arc::clone(&departures));
            RwLock::new(Shard::new(per_shard, seed, any_number(), index, departures))
        };
        Ok(Self {
            shards: std::array::from_fn(|at| shard(&indexes[at])),
            indexes,
            departures,
            space: Mutex::new(Space::new(pool.bytes())),
            freed: Condvar::new(),
            pressed: Condvar::new(),
            victims: Mutex::new(VecDeque::new()),
            tenants: Tenants::new(&config, pool.bytes()),
            scan_shard: AtomicUsize::new(0),
            scrubs: ScrubCounts::default(),
            events: Mutex::new(EventBuffer::new(config.events_max as usize)),
            owners: AtomicU64::new(1),
            quarantine: Quarantine::default(),
            pool_full: AtomicU64::new(0),
            put_waits: AtomicU64::new(0),
            hits_dropped: AtomicU64::new(0),
            config,
            ahead: Ahead::start(Arc::clone(&pool)),
            pool,
            damaged: Mutex::new(VecDeque::new()),
        })
    }

    pub fn config(&self) -> &DramConfig {
        &self.config
    }

    pub fn pool(&self) -> &Arc<HostPool> {
        &self.pool
    }

    /// Slots are below this.
    pub fn slots(&self) -> u32 {
        let per_shard = (self.config.blocks_max as usize).div_ceil(SHARDS);
        ((per_shard + per_shard / 8 + 8) * SHARDS) as u32
    }

    /// Which blocks have left the pool, and the tiers below that say so too.
    pub fn departures(&self) -> &Arc<Departures> {
        &self.departures
    }

    /// A new owner of reservations and leases.
    pub fn new_owner(&self) -> OwnerId {
        // They do not run out: with ten thousand connections a second, in three years.
        OwnerId(self.owners.fetch_add(1, Ordering::Relaxed) % (1 << OwnerId::CALLER_SHIFT))
    }

    /// A new holder in another process that maps the pool. When a place is taken back from it, nobody else gets that place before
    /// it is certain that it writes no more.
    pub fn new_client(&self) -> OwnerId {
        OwnerId(self.new_owner().0 | OwnerId::CLIENT)
    }

    /// A new holder for a client that sends its blocks.
    pub fn new_sender(&self) -> OwnerId {
        OwnerId(self.new_owner().0 | OwnerId::SENDS)
    }

    /// A new holder for transfers from other hosts that this process makes or allows. No time ends its reservations:
    /// the caller that makes them gives each one back, once nothing writes to it any more.
    pub fn new_transfers_owner(&self) -> OwnerId {
        OwnerId(self.new_owner().0 | OwnerId::TRANSFERS | OwnerId::BRINGS)
    }

    /// The same for what one peer asks for: it reserves no more than its share of the pool.
    pub fn new_peer_owner(&self) -> OwnerId {
        OwnerId(self.new_transfers_owner().0 | OwnerId::PEER)
    }

    /// A new holder that brings blocks up from tiers below.
    pub fn new_bringing_owner(&self) -> OwnerId {
        OwnerId(self.new_owner().0 | OwnerId::BRINGS)
    }

    /// Everything countable, at one moment per shard.
    pub fn metrics(&self) -> StoreMetrics {
        let mut metrics = StoreMetrics { lifecycle: LifecycleCounts::default(), ..StoreMetrics::default() };
        for shard in 0..SHARDS {
            let guard = self.read(shard);
            metrics.lifecycle.add(&guard.lifecycle);
            let counters = &guard.counters;
            metrics.hits += counters.hits;
            metrics.misses += counters.misses;
            metrics
                .misses_by_cause
                .iter_mut()
                .zip(counters.misses_by_cause)
                .for_each(|(sum, one)| *sum += one);
            metrics.creation.add(&counters.creation);
            metrics.age_at_eviction.add(&counters.age_at_eviction);
            metrics.lifetime.add(&counters.lifetime);
            metrics.reuse_interval.add(&counters.reuse_interval);
            metrics.migration.add(&counters.migration);
            metrics.migrated_bytes += counters.migrated_bytes;
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
            let space = self.space.lock();
            metrics.pool_bytes = self.pool.bytes();
            metrics.free_bytes = space.extents.free_bytes();
            metrics.largest_free_bytes = space.extents.largest_free();
            metrics.free_extents = space.extents.free_extents() as u64;
        }
        metrics.scrub = self.scrub_metrics();
        metrics.tenants = self.tenants.metrics();
        metrics.quarantined_bytes = self.quarantine.bytes();
        (metrics.quarantined, metrics.quarantine_refused) = self.quarantine.counts();
        metrics.victims_ready = self.victims.lock().len() as u64;
        metrics.events_waiting = self.lock_events().len() as u64;
        metrics.hits_dropped = self.hits_dropped.load(Ordering::Relaxed);
        metrics.pool_full = self.pool_full.load(Ordering::Relaxed);
        metrics.put_waits = self.put_waits.load(Ordering::Relaxed);
        metrics
    }

    /// Blocks dropped since the last call because their bytes no longer matched their checksums. The oldest beyond 4,096
    /// are forgotten.
    pub fn take_damaged(&self) -> Vec<BlockKey> {
        self.damaged.lock().drain(..).collect()
    }

    fn note_damaged(&self, key: BlockKey) {
        let mut damaged = self.damaged.lock();
        if damaged.len() == DAMAGED_MAX {
            damaged.pop_front();
        }
        damaged.push_back(key);
    }

    /// Memory that the store takes besides the pool.
    pub fn metadata(&self) -> Metadata {
        let mut sum =
            Metadata { other_bytes: self.space.lock().extents.memory_bytes() as u64, ..Metadata::default() };
        for shard in 0..SHARDS {
            self.read(shard).add_metadata(&mut sum);
        }
        sum
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
        self.shards[shard].read()
    }

    fn write(&self, shard: usize) -> RwLockWriteGuard<'_, Shard> {
        self.shards[shard].write()
    }
}

/// Differs from run to run, and is no secret.
fn any_number() -> u32 {
    kvasir_os::random::number() as u32
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
