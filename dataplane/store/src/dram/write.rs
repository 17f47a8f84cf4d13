//! Reserve, fill, commit: how a block comes in.

use std::sync::Arc;

use super::{
    CALLER_SHARE, DramStore, Held, OwnerId, Reservation, Reserve, SHARDS, check_batch, millis, slot_of, ticks,
};
use crate::config::CommitCheck;
use crate::error::StoreError;
use crate::events::{EventKind, NO_SLOT};
use crate::ghosts::MissCause;
use crate::lifecycle::State;
use crate::shard::Freed;
use kvasir_memory::extents::Extents;
use kvasir_memory::shared::{Place, Shared};
use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockMeta;

/// Bytes reserved and not committed, of those that may be.
struct Budget {
    reserved: u64,
    max_bytes: u64,
}

impl Budget {
    /// A block that would not fit if it were alone has a reason of its own to fail, or is allowed to.
    fn is_too_small_for(&self, size: u64) -> bool {
        self.reserved > 0 && self.reserved.saturating_add(size) > self.max_bytes
    }
}

impl DramStore {
    /// Reserves memory for blocks. Each place must be committed or aborted within the reservation's time.
    pub fn reserve(
        &self,
        owner: OwnerId,
        blocks: &[BlockMeta],
        now_ms: u64,
    ) -> Result<Vec<Reserve>, StoreError> {
        check_batch(blocks.len())?;
        let mut deadline = None;
        let mut budgets = self.budgets(owner);
        let mut one = |meta: &BlockMeta| {
            let size = Extents::rounded(meta.size.into());
            if let Some(budget) = budgets.iter().find(|budget| budget.is_too_small_for(size)) {
                let Budget { reserved: reserved_bytes, max_bytes } = *budget;
                return Reserve::Refused(StoreError::TooMuchReserved {
                    key: meta.key,
                    reserved_bytes,
                    max_bytes,
                });
            }
            let outcome = self.reserve_one(owner, meta, now_ms, &mut deadline);
            if matches!(outcome, Reserve::Reserved(_)) {
                budgets.iter_mut().for_each(|budget| budget.reserved += size);
            }
            outcome
        };
        Ok(blocks.iter().map(&mut one).collect())
    }

    /// What `owner` may reserve, and what all connections of its caller may.
    fn budgets(&self, owner: OwnerId) -> [Budget; 2] {
        let share = [owner.reserved_share(), owner.is_of_a_caller().then_some(CALLER_SHARE as u64)];
        let bounded = share.iter().any(Option::is_some);
        let reserved = if bounded { self.reserved_by(owner) } else { [0; 2] };
        std::array::from_fn(|at| Budget {
            reserved: reserved[at],
            max_bytes: share[at].map_or(u64::MAX, |share| self.pool.bytes() / share),
        })
    }

    /// Bytes that `owner` has reserved and not committed, or that were taken back and it may still be writing to; and the same
    /// of all connections of its caller.
    fn reserved_by(&self, owner: OwnerId) -> [u64; 2] {
        let mut sums = self.quarantine.bytes_of(owner);
        for shard in 0..SHARDS {
            let guard = self.read(shard);
            for (&local, reservation) in &guard.reservations {
                let bytes = Extents::rounded(guard.records[local as usize].size.into());
                owner.add_if_own(&mut sums, reservation.owner, bytes);
            }
        }
        sums
    }

