//! How blocks go: removed, evicted, expired, or left behind by a holder that is gone.

use super::feed::event;
use super::{
    BlockStat, DramStore, Evict, Offered, OwnerId, Remove, SHARDS, TICK_MS, TTL_SCAN, check_batch, lock,
    millis, slot_of, split,
};
use crate::block::BlockKey;
use crate::error::StoreError;
use crate::tier::events::EventKind;
use crate::tier::lifecycle::State;
use crate::tier::shard::{Freed, Record, Reservation, Shard};

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
            if !guard.records[local as usize].state.is_resident() {
                return Ok(Remove::InProgress);
            }
            self.push_removal(&mut guard, slot_of(local, shard), now_ms);
            guard.drop_block(local, State::Removed)?
        };
        self.free(freed);
        Ok(Remove::Removed)
    }

    /// Evicts blocks that a policy chose, now. For victims ahead of need use
    /// [`offer_victims`](Self::offer_victims).
    pub fn evict(&self, slots: &[u32], now_ms: u64) -> Vec<Evict> {
        slots.iter().map(|&slot| self.evict_one(slot, false, now_ms)).collect()
    }

    fn evict_one(&self, slot: u32, from_reserve: bool, now_ms: u64) -> Evict {
        let (local, shard) = split(slot);
        let freed = {
            let mut guard = self.write(shard);
            let epoch = self.lock_events().epoch();
            let Some(record) = guard.records.get_mut(local as usize) else { return Evict::NotResident };
            if !record.state.is_resident() || (from_reserve && !record.in_reserve) {
                return Evict::NotResident;
            }
            // Whoever is in the reserve was not used since it was put there.
            let changed = !from_reserve && record.epoch == epoch;
            if changed || record.leases > 0 {
                let outcome = if changed { Evict::Changed } else { Evict::InUse };
                record.in_reserve = false;
                record.epoch = self.push(event(EventKind::Keep, record, slot, 0, now_ms));
                return outcome;
            }
            guard.counters.evicted_bytes += u64::from(guard.records[local as usize].size);
            guard.drop_block(local, State::Evicted).unwrap_or(None)
        };
        self.free(freed);
        Evict::Evicted
    }

    /// Puts victims that a policy chose in the reserve, most expendable first.
    pub fn offer_victims(&self, slots: &[u32], now_ms: u64) -> Offered {
        let mut chosen = Vec::new();
        let mut offered = self.choose_victims(slots, now_ms, &mut chosen);
        let slots: Vec<u32> = chosen.iter().map(|stat| stat.slot).collect();
        offered.taken = self.make_ready(&slots, now_ms);
        offered.kept += chosen.len() - offered.taken;
        offered
    }

    /// The first half of [`offer_victims`](Self::offer_victims): appends those of `slots` that may go, which can now be
    /// [held](Self::hold_chosen) for a copy. A block that is used before [`make_ready`](Self::make_ready) stays.
    pub fn choose_victims(&self, slots: &[u32], now_ms: u64, chosen: &mut Vec<BlockStat>) -> Offered {
        let mut offered = Offered::default();
        for &slot in slots {
            let (local, shard) = split(slot);
            let mut guard = self.write(shard);
            let epoch = self.lock_events().epoch();
            let Some(record) =
                guard.records.get_mut(local as usize).filter(|record| record.state.is_resident())
            else {
                offered.not_resident += 1;
                continue;
            };
            if record.in_reserve {
                continue;
            }
            if record.leases > 0 || record.epoch == epoch {
                record.epoch = self.push(event(EventKind::Keep, record, slot, 0, now_ms));
                offered.kept += 1;
                continue;
            }
            record.in_reserve = true;
            let record = record.clone();
            drop(guard);
            chosen.push(self.describe(slot, &record));
        }
        offered
    }

    /// The second half: what was chosen and is unused since goes into the reserve. Returns how many did; the others
    /// were used, are gone, or are beyond the bound of the reserve (the policy gets a `Keep`).
    pub fn make_ready(&self, slots: &[u32], now_ms: u64) -> usize {
        let mut taken = 0;
        for &slot in slots {
            let (local, shard) = split(slot);
            let mut guard = self.write(shard);
            let chosen = |record: &&mut Record| record.state.is_resident() && record.in_reserve;
            let Some(record) = guard.records.get_mut(local as usize).filter(chosen) else { continue };
            let mut victims = lock(&self.victims);
            if victims.len() < self.config.reserve_max {
                victims.push_back(slot);
                taken += 1;
            } else {
                record.in_reserve = false;
                record.epoch = self.push(event(EventKind::Keep, record, slot, 0, now_ms));
            }
        }
        // A waiter checks the reserve under the lock of `space`; taking it here makes the wake-up certain.
        lock(&self.space).slots_full &= taken == 0;
        self.freed.notify_all();
        taken
    }

    /// Evicts from the reserve until the high watermark, at most `max` blocks. Returns how many went.
    pub fn reclaim(&self, max: usize, now_ms: u64) -> usize {
        let mut gone = 0;
        while gone < max && self.pressure().excess_bytes() > 0 {
            match self.evict_from_reserve(now_ms) {
                Some(evicted) => gone += usize::from(evicted),
                None => break,
            }
        }
        gone
    }

    /// Takes the next victim; whether it was evicted, or none if the reserve is empty.
    pub(super) fn evict_from_reserve(&self, now_ms: u64) -> Option<bool> {
        let slot = lock(&self.victims).pop_front()?;
        Some(self.evict_one(slot, true, now_ms) == Evict::Evicted)
    }

    /// Ends what has run out: leases, reservations, blocks over their time to live. Call it a few times a second.
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
            if over && record.state == State::Active {
                self.push_removal(guard, slot_of(at as u32, shard), now_ms);
                freed.extend(guard.drop_block(at as u32, State::Expired).unwrap_or(None));
            }
        }
    }

    /// Aborts the reservations and ends the leases of a holder that is gone.
    pub fn release_owner(&self, owner: OwnerId) {
        let mut freed: Vec<Freed> = Vec::new();
        for shard in 0..SHARDS {
            let mut guard = self.write(shard);
            for (index, life) in guard.leases.of(owner) {
                if let Some(lease) = guard.leases.end(index, life) {
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
