//! What the eviction policy chose, and what the store says to it: the reserve of victims, floors and quotas.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use super::{BlockStat, DramStore, Evict, Offered, SHARDS, check_batch, slot_of, split};
use crate::error::StoreError;
use crate::ghosts::MissCause;
use crate::lifecycle::State;
use crate::record::Record;
use crate::shard::Shard;
use crate::tenants::TenantIndex;
use kvasir_protocol::block::BlockKey;

/// The bounds when the store must choose by itself: records looked at per shard, and blocks compared.
const SCAN: usize = 2048;
const SAMPLES: usize = 8;

/// What chose a block for eviction.
#[derive(Clone, Copy)]
enum Chosen {
    /// The policy, just now.
    Policy,
    /// The policy, ahead of need; nothing has used the block since.
    Reserve,
    /// The store: the block with this key.
    Store(BlockKey),
    /// A person or client who named the block: floors and soft pins do not keep it.
    Person(BlockKey),
}

impl DramStore {
    /// Evicts blocks that a policy chose, now. For victims ahead of need use
    /// [`offer_victims`](Self::offer_victims).
    pub fn evict(&self, slots: &[u32], now_ms: u64) -> Vec<Evict> {
        slots.iter().map(|&slot| self.evict_one(slot, Chosen::Policy, now_ms)).collect()
    }

    /// Evicts blocks that a caller names. Readers and hard pins keep a block; soft pins and floors do not.
    pub fn evict_keys(&self, keys: &[BlockKey], now_ms: u64) -> Result<Vec<Evict>, StoreError> {
        check_batch(keys.len())?;
        let evict = |&key: &BlockKey| match self.slot_of_resident(key) {
            Some(slot) => self.evict_one(slot, Chosen::Person(key), now_ms),
            None => Evict::NotResident,
        };
        Ok(keys.iter().map(evict).collect())
    }

    fn evict_one(&self, slot: u32, chosen: Chosen, now_ms: u64) -> Evict {
        let (local, shard) = split(slot);
        let freed = {
            let mut guard = self.write(shard);
            let known = guard.records.get(local as usize).filter(|record| match chosen {
                Chosen::Policy => record.is_resident(),
                Chosen::Reserve => record.is_resident() && record.in_reserve(),
                Chosen::Store(key) | Chosen::Person(key) => record.is_resident() && guard.key(local) == key,
            });
            if known.is_none() {
                return Evict::NotResident;
            }
            let by_policy = matches!(chosen, Chosen::Policy | Chosen::Reserve);
            if let Some(refused) = self.refusal(&guard, local, chosen, now_ms) {
                if by_policy {
                    self.push_keep(&mut guard, slot, now_ms);
                }
                return refused;
            }
            if !by_policy {
                self.push_removal(&mut guard, slot, now_ms);
            }
            guard.counters.evicted_bytes += u64::from(guard.records[local as usize].size);
            guard.drop_block(local, MissCause::Evicted, now_ms).unwrap_or(None)
        };
        self.free(freed);
        Evict::Evicted
    }

