//! Evicts in order of insertion; a hit changes nothing.
//!
//! A block inserted under a resident parent takes the place directly before it: once the parent is gone, the
//! block is of no use.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{EventKind, Events, Victim};
use kvasir_policy::list::Lists;
use kvasir_policy::{Description, Evictor};

/// Resident blocks, oldest at the front.
#[derive(Default)]
pub struct Fifo {
    queue: Lists,
}

impl Evictor for Fifo {
    fn describe(&self) -> Description {
        Description::evictor("fifo", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        self.queue = Lists::new(slots, 1);
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert => {
                    self.queue.remove(event.slot);
                    if !self.queue.insert_before(event.parent_or_uses, event.slot) {
                        self.queue.push_back(0, event.slot);
                    }
                }
                EventKind::Hit if self.queue.contains(event.slot) => {}
                // Its turn had come already, or may have while it was pinned.
                EventKind::Hit | EventKind::Keep => self.queue.push_front(0, event.slot),
                EventKind::Unpin => {
                    self.queue.remove(event.slot);
                    self.queue.push_front(0, event.slot);
                }
                EventKind::Remove => self.queue.remove(event.slot),
                EventKind::Pin => self.queue.hold(event.slot),
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        victims.extend((0..want).map_while(|_| self.queue.pop_front(0)).map(Victim::new));
    }
}

kvasir_policy::export_evictor!(Fifo);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::testing::run;
    use kvasir_policy_testing::{Roomy, feed, keeps_books, said, steps, words};
    use proptest::prelude::*;

    /// A plain list: a child directly before its parent, else at the end.
    #[derive(Default)]
    struct Model(Vec<u32>);

    impl Evictor for Model {
        fn describe(&self) -> Description {
            Description::evictor("model", "0.0.0")
        }

        fn open(&mut self, _: u32) {}

        fn on_events(&mut self, events: Events<'_>) {
            for event in events {
                let parent = self.0.iter().position(|&slot| slot == event.parent_or_uses);
                match event.kind {
                    EventKind::Insert => self.0.insert(parent.unwrap_or(self.0.len()), event.slot),
                    EventKind::Keep => self.0.insert(0, event.slot),
                    EventKind::Remove => self.0.retain(|&slot| slot != event.slot),
                    _ => {}
                }
            }
        }

        fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
            let taken = self.0.len().min(want as usize);
            victims.extend(self.0.drain(..taken).map(Victim::new));
        }
    }

    proptest! {
        #[test]
        fn equals_the_model(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Model::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Fifo::default(), slots, &steps, true), expected);
        }

        #[test]
        fn survives_any_words(words in words()) {
            feed(Fifo::default(), &words);
        }

        #[test]
        fn keeps_the_books(said in said()) {
            keeps_books(Fifo::default(), &said);
        }

        #[test]
        fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
            let expected = run(&mut Fifo::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Roomy(Fifo::default()), slots, &steps, true), expected);
        }
    }
}
