//! SIEVE (Zhang et al., NSDI '24): a queue in order of insertion, a bit per block that a hit sets,
//! and a hand that walks from the oldest block to the newest, clears set bits and evicts the first
//! block whose bit is clear.
//!
//! For chains of blocks the hand passes over a block while a child of it is resident.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{EventKind, Events, Victim};
use kvasir_policy::list::{Family, Lists, Walk};
use kvasir_policy::{Description, Evictor};

/// Resident blocks, oldest at the front.
#[derive(Default)]
pub struct Sieve {
    queue: Lists,
    visited: Vec<bool>,
    family: Family,
    walk: Walk,
    /// Where the hand stopped; `None` means the front.
    hand: Option<u32>,
    /// The request that is inserting: its last block.
    inserted: Option<u32>,
}

impl Sieve {
    /// Takes the block out of the queue; the hand moves on if it was there.
    fn unlink(&mut self, slot: u32) {
        if self.hand == Some(slot) {
            self.hand = self.queue.next(slot);
        }
        self.queue.remove(slot);
    }

    /// Puts a block at the new end; blocks of one request are kept deepest first.
    fn link(&mut self, slot: u32, parent: Option<u32>) {
        let same_request = parent.is_some() && parent == self.inserted;
        if !(same_request && parent.is_some_and(|at| self.queue.insert_before(at, slot))) {
            self.queue.push_back(0, slot);
        }
        self.inserted = Some(slot);
    }

    fn set_visited(&mut self, slot: u32, visited: bool) {
        if let Some(bit) = self.visited.get_mut(slot as usize) {
            *bit = visited;
        }
    }

    /// Moves the hand to the next victim. Two laps clear every bit and pass every leaf; only blocks
    /// whose children are pinned or elsewhere are left then, and the one under the hand goes.
    fn victim(&mut self) -> Option<u32> {
        let mut slot = self.hand.or_else(|| self.queue.front(0))?;
        for _ in 0..2 * self.queue.len() {
            let visited = std::mem::take(&mut self.visited[slot as usize]);
            if !visited && !self.family.has_children(slot) {
                break;
            }
            slot = self.queue.next(slot).or_else(|| self.queue.front(0))?;
        }
        self.hand = Some(slot);
        Some(slot)
    }
}

impl Evictor for Sieve {
    fn describe(&self) -> Description {
        Description::evictor("sieve", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            queue: Lists::new(slots, 1),
            visited: vec![false; slots as usize],
            family: Family::new(slots),
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            let slot = event.slot;
            let before = self.walk.shallower(&event);
            match event.kind {
                EventKind::Insert => {
                    self.unlink(slot);
                    self.link(slot, before);
                    self.set_visited(slot, false);
                    self.family.insert(slot, event.parent_or_uses);
                }
                EventKind::Hit if self.queue.contains(slot) => self.set_visited(slot, true),
                // It was chosen, or is pinned and stays out.
                EventKind::Hit | EventKind::Keep => {
                    self.link(slot, before);
                    self.set_visited(slot, true);
                    self.family.stay(slot);
                }
                EventKind::Unpin => {
                    self.unlink(slot);
                    self.link(slot, before);
                    self.family.stay(slot);
                }
                EventKind::Remove => {
                    self.unlink(slot);
                    self.family.leave(slot);
                }
                EventKind::Pin => {
                    self.unlink(slot);
                    self.queue.hold(slot);
                    self.family.stay(slot);
                }
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            self.unlink(slot);
            self.family.leave(slot);
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Sieve);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::testing::run;
    use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
    use proptest::prelude::*;

    /// The queue as a plain list, the hand as a position in it, children found by scanning.
    #[derive(Default)]
    struct Model {
        /// Slot, visited, slot of the parent.
        queue: Vec<(u32, bool, u32)>,
        hand: usize,
        gone: Vec<(u32, u32)>,
        inserted: u32,
        last: (u32, u32, u64, u16),
    }

    impl Model {
        fn remove(&mut self, at: usize) -> (u32, bool, u32) {
            if at < self.hand {
                self.hand -= 1;
            }
            self.queue.remove(at)
        }

        fn link(&mut self, slot: u32, before: Option<u32>, visited: bool, parent: u32) {
            let before = before.filter(|&at| at == self.inserted);
            let at = self.queue.iter().position(|&(s, ..)| Some(s) == before).unwrap_or(self.queue.len());
            // A hand past the end is at the front; one at this very place stays with its block.
            let at_end = self.hand >= self.queue.len();
            if at <= self.hand && !at_end {
                self.hand += 1;
            }
            if at_end {
                self.hand = usize::MAX;
            }
            self.queue.insert(at, (slot, visited, parent));
            self.inserted = slot;
        }
    }

    impl Evictor for Model {
        fn describe(&self) -> Description {
            Description::evictor("model", "0.0.0")
        }

        fn open(&mut self, _: u32) {
            (self.inserted, self.hand) = (u32::MAX, usize::MAX);
        }

        fn on_events(&mut self, events: Events<'_>) {
            for event in events {
                let now = (event.slot, event.depth, event.time_ms, event.class);
                let last = std::mem::replace(&mut self.last, now);
                let at = self.queue.iter().position(|&(slot, ..)| slot == event.slot);
                match (event.kind, at) {
                    (EventKind::Insert, _) => {
                        self.link(event.slot, Some(event.parent_or_uses), false, event.parent_or_uses);
                    }
                    (EventKind::Keep, _) => {
                        let gone = self.gone.iter().rposition(|&(slot, _)| slot == event.slot).unwrap();
                        let (slot, parent) = self.gone.remove(gone);
                        let same = last.1 < now.1 && (last.2, last.3) == (now.2, now.3);
                        self.link(slot, same.then_some(last.0), true, parent);
                    }
                    (EventKind::Remove, Some(at)) => drop(self.remove(at)),
                    (_, Some(at)) => self.queue[at].1 = true,
                    _ => unreachable!("not among the steps"),
                }
            }
        }

        fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
            while (victims.len() as u32) < want && !self.queue.is_empty() {
                if self.hand >= self.queue.len() {
                    self.hand = 0;
                }
                let (slot, visited, _) = self.queue[self.hand];
                if visited || self.queue.iter().any(|&(.., parent)| parent == slot) {
                    self.queue[self.hand].1 = false;
                    self.hand += 1;
                    continue;
                }
                let (slot, _, parent) = self.queue.remove(self.hand);
                self.gone.push((slot, parent));
                victims.push(Victim::new(slot));
            }
        }
    }

    proptest! {
        #[test]
        fn equals_the_model(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Model::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Sieve::default(), slots, &steps, true), expected);
        }

        #[test]
        fn survives_any_words(words in words()) {
            feed(Sieve::default(), &words);
        }

        #[test]
        fn keeps_the_books(said in said()) {
            keeps_books(Sieve::default(), &said);
        }

        #[test]
        fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Sieve::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Roomy(Sieve::default()), slots, &steps, true), expected);
        }
    }
}
