//! Leases of one shard: a slab with an expiry queue threaded through it.
//!
//! All leases of a store live equally long, so the queue is in order of expiry by construction and expiring,
//! like releasing, is O(1).

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::dram::OwnerId;
use kvasir_os::planted::{self, Bug};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
pub(super) struct Lease {
    /// Slot within the shard.
    pub(super) local: u32,
    pub(super) owner: OwnerId,
    pub(super) expires_ms: u64,
    held: bool,
    /// Counts the lives of this entry; the high half of a lease's id.
    life: u32,
    prev: u32,
    next: u32,
}

pub(super) struct Leases {
    entries: Vec<Lease>,
    free: Vec<u32>,
    /// Oldest and youngest lease.
    head: u32,
    tail: u32,
    held: usize,
    /// How many leases each owner holds, if any.
    by_owner: HashMap<OwnerId, usize>,
    /// Life that a new entry begins with. Random, so that an id given by an earlier run of the host ends nothing now.
    first_life: u32,
}

impl Leases {
    pub(super) fn new(first_life: u32) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            head: NONE,
            tail: NONE,
            held: 0,
            by_owner: HashMap::new(),
            first_life,
        }
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// How many `owner` holds.
    pub(super) fn held_by(&self, owner: OwnerId) -> usize {
        self.by_owner.get(&owner).copied().unwrap_or(0)
    }

    /// How many all connections of the caller of `owner` hold. Looks at each connection that holds any.
    pub(super) fn held_by_caller(&self, owner: OwnerId) -> usize {
        let own = self.by_owner.iter().filter(|(holder, _)| owner.has_caller_of(**holder));
        own.map(|(_, held)| held).sum()
    }

    /// Adds a lease; returns its (index, life).
    pub(super) fn add(&mut self, local: u32, owner: OwnerId, expires_ms: u64) -> (u32, u32) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Lease {
                local,
                owner,
                expires_ms,
                held: false,
                life: self.first_life,
                prev: NONE,
                next: NONE,
            });
            self.entries.len() as u32 - 1
        });
        // Callers read their clocks before they get here, so `now` may step back a little between them.
        let youngest = self.entries.get(self.tail as usize).map_or(0, |lease| lease.expires_ms);
        let life = self.entries[index as usize].life.wrapping_add(1);
        self.entries[index as usize] = Lease {
            local,
            owner,
            expires_ms: expires_ms.max(youngest),
            held: true,
            life,
            prev: self.tail,
            next: NONE,
        };
        match self.entries.get_mut(self.tail as usize) {
            Some(tail) => tail.next = index,
            None => self.head = index,
        }
        self.tail = index;
        self.held += 1;
        *self.by_owner.entry(owner).or_default() += 1;
        (index, life)
    }

    /// Ends a lease of `owner`. Returns `None` if it ended before or is another's.
    pub(super) fn end(&mut self, owner: OwnerId, index: u32, life: u32) -> Option<Lease> {
        let is_owners = |lease: &Lease| lease.owner == owner || planted::is(Bug::EndsLeasesOfOthers);
        let is_meant = |lease: &&Lease| lease.held && lease.life == life && is_owners(lease);
        let lease = *self.entries.get(index as usize).filter(is_meant)?;
        match self.entries.get_mut(lease.prev as usize) {
            Some(prev) => prev.next = lease.next,
            None => self.head = lease.next,
        }
        match self.entries.get_mut(lease.next as usize) {
            Some(next) => next.prev = lease.prev,
            None => self.tail = lease.prev,
        }
        self.entries[index as usize].held = false;
        self.free.push(index);
        self.held -= 1;
        if let Entry::Occupied(mut own) = self.by_owner.entry(lease.owner) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
        Some(lease)
    }

    /// Ends the oldest lease if it has expired.
    pub(super) fn expire_one(&mut self, now_ms: u64) -> Option<Lease> {
        let oldest = *self.entries.get(self.head as usize).filter(|lease| lease.expires_ms <= now_ms)?;
        self.end(oldest.owner, self.head, oldest.life)
    }

    /// Bytes these tables take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Lease>() + self.free.capacity() * size_of::<u32>()
    }

    /// The (index, life) of every lease of `owner`.
    pub(super) fn of(&self, owner: OwnerId) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let mut at = self.head;
        while let Some(lease) = self.entries.get(at as usize) {
            if lease.owner == owner {
                found.push((at, lease.life));
            }
            at = lease.next;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_end_once_and_expire_in_order() {
        let (a, b) = (OwnerId(1), OwnerId(2));
        let mut leases = Leases::new(u32::MAX - 1);
        let first = leases.add(10, a, 100);
        let second = leases.add(11, b, 90);
        let third = leases.add(12, a, 200);
        assert_eq!(leases.of(a), [first, third]);
        assert!(leases.expire_one(99).is_none());
        assert!(leases.end(a, second.0, second.1).is_none(), "nobody ends another's lease");
        assert_eq!(leases.end(b, second.0, second.1).map(|l| l.local), Some(11));
        assert!(leases.end(b, second.0, second.1).is_none());
        assert_eq!(leases.expire_one(100).map(|l| l.local), Some(10));
        leases.add(13, b, 250);
        assert!(leases.end(a, first.0, first.1).is_none(), "an id is never good for a later lease");
        assert_eq!(leases.expire_one(1000).map(|l| l.local), Some(12));
        assert_eq!(leases.expire_one(1000).map(|l| l.local), Some(13));
        assert_eq!((leases.expire_one(1000).map(|l| l.local), leases.held()), (None, 0));
        assert!(leases.by_owner.is_empty(), "nothing is kept of owners that hold none");
    }
}