    fn reserve_one(
        &self,
        owner: OwnerId,
        meta: &BlockMeta,
        now_ms: u64,
        deadline: &mut Option<Instant>,
    ) -> Reserve {
        let (key, size) = (meta.key, u64::from(meta.size));
        if size == 0 {
            return Reserve::Refused(StoreError::ZeroSize { key });
        }
        if size > self.pool.bytes() {
            return Reserve::Refused(StoreError::TooLarge { key, size, pool_bytes: self.pool.bytes() });
        }
        let (hash, shard) = self.place(key);
        if let Some(outcome) = self.known(shard, hash, meta, now_ms) {
            return outcome;
        }
        if let Err(error) = self.check_quarantine(owner) {
            return Reserve::Refused(error);
        }
        let tenant = self.tenants.index(meta.tenant);
        let label = self.tenants.label(tenant, meta.class);
        let charged = Extents::rounded(size);
        if let Err(error) = self.charge(tenant, key, charged, now_ms) {
            return Reserve::Refused(error);
        }
        let offset = match self.allocate(key, size, now_ms, deadline) {
            Ok(offset) => offset,
            Err(error) => {
                self.tenants.refund(tenant, charged);
                return Reserve::Refused(error);
            }
        };
        let unused = Freed { offset, size: meta.size, label, pins: Vec::new() };
        let mut guard = match self.shard_with_room(shard, key, now_ms, deadline) {
            Ok(guard) => guard,
            Err(error) => {
                self.free([unused]);
                return Reserve::Refused(error);
            }
        };
        // Another writer may have come first while no lock was held.
        if guard.find(hash, key).is_some() {
            drop(guard);
            self.free([unused]);
            return Reserve::InProgress;
        }
        let local = guard.create(hash, meta, label, offset);
        let slot = slot_of(local, shard);
        let expires_ms = now_ms.saturating_add(millis(self.config.reservation_ttl));
        let id = guard.open(local, slot, owner, meta, expires_ms);
        Reserve::Reserved(Reservation { id, slot, offset, size: meta.size })
    }

    /// The answer for a key that is known already.
    fn known(&self, shard: usize, hash: u64, meta: &BlockMeta, now_ms: u64) -> Option<Reserve> {
        self.read(shard).find(hash, meta.key)?;
        let mut guard = self.write(shard);
        guard.find(hash, meta.key)?;
        let local = guard.resident(hash, meta.key).map(|(local, _)| local);
        let Some(local) = local else { return Some(Reserve::InProgress) };
        if guard.is_expired(local, now_ms) {
            if guard.records[local as usize].state() != State::Active {
                return Some(Reserve::InProgress);
            }
            self.push_removal(&mut guard, slot_of(local, shard), now_ms);
            let freed = guard.drop_block(local, MissCause::Expired, now_ms).unwrap_or(None);
            drop(guard);
            self.free(freed);
            return None;
        }
        self.note_use(&mut guard, slot_of(local, shard), meta.class, now_ms);
        guard.counters.already_stored += 1;
        Some(Reserve::AlreadyStored)
    }

    /// Copies `bytes` into a reservation, `at` bytes from its start. For writers in this process.
    pub fn fill(&self, owner: OwnerId, id: u64, at: u32, bytes: Shared<'_>) -> Result<(), StoreError> {
        self.while_busy(owner, id, |offset, size| {
            let (len, size, offset_in) = (bytes.len() as u64, u64::from(size), u64::from(at));
            let inside = offset_in.checked_add(len).is_some_and(|end| end <= size);
            let place = self.pool.mapping().place(offset + offset_in, len).filter(|_| inside);
            let filled = place.map(|mut place| place.copy_in(bytes));
            filled.map(|_| ()).ok_or(StoreError::OutOfReservation { id, offset: offset_in, len, size })
        })?
    }

