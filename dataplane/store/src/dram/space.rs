//! Memory of the pool: who gets it, who waits for it, how full it is.

use parking_lot::{MutexGuard, RwLockWriteGuard};
use std::sync::atomic::Ordering;

use super::{DramStore, millis};
use crate::error::StoreError;
use crate::shard::{Freed, Shard};
use kvasir_memory::extents::Extents;
use kvasir_os::time::{Duration, Instant};
use kvasir_protocol::block::BlockKey;

pub(super) struct Space {
    pub(super) extents: Extents,
    /// The end of what was ever handed out.
    frontier: u64,
    /// When the puts that wait began to.
    waiting: Vec<Instant>,
    /// See [`Pressure::slots_full`].
    pub(super) slots_full: bool,
}

impl Space {
    pub(super) fn new(bytes: u64) -> Self {
        Self { extents: Extents::new(bytes), frontier: 0, waiting: Vec::new(), slots_full: false }
    }
}

/// How a wait for room ended.
enum Waited {
    Woken,
    OutOfTime { free_bytes: u64 },
}

/// How full the pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pressure {
    pub pool_bytes: u64,
    pub free_bytes: u64,
    /// Eviction starts below this much free.
    pub low_bytes: u64,
    /// Eviction stops at this much free.
    pub high_bytes: u64,
    /// Victims ready, and the most that are kept.
    pub reserve: usize,
    pub reserve_max: usize,
    /// Puts waiting for space right now.
    pub waiting_puts: usize,
    /// For how long the first of them has waited.
    pub longest_wait: Duration,
    /// A put found no slot, whether it waits for one or was refused, and no victim was offered since.
    pub slots_full: bool,
}

impl Pressure {
    pub fn is_low(&self) -> bool {
        self.free_bytes < self.low_bytes || self.waiting_puts > 0 || self.slots_full
    }

    /// Bytes to evict to reach the high watermark.
    pub fn excess_bytes(&self) -> u64 {
        self.high_bytes.saturating_sub(self.free_bytes)
    }
}

impl DramStore {
    pub fn pressure(&self) -> Pressure {
        let space = self.space.lock();
        let (free_bytes, waiting_puts) = (space.extents.free_bytes(), space.waiting.len());
        let longest_wait = space.waiting.iter().min().map_or(Duration::ZERO, Instant::elapsed);
        let (slots_full, reserve) = (space.slots_full, self.victims.lock().len());
        drop(space);
        let pool_bytes = self.pool.bytes();
        let share = |part: f64| (pool_bytes as f64 * part) as u64;
        Pressure {
            pool_bytes,
            free_bytes,
            low_bytes: share(self.config.low_free),
            high_bytes: share(self.config.high_free),
            reserve,
            reserve_max: self.config.reserve_max as usize,
            waiting_puts,
            longest_wait,
            slots_full,
        }
    }

    /// Waits until the pool is low, a put waits for space or one found no slot, at most `timeout`.
    pub fn wait_pressure(&self, timeout: Duration) -> Pressure {
        let low = (self.pool.bytes() as f64 * self.config.low_free) as u64;
        let mut space = self.space.lock();
        let calm = |space: &mut Space| {
            space.extents.free_bytes() >= low && space.waiting.is_empty() && !space.slots_full
        };
        self.pressed.wait_while_for(&mut space, calm, timeout);
        drop(space);
        self.pressure()
    }

    /// Memory for `size` bytes: free, or freed from the reserve, or waited for until the call's deadline.
    pub(super) fn allocate(
        &self,
        key: BlockKey,
        size: u64,
        now_ms: u64,
        deadline: &mut Option<Instant>,
    ) -> Result<u64, StoreError> {
        loop {
            let mut space = self.space.lock();
            if let Some(offset) = space.extents.allocate(size) {
                let low = (self.pool.bytes() as f64 * self.config.low_free) as u64;
                if space.extents.free_bytes() < low {
                    self.pressed.notify_all();
                }
                let end = offset + size;
                if end > space.frontier {
                    space.frontier = end;
                    self.ahead.iter().for_each(|ahead| ahead.reached(end));
                }
                return Ok(offset);
            }
            if !self.victims.lock().is_empty() {
                drop(space);
                self.evict_from_reserve(now_ms);
            } else if let Waited::OutOfTime { free_bytes } = self.wait_for_room(space, deadline) {
                self.pool_full.fetch_add(1, Ordering::Relaxed);
                let waited_ms = millis(self.config.put_wait);
                return Err(StoreError::PoolFull { key, size, free_bytes, waited_ms });
            }
        }
    }

    /// A shard, locked, with a free slot: made from the reserve, or waited for until the call's deadline.
    pub(super) fn shard_with_room(
        &self,
        shard: usize,
        key: BlockKey,
        now_ms: u64,
        deadline: &mut Option<Instant>,
    ) -> Result<RwLockWriteGuard<'_, Shard>, StoreError> {
        loop {
            let guard = self.write(shard);
            if guard.has_room() {
                return Ok(guard);
            }
            drop(guard);
            if self.evict_from_reserve(now_ms).is_some() {
                continue;
            }
            let mut space = self.space.lock();
            // This holds unless victims came meanwhile.
            space.slots_full = self.victims.lock().is_empty();
            if space.slots_full && matches!(self.wait_for_room(space, deadline), Waited::OutOfTime { .. }) {
                return Err(StoreError::SlotsFull { key, slots: self.slots() });
            }
        }
    }

    /// Calls the evictor and waits until something was freed or offered, or the call's deadline has passed.
    fn wait_for_room(&self, mut space: MutexGuard<'_, Space>, deadline: &mut Option<Instant>) -> Waited {
        let until = *deadline.get_or_insert_with(|| {
            self.put_waits.fetch_add(1, Ordering::Relaxed);
            Instant::now() + self.config.put_wait
        });
        self.pressed.notify_all();
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Waited::OutOfTime { free_bytes: space.extents.free_bytes() };
        }
        let since = until - self.config.put_wait;
        space.waiting.push(since);
        self.freed.wait_for(&mut space, left);
        if let Some(at) = space.waiting.iter().position(|one| *one == since) {
            space.waiting.swap_remove(at);
        }
        Waited::Woken
    }

    pub(super) fn free(&self, freed: impl IntoIterator<Item = Freed>) {
        let mut freed = freed.into_iter().peekable();
        if freed.peek().is_none() {
            return;
        }
        let mut space = self.space.lock();
        freed.for_each(|freed| {
            space.extents.free(freed.offset, freed.size.into());
            self.tenants.refund(self.tenants.tenant_of(freed.label), Extents::rounded(freed.size.into()));
            freed.pins.iter().for_each(|pin| self.tenants.refund_pin(pin.tenant, pin.bytes));
        });
        let waiting = !space.waiting.is_empty();
        drop(space);
        if waiting {
            self.freed.notify_all();
        }
    }
}
