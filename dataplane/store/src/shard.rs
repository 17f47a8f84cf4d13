//! One shard of the store: records of its blocks, the index over them, reservations and leases.
//!
//! A slot of the store is `local * SHARDS + shard`; everything here speaks of `local`. All steps here are short
//! and under the shard's lock; copying, checksums and waiting happen outside.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::departures::Departures;
use super::dram::{Metadata, OwnerId, TICK_MS};
use super::extras::{Extras, Pinned};
use super::ghosts::{Ghosts, MISS_CAUSES, MissCause};
use super::index::Index;
use super::lease::Leases;
use super::lifecycle::{LifecycleCounts, State};
use super::record::Record;
use crate::error::StoreError;
use crate::metrics::Histogram;
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// Ended reservations that a shard remembers, to tell a double commit from an id that never existed.
const ENDED_MAX: usize = 256;

pub(super) struct Reservation {
    pub(super) id: u64,
    pub(super) owner: OwnerId,
    pub(super) parent: Option<BlockKey>,
    pub(super) expires_ms: u64,
    /// Time to live of the future block, 0 = none.
    pub(super) ttl_ms: u32,
    /// Bytes are being received or checksummed right now; memory must not be taken away.
    pub(super) busy: bool,
    /// It will be aborted as soon as it is not busy.
    pub(super) doomed: bool,
}

#[derive(Clone, Copy)]
enum Ended {
    Committed,
    Aborted,
}

/// Memory to give back, and which tenants to refund, once the shard's lock is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Freed {
    pub(super) offset: u64,
    pub(super) size: u32,
    /// Label of the block that was there.
    pub(super) label: u16,
    pub(super) pins: Vec<Pinned>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) hit_bytes: u64,
    pub(super) stored_bytes: u64,
    pub(super) evicted_bytes: u64,
    pub(super) corrupt: u64,
    pub(super) already_stored: u64,
    pub(super) leases_expired: u64,
    pub(super) reservations_reclaimed: u64,
    pub(super) misses_by_cause: [u64; MISS_CAUSES],
    pub(super) creation: Histogram,
    pub(super) age_at_eviction: Histogram,
    pub(super) lifetime: Histogram,
    pub(super) reuse_interval: Histogram,
    pub(super) migration: Histogram,
    pub(super) migrated_bytes: u64,
}

pub(super) struct Shard {
    /// Changed here alone, under this shard's lock.
    index: Arc<Index>,
    pub(super) records: Vec<Record>,
    free: Vec<u32>,
    /// Readers beyond the first, of blocks that have several. The state says whether there is a first one.
    more_readers: HashMap<u32, u16>,
    slots_max: usize,
    pub(super) reservations: HashMap<u32, Reservation>,
    reservations_made: u32,
    ended: VecDeque<(u64, Ended)>,
    pub(super) leases: Leases,
    pub(super) extras: Extras,
    ghosts: Ghosts,
    departures: Arc<Departures>,
    pub(super) lifecycle: LifecycleCounts,
    pub(super) counters: Counters,
    /// Where the scan for blocks past their time to live continues.
    pub(super) ttl_cursor: usize,
    /// Where the store's own search for a victim continues.
    pub(super) scan_cursor: usize,
    seed: u64,
}

impl Shard {
    pub(super) fn new(
        slots_max: usize,
        seed: u64,
        first_life: u32,
        index: Arc<Index>,
        departures: Arc<Departures>,
    ) -> Self {
        Self {
            index,
            // Memory that nobody touched is not resident; growing would cost more, in time under the shard's lock and
            // at its peak.
            records: Vec::with_capacity(slots_max),
            free: Vec::new(),
            more_readers: HashMap::new(),
            slots_max,
            reservations: HashMap::new(),
            reservations_made: 0,
            ended: VecDeque::new(),
            leases: Leases::new(first_life),
            extras: Extras::default(),
            ghosts: Ghosts::default(),
            departures,
            lifecycle: LifecycleCounts::default(),
            counters: Counters::default(),
            ttl_cursor: 0,
            scan_cursor: 0,
            seed,
        }
    }

    pub(super) fn find(&self, hash: u64, key: BlockKey) -> Option<u32> {
        self.index.find(hash, key)
    }

    pub(super) fn key(&self, local: u32) -> BlockKey {
        self.index.key(local)
    }

    fn hash(&self, local: u32) -> u64 {
        hash_of(self.key(local), self.seed)
    }

    /// The record of a resident block.
    pub(super) fn resident(&mut self, hash: u64, key: BlockKey) -> Option<(u32, &mut Record)> {
        let local = self.find(hash, key)?;
        let record = &mut self.records[local as usize];
        record.is_resident().then_some((local, record))
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.records.len() < self.slots_max
    }

