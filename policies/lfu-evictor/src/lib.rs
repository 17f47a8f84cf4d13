//! Evicts the block used least often since it came, and of several the one used longest ago. What leaves is forgotten, and
//! nothing ages: what was popular once stays (`gdsf` lets it be overtaken). A baseline, as in the literature.
//!
//! For chains of blocks: one whose turn comes while children of it are resident waits until the last of them has left.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::evictor::{EventKind, Events, Victim};
use kvasir_policy::{Description, Evictor};
use std::collections::BTreeSet;

/// What a block is ordered by: whether other blocks follow it, its uses, the number of the event that used it last, its slot.
type Rank = (bool, u64, u64, u32);

/// See the module documentation.
#[derive(Default)]
pub struct Lfu {
    books: Books,
    /// By slot.
    blocks: Vec<Block>,
    order: BTreeSet<Rank>,
    events: u64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    uses: u64,
    used: u64,
    /// Where it is in the order.
    rank: Option<Rank>,
}

impl Lfu {
    /// Puts a block where it stands now.
    fn sort(&mut self, slot: u32) {
        let Some(block) = self.blocks.get_mut(slot as usize) else { return };
        let standing = self.books.standing(slot);
        let rank = (standing == Standing::Parent, block.uses, block.used, slot);
        let next = (standing != Standing::Out).then_some(rank);
        if let Some(before) = std::mem::replace(&mut block.rank, next) {
            self.order.remove(&before);
        }
        self.order.extend(next);
    }
}

impl Evictor for Lfu {
    fn describe(&self) -> Description {
        Description::evictor("lfu", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        let blocks = vec![Block::default(); slots as usize];
        *self = Self { books: Books::new(slots), blocks, ..Self::default() };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            self.events += 1;
            let (noted, parents) = self.books.note(&event);
            if let Some(block) = self.blocks.get_mut(event.slot as usize) {
                block.uses = match (noted, event.kind) {
                    (Noted::Came, _) => 1,
                    (_, EventKind::Hit) => block.uses.saturating_add(event.parent_or_uses.into()),
                    _ => block.uses,
                };
                block.used = if noted == Noted::Nothing { block.used } else { self.events };
            }
            [Some(event.slot)].into_iter().chain(parents).flatten().for_each(|slot| self.sort(slot));
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            // If all have children, then such that are pinned.
            let Some(&(.., slot)) = self.order.first() else { return };
            let parent = self.books.choose(slot);
            [Some(slot), parent].into_iter().flatten().for_each(|slot| self.sort(slot));
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Lfu);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::testing::run;
    use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Looks at all leaves for the one with the fewest uses.
    #[derive(Default)]
    struct Model {
        books: Books,
        /// By slot: uses, and the number of the last.
        blocks: BTreeMap<u32, (u64, u64)>,
        events: u64,
    }

    impl Evictor for Model {
        fn describe(&self) -> Description {
            Description::evictor("model", "0.0.0")
        }

        fn open(&mut self, slots: u32) {
            *self = Self { books: Books::new(slots), ..Self::default() };
        }

        fn on_events(&mut self, events: Events<'_>) {
            for event in events {
                self.books.note(&event);
                self.events += 1;
                let uses = self.blocks.get(&event.slot).map_or(0, |&(uses, _)| uses);
                let uses = match event.kind {
                    EventKind::Insert => 1,
                    EventKind::Hit => uses + u64::from(event.parent_or_uses),
                    _ => uses,
                };
                self.blocks.insert(event.slot, (uses, self.events));
            }
        }

        fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
            for _ in 0..want {
                let books = &self.books;
                let leaves = self.blocks.iter().filter(|(slot, _)| books.standing(**slot) == Standing::Leaf);
                let Some((&slot, _)) = leaves.min_by_key(|(_, rank)| **rank) else { return };
                self.books.choose(slot);
                victims.push(Victim::new(slot));
            }
        }
    }

    proptest! {
        #[test]
        fn equals_the_model(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Model::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Lfu::default(), slots, &steps, true), expected);
        }

        #[test]
        fn survives_any_words(words in words()) {
            feed(Lfu::default(), &words);
        }

        #[test]
        fn keeps_the_books(said in said()) {
            keeps_books(Lfu::default(), &said);
        }

        #[test]
        fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Lfu::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Roomy(Lfu::default()), slots, &steps, true), expected);
        }
    }
}
