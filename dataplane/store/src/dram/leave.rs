//! How blocks go: removed, evicted, expired, or left behind by a holder that is gone.

use super::{DramStore, OwnerId, Remove, SHARDS, TICK_MS, TTL_SCAN, check_batch, millis, slot_of};
use crate::error::StoreError;
use crate::ghosts::MissCause;
use crate::lifecycle::State;
use crate::shard::{Freed, Reservation, Shard};
use kvasir_protocol::block::BlockKey;

impl DramStore {
    /// Makes blocks invisible now and frees their memory when the last reader is done.
    pub fn remove(&self, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Remove>, StoreError> {
        check_batch(keys.len())?;
        keys.iter().map(|&key| self.remove_one(key, now_ms)).collect()
    }

    fn remove_one(&self, key: BlockKey, now_ms: u64) -> Result<Remove, StoreError> {
        let (hash, shard) = self.place(key);
        let freed = {
            let mut guard = self.write(shard);
            let Some(local) = guard.find(hash, key) else { return Ok(Remove::Missing) };
            if !guard.records[local as usize].is_resident() {
                return Ok(Remove::InProgress);
            }
            self.push_removal(&mut guard, slot_of(local, shard), now_ms);
            guard.drop_block(local, MissCause::Removed, now_ms)?
        };
        self.free(freed);
        Ok(Remove::Removed)
    }

    /// Ends what has run out: leases, reservations, pins, blocks past their time to live. Call it a few times a second.
    pub fn sweep(&self, now_ms: u64) {
        let mut freed: Vec<Freed> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            while let Some(lease) = guard.leases.expire_one(now_ms) {
                guard.counters.leases_expired += 1;
                freed.extend(guard.give_back(lease.local).unwrap_or(None));
            }
            let late = |r: &Reservation| r.expires_ms <= now_ms && !r.doomed && !r.owner.is_transfers();
            let late: Vec<u32> =
                guard.reservations.iter().filter_map(|(local, r)| late(r).then_some(*local)).collect();
            freed.extend(late.into_iter().filter_map(|local| self.take_back(&mut guard, local, None)));
            self.sweep_extras(&mut guard, shard, now_ms, &mut freed);
            let ttl = self.config.block_ttl;
            if !ttl.is_zero() {
                self.sweep_ttl(&mut guard, shard, millis(ttl), now_ms, &mut freed);
            }
        }
        freed.extend(self.sweep_quarantine(now_ms));
        self.free(freed);
    }

    fn sweep_ttl(&self, guard: &mut Shard, shard: usize, ttl_ms: u64, now_ms: u64, freed: &mut Vec<Freed>) {
        for _ in 0..TTL_SCAN.min(guard.records.len()) {
            let at = guard.ttl_cursor % guard.records.len();
            guard.ttl_cursor = at + 1;
            let record = &guard.records[at];
            let over = u64::from(record.inserted) * TICK_MS + ttl_ms <= now_ms;
            if over && record.state() == State::Active {
                self.push_removal(guard, slot_of(at as u32, shard), now_ms);
                freed.extend(guard.drop_block(at as u32, MissCause::Expired, now_ms).unwrap_or(None));
            }
        }
    }

    /// Aborts the reservations and ends the leases of a holder that is gone. The places of a client go after a grace time.
    pub fn release_owner(&self, owner: OwnerId, now_ms: u64) {
        self.end_leases(owner);
        self.abandon_owner(owner, now_ms);
    }

    fn end_leases(&self, owner: OwnerId) {
        let mut freed: Vec<Freed> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            for (index, life) in guard.leases.of(owner) {
                if let Some(lease) = guard.leases.end(owner, index, life) {
                    freed.extend(guard.give_back(lease.local).unwrap_or(None));
                }
            }
        }
        self.free(freed);
    }

    /// Aborts the reservations of a holder with which this host has nothing more to do, and which may still be there. What it
    /// held may be evicted. Its leases end in their time, because it may be reading what it was lent, and nobody tells it to stop.
    pub fn abandon_owner(&self, owner: OwnerId, now_ms: u64) {
        let until_ms = Some(self.grace_ends(now_ms));
        let mut freed: Vec<Freed> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            let own = |(local, r): (&u32, &Reservation)| (r.owner == owner).then_some(*local);
            let own: Vec<u32> = guard.reservations.iter().filter_map(own).collect();
            freed.extend(own.into_iter().filter_map(|local| self.take_back(&mut guard, local, until_ms)));
            self.end_holds(&mut guard, shard, owner, now_ms);
        }
        self.end_quarantine(owner, now_ms);
        self.free(freed);
    }
}
