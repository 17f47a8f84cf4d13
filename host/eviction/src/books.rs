//! What one engine of the eviction policy has been told, kept beside it: which blocks it may choose (the contract's
//! "books"), and which it has never heard of.

use kvasir_policy::evictor::Victim;
use kvasir_store::events::{AccessEvent, EventKind};
use std::collections::HashSet;

/// A choice of victims that is not within the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadChoice {
    #[error("{given} victims where {wanted} of {resident} resident were wanted")]
    TooFew { given: usize, wanted: u32, resident: u32 },
    #[error("victim {slot} is outside the pool of {slots} slots")]
    Outside { slot: u32, slots: u32 },
    #[error("victim {slot} is free, or was chosen before")]
    Free { slot: u32 },
}

/// The books follow the same events as the engine, so an answer is wrong exactly when it breaks the contract, whatever
/// the store did meanwhile.
pub(crate) struct Books {
    /// Told as resident, not chosen since and not pinned.
    free: Bits,
    /// Told as resident and not removed since: the engine knows what a `hit` or a `keep` of it means.
    told: Bits,
    /// Pinned blocks: free again when the pin ends.
    pinned: HashSet<u32>,
    slots: u32,
    count: u32,
}

impl Books {
    pub(crate) fn new(slots: u32) -> Self {
        let (free, told) = (Bits::new(slots), Bits::new(slots));
        Self { free, told, pinned: HashSet::new(), slots, count: 0 }
    }

    /// Blocks the policy can still choose.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    /// Whether the engine knows what is in a slot, chosen or not.
    pub(crate) fn knows(&self, slot: u32) -> bool {
        self.told.get(slot)
    }

    /// Whether the engine counts the block in a slot as resident.
    pub(crate) fn holds(&self, slot: u32) -> bool {
        self.free.get(slot) || self.is_pinned(slot)
    }

    pub(crate) fn is_pinned(&self, slot: u32) -> bool {
        self.pinned.contains(&slot)
    }

    pub(crate) fn note(&mut self, event: &AccessEvent) {
        let slot = event.slot;
        match event.kind {
            EventKind::Insert => {
                self.pinned.remove(&slot);
                self.told.set(slot, true);
                self.set_free(slot, true);
            }
            EventKind::Hit | EventKind::Keep if self.is_pinned(slot) => {}
            EventKind::Hit | EventKind::Keep => {
                self.set_free(slot, true);
            }
            EventKind::Remove => {
                self.pinned.remove(&slot);
                self.told.set(slot, false);
                self.set_free(slot, false);
            }
            EventKind::Pin => {
                self.pinned.insert(slot);
                self.set_free(slot, false);
            }
            EventKind::Unpin => {
                if self.pinned.remove(&slot) {
                    self.set_free(slot, true);
                }
            }
        }
    }

    /// Strikes the chosen slots off. Fails on a slot that is not on the books.
    pub(crate) fn choose(&mut self, victims: &[Victim], slots: &mut Vec<u32>) -> Result<(), BadChoice> {
        for victim in victims {
            if victim.slot >= self.slots {
                return Err(BadChoice::Outside { slot: victim.slot, slots: self.slots });
            }
            if !self.set_free(victim.slot, false) {
                return Err(BadChoice::Free { slot: victim.slot });
            }
            slots.push(victim.slot);
        }
        Ok(())
    }

    /// Returns whether the bit changed.
    fn set_free(&mut self, slot: u32, on: bool) -> bool {
        let changed = self.free.set(slot, on);
        match (changed, on) {
            (true, true) => self.count += 1,
            (true, false) => self.count -= 1,
            (false, _) => {}
        }
        changed
    }
}

/// One bit per slot.
struct Bits(Vec<u64>);

impl Bits {
    fn new(slots: u32) -> Self {
        Self(vec![0; slots.div_ceil(64) as usize])
    }

    fn get(&self, slot: u32) -> bool {
        self.0.get((slot / 64) as usize).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Returns whether the bit changed.
    fn set(&mut self, slot: u32, on: bool) -> bool {
        let Some(word) = self.0.get_mut((slot / 64) as usize) else { return false };
        let bit = 1 << (slot % 64);
        let changed = (*word & bit != 0) != on;
        *word = if on { *word | bit } else { *word & !bit };
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, slot: u32) -> AccessEvent {
        AccessEvent {
            kind,
            replayed: false,
            class: 0,
            slot,
            parent_or_uses: 0,
            depth: 0,
            size: 1,
            time_ms: 0,
            identity: 0,
            tenant: 0,
        }
    }

    #[test]
    fn a_block_is_chosen_once_until_it_is_named_again() {
        let mut books = Books::new(100);
        let mut chosen = Vec::new();
        for (kind, slot) in [(EventKind::Insert, 1), (EventKind::Insert, 99), (EventKind::Hit, 1)] {
            books.note(&event(kind, slot));
        }
        assert_eq!(books.len(), 2);
        assert_eq!(books.choose(&[Victim::new(99)], &mut chosen), Ok(()));
        let refused = [(99, BadChoice::Free { slot: 99 }), (5, BadChoice::Free { slot: 5 })];
        let outside = (100, BadChoice::Outside { slot: 100, slots: 100 });
        for (slot, expected) in refused.into_iter().chain([outside]) {
            assert_eq!(books.choose(&[Victim::new(slot)], &mut chosen), Err(expected));
        }
        books.note(&event(EventKind::Keep, 99));
        assert_eq!(books.choose(&[Victim::new(99)], &mut chosen), Ok(()));
        books.note(&event(EventKind::Remove, 1));
        assert_eq!(books.len(), 0);

        for kind in [EventKind::Insert, EventKind::Pin, EventKind::Hit, EventKind::Keep] {
            books.note(&event(kind, 7));
        }
        assert!(books.choose(&[Victim::new(7)], &mut chosen).is_err(), "pinned");
        assert_eq!(books.len(), 0);
        books.note(&event(EventKind::Unpin, 7));
        assert_eq!(books.choose(&[Victim::new(7)], &mut chosen), Ok(()));
        assert_eq!(chosen, [99, 99, 7]);
    }
}
