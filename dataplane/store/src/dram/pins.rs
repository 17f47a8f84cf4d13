//! Pins and times to live: what keeps a block, and what ends it, whatever the policy thinks.

use std::collections::HashSet;

use super::{DramStore, OwnerId, check_batch, millis, slot_of};
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
    /// The connection holds as many blocks as one connection may, or all connections together do.
    Throttled,
}

/// The party that says that a block must stay.
#[derive(Clone, Copy)]
struct Keeper {
    tenant: TenantIndex,
    /// The connection with which it ends.
    holder: Option<OwnerId>,
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
        let keeper = Keeper { tenant, holder: None };
        Ok(keys.iter().map(|&key| self.pin_one(keeper, key, until_ms, hard, now_ms)).collect())
    }

    /// Keeps resident blocks from being evicted for `lasts_ms` at most (the store has an upper bound), as a hard pin that
    /// ends with `holder`. To end it before takes as many calls of [`end_hold`](Self::end_hold) as there were holds.
    ///
    /// All pins of a tenant on a block take its bytes from the tenant's quota once. How many blocks are held is bounded as
    /// leases are, and one holder has a part of that, as has its caller over all connections.
    pub fn hold_keys(
        &self,
        tenant: u16,
        holder: OwnerId,
        keys: &[BlockKey],
        lasts_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Pinning>, StoreError> {
        check_batch(keys.len())?;
        let keeper = Keeper { tenant: self.tenants.index(tenant), holder: Some(holder) };
        let until_ms = now_ms.saturating_add(lasts_ms.min(millis(self.config.pin_max)));
        Ok(keys.iter().map(|&key| self.pin_one(keeper, key, until_ms, true, now_ms)).collect())
    }

    /// Takes back one hold of `holder` on each block. Returns whether there was one.
    pub fn end_hold(
        &self,
        tenant: u16,
        holder: OwnerId,
        keys: &[BlockKey],
        now_ms: u64,
    ) -> Result<Vec<bool>, StoreError> {
        check_batch(keys.len())?;
        let tenant = self.tenants.index(tenant);
        let end = |&key: &BlockKey| {
            let (hash, shard) = self.place(key);
            let mut guard = self.write(shard);
            let Some((local, _)) = guard.resident(hash, key) else { return false };
            let Some(ended) = guard.extras.end_one(local, tenant, holder) else { return false };
            self.ended_pins(&mut guard, slot_of(local, shard), &ended, now_ms);
            true
        };
        Ok(keys.iter().map(end).collect())
    }

    /// Ends all holds of a holder that is gone, in one shard.
    pub(super) fn end_holds(&self, guard: &mut Shard, shard: usize, holder: OwnerId, now_ms: u64) {
        let held: Vec<u32> = guard.extras.held_by(holder).into_iter().flatten().copied().collect();
        for local in held {
            let ended = guard.extras.end_held(local, holder);
            self.ended_pins(guard, slot_of(local, shard), &ended, now_ms);
        }
    }

    fn pin_one(&self, keeper: Keeper, key: BlockKey, until_ms: u64, hard: bool, now_ms: u64) -> Pinning {
        let Keeper { tenant, holder } = keeper;
        let (hash, shard) = self.place(key);
        let mut guard = self.write(shard);
        let Some((local, record)) = guard.resident(hash, key) else { return Pinning::Missing };
        let bytes = Extents::rounded(record.size.into());
        let in_reserve = record.in_reserve();
        if guard.is_expired(local, now_ms) {
            return Pinning::Missing;
        }
        let was_pinned = guard.is_pinned(local, now_ms, false);
        let own = |pin: &&Pinned| (pin.tenant, pin.holder) == (tenant, holder);
        let old = guard.extras.pins(local).iter().find(own).copied();
        let is_paid = guard.extras.pins(local).iter().any(|pin| pin.tenant == tenant);
        if old.is_none() && holder.is_some_and(|holder| self.holds_enough(&guard, holder)) {
            return Pinning::Throttled;
        }
        if !is_paid && !self.tenants.charge_pin(tenant, bytes) {
            return Pinning::QuotaFull;
        }
        let until_ms = old.map_or(until_ms, |old| old.until_ms.max(until_ms));
        let hard = hard || old.is_some_and(|old| old.hard && old.until_ms > now_ms);
        let bytes = old.map_or(if is_paid { 0 } else { bytes }, |old| old.bytes);
        let times = old.map_or(1, |old| old.times.saturating_add(1));
        guard.extras.pin(local, Pinned { tenant, holder, times, bytes, until_ms, hard });
        guard.records[local as usize].set_has_extras(true);
        let slot = slot_of(local, shard);
        if in_reserve {
            self.push_keep(&mut guard, slot, now_ms);
        } else if !was_pinned {
            self.push(self.event(EventKind::Pin, &guard.records[local as usize], slot, 0, now_ms));
        }
        Pinning::Until { ms: until_ms }
    }

    fn holds_enough(&self, shard: &Shard, holder: OwnerId) -> bool {
        let extras = &shard.extras;
        let own = extras.held_by(holder).map_or(0, HashSet::len);
        self.has_enough(extras.held(), own, || extras.held_by_caller(holder))
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
            let ended = guard.extras.unpin(local, tenant, None);
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