    /// Has `fill` fill a whole reservation, without a copy in between. After an I/O error the reservation stands and its
    /// bytes are undefined.
    pub fn receive(
        &self,
        owner: OwnerId,
        id: u64,
        fill: impl FnOnce(&mut Place<'_>) -> std::io::Result<()>,
    ) -> Result<std::io::Result<()>, StoreError> {
        self.while_busy(owner, id, |offset, size| {
            let place = self.pool.mapping().place(offset, size.into());
            // The store reserves only what lies in its pool.
            place.map_or(Err(std::io::ErrorKind::InvalidInput.into()), |mut place| fill(&mut place))
        })
    }

    /// Runs `work(offset, size)` while the reservation's memory cannot be taken back.
    fn while_busy<R>(
        &self,
        owner: OwnerId,
        id: u64,
        work: impl FnOnce(u64, u32) -> R,
    ) -> Result<R, StoreError> {
        let (local, shard) = self.home(id).ok_or(StoreError::UnknownReservation { id })?;
        let (offset, size) = {
            let mut guard = self.write(shard);
            guard.reservation(local, id, owner)?.busy = true;
            let record = &guard.records[local as usize];
            (record.offset(), record.size)
        };
        let result = work(offset, size);
        let freed = self.write(shard).idle(local)?;
        self.free(freed);
        Ok(result)
    }

    /// Makes filled reservations visible, each with the checksum that its writer took while copying (or none:
    /// the store reads the block once more). Bytes are immutable from here on.
    ///
    /// Per item: the slot, or why not; with [`StoreError::ChecksumMismatch`] the reservation is aborted, with
    /// every other error it is as it was.
    pub fn commit(
        &self,
        owner: OwnerId,
        items: &[(u64, Option<u64>)],
        now_ms: u64,
    ) -> Result<Vec<Result<u32, StoreError>>, StoreError> {
        check_batch(items.len())?;
        let commit = |&(id, given)| {
            let done = self.commit_one(owner, id, given, false, now_ms);
            self.settle_late(owner, id, &done);
            Ok(done?.slot)
        };
        Ok(items.iter().map(commit).collect())
    }

    /// Makes a filled reservation visible and holds it from the same moment on, so that it cannot be evicted in between.
    /// See [`commit`](Self::commit).
    pub fn commit_held(
        self: &Arc<Self>,
        owner: OwnerId,
        id: u64,
        checksum: u64,
        now_ms: u64,
    ) -> Result<Held, StoreError> {
        let place = self.commit_one(owner, id, Some(checksum), true, now_ms)?;
        Ok(Held::new(Arc::clone(self), place.slot, place.offset, place.size, checksum))
    }

    fn commit_one(
        &self,
        owner: OwnerId,
        id: u64,
        given: Option<u64>,
        hold: bool,
        now_ms: u64,
    ) -> Result<Reservation, StoreError> {
        let (local, shard) = self.home(id).ok_or(StoreError::UnknownReservation { id })?;
        let (key, offset, size, parent, ttl_ms, reserved_ms) = {
            let mut guard = self.write(shard);
            let reservation = guard.reservation(local, id, owner)?;
            reservation.busy = true;
            let (parent, ttl_ms) = (reservation.parent, reservation.ttl_ms);
            let reserved_ms = reservation.expires_ms.saturating_sub(millis(self.config.reservation_ttl));
            guard.step(local, State::Storing)?;
            let record = &guard.records[local as usize];
            (guard.key(local), record.offset(), record.size, parent, ttl_ms, reserved_ms)
        };
        let found = match given {
            Some(given) if self.config.commit_check == CommitCheck::Trust => given,
            _ => self.checksum_at(offset, size),
        };
        let parent_slot = parent.and_then(|parent| self.slot_of_resident(parent)).unwrap_or(NO_SLOT);
        let mut guard = self.write(shard);
        let doomed = guard.idle(local)?;
        if let Some(freed) = doomed {
            drop(guard);
            self.free([freed]);
            return Err(StoreError::Aborted { id });
        }
        if let Some(expected) = given.filter(|&given| given != found) {
            guard.counters.corrupt += 1;
            let freed = guard.abort(local)?;
            drop(guard);
            self.free(freed);
            return Err(StoreError::ChecksumMismatch { key, expected, found });
        }
        guard.activate(local)?;
        guard.counters.stored_bytes += u64::from(size);
        guard.counters.creation.record(now_ms.saturating_sub(reserved_ms));
        if ttl_ms > 0 {
            guard.extras.set_expiry(local, now_ms.saturating_add(ttl_ms.into()));
        }
        let slot = slot_of(local, shard);
        let record = &mut guard.records[local as usize];
        record.set_has_extras(ttl_ms > 0);
        record.set_checksum(found);
        record.set_parent_slot(parent_slot);
        (record.inserted, record.used) = (ticks(now_ms), ticks(now_ms));
        record.set_was_brought(owner.brings());
        record.set_epoch(self.push(self.event(EventKind::Insert, record, slot, parent_slot, now_ms)));
        if hold {
            guard.lend(local, State::Migrating)?;
        }
        Ok(Reservation { id, slot, offset, size })
    }

    /// Gives reservations up.
    pub fn abort(&self, owner: OwnerId, ids: &[u64]) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        check_batch(ids.len())?;
        let abort = |&id| {
            let done = self.abort_one(owner, id);
            self.settle_late(owner, id, &done);
            done
        };
        Ok(ids.iter().map(abort).collect())
    }

