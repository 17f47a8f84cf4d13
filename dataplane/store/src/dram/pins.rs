//! Pins and times to live: what keeps a block, and what ends it, whatever the policy thinks.

use super::{DramStore, check_batch, millis, slot_of};
use crate::error::StoreError;
use crate::events::EventKind;
use crate::extras::Pinned;
use crate::ghosts::MissCause;
use crate::lifecycle::State;
use crate::shard::{Freed, Shard};
use crate::tenants::TenantIndex;
use kvasir_memory::extents::Extents;
use kvasir_protocol::block::{BlockKey, Pin};

/// An expired block that someone reads is looked at again after this long.
const RETRY_MS: u64 = 1000;

/// The outcome of a request to pin a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinning {
    Until {
        ms: u64,
    },
    Missing,
    /// The tenant has pinned as much as it may.
    QuotaFull,
}

impl DramStore {
    /// Keeps resident blocks from being evicted, on the account of `tenant`. A second pin of the same tenant
    /// prolongs the first, never shortens it; it ends by itself, or by [`unpin`](Self::unpin).
    pub fn pin(
        &self,
        tenant: u16,
        keys: &[BlockKey],
        pin: Pin,
        now_ms: u64,
    ) -> Result<Vec<Pinning>, StoreError> {
        check_batch(keys.len())?;
        let tenant = self.tenants.index(tenant);
        let (lasts_ms, hard) = match pin {
            Pin::Hard { duration_ms } => (duration_ms.into(), true),
            Pin::Soft { weight } => {
                let halvings = f64::from(weight.max(1)).log2();
                ((millis(self.config.pin_half_life) as f64 * halvings) as u64, false)
            }
        };
        let until_ms = now_ms.saturating_add(lasts_ms.min(millis(self.config.pin_max)));
        Ok(keys.iter().map(|&key| self.pin_one(tenant, key, until_ms, hard, now_ms)).collect())
    }

    fn pin_one(&self, tenant: TenantIndex, key: BlockKey, until_ms: u64, hard: bool, now_ms: u64) -> Pinning {
        let (hash, shard) = self.place(key);
        let mut guard = self.write(shard);
        let Some((local, record)) = guard.resident(hash, key) else { return Pinning::Missing };
        let bytes = Extents::rounded(record.size.into());
        let in_reserve = record.in_reserve();
        if guard.is_expired(local, now_ms) {
            return Pinning::Missing;
        }
        let was_pinned = guard.is_pinned(local, now_ms, false);
        let old = guard.extras.pins(local).iter().find(|pin| pin.tenant == tenant).copied();
        if old.is_none() && !self.tenants.charge_pin(tenant, bytes) {
            return Pinning::QuotaFull;
        }
        let until_ms = old.map_or(until_ms, |old| old.until_ms.max(until_ms));
        let hard = hard || old.is_some_and(|old| old.hard && old.until_ms > now_ms);
        guard.extras.pin(local, Pinned { tenant, bytes, until_ms, hard });
        guard.records[local as usize].set_has_extras(true);
        let slot = slot_of(local, shard);
        if in_reserve {
            self.push_keep(&mut guard, slot, now_ms);
        } else if !was_pinned {
            self.push(self.event(EventKind::Pin, &guard.records[local as usize], slot, 0, now_ms));
        }
        Pinning::Until { ms: until_ms }
    }

    /// Ends the pins of `tenant`. Returns whether there was one.
    pub fn unpin(&self, tenant: u16, keys: &[BlockKey], now_ms: u64) -> Result<Vec<bool>, StoreError> {
        check_batch(keys.len())?;
        let tenant = self.tenants.index(tenant);
        let unpin = |&key: &BlockKey| {
            let (hash, shard) = self.place(key);
            let mut guard = self.write(shard);
            let Some((local, record)) = guard.resident(hash, key) else { return false };
            if !record.has_extras() {
                return false;
            }
            let ended = guard.extras.unpin(local, tenant);
            self.ended_pins(&mut guard, slot_of(local, shard), ended.as_slice(), now_ms);
            ended.is_some()
        };
        Ok(keys.iter().map(unpin).collect())
    }

    /// Refunds pins that ended and, if they were the last of their block, tells the policy.
    fn ended_pins(&self, guard: &mut Shard, slot: u32, ended: &[Pinned], now_ms: u64) {
        let local = super::split(slot).0;
        ended.iter().for_each(|pin| self.tenants.refund_pin(pin.tenant, pin.bytes));
        let none_left = guard.extras.pins(local).is_empty();
        if none_left && guard.extras.expires_ms(local).is_none() {
            guard.records[local as usize].set_has_extras(false);
        }
        if !ended.is_empty() && none_left && guard.records[local as usize].is_resident() {
            self.push(self.event(EventKind::Unpin, &guard.records[local as usize], slot, 0, now_ms));
        }
    }

    /// Ends pins and blocks whose time is over.
    pub(super) fn sweep_extras(&self, guard: &mut Shard, shard: usize, now_ms: u64, freed: &mut Vec<Freed>) {
        for local in guard.extras.due(now_ms) {
            let slot = slot_of(local, shard);
            let ended = guard.extras.end_pins(local, now_ms);
            self.ended_pins(guard, slot, &ended, now_ms);
            if !guard.is_expired(local, now_ms) {
                continue;
            }
            if guard.records[local as usize].state() == State::Active {
                self.push_removal(guard, slot, now_ms);
                freed.extend(guard.drop_block(local, MissCause::Expired, now_ms).unwrap_or(None));
            } else {
                guard.extras.look_again(local, now_ms + RETRY_MS);
            }
        }
    }
}
