//! Randomised eviction of leaves (RLT; Wu, Silwal and Zhang, arXiv 2601.18999): marking, as it is known of paging, for chains of
//! blocks.
//!
//! Time falls into phases. A block that comes or is used in one is marked. Evicted is one of the leaves without a mark, drawn
//! at random, so that no order of requests is the worst for it. Where none is left a new phase begins, and no block is marked.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::draw::Bags;
use kvasir_policy::evictor::{Events, Victim};
use kvasir_policy::{Description, Evictor};

/// Bag of blocks that other blocks follow. Of the two others, which hold leaves, one holds those with a mark.
const PARENTS: u32 = 2;

/// See the module documentation.
#[derive(Default)]
pub struct Rlt {
    books: Books,
    bags: Bags,
    phase: u64,
    /// By slot: the phase in which it was used last.
    used: Vec<u64>,
}

impl Rlt {
    /// The bag of leaves that were last used in this phase or in one before: a new phase has all of them in the other one.
    fn leaves(&self, marked: bool) -> u32 {
        ((self.phase ^ u64::from(marked)) & 1) as u32
    }

    /// Puts a block where it stands now.
    fn sort(&mut self, slot: u32) {
        match self.books.standing(slot) {
            Standing::Leaf => {
                let marked = self.used[slot as usize] == self.phase;
                self.bags.put(self.leaves(marked), slot);
            }
            Standing::Parent => self.bags.put(PARENTS, slot),
            Standing::Out => self.bags.remove(slot),
        }
    }

    fn victim(&mut self) -> Option<u32> {
        if self.bags.is_empty(self.leaves(false)) {
            self.phase += 1;
        }
        let leaves = self.leaves(false);
        // If all have children, then such that are pinned.
        let bag = if self.bags.is_empty(leaves) { PARENTS } else { leaves };
        self.bags.draw(bag, 1).first().copied()
    }
}

impl Evictor for Rlt {
    fn describe(&self) -> Description {
        Description::evictor("rlt", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        let (books, bags) = (Books::new(slots), Bags::new(slots, 3));
        *self = Self { books, bags, phase: 1, used: vec![0; slots as usize] };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            let (noted, parents) = self.books.note(&event);
            if matches!(noted, Noted::Came | Noted::Back | Noted::Used) {
                self.used[event.slot as usize] = self.phase;
            }
            self.sort(event.slot);
            parents.into_iter().flatten().for_each(|parent| self.sort(parent));
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            let parent = self.books.choose(slot);
            [Some(slot), parent].into_iter().flatten().for_each(|slot| self.sort(slot));
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Rlt);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::evictor::Event;
    use kvasir_policy::testing::run;
    use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Asks for one victim after the other, and checks that each is among those that the paper's algorithm may draw.
    #[derive(Default)]
    struct Checked {
        policy: Rlt,
        books: Books,
        /// Blocks used in this phase, and others.
        marked: BTreeMap<u32, bool>,
    }

    impl Checked {
        fn leaves(&self, marked: bool) -> Vec<u32> {
            let is_leaf = |slot: &u32| self.books.standing(*slot) == Standing::Leaf;
            self.marked
                .iter()
                .filter(|(_, is)| **is == marked)
                .map(|(&slot, _)| slot)
                .filter(is_leaf)
                .collect()
        }
    }

    impl Evictor for Checked {
        fn describe(&self) -> Description {
            self.policy.describe()
        }

        fn open(&mut self, slots: u32) {
            (self.books, self.marked) = (Books::new(slots), BTreeMap::new());
            self.policy.open(slots);
        }

        fn on_events(&mut self, events: Events<'_>) {
            for event in events {
                let Event { slot, .. } = event;
                match self.books.note(&event).0 {
                    Noted::Came | Noted::Back | Noted::Used => drop(self.marked.insert(slot, true)),
                    Noted::Left => drop(self.marked.remove(&slot)),
                    Noted::Nothing => {}
                }
            }
            self.policy.on_events(events);
        }

        fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
            for _ in 0..want {
                if self.leaves(false).is_empty() {
                    self.marked.values_mut().for_each(|marked| *marked = false);
                }
                let (leaves, before) = (self.leaves(false), victims.len());
                self.policy.select_victims(now_ms, 1, victims);
                let Some(&Victim { slot, .. }) = victims.get(before) else { return };
                assert!(leaves.is_empty() || leaves.contains(&slot), "{slot} of {leaves:?}");
                self.books.choose(slot);
            }
        }
    }

    proptest! {
        #[test]
        fn only_leaves_without_a_mark_are_drawn(steps in steps(0..3, 3), slots in 1..16_u32) {
            run(&mut Checked::default(), slots, &steps, true);
        }

        #[test]
        fn survives_any_words(words in words()) {
            feed(Rlt::default(), &words);
        }

        #[test]
        fn keeps_the_books(said in said()) {
            keeps_books(Rlt::default(), &said);
        }

        #[test]
        fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Rlt::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Roomy(Rlt::default()), slots, &steps, true), expected);
        }
    }
}