    /// Records a reserved block. The key must not be in the index, and there must be room.
    pub(super) fn create(&mut self, hash: u64, meta: &BlockMeta, label: u16, offset: u64) -> u32 {
        let record = Record::new(meta, label, offset, self.lifecycle.begin());
        let local = match self.free.pop() {
            Some(local) => {
                self.records[local as usize] = record;
                local
            }
            None => {
                self.records.push(record);
                self.records.len() as u32 - 1
            }
        };
        self.index.insert(hash, meta.key, local);
        local
    }

    /// Opens the reservation of a block just created in the store's slot `slot`.
    pub(super) fn open(
        &mut self,
        local: u32,
        slot: u32,
        owner: OwnerId,
        meta: &BlockMeta,
        expires_ms: u64,
    ) -> u64 {
        self.reservations_made = self.reservations_made.wrapping_add(1);
        let id = u64::from(self.reservations_made) << 32 | u64::from(slot);
        let reservation = Reservation {
            id,
            owner,
            parent: meta.parent,
            expires_ms,
            ttl_ms: meta.ttl_ms,
            busy: false,
            doomed: false,
        };
        self.reservations.insert(local, reservation);
        id
    }

    /// The open reservation `id` of `owner`, not in use by another call.
    pub(super) fn reservation(
        &mut self,
        local: u32,
        id: u64,
        owner: OwnerId,
    ) -> Result<&mut Reservation, StoreError> {
        let ended = self.ended.iter().rev().find(|(ended, _)| *ended == id).map(|(_, how)| *how);
        match self.reservations.get_mut(&local).filter(|reservation| reservation.id == id) {
            Some(reservation) if reservation.owner != owner => Err(StoreError::NotTheWriter { id }),
            Some(reservation) if reservation.doomed => Err(StoreError::Aborted { id }),
            Some(reservation) if reservation.busy => Err(StoreError::Busy { id }),
            Some(reservation) => Ok(reservation),
            None => Err(match ended {
                Some(Ended::Committed) => StoreError::AlreadyCommitted { id },
                Some(Ended::Aborted) => StoreError::Aborted { id },
                None => StoreError::UnknownReservation { id },
            }),
        }
    }

    fn end_reservation(&mut self, local: u32, how: Ended) {
        if let Some(reservation) = self.reservations.remove(&local) {
            if self.ended.len() == ENDED_MAX {
                self.ended.pop_front();
            }
            self.ended.push_back((reservation.id, how));
        }
    }

    /// Makes a stored block visible.
    pub(super) fn activate(&mut self, local: u32) -> Result<(), StoreError> {
        self.step(local, State::Active)?;
        self.index.show(self.hash(local), local);
        self.end_reservation(local, Ended::Committed);
        Ok(())
    }

    /// Gives up a reserved block, at once or, while it is busy, when [`idle`](Self::idle) is called.
    pub(super) fn abort(&mut self, local: u32) -> Result<Option<Freed>, StoreError> {
        if let Some(reservation) = self.reservations.get_mut(&local).filter(|reservation| reservation.busy) {
            reservation.doomed = true;
            return Ok(None);
        }
        self.step(local, State::Aborted)?;
        self.end_reservation(local, Ended::Aborted);
        Ok(Some(self.forget(local)))
    }

    /// The call that kept the reservation busy is done. Returns the memory if it was doomed meanwhile.
    pub(super) fn idle(&mut self, local: u32) -> Result<Option<Freed>, StoreError> {
        let Some(reservation) = self.reservations.get_mut(&local) else { return Ok(None) };
        reservation.busy = false;
        if reservation.doomed { self.abort(local) } else { Ok(None) }
    }

    /// How many read a block now: leases and transfers.
    pub(super) fn readers(&self, local: u32) -> u32 {
        match self.records[local as usize].state() {
            State::Reused | State::Migrating | State::Evicting => {
                1 + u32::from(self.more_readers.get(&local).copied().unwrap_or(0))
            }
            _ => 0,
        }
    }

    /// Whether a pin keeps the block now.
    pub(super) fn is_pinned(&self, local: u32, now_ms: u64, only_hard: bool) -> bool {
        let keeps = |pin: &Pinned| pin.until_ms > now_ms && (pin.hard || !only_hard);
        self.records[local as usize].has_extras() && self.extras.pins(local).iter().any(keeps)
    }

    /// Whether the block's own time to live is over.
    pub(super) fn is_expired(&self, local: u32, now_ms: u64) -> bool {
        self.records[local as usize].has_extras()
            && self.extras.expires_ms(local).is_some_and(|expires_ms| expires_ms <= now_ms)
    }

