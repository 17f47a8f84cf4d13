use super::*;
use kvasir_policy::testing::run;
use kvasir_policy_testing::{Roomy, accesses, feed, keeps_books, said, steps, words};
use proptest::prelude::*;

/// The paper's algorithm over plain lists, oldest first, without chains.
#[derive(Default)]
struct Model {
    slots: usize,
    /// Slot, identity, uses.
    small: Vec<(u32, u64, u32)>,
    main: Vec<(u32, u64, u32)>,
    ghosts: Vec<u64>,
}

impl Model {
    fn victim(&mut self) -> u32 {
        let tenth = (self.slots / 10).max(1);
        while (self.small.len() >= tenth || self.main.is_empty()) && !self.small.is_empty() {
            let (slot, identity, uses) = self.small.remove(0);
            if uses <= 1 {
                self.ghosts.push(identity);
                let excess = self.ghosts.len().saturating_sub(self.slots - tenth);
                self.ghosts.drain(..excess);
                return slot;
            }
            self.main.push((slot, identity, 0));
        }
        loop {
            let (slot, identity, uses) = self.main.remove(0);
            if uses == 0 {
                return slot;
            }
            self.main.push((slot, identity, uses - 1));
        }
    }
}

impl Evictor for Model {
    fn describe(&self) -> Description {
        Description::evictor("model", "0.0.0")
    }

    fn open(&mut self, slots: u32) {
        self.slots = slots as usize;
    }

    fn on_events(&mut self, events: Events<'_>) {
        for Event { kind, slot, identity, .. } in events {
            let known = self.small.iter_mut().chain(&mut self.main).find(|block| block.0 == slot);
            match (kind, known) {
                (EventKind::Remove, _) => {
                    self.small.retain(|block| block.0 != slot);
                    self.main.retain(|block| block.0 != slot);
                }
                (_, Some(block)) => block.2 = (block.2 + 1).min(3),
                (_, None) => {
                    let ghost = self.ghosts.iter().position(|&ghost| ghost == identity);
                    ghost.map(|at| self.ghosts.remove(at));
                    let main = ghost.is_some() || kind == EventKind::Keep;
                    let queue = if main { &mut self.main } else { &mut self.small };
                    queue.push((slot, identity, 0));
                }
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        let want = (want as usize).min(self.small.len() + self.main.len());
        victims.extend((0..want).map(|_| Victim::new(self.victim())));
    }
}

proptest! {
    #[test]
    fn equals_the_model(steps in accesses(), slots in 1..24_u32) {
        let expected = run(&mut Model::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut S3Fifo::default(), slots, &steps, true), expected);
    }

    #[test]
    fn leaves_leave_first(steps in steps(0..3, 3), slots in 1..16_u32) {
        run(&mut S3Fifo::default(), slots, &steps, true);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(S3Fifo::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(S3Fifo::default(), &said);
    }

    #[test]
    fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
        let expected = run(&mut S3Fifo::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Roomy(S3Fifo::default()), slots, &steps, true), expected);
    }
}
