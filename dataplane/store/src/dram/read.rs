//! Lookups, leases and what is known about a block.

use std::collections::HashMap;
use std::sync::Arc;

use super::{
    BlockStat, CALLER_SHARE, DramStore, Lease, Lookup, OWNER_SHARE, OwnerId, SHARDS, TICK_MS, Verify,
    check_batch, millis, slot_of, split,
};
use crate::error::StoreError;
use crate::events::NO_SLOT;
use crate::ghosts::MissCause;
use crate::lifecycle::State;
use crate::record::Record;
use crate::shard::Shard;
use kvasir_memory::buffer::{Buffer, Source};
use kvasir_memory::shared::Shared;
use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockKey;

impl DramStore {
    /// Which keys are resident.
    pub fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StoreError> {
        check_batch(keys.len())?;
        Ok(keys.iter().map(|&key| self.slot_of_resident(key).is_some()).collect())
    }

    /// Leases on the resident ones of `keys`, for a request of `class`. Each hit counts as a use.
    pub fn get(
        &self,
        owner: OwnerId,
        keys: &[BlockKey],
        class: u16,
        now_ms: u64,
    ) -> Result<Vec<Lookup>, StoreError> {
        check_batch(keys.len())?;
        Ok(keys.iter().map(|&key| self.get_one(owner, key, class, now_ms)).collect())
    }

    fn get_one(&self, owner: OwnerId, key: BlockKey, class: u16, now_ms: u64) -> Lookup {
        let (hash, shard) = self.place(key);
        let mut guard = self.write(shard);
        let found = guard.resident(hash, key).map(|(local, _)| local);
        let Some(local) = found.filter(|&local| !guard.is_expired(local, now_ms)) else {
            guard.miss(hash, found.is_some());
            return Lookup::Miss;
        };
        let leases = &guard.leases;
        let of_caller = || leases.held_by_caller(owner);
        let full = self.has_enough(leases.held(), leases.held_by(owner), of_caller);
        if full || guard.lend(local, State::Reused).is_err() {
            return Lookup::Throttled;
        }
        let ttl = millis(self.config.lease_ttl);
        let expires_ms = now_ms.saturating_add(ttl);
        let held_until = expires_ms.saturating_add(millis(self.config.lease_grace));
        let (index, life) = guard.leases.add(local, owner, held_until);
        let slot = slot_of(local, shard);
        self.note_use(&mut guard, slot, class, now_ms);
        let record = &guard.records[local as usize];
        let id = u64::from(life) << 32 | u64::from(slot_of(index, shard));
        let lease = Lease {
            id,
            slot,
            offset: record.offset(),
            size: record.size,
            checksum: record.checksum(),
            expires_ms,
        };
        guard.counters.hits += 1;
        guard.counters.hit_bytes += u64::from(lease.size);
        Lookup::Hit(lease)
    }

    /// Whether no more is lent or held, in a shard where `held` are: by all, by this holder, or by all connections of its caller.
    pub(super) fn has_enough(&self, held: usize, own: usize, of_caller: impl FnOnce() -> usize) -> bool {
        let most = (self.config.leases_max as usize / SHARDS).max(1);
        let part = |share: usize| (most / share).max(1);
        // What a caller has is counted only where it can be too much.
        let is_callers = || held >= part(CALLER_SHARE) && of_caller() >= part(CALLER_SHARE);
        held >= most || own >= part(OWNER_SHARE) || is_callers()
    }

