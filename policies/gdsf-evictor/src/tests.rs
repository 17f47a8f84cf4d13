use super::*;
use kvasir_policy::evictor::{EVENT, NO_SLOT};
use kvasir_policy::testing::run;
use kvasir_policy_testing::{Roomy, accesses, feed, keeps_books, said, steps, words};
use proptest::prelude::*;

/// The paper's algorithm as a full scan, without chains.
#[derive(Default)]
struct Model {
    /// Slot, priority, uses, number of the event.
    blocks: Vec<(u32, f64, u32, u64)>,
    gone: Vec<(u32, u32)>,
    clock: f64,
    events: u64,
}

impl Evictor for Model {
    fn describe(&self) -> Description {
        Description::evictor("model", "0.0.0")
    }

    fn open(&mut self, _: u32) {}

    fn on_events(&mut self, events: Events<'_>) {
        for Event { kind, slot, .. } in events {
            self.events += 1;
            let uses = self.blocks.iter().find(|block| block.0 == slot).map_or(0, |block| block.2);
            self.blocks.retain(|block| block.0 != slot);
            let uses = match kind {
                EventKind::Remove => continue,
                EventKind::Keep => self.gone.iter().rfind(|block| block.0 == slot).unwrap().1,
                _ => uses + 1,
            };
            self.blocks.push((slot, self.clock + f64::from(uses), uses, self.events));
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        self.blocks.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.3.cmp(&b.3)));
        let taken = self.blocks.len().min(want as usize);
        for (slot, priority, uses, _) in self.blocks.drain(..taken) {
            self.clock = self.clock.max(priority);
            self.gone.push((slot, uses));
            victims.push(Victim::new(slot));
        }
    }
}

proptest! {
    #[test]
    fn equals_a_full_scan(steps in accesses(), slots in 1..24_u32) {
        let expected = run(&mut Model::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Gdsf::default(), slots, &steps, true), expected);
    }

    #[test]
    fn leaves_leave_first(steps in steps(0..3, 3), slots in 1..16_u32) {
        run(&mut Gdsf::default(), slots, &steps, true);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(Gdsf::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(Gdsf::default(), &said);
    }

    #[test]
    fn spare_slots_change_nothing(steps in steps(0..3, 3), slots in 1..16_u32) {
        let expected = run(&mut Gdsf::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut Roomy(Gdsf::default()), slots, &steps, true), expected);
    }
}

#[test]
fn what_is_large_leaves_first_and_what_is_costly_last() {
    let configured = |cost_per_depth: &str| {
        let mut policy = Gdsf::default();
        let given = [("cost-per-depth".to_owned(), cost_per_depth.to_owned())];
        policy.configure(&Settings::new(&policy.describe(), &given)?).map(|()| policy)
    };
    let order = |cost_per_depth: &str| {
        let mut policy = configured(cost_per_depth).unwrap();
        policy.open(3);
        for (slot, depth, size_bytes) in [(0, 9, 2 << 20), (1, 0, 1 << 20), (2, 9, 1 << 20)] {
            let event = Event {
                kind: EventKind::Insert,
                replayed: false,
                class: 0,
                slot,
                parent_or_uses: NO_SLOT,
                depth,
                size_bytes,
                time_ms: 0,
                identity: slot.into(),
                tenant: 0,
            };
            let mut words = Vec::new();
            event.encode(0, &mut words);
            policy.on_events(Events::new(0, EVENT, &words));
        }
        let mut victims = Vec::new();
        policy.select_victims(0, 3, &mut victims);
        victims.iter().map(|victim| victim.slot).collect::<Vec<_>>()
    };
    assert_eq!((order("0"), order("1")), (vec![0, 1, 2], vec![1, 0, 2]));
    assert!(configured("-1").is_err());
}
