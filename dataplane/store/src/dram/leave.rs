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
            let late =
                |(local, r): (&u32, &Reservation)| (r.expires_ms <= now_ms && !r.doomed).then_some(*local);
            let late: Vec<u32> = guard.reservations.iter().filter_map(late).collect();
            freed.extend(reclaim_reservations(&mut guard, &late));
            self.sweep_extras(&mut guard, shard, now_ms, &mut freed);
            if let Some(ttl) = self.config.block_ttl {
                self.sweep_ttl(&mut guard, shard, millis(ttl), now_ms, &mut freed);
            }
        }
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

    /// Aborts the reservations and ends the leases of a holder that is gone.
    pub fn release_owner(&self, owner: OwnerId) {
        let mut freed: Vec<Freed> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            for (index, life) in guard.leases.of(owner) {
                if let Some(lease) = guard.leases.end(owner, index, life) {
                    freed.extend(guard.give_back(lease.local).unwrap_or(None));
                }
            }
            let own = |(local, r): (&u32, &Reservation)| (r.owner == owner).then_some(*local);
            let own: Vec<u32> = guard.reservations.iter().filter_map(own).collect();
            freed.extend(reclaim_reservations(&mut guard, &own));
        }
        self.free(freed);
    }
}

fn reclaim_reservations(guard: &mut Shard, locals: &[u32]) -> Vec<Freed> {
    guard.counters.reservations_reclaimed += locals.len() as u64;
    locals.iter().filter_map(|&local| guard.abort(local).unwrap_or(None)).collect()
}