    /// Why a resident block may not go now.
    fn refusal(&self, guard: &Shard, local: u32, chosen: Chosen, now_ms: u64) -> Option<Evict> {
        let record = &guard.records[local as usize];
        let by_policy = matches!(chosen, Chosen::Policy | Chosen::Reserve);
        let changed = matches!(chosen, Chosen::Policy) && record.epoch() == self.lock_events().epoch();
        if changed {
            Some(Evict::Changed)
        } else if guard.readers(local) > 0 {
            Some(Evict::InUse)
        } else if guard.is_pinned(local, now_ms, matches!(chosen, Chosen::Person(_))) {
            Some(Evict::Pinned)
        } else if by_policy && self.tenants.is_protected(self.tenant_of(record)) {
            Some(Evict::Floor)
        } else {
            None
        }
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
    ///
    /// In place of a victim that its tenant's floor keeps, while room is needed, the store evicts a block of a tenant
    /// above its floor. A policy does not know of tenants, and might name the same victims for ever.
    pub fn choose_victims(&self, slots: &[u32], now_ms: u64, chosen: &mut Vec<BlockStat>) -> Offered {
        let (mut offered, mut by_floor) = (Offered::default(), 0);
        for &slot in slots {
            let (local, shard) = split(slot);
            let mut guard = self.write(shard);
            let Some(record) = guard.records.get(local as usize).filter(|record| record.is_resident()) else {
                offered.not_resident += 1;
                continue;
            };
            if record.in_reserve() {
                continue;
            }
            if let Some(refused) = self.refusal(&guard, local, Chosen::Policy, now_ms) {
                self.push_keep(&mut guard, slot, now_ms);
                offered.kept += 1;
                by_floor += usize::from(refused == Evict::Floor);
                continue;
            }
            guard.records[local as usize].set_in_reserve(true);
            let described = self.describe(&guard, local, shard);
            drop(guard);
            chosen.push(self.with_parent(described));
        }
        let needed = |store: &Self| {
            let pressure = store.pressure();
            pressure.is_low() || pressure.excess_bytes() > 0
        };
        let above = |tenant| self.tenants.is_above_floor(tenant);
        while offered.replaced < by_floor && needed(self) && self.evict_any(above, now_ms) {
            offered.replaced += 1;
        }
        offered
    }

    /// The second half: puts what was chosen, and has not been used since, into the reserve. Returns how many did; the others
    /// were used, are gone, or are beyond the bound of the reserve (the policy gets a `Keep`).
    pub fn make_ready(&self, slots: &[u32], now_ms: u64) -> usize {
        let mut taken = 0;
        for &slot in slots {
            let (local, shard) = split(slot);
            let mut guard = self.write(shard);
            let chosen = |record: &&mut Record| record.is_resident() && record.in_reserve();
            if guard.records.get_mut(local as usize).filter(chosen).is_none() {
                continue;
            }
            let mut victims = self.victims.lock();
            if victims.len() < self.config.reserve_max as usize {
                victims.push_back(slot);
                taken += 1;
            } else {
                self.push_keep(&mut guard, slot, now_ms);
            }
        }
        // A waiter checks the reserve under the lock of `space`; taking it here makes the wake-up certain.
        self.space.lock().slots_full &= taken == 0;
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

    /// Takes the next victim. Returns whether it was evicted, or `None` if the reserve is empty.
    pub(crate) fn evict_from_reserve(&self, now_ms: u64) -> Option<bool> {
        let slot = self.victims.lock().pop_front()?;
        Some(self.evict_one(slot, Chosen::Reserve, now_ms) == Evict::Evicted)
    }

    /// Takes `bytes` from a tenant's quota. The tenant may lose blocks of its own for that.
    pub(super) fn charge(
        &self,
        tenant: TenantIndex,
        key: BlockKey,
        bytes: u64,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let quota_bytes = self.tenants.quota(tenant);
        while let Err(used_bytes) = self.tenants.charge(tenant, bytes) {
            if bytes > quota_bytes || !self.evict_any(|other| other == tenant, now_ms) {
                self.tenants.count_quota_full(tenant);
                let tenant = self.tenants.id(tenant);
                return Err(StoreError::QuotaFull { key, tenant, size: bytes, used_bytes, quota_bytes });
            }
        }
        Ok(())
    }

    /// Evicts an idle block of a tenant that `wanted` names: of a few that come next in the records the least
    /// recently used, the deepest if there are several. The policy cannot be asked, because it does not know of tenants.
    fn evict_any(&self, wanted: impl Fn(TenantIndex) -> bool, now_ms: u64) -> bool {
        let mut found = Vec::with_capacity(SAMPLES);
        for _ in 0..SHARDS {
            let shard = self.scan_shard.fetch_add(1, Ordering::Relaxed) % SHARDS;
            self.sample(shard, &wanted, now_ms, &mut found);
            if found.len() == SAMPLES {
                break;
            }
        }
        let best = found.into_iter().min();
        best.is_some_and(|(.., slot, key)| self.evict_one(slot, Chosen::Store(key), now_ms) == Evict::Evicted)
    }

    /// Looks on through a shard for idle blocks: last use, depth, slot and key of each.
    fn sample(
        &self,
        shard: usize,
        wanted: &impl Fn(TenantIndex) -> bool,
        now_ms: u64,
        found: &mut Vec<(u32, Reverse<u32>, u32, BlockKey)>,
    ) {
        let mut guard = self.write(shard);
        for _ in 0..SCAN.min(guard.records.len()) {
            let at = guard.scan_cursor % guard.records.len();
            guard.scan_cursor = at + 1;
            let record = &guard.records[at];
            let idle = record.state() == State::Active && !guard.is_pinned(at as u32, now_ms, false);
            if idle && wanted(self.tenant_of(record)) {
                found.push((
                    record.used,
                    Reverse(record.depth()),
                    slot_of(at as u32, shard),
                    guard.key(at as u32),
                ));
            }
            if found.len() == SAMPLES {
                return;
            }
        }
    }

    pub(super) fn tenant_of(&self, record: &Record) -> TenantIndex {
        self.tenants.tenant_of(record.label())
    }
}
