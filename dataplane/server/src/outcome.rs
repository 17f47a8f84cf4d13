//! The store's answers, in terms of the protocol.

use kvasir_protocol::wire::{Found, Outcome, Placed, Stat};
use kvasir_store::dram::{BlockStat, Evict, Lookup, Pinning, Remove, Reserve, Verify};
use kvasir_store::tiering::Residency;

pub(super) fn found(lookup: &Lookup) -> Found {
    match lookup {
        Lookup::Hit(lease) => {
            Found::Hit { offset: lease.offset, size: lease.size, checksum: lease.checksum, lease: lease.id }
        }
        Lookup::Miss => Found::Not(Outcome::Missing),
        Lookup::Throttled => Found::Not(Outcome::Throttled),
    }
}

pub(super) fn place(reserve: &Reserve) -> Placed {
    match reserve {
        Reserve::Reserved(reservation) => {
            Placed::At { reservation: reservation.id, offset: reservation.offset }
        }
        Reserve::AlreadyStored => Placed::Not(Outcome::AlreadyStored),
        Reserve::InProgress => Placed::Not(Outcome::InProgress),
        Reserve::Refused(error) => Placed::Not(error.into()),
    }
}

pub(super) fn outcome<T>(result: &Result<T, kvasir_store::error::StoreError>) -> Outcome {
    result.as_ref().map_or_else(Outcome::from, |_| Outcome::Done)
}

pub(super) fn removed(remove: Remove) -> Outcome {
    match remove {
        Remove::Removed => Outcome::Done,
        Remove::Missing => Outcome::Missing,
        Remove::InProgress | Remove::Unfinished => Outcome::InProgress,
    }
}

pub(super) fn verified(verify: Verify) -> Outcome {
    match verify {
        Verify::Intact => Outcome::Done,
        Verify::Dropped => Outcome::Dropped,
        Verify::Missing => Outcome::Missing,
    }
}

pub(super) fn pinned(pinning: Pinning) -> Outcome {
    match pinning {
        Pinning::Until { .. } => Outcome::Done,
        Pinning::Missing => Outcome::Missing,
        Pinning::QuotaFull => Outcome::PinQuotaFull,
        Pinning::Throttled => Outcome::Throttled,
    }
}

/// A pin or a hold.
pub(super) fn ended(was_there: bool) -> Outcome {
    if was_there { Outcome::Done } else { Outcome::Missing }
}

pub(super) fn evicted(evict: Evict) -> Outcome {
    match evict {
        Evict::Evicted => Outcome::Done,
        Evict::NotResident => Outcome::Missing,
        Evict::InUse | Evict::Changed => Outcome::InUse,
        Evict::Pinned | Evict::Floor => Outcome::Pinned,
    }
}

/// Returns `None` if no tier holds the block.
pub(super) fn describe((stat, at): &(Option<BlockStat>, Residency), now: u64) -> Option<Stat> {
    let (size, tiers) = (at.size?, at.bits());
    Some(stat.as_ref().map_or(Stat { size, tiers, ..Stat::default() }, |stat| Stat {
        size,
        tiers,
        checksum: stat.checksum,
        depth: stat.depth,
        class: stat.class,
        uses: stat.uses,
        leases: stat.leases,
        age_ms: now.saturating_sub(stat.inserted_ms),
        idle_ms: now.saturating_sub(stat.used_ms),
    }))
}
