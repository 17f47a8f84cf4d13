use super::*;
use kvasir_policy::evictor::{Event, EventKind};
use kvasir_policy::testing::run;
use kvasir_policy_testing::{Roomy, accesses, feed, keeps_books, said, steps, words};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A full scan over the same densities, without chains and without sets: exact for pools of at most as many blocks as are
/// drawn.
#[derive(Default)]
struct Model {
    /// The most blocks there were.
    full: u64,
    /// By slot: clock of the last use, class.
    blocks: BTreeMap<u32, (u64, u8)>,
    densities: Densities,
    clock: u64,
}

impl Evictor for Model {
    fn describe(&self) -> Description {
        Description::evictor("model", "0.0.0")
    }

    fn open(&mut self, _: u32) {
        self.densities = Densities::new(64);
    }

    fn on_events(&mut self, events: Events<'_>) {
        for Event { kind, slot, .. } in events {
            self.clock += 1;
            match (kind, self.blocks.get(&slot).copied()) {
                (EventKind::Remove, _) => drop(self.blocks.remove(&slot)),
                (_, None) => drop(self.blocks.insert(slot, (self.clock, 0))),
                (_, Some((used, class))) => {
                    let age = self.clock - used;
                    self.densities.ended(class, age, true);
                    let class = if age >= self.full {
                        1
                    } else if age >= self.full / 8 {
                        2
                    } else {
                        3
                    };
                    self.blocks.insert(slot, (self.clock, class));
                }
            }
            self.full = self.full.max(self.blocks.len() as u64);
            self.densities.refit_if_due(self.clock, self.full / 2);
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let rank = |(&slot, &(used, class)): (&u32, &(u64, u8))| {
                let density = self.densities.at(class, self.clock - used);
                (density / f64::from(1 << 20), used, slot)
            };
            let ranks = self.blocks.iter().map(rank);
            let Some((.., slot)) = ranks.min_by(|a, b| a.partial_cmp(b).unwrap()) else { return };
            let (used, class) = self.blocks.remove(&slot).unwrap();
            self.densities.ended(class, self.clock - used, false);
            victims.push(Victim::new(slot));
        }
    }
}

proptest! {
    #[test]
    fn equals_a_full_scan(steps in accesses(), slots in 1..24_u32) {
        let expected = run(&mut Model::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Lhd::default(), slots, &steps, true), expected);
    }

    #[test]
    fn leaves_leave_first(steps in steps(0..3, 3), slots in 1..16_u32) {
        run(&mut Lhd::default(), slots, &steps, true);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(Lhd::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(Lhd::default(), &said);
    }

    #[test]
    fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
        let expected = run(&mut Lhd::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Roomy(Lhd::default()), slots, &steps, true), expected);
    }
}
