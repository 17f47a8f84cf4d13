//! Places that were taken back while another process may still be writing to them.
//!
//! A client on this machine fills its reservations through its own mapping of the pool, so nothing here can stop it. One
//! that was frozen (a stopped process, a paused control group or machine) goes on with its copy whenever it runs again. If
//! its place belonged to another block by then, that block would change under readers who have compared its checksum.
//!
//! Therefore such a place goes to nobody when its time is over, or its hand-over breaks off, but waits here until its writer
//! says that it is done with it (it commits or aborts the reservation, which then fails) or until
//! [`DramConfig::lease_grace`](crate::config::DramConfig::lease_grace) after its connection ended. A client that closed its
//! connection, or is gone, writes no more; the grace is for a connection that this host ended, and for copies of a GPU that its
//! process has begun.
//!
//! **Bound.** A place in here counts as reserved by its writer, which has at most a third of the pool, and with all other
//! connections of its caller half. While half of the pool is in here, no such client gets new places. It takes two stopped clients
//! to stop the others. So it can grow beyond that only by what they had reserved before, and nothing is ever given away that may
//! still be written to.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{DramStore, OwnerId, SHARDS, millis};
use crate::error::StoreError;
use crate::shard::{Freed, Shard};
use kvasir_memory::extents::Extents;
use kvasir_os::planted::{self, Bug};

/// Half of the pool may be in quarantine.
const SHARE: u64 = 2;

#[derive(Default)]
pub(super) struct Quarantine {
    places: Mutex<Vec<Place>>,
    /// Bytes of those places. Changed under the lock.
    bytes: AtomicU64,
    /// Places taken in since the start, and reservations refused because it was full.
    taken: AtomicU64,
    refused: AtomicU64,
}

struct Place {
    owner: OwnerId,
    reservation: u64,
    freed: Freed,
    /// When it may go; none while its writer is connected.
    until_ms: Option<u64>,
}

impl Quarantine {
    fn add(&self, owner: OwnerId, reservation: u64, freed: Freed, until_ms: Option<u64>) {
        let mut places = self.places.lock();
        self.bytes.fetch_add(Extents::rounded(freed.size.into()), Ordering::Relaxed);
        self.taken.fetch_add(1, Ordering::Relaxed);
        places.push(Place { owner, reservation, freed, until_ms });
    }

    /// Takes out the places that `may_go` names.
    fn take(&self, may_go: impl Fn(&Place) -> bool) -> Vec<Freed> {
        if self.bytes() == 0 {
            return Vec::new();
        }
        let mut places = self.places.lock();
        let gone: Vec<Freed> =
            places.extract_if(.., |place| may_go(place)).map(|place| place.freed).collect();
        let bytes: u64 = gone.iter().map(|freed| Extents::rounded(freed.size.into())).sum();
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        gone
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of one writer's places, and of those of all connections of its caller.
    pub(super) fn bytes_of(&self, owner: OwnerId) -> [u64; 2] {
        let mut sums = [0; 2];
        if self.bytes() > 0 {
            for place in &*self.places.lock() {
                owner.add_if_own(&mut sums, place.owner, Extents::rounded(place.freed.size.into()));
            }
        }
        sums
    }

    /// Places taken in since the start, and reservations refused.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.taken.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

impl DramStore {
    /// Whether a client that fills its places itself may have another.
    pub(super) fn check_quarantine(&self, owner: OwnerId) -> Result<(), StoreError> {
        let bytes = self.quarantine.bytes();
        if !owner.is_client() || bytes < self.pool.bytes() / SHARE {
            return Ok(());
        }
        self.quarantine.refused.fetch_add(1, Ordering::Relaxed);
        Err(StoreError::WritersLate { bytes })
    }

    /// Takes a reservation back that its owner has not given up. Returns the memory, unless its owner may still write to it.
    pub(super) fn take_back(&self, guard: &mut Shard, local: u32, until_ms: Option<u64>) -> Option<Freed> {
        let (owner, id) =
            guard.reservations.get(&local).map(|reservation| (reservation.owner, reservation.id))?;
        guard.counters.reservations_reclaimed += 1;
        let freed = guard.abort(local).unwrap_or(None)?;
        if !owner.is_client() || planted::is(Bug::GivesPlacesOfWritersAway) {
            return Some(freed);
        }
        self.quarantine.add(owner, id, freed, until_ms);
        None
    }

    /// Takes reservations back whose owner does not know of it yet, because what they were for has broken off.
    pub fn revoke(&self, owner: OwnerId, ids: &[u64]) {
        for &id in ids {
            let Some((local, shard)) = self.home(id) else { continue };
            let freed = {
                let mut guard = self.write(shard);
                // Otherwise it has ended by itself.
                if guard.reservation(local, id, owner).is_err() {
                    continue;
                }
                self.take_back(&mut guard, local, None)
            };
            self.free(freed);
        }
    }

    /// Called when the owner says that it no longer writes to the place of a reservation that was taken back.
    pub(super) fn leave_quarantine(&self, owner: OwnerId, id: u64) {
        let freed = self.quarantine.take(|place| place.owner == owner && place.reservation == id);
        self.free(freed);
    }

    /// Called when the owner's connection has ended: its places may go after the grace time.
    pub(super) fn end_quarantine(&self, owner: OwnerId, now_ms: u64) {
        let until_ms = self.grace_ends(now_ms);
        let mut places = self.quarantine.places.lock();
        for place in places.iter_mut().filter(|place| place.owner == owner) {
            place.until_ms.get_or_insert(until_ms);
        }
    }

    /// Whether the owner may be writing to any place: reserved, or taken back.
    pub fn is_filling(&self, owner: OwnerId) -> bool {
        let reserved = |shard| self.read(shard).reservations.values().any(|r| r.owner == owner);
        (0..SHARDS).any(reserved) || self.quarantine.places.lock().iter().any(|place| place.owner == owner)
    }

    pub(super) fn sweep_quarantine(&self, now_ms: u64) -> Vec<Freed> {
        self.quarantine.take(|place| place.until_ms.is_some_and(|until_ms| until_ms <= now_ms))
    }

    pub(super) fn grace_ends(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add(millis(self.config.lease_grace))
    }
}