    /// Ends leases of `owner`. To it, a lease of another owner is as unknown as one that never existed.
    pub fn release(&self, owner: OwnerId, ids: &[u64]) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        check_batch(ids.len())?;
        Ok(ids.iter().map(|&id| self.release_one(owner, id)).collect())
    }

    fn release_one(&self, owner: OwnerId, id: u64) -> Result<(), StoreError> {
        let (index, shard) = ((id as u32) / SHARDS as u32, (id as u32) as usize % SHARDS);
        let freed = {
            let mut guard = self.write(shard);
            let lease = guard.leases.end(owner, index, (id >> 32) as u32);
            let lease = lease.ok_or(StoreError::LeaseGone { id })?;
            guard.give_back(lease.local)?
        };
        self.free(freed);
        Ok(())
    }

    /// Holds a block for sending it elsewhere from this process. Ends when the value is dropped; the transfer's
    /// own deadline bounds it. `None` means that it is not resident (or lent too often).
    pub fn hold(self: &Arc<Self>, key: BlockKey, class: u16, now_ms: u64) -> Option<Held> {
        let (hash, shard) = self.place(key);
        let mut guard = self.write(shard);
        let found = guard.resident(hash, key).map(|(local, _)| local);
        let Some(local) = found.filter(|&local| !guard.is_expired(local, now_ms)) else {
            guard.miss(hash, found.is_some());
            return None;
        };
        guard.lend(local, State::Migrating).ok()?;
        let slot = slot_of(local, shard);
        self.note_use(&mut guard, slot, class, now_ms);
        let record = &guard.records[local as usize];
        let (offset, size, checksum) = (record.offset(), record.size, record.checksum());
        guard.counters.hits += 1;
        guard.counters.hit_bytes += u64::from(size);
        drop(guard);
        Some(Held::new(Arc::clone(self), slot, offset, size, checksum))
    }

    /// Holds a chosen victim while it is copied elsewhere. Not a use. `None` means that it was used or left meanwhile.
    pub fn hold_chosen(self: &Arc<Self>, slot: u32, key: BlockKey) -> Option<Held> {
        let (local, shard) = split(slot);
        let mut guard = self.write(shard);
        let chosen = |r: &&Record| r.is_resident() && r.in_reserve() && guard.key(local) == key;
        let record = guard.records.get(local as usize).filter(chosen)?;
        let (offset, size, checksum) = (record.offset(), record.size, record.checksum());
        guard.lend(local, State::Migrating).ok()?;
        drop(guard);
        Some(Held::new(Arc::clone(self), slot, offset, size, checksum))
    }

    /// What is known about each key, or `None` if it is not resident. Not a use.
    pub fn stat(&self, keys: &[BlockKey]) -> Result<Vec<Option<BlockStat>>, StoreError> {
        check_batch(keys.len())?;
        Ok(keys.iter().map(|&key| self.stat_one(key)).collect())
    }

    fn stat_one(&self, key: BlockKey) -> Option<BlockStat> {
        let (hash, shard) = self.place(key);
        let described = {
            let guard = self.read(shard);
            let local = guard.find(hash, key)?;
            guard.records[local as usize].is_resident().then(|| self.describe(&guard, local, shard))
        };
        described.map(|described| self.with_parent(described))
    }

    /// Up to `max` resident blocks, from slot `from` on, and the slot to continue from (`None`: that was all).
    pub fn list(&self, from: u32, max: usize) -> (Vec<BlockStat>, Option<u32>) {
        let mut found = Vec::new();
        for slot in from..self.slots() {
            if found.len() == max {
                return (found, Some(slot));
            }
            found.extend(self.stat_at(slot));
        }
        (found, None)
    }

    /// What is known about the block in a slot, or `None` if none is resident there. Not a use.
    pub fn stat_at(&self, slot: u32) -> Option<BlockStat> {
        let (local, shard) = split(slot);
        let described = {
            let guard = self.read(shard);
            let record = guard.records.get(local as usize).filter(|record| record.is_resident());
            record.map(|_| self.describe(&guard, local, shard))
        };
        described.map(|described| self.with_parent(described))
    }

    /// How a block that is not here left last, if that is remembered. This is not a lookup: no miss is counted.
    pub fn cause(&self, key: BlockKey) -> MissCause {
        let (hash, shard) = self.place(key);
        self.read(shard).cause(hash)
    }

    /// All about a block except its parent, which another shard may know.
    pub(super) fn describe(&self, guard: &Shard, local: u32, shard: usize) -> (BlockStat, Record) {
        let record = guard.records[local as usize].clone();
        let stat = BlockStat {
            key: guard.key(local),
            slot: slot_of(local, shard),
            state: record.state(),
            size: record.size,
            checksum: record.checksum(),
            depth: record.depth(),
            class: self.tenants.class_of(record.label()),
            tenant: self.tenants.id(self.tenant_of(&record)),
            uses: record.uses(),
            leases: guard.readers(local),
            expires_ms: guard.extras.expires_ms(local),
            pinned_until_ms: guard.extras.pins(local).iter().map(|pin| pin.until_ms).max(),
            inserted_ms: u64::from(record.inserted) * TICK_MS,
            was_brought: record.was_brought(),
            used_ms: u64::from(record.used) * TICK_MS,
            parent: None,
        };
        (stat, record)
    }

    pub(super) fn with_parent(&self, (stat, record): (BlockStat, Record)) -> BlockStat {
        BlockStat { parent: self.parent(&record), ..stat }
    }

    fn parent(&self, record: &Record) -> Option<BlockKey> {
        if record.parent_slot() == NO_SLOT {
            return None;
        }
        let (local, shard) = split(record.parent_slot());
        let guard = self.read(shard);
        let parent = guard.records.get(local as usize)?;
        let key = guard.key(local);
        record.is_child_of(parent, key).then_some(key)
    }

    /// Takes no lock, unless it changes all the time.
    pub(super) fn slot_of_resident(&self, key: BlockKey) -> Option<u32> {
        let (hash, shard) = self.place(key);
        let local = self.indexes[shard].shown(hash, key).unwrap_or_else(|_| {
            let guard = self.read(shard);
            guard.find(hash, key).filter(|&local| guard.records[local as usize].is_resident())
        });
        local.map(|local| slot_of(local, shard))
    }

    /// Compares blocks with their checksums. One that differs is dropped and counted. Each is read once, however often a batch
    /// names it: a request of a few bytes could ask for hundreds of GiB.
    pub fn verify(self: &Arc<Self>, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Verify>, StoreError> {
        check_batch(keys.len())?;
        let mut known = HashMap::with_capacity(keys.len());
        let verify = |&key| *known.entry(key).or_insert_with(|| self.verify_one(key, now_ms));
        Ok(keys.iter().map(verify).collect())
    }

    pub(super) fn verify_one(&self, key: BlockKey, now_ms: u64) -> Verify {
        let (hash, shard) = self.place(key);
        let (local, offset, size, expected) = {
            let mut guard = self.write(shard);
            let Some((local, _)) = guard.resident(hash, key) else { return Verify::Missing };
            if guard.lend(local, State::Migrating).is_err() {
                return Verify::Missing;
            }
            let record = &guard.records[local as usize];
            (local, record.offset(), record.size, record.checksum())
        };
        let intact = self.checksum_at(offset, size) == expected;
        let mut freed = None;
        let mut guard = self.write(shard);
        if !intact && guard.records[local as usize].is_resident() {
            self.push_removal(&mut guard, slot_of(local, shard), now_ms);
            guard.counters.corrupt += 1;
            freed = guard.drop_block(local, MissCause::Corrupted, now_ms).unwrap_or(None);
        }
        let last = guard.give_back(local).unwrap_or(None);
        drop(guard);
        self.free(freed.into_iter().chain(last));
        if intact {
            return Verify::Intact;
        }
        self.note_damaged(key);
        Verify::Dropped
    }

    pub(super) fn checksum_at(&self, offset: u64, size: u32) -> u64 {
        self.pool.mapping().bytes(offset, size.into()).map_or(0, |bytes| bytes.checksum())
    }
}

