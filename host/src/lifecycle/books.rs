//! Which blocks a policy may choose: the contract's "books", kept beside the policy to check it.

use kvasir_dataplane::tier::events::{AccessEvent, EventKind};
use kvasir_policy::evictor::Victim;
use std::collections::HashSet;

/// One bit per slot: told to the policy as resident, not chosen since and not pinned.
///
/// The books follow the same events as the policy, so an answer is wrong exactly when it breaks the
/// contract, whatever the store did meanwhile.
pub(super) struct Books {
    words: Vec<u64>,
    /// Pinned blocks: on the books again when the pin ends.
    pinned: HashSet<u32>,
    slots: u32,
    count: u32,
}

impl Books {
    pub(super) fn new(slots: u32) -> Self {
        Self { words: vec![0; slots.div_ceil(64) as usize], pinned: HashSet::new(), slots, count: 0 }
    }

    /// Blocks the policy can still choose.
    pub(super) fn len(&self) -> u32 {
        self.count
    }

    pub(super) fn clear(&mut self) {
        self.words.fill(0);
        self.pinned.clear();
        self.count = 0;
    }

    pub(super) fn note(&mut self, event: &AccessEvent) {
        match event.kind {
            EventKind::Insert => {
                self.pinned.remove(&event.slot);
                self.set(event.slot, true)
            }
            EventKind::Hit | EventKind::Keep => {
                let free = !self.pinned.contains(&event.slot);
                free && self.set(event.slot, true)
            }
            EventKind::Remove => {
                self.pinned.remove(&event.slot);
                self.set(event.slot, false)
            }
            EventKind::Pin => self.pinned.insert(event.slot) && self.set(event.slot, false),
            EventKind::Unpin => self.pinned.remove(&event.slot) && self.set(event.slot, true),
        };
    }

    /// Strikes the chosen slots off; on a slot that is not on the books, what is wrong.
    pub(super) fn choose(&mut self, victims: &[Victim], slots: &mut Vec<u32>) -> Result<(), String> {
        for victim in victims {
            if victim.slot >= self.slots {
                return Err(format!("victim {} is outside the pool of {} slots", victim.slot, self.slots));
            }
            if !self.set(victim.slot, false) {
                return Err(format!("victim {} is free, or was chosen before", victim.slot));
            }
            slots.push(victim.slot);
        }
        Ok(())
    }

    /// Returns whether the bit changed.
    fn set(&mut self, slot: u32, on: bool) -> bool {
        let Some(word) = self.words.get_mut((slot / 64) as usize) else { return false };
        let bit = 1 << (slot % 64);
        let was = *word & bit != 0;
        if was == on {
            return false;
        }
        *word ^= bit;
        if on {
            self.count += 1
        } else {
            self.count -= 1
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, slot: u32) -> AccessEvent {
        let (class, parent_or_uses, depth, size, time_ms, identity) = (0, 0, 0, 1, 0, 0);
        AccessEvent { kind, replayed: false, class, slot, parent_or_uses, depth, size, time_ms, identity }
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
        assert!(books.choose(&[Victim::new(99)], &mut chosen).unwrap_err().contains("chosen before"));
        assert!(books.choose(&[Victim::new(5)], &mut chosen).unwrap_err().contains("free"));
        assert!(books.choose(&[Victim::new(100)], &mut chosen).unwrap_err().contains("outside"));
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