    /// A client that names a reservation of its own again no longer writes to it, also when it was too late.
    fn settle_late<T>(&self, owner: OwnerId, id: u64, done: &Result<T, StoreError>) {
        let ended = |error: &StoreError| {
            matches!(error, StoreError::Aborted { .. } | StoreError::UnknownReservation { .. })
        };
        if owner.is_client() && done.as_ref().is_err_and(ended) {
            self.leave_quarantine(owner, id);
        }
    }

    fn abort_one(&self, owner: OwnerId, id: u64) -> Result<(), StoreError> {
        let (local, shard) = self.home(id).ok_or(StoreError::UnknownReservation { id })?;
        let freed = {
            let mut guard = self.write(shard);
            guard.reservation(local, id, owner)?;
            guard.abort(local)?
        };
        self.free(freed);
        Ok(())
    }

    /// Stores one block in one call.
    pub fn put(
        &self,
        owner: OwnerId,
        meta: &BlockMeta,
        bytes: &[u8],
        now_ms: u64,
    ) -> Result<Reserve, StoreError> {
        let mapping = self.pool.mapping();
        self.put_by(owner, meta, bytes, |offset| mapping.write_checksummed(offset, bytes, || {}), now_ms)
    }

    /// As [`put`](Self::put), for bytes that the caller has compared with `checksum`, and that nobody can change meanwhile: they are not
    /// summed up again.
    pub fn put_checked(
        &self,
        owner: OwnerId,
        meta: &BlockMeta,
        bytes: &[u8],
        checksum: u64,
        now_ms: u64,
    ) -> Result<Reserve, StoreError> {
        let mapping = self.pool.mapping();
        let write = |offset| mapping.write_block(offset, bytes).then_some(checksum);
        self.put_by(owner, meta, bytes, write, now_ms)
    }

    /// `write` writes the bytes to where it is told, and returns their checksum.
    fn put_by(
        &self,
        owner: OwnerId,
        meta: &BlockMeta,
        bytes: &[u8],
        write: impl FnOnce(u64) -> Option<u64>,
        now_ms: u64,
    ) -> Result<Reserve, StoreError> {
        let outcome = self.reserve_one(owner, meta, now_ms, &mut None);
        if let Reserve::Reserved(reservation) = &outcome {
            let id = reservation.id;
            let is_whole = bytes.len() as u64 == u64::from(meta.size);
            let filled = self.while_busy(owner, id, |offset, _| is_whole.then(|| write(offset)).flatten())?;
            let Some(sum) = filled else {
                self.abort_one(owner, id)?;
                let (len, size) = (bytes.len() as u64, meta.size.into());
                return Err(StoreError::OutOfReservation { id, offset: 0, len, size });
            };
            self.commit_one(owner, id, Some(sum), false, now_ms)?;
        }
        Ok(outcome)
    }
}
