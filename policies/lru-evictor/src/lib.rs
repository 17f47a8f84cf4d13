//! Evicts the block used longest ago; within one request the deepest block first.

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
        victims.extend((0..want).map_while(|_| self.queue.pop_front(0)).map(Victim::drop));
    }
}

kvasir_policy::export_evictor!(Lru);

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::testing::{Step, run};
    use proptest::prelude::*;

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let blocks = prop::collection::vec(0..3_u64, 1..6);
        // A time of its own for every request, so that time and depth are an order.
        let step = (1..3_u64, 0..3_u16, blocks, prop::bool::weighted(0.1));
        let step = step.prop_map(|(wait_ms, class, blocks, remove)| Step { wait_ms, class, blocks, remove });
        prop::collection::vec(step, 1..80)
    }

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
            victims.extend(self.blocks.drain(..taken).map(|(slot, ..)| Victim::drop(slot)));
        }
    }

    proptest! {
        #[test]
        fn equals_the_model(steps in steps(), slots in 1..16_u32) {
            let expected = run(&mut Model::default(), slots, &steps, true);
            prop_assert_eq!(run(&mut Lru::default(), slots, &steps, true), expected);
        }

        #[test]
        fn survives_any_words(words in prop::collection::vec(prop_oneof![0..20_u32, any::<u32>()], 0..400)) {
            let mut policy = Lru::default();
            policy.open(8);
            for batch in words.chunks(40) {
                policy.on_events(Events::new(0, batch));
                let mut victims = Vec::new();
                policy.select_victims(0, 3, &mut victims);
                prop_assert!(victims.len() <= 3);
            }
        }
    }
}
