//! The DRAM tier as the trait of all tiers, so that their suite runs on it too.
//!
//! It copies where [`DramStore`] itself lends in place, and every get counts as a use. Calls are complete when they
//! return; a put into a full pool returns after at most `put_wait`.

use std::sync::Arc;

use super::{BlockStat, DramStore, OwnerId, Remove, Reserve, Verify};
use crate::error::StoreError;
use crate::lifecycle::State;
use crate::store::{
    BlockStore, Capabilities, Get, GetDone, Loaded, Pending, Put, PutDone, Stored, Tier, TierError, TierStats,
};
use kvasir_protocol::block::{BATCH_MAX, BlockKey, BlockMeta, checksum};
use kvasir_protocol::clock::Clock;

const NAME: &str = "dram";
/// Blocks that one step of the walk for [`BlockStore::stats`] takes.
const LIST_STEP: usize = 1024;

/// A [`DramStore`] as a [`BlockStore`].
pub(super) struct DramTier {
    store: Arc<DramStore>,
    clock: Clock,
    owner: OwnerId,
}

impl DramTier {
    /// `clock` is the one that the store's other callers use.
    pub(super) fn new(store: Arc<DramStore>, clock: Clock) -> Self {
        let owner = store.new_bringing_owner();
        Self { store, clock, owner }
    }

    fn block_bytes_max(&self) -> u64 {
        self.store.pool().bytes().min(u32::MAX.into())
    }

    /// At most [`BATCH_MAX`] items.
    fn put_batch(&self, batch: &[Put]) -> Vec<Result<Stored, TierError>> {
        let checked: Vec<_> = batch.iter().map(|put| put.check(NAME, self.block_bytes_max())).collect();
        let good = batch.iter().zip(&checked).filter(|(_, checked)| checked.is_ok());
        let metas: Vec<BlockMeta> = good.map(|(put, _)| put.meta).collect();
        let mut reserved = match self.store.reserve(self.owner, &metas, self.clock.now_ms()) {
            Ok(reserved) => reserved.into_iter(),
            Err(error) => return batch.iter().map(|put| Err(failed(&error, "put", &put.meta))).collect(),
        };
        let mut fill = |(put, checked): (&Put, Result<(), TierError>)| {
            checked?;
            reserved.next().map_or(Err(TierError::InProgress { key: put.meta.key }), |at| self.fill(put, at))
        };
        batch.iter().zip(checked).map(&mut fill).collect()
    }

    fn fill(&self, put: &Put, reserve: Reserve) -> Result<Stored, TierError> {
        let meta = &put.meta;
        let fail = |error| failed(&error, "put", meta);
        let id = match reserve {
            Reserve::Reserved(reservation) => reservation.id,
            Reserve::AlreadyStored => return Ok(Stored::AlreadyStored),
            // Often by this very batch, a moment ago.
            Reserve::InProgress if self.exists(&[meta.key]) == [true] => return Ok(Stored::AlreadyStored),
            Reserve::InProgress => return Err(TierError::InProgress { key: meta.key }),
            Reserve::Refused(error) => return Err(fail(error)),
        };
        self.store.fill(self.owner, id, 0, put.bytes()?).map_err(fail)?;
        let commit = self.store.commit(self.owner, &[(id, Some(put.checksum))], self.clock.now_ms());
        commit.map_err(fail)?.remove(0).map_err(fail)?;
        Ok(Stored::Stored)
    }

    fn get_one(&self, get: &mut Get) -> Result<Option<Loaded>, TierError> {
        let now = self.clock.now_ms();
        let Some(held) = self.store.hold(get.key, 0, now) else { return Ok(None) };
        let target = get.target(held.size)?;
        held.bytes().copy_to(target);
        if checksum(target) != held.checksum {
            // Drops the block and counts it, unless the bytes in the pool are good after all.
            let verdict = self.store.verify(&[get.key], now);
            debug_assert!(verdict.is_ok_and(|verdict| verdict != [Verify::Intact]));
            return Ok(None);
        }
        // What is known about the block is read after its bytes, so it must still be the same block.
        let stat = self.stat(&[get.key]).pop().flatten().filter(|stat| stat.slot == held.slot);
        Ok(stat.map(|stat| {
            let BlockStat { key, parent, depth, class, tenant, expires_ms, .. } = stat;
            let ttl_ms = expires_ms.map_or(0, |at| millis_left(at, now));
            let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms, size: held.size };
            Loaded { meta, checksum: held.checksum }
        }))
    }

    fn stat(&self, keys: &[BlockKey]) -> Vec<Option<BlockStat>> {
        let known = |keys| self.store.stat(keys).unwrap_or_default();
        keys.chunks(BATCH_MAX).flat_map(known).collect()
    }

    fn remove_one(&self, key: BlockKey) -> Result<bool, TierError> {
        match self.store.remove(&[key], self.clock.now_ms()) {
            Ok(removed) => Ok(removed == [Remove::Removed]),
            Err(error) => Err(failed(&error, "remove", &BlockMeta::single(key, 0))),
        }
    }
}

