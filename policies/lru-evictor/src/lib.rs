//! Evicts the block used longest ago; within one request the deepest block first.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::{Lists, Walk};
use kvasir_policy::{Description, Evictor};

/// Resident blocks, least recently used at the front.
#[derive(Default)]
pub struct Lru {
    queue: Lists,
    walk: Walk,
}

impl Lru {
    fn touch(&mut self, event: &Event) {
        let at = self.walk.shallower(event);
        if !at.is_some_and(|at| self.queue.insert_before(at, event.slot)) {
            self.queue.push_back(0, event.slot);
        }
    }
}

impl Evictor for Lru {
    fn describe(&self) -> Description {
        Description::evictor("lru", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self { queue: Lists::new(slots, 1), walk: Walk::default() };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert | EventKind::Unpin => {
                    self.queue.remove(event.slot);
                    self.touch(&event);
                }
                EventKind::Hit | EventKind::Keep => self.touch(&event),
                EventKind::Remove => self.queue.remove(event.slot),
                EventKind::Pin => self.queue.hold(event.slot),
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        victims.extend((0..want).map_while(|_| self.queue.pop_front(0)).map(Victim::new));
    }
}

kvasir_policy::export_evictor!(Lru);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::testing::run;
    use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
    use proptest::prelude::*;

    /// Picks the block used longest ago, deepest first.
    #[derive(Default)]
    struct Model {
        /// Slot, time of the last request, depth.
        blocks: Vec<(u32, u64, u32)>,
    }

    impl Evictor for Model {
        fn describe(&self) -> Description {
            Description::evictor("model", "0.0.0")
        }

        fn open(&mut self, _: u32) {}

        fn on_events(&mut self, events: Events<'_>) {
            for event in events {
                let slot = event.slot;
                self.blocks.retain(|&(resident, ..)| resident != slot);
                if event.kind != EventKind::Remove {
                    self.blocks.push((slot, event.time_ms, event.depth));
                }
            }
        }

        fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
            self.blocks.sort_by_key(|&(_, request, depth)| (request, std::cmp::Reverse(depth)));
            let taken = self.blocks.len().min(want as usize);
            victims.extend(self.blocks.drain(..taken).map(|(slot, ..)| Victim::new(slot)));
        }
    }

    proptest! {
        // Every request has its own time, so that time and depth define an order.
        #[test]
        fn equals_the_model(steps in steps(1..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Model::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Lru::default(), slots, &steps, true), expected);
        }

        #[test]
        fn survives_any_words(words in words()) {
            feed(Lru::default(), &words);
        }

        #[test]
        fn keeps_the_books(said in said()) {
            keeps_books(Lru::default(), &said);
        }

        #[test]
        fn spare_slots_change_nothing(steps in steps(1..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Lru::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Roomy(Lru::default()), slots, &steps, true), expected);
        }
    }
}