/// A block being sent from this process; given back on drop.
pub struct Held {
    store: Arc<DramStore>,
    pub slot: u32,
    offset: u64,
    pub size: u32,
    pub checksum: u64,
    since: Instant,
}

impl Held {
    pub(super) fn new(store: Arc<DramStore>, slot: u32, offset: u64, size: u32, checksum: u64) -> Self {
        Self { store, slot, offset, size, checksum, since: Instant::now() }
    }

    /// Where in the pool.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn bytes(&self) -> Shared<'_> {
        self.store.pool.mapping().bytes(self.offset, self.size.into()).unwrap_or(Shared::from(&[][..]))
    }
}

impl From<Held> for Source {
    fn from(held: Held) -> Self {
        let (pool, offset, size) = (Arc::clone(&held.store.pool), held.offset, held.size);
        // The store lends only what lies in its pool.
        Self::of_pool(&pool, offset, size.into(), held).unwrap_or_else(|| Buffer::zeroed(0).into())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let (local, shard) = split(self.slot);
        let freed = {
            let mut guard = self.store.write(shard);
            guard.counters.migration.record(super::millis(self.since.elapsed()));
            guard.counters.migrated_bytes += u64::from(self.size);
            guard.give_back(local).unwrap_or(None)
        };
        self.store.free(freed);
    }
}
