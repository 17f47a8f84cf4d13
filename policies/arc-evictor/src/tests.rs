use super::*;
use kvasir_policy::testing::run;
use kvasir_policy_testing::{Roomy, accesses, feed, keeps_books, said, steps, words};
use proptest::prelude::*;

/// The paper's algorithm over plain lists, least recently used first, without chains.
#[derive(Default)]
struct Model {
    slots: usize,
    /// T1 and T2: slot and identity.
    lists: [Vec<(u32, u64)>; 2],
    /// B1 and B2.
    ghosts: [Vec<u64>; 2],
    target: f64,
}

impl Model {
    fn arrives(&mut self, slot: u32, identity: u64) {
        let [b1, b2] = [0, 1].map(|list: usize| self.ghosts[list].len() as f64);
        let was = |list: usize| self.ghosts[list].contains(&identity);
        let list = usize::from(was(0) || was(1));
        if was(0) {
            self.target = f64::min(self.target + f64::max(1.0, b2 / b1), self.slots as f64);
        } else if was(1) {
            self.target = f64::max(self.target - f64::max(1.0, b1 / b2), 0.0);
        }
        self.forget(identity);
        self.lists[list].push((slot, identity));
    }

    fn forget(&mut self, identity: u64) {
        self.ghosts.iter_mut().for_each(|ghosts| ghosts.retain(|&ghost| ghost != identity));
    }

    fn trim(&mut self) {
        while self.lists[0].len() + self.ghosts[0].len() > self.slots && !self.ghosts[0].is_empty() {
            self.ghosts[0].remove(0);
        }
        let all = |model: &Self| {
            model.lists.iter().map(Vec::len).chain(model.ghosts.iter().map(Vec::len)).sum::<usize>()
        };
        while all(self) > 2 * self.slots {
            self.ghosts[1].remove(0);
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
            self.lists.iter_mut().for_each(|list| list.retain(|block| block.0 != slot));
            match kind {
                EventKind::Insert => self.arrives(slot, identity),
                EventKind::Remove => {}
                _ => {
                    self.forget(identity);
                    self.lists[1].push((slot, identity));
                }
            }
            self.trim();
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let first = self.lists[0].len() as f64 > self.target || self.lists[1].is_empty();
            let list = if first && !self.lists[0].is_empty() { 0 } else { 1 };
            if self.lists[list].is_empty() {
                return;
            }
            let (slot, identity) = self.lists[list].remove(0);
            self.ghosts[list].push(identity);
            self.trim();
            victims.push(Victim::new(slot));
        }
    }
}

proptest! {
    #[test]
    fn equals_the_model(steps in accesses(), slots in 1..24_u32) {
        let expected = run(&mut Model::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Arc::default(), slots, &steps, true), expected);
    }

    #[test]
    fn leaves_leave_first(steps in steps(0..3, 3), slots in 1..16_u32) {
        run(&mut Arc::default(), slots, &steps, true);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(Arc::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(Arc::default(), &said);
    }

    #[test]
    fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
        let expected = run(&mut Arc::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Roomy(Arc::default()), slots, &steps, true), expected);
    }
}