    /// One more reader of a resident block.
    pub(super) fn lend(&mut self, local: u32, to: State) -> Result<(), StoreError> {
        let state = self.records[local as usize].state();
        if state != State::Active {
            let more = self.more_readers.entry(local).or_insert(0);
            *more = more.checked_add(1).ok_or(StoreError::TooManyLeases { held: usize::from(*more) + 1 })?;
        }
        if state == to { Ok(()) } else { self.step(local, to) }
    }

    /// One reader fewer. Returns the memory if the block was only waiting for that.
    pub(super) fn give_back(&mut self, local: u32) -> Result<Option<Freed>, StoreError> {
        if let Some(more) = self.more_readers.get_mut(&local) {
            *more -= 1;
            if *more == 0 {
                self.more_readers.remove(&local);
            }
            return Ok(None);
        }
        if self.records[local as usize].state() == State::Evicting {
            self.step(local, State::Removed)?;
            return Ok(Some(self.vacate(local)));
        }
        self.step(local, State::Active).map(|()| None)
    }

    /// How a block that is not here left last.
    pub(super) fn cause(&self, hash: u64) -> MissCause {
        self.ghosts.cause(hash)
    }

    /// A lookup that found nothing.
    pub(super) fn miss(&mut self, hash: u64, expired: bool) {
        let cause = if expired { MissCause::Expired } else { self.ghosts.cause(hash) };
        self.counters.misses += 1;
        self.counters.misses_by_cause[cause as usize] += 1;
    }

    /// Makes a resident block invisible and, if nobody reads it, frees it. Later misses know why.
    pub(super) fn drop_block(
        &mut self,
        local: u32,
        why: MissCause,
        now_ms: u64,
    ) -> Result<Option<Freed>, StoreError> {
        let end = match why {
            MissCause::Evicted => State::Evicted,
            MissCause::Expired => State::Expired,
            _ => State::Removed,
        };
        let record = &self.records[local as usize];
        self.ghosts.note(self.hash(local), why);
        // Nobody looks it up before this shard's lock is free, and then it is gone.
        self.departures.note(self.key(local));
        let age_ms = now_ms.saturating_sub(u64::from(record.inserted) * TICK_MS);
        self.counters.lifetime.record(age_ms);
        if end == State::Evicted {
            self.counters.age_at_eviction.record(age_ms);
        }
        if end == State::Expired {
            self.step(local, State::Expired)?;
            return Ok(Some(self.forget(local)));
        }
        let is_read = self.readers(local) > 0;
        self.step(local, State::Evicting)?;
        self.unindex(local);
        if is_read {
            return Ok(None);
        }
        self.step(local, end)?;
        Ok(Some(self.vacate(local)))
    }

    pub(super) fn step(&mut self, local: u32, to: State) -> Result<(), StoreError> {
        let record = &mut self.records[local as usize];
        let mut state = record.state();
        self.lifecycle.advance(&mut state, to)?;
        record.set_state(state);
        Ok(())
    }

    pub(super) fn add_metadata(&self, sum: &mut Metadata) {
        let resident = State::ALL.into_iter().filter(|state| state.is_resident());
        sum.blocks += resident.map(|state| self.lifecycle.in_state(state)).sum::<u64>();
        sum.records_bytes += (self.records.len() * size_of::<Record>()) as u64;
        sum.index_bytes += self.index.memory_bytes(self.records.len()) as u64;
        let reservations = self.reservations.capacity() * size_of::<(u32, Reservation)>();
        let ended = self.ended.capacity() * size_of::<(u64, Ended)>();
        let slots =
            self.free.capacity() * size_of::<u32>() + self.more_readers.capacity() * size_of::<(u32, u16)>();
        let aside = self.leases.memory_bytes() + self.extras.memory_bytes() + self.ghosts.memory_bytes();
        sum.other_bytes += (reservations + ended + slots + aside) as u64;
    }

    fn forget(&mut self, local: u32) -> Freed {
        self.unindex(local);
        self.vacate(local)
    }

    fn unindex(&mut self, local: u32) {
        self.index.remove(self.hash(local), local);
    }

    fn vacate(&mut self, local: u32) -> Freed {
        self.free.push(local);
        let record = &self.records[local as usize];
        let pins = if record.has_extras() { self.extras.remove(local) } else { Vec::new() };
        Freed { offset: record.offset(), size: record.size, label: record.label(), pins }
    }
}

/// The hash that picks a key's shard (bits 32 up) and place in it. Seeded, because clients choose keys.
pub fn hash_of(key: BlockKey, seed: u64) -> u64 {
    let low = key.0 as u64 ^ seed;
    let high = (key.0 >> 64) as u64 ^ seed.rotate_left(32) ^ 0xa076_1d64_78bd_642f;
    let product = u128::from(low) * u128::from(high);
    let folded = product as u64 ^ (product >> 64) as u64;
    folded ^ key.0 as u64
}
