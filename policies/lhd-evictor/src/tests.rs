use super::*;
use kvasir_policy::testing::run;
use kvasir_policy_testing::{accesses, feed, keeps_books, steps, words};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A full scan over the same densities, without chains and without sets: exact for pools of at most as many blocks as are
/// drawn.
#[derive(Default)]
struct Model {
    slots: u64,
    /// By slot: clock of the last use, class, explorer.
    blocks: BTreeMap<u32, (u64, u8, bool)>,
    densities: Densities,
    clock: u64,
}

impl Evictor for Model {
    fn describe(&self) -> Description {
        Description::evictor("model", "0.0.0")
    }

    fn open(&mut self, slots: u32) {
        (self.slots, self.densities) = (slots.into(), Densities::new(64, slots));
    }

    fn on_events(&mut self, events: Events<'_>) {
        for Event { kind, slot, identity, .. } in events {
            self.clock += 1;
            match (kind, self.blocks.get(&slot).copied()) {
                (EventKind::Remove, _) => drop(self.blocks.remove(&slot)),
                (_, None) => drop(self.blocks.insert(slot, (self.clock, 0, identity % 64 == 0))),
                (_, Some((used, class, _))) => {
                    let age = self.clock - used;
                    self.densities.hit(class, age);
                    let class = if age >= self.slots {
                        1
                    } else if age >= self.slots / 8 {
                        2
                    } else {
                        3
                    };
                    self.blocks.insert(slot, (self.clock, class, false));
                }
            }
            self.densities.refit_if_due(self.clock);
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let rank = |slot: &u32| {
                let (used, class, explorer) = self.blocks[slot];
                let age = self.clock - used;
                let explores = explorer && age < 4 * self.slots;
                (
                    if explores { f64::MAX } else { self.densities.at(class, age) / f64::from(1 << 20) },
                    used,
                    *slot,
                )
            };
            let Some(slot) =
                self.blocks.keys().copied().min_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap())
            else {
                return;
            };
            let (used, class, _) = self.blocks.remove(&slot).unwrap();
            self.densities.evicted(class, self.clock - used);
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
}

#[test]
fn pins_and_uses_of_chosen_blocks_are_heard() {
    keeps_books(Lhd::default());
}

#[test]
fn draws_cover_the_candidates() {
    let mut state = 1;
    let mut seen = [0; 10];
    for _ in 0..10_000 {
        seen[draw(&mut state, 10)] += 1;
    }
    assert!(seen.iter().all(|&count| (800..1_200).contains(&count)), "{seen:?}");
}