impl BlockStore for DramTier {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            tier: Tier::Dram,
            name: NAME,
            durable: false,
            block_bytes_max: self.block_bytes_max(),
            capacity_bytes: Some(self.store.pool().bytes()),
        }
    }

    fn put(&self, batch: Vec<Put>) -> Pending<Vec<PutDone>> {
        let outcomes: Vec<_> = batch.chunks(BATCH_MAX).flat_map(|batch| self.put_batch(batch)).collect();
        let done = |(put, outcome): (Put, _)| PutDone { buffer: put.buffer, outcome };
        Pending::ready(batch.into_iter().zip(outcomes).map(done).collect())
    }

    fn get(&self, batch: Vec<Get>) -> Pending<Vec<GetDone>> {
        let done = |mut get: Get| GetDone { outcome: self.get_one(&mut get), buffer: get.buffer };
        Pending::ready(batch.into_iter().map(done).collect())
    }

    fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        self.stat(keys).into_iter().map(|stat| Some(stat?.size)).collect()
    }

    fn exists(&self, keys: &[BlockKey]) -> Vec<bool> {
        keys.chunks(BATCH_MAX).flat_map(|keys| self.store.exists(keys).unwrap_or_default()).collect()
    }

    fn remove(&self, keys: Vec<BlockKey>) -> Pending<Vec<Result<bool, TierError>>> {
        Pending::ready(keys.into_iter().map(|key| self.remove_one(key)).collect())
    }

    fn flush(&self) -> Pending<Result<(), TierError>> {
        Pending::ready(Ok(()))
    }

    /// Walks all slots to count the bytes of blocks, of which the store keeps no total.
    fn stats(&self) -> TierStats {
        let (mut blocks, mut block_bytes, mut from) = (0, 0, Some(0));
        while let Some(slot) = from {
            let (found, next) = self.store.list(slot, LIST_STEP);
            blocks += found.len() as u64;
            block_bytes += found.iter().map(|stat| u64::from(stat.size)).sum::<u64>();
            from = next;
        }
        let metrics = self.store.metrics();
        TierStats {
            blocks,
            block_bytes,
            used_bytes: metrics.pool_bytes - metrics.free_bytes,
            hits: metrics.hits,
            misses: metrics.misses,
            read_bytes: metrics.hit_bytes,
            written_bytes: metrics.stored_bytes,
            corrupt: metrics.checksum_failures,
            scrubbed_bytes: metrics.scrub.bytes,
            io_errors: 0,
            evicted: metrics.lifecycle.in_state(State::Evicted),
            broken: false,
        }
    }
}

/// At least one: 0 would mean no limit.
fn millis_left(at: u64, now: u64) -> u32 {
    u32::try_from(at.saturating_sub(now)).unwrap_or(u32::MAX).max(1)
}

fn failed(error: &StoreError, step: &'static str, meta: &BlockMeta) -> TierError {
    let (tier, key) = (NAME, meta.key);
    match error {
        StoreError::PoolFull { .. } | StoreError::SlotsFull { .. } | StoreError::QuotaFull { .. } => {
            TierError::Full { tier, key, size: meta.size.into() }
        }
        other => TierError::Io { tier, step, key, reason: other.to_string(), retryable: other.retryable() },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::DramConfig;
    use crate::conformance::{self, block, holds, key, put, put_all};

    fn tier() -> DramTier {
        let config = DramConfig {
            pool_bytes: 32 << 20,
            blocks_max: 8192,
            put_wait: Duration::ZERO,
            ..DramConfig::default()
        };
        DramTier::new(Arc::new(DramStore::open(config).unwrap()), Clock::start())
    }

    #[test]
    fn conforms() {
        conformance::check(|| Arc::new(tier()));
    }

    #[test]
    fn a_block_that_another_writer_is_storing_is_not_claimed() {
        let tier = tier();
        let other = tier.store.new_owner();
        let reserved = tier.store.reserve(other, &[block(1, 100).meta], 0).unwrap().remove(0);
        let error = put(&tier, 1, 100).unwrap_err();
        assert!(error == TierError::InProgress { key: key(1) } && error.retryable());
        let Reserve::Reserved(reservation) = reserved else { panic!("{reserved:?}") };
        tier.store.abort(other, &[reservation.id]).unwrap().remove(0).unwrap();
        assert_eq!(put(&tier, 1, 100), Ok(Stored::Stored));
    }

    #[test]
    fn damage_in_the_pool_is_a_miss() {
        let tier = tier();
        assert!(put_all(&tier, vec![block(1, 100), block(2, 100)]).iter().all(Result::is_ok));
        let held = tier.store.hold(key(1), 0, 0).unwrap();
        let mapping = tier.store.pool().mapping();
        let at = held.bytes().as_ptr() as u64 - mapping.bytes(0, 1).unwrap().as_ptr() as u64;
        drop(held);
        assert!(mapping.write(at + 50, &[!mapping.bytes(at + 50, 1).unwrap().to_vec()[0]]));
        assert!(!holds(&tier, 1, 100) && holds(&tier, 2, 100));
        assert_eq!((tier.exists(&[key(1)]), tier.stats().corrupt), (vec![false], 1));
    }
}
