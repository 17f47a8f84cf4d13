use super::*;
use kvasir_policy::evictor::{Kept, Layout, NO_SLOT};
use kvasir_policy::testing::run;
use kvasir_policy_testing::{feed, keeps_books, said, steps, words};
use proptest::prelude::*;
use std::collections::HashMap;

/// The policy in the plainest form: at every decision, the priority of every childless block.
#[derive(Default)]
struct Model {
    settings: fit::Settings,
    samples: Vec<Samples>,
    fits: Vec<Fit>,
    fitted_ms: u64,
    next_fit_ms: u64,
    /// By slot.
    resident: HashMap<u32, ModelBlock>,
    /// Chosen, but perhaps kept.
    gone: HashMap<u32, ModelBlock>,
    /// By identity: class and time of the last use.
    ghosts: HashMap<u64, (usize, u64)>,
}

#[derive(Clone)]
struct ModelBlock {
    identity: u64,
    parent: Option<u64>,
    class: usize,
    last_ms: u64,
    depth: u32,
}

impl Model {
    fn refit_if_due(&mut self, now_ms: u64) {
        if now_ms < self.next_fit_ms {
            return;
        }
        let mut samples: [Samples; CLASSES] = self.samples.clone().try_into().unwrap();
        fit::age(&mut samples, (now_ms - self.fitted_ms) as f64, &self.settings);
        let mut fits: [Fit; CLASSES] = self.fits.clone().try_into().unwrap();
        fit::refit(&samples, &mut fits, &self.settings);
        (self.samples, self.fits) = (samples.to_vec(), fits.to_vec());
        (self.fitted_ms, self.next_fit_ms) = (now_ms, now_ms + self.settings.refit_ms as u64);
    }

    fn victim(&mut self, now_ms: u64) -> Option<u32> {
        let childless = |b: &ModelBlock| !self.resident.values().any(|c| c.parent == Some(b.identity));
        let key = |b: &ModelBlock| self.fits[b.class].log_priority((now_ms - b.last_ms) as f64);
        self.resident
            .iter()
            .filter(|(_, b)| childless(b))
            .min_by(|(_, a), (_, b)| {
                key(a).total_cmp(&key(b)).then(b.depth.cmp(&a.depth)).then(a.class.cmp(&b.class))
            })
            .map(|(&slot, _)| slot)
    }
}

impl Evictor for Model {
    fn describe(&self) -> Description {
        Description::evictor("model", "0.0.0")
    }

    fn open(&mut self, _: u32) {
        self.samples = vec![Samples::default(); CLASSES];
        self.fits = vec![Fit::default(); CLASSES];
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            self.refit_if_due(event.time_ms);
            let (class, now_ms) = (usize::from(event.class), event.time_ms);
            match event.kind {
                EventKind::Insert => {
                    self.samples[class].uses += 1.0;
                    match self.ghosts.remove(&event.identity) {
                        Some((old, last)) if ((now_ms - last) as f64) < self.settings.forget_ms => {
                            self.samples[old].reuse((now_ms - last) as f64);
                        }
                        _ => self.samples[class].blocks += 1.0,
                    }
                    let parent = self.resident.get(&event.parent_or_uses).map(|p| p.identity);
                    let identity = event.identity;
                    let block = ModelBlock { identity, parent, class, last_ms: now_ms, depth: event.depth };
                    self.resident.insert(event.slot, block);
                }
                EventKind::Hit => {
                    self.samples[class].uses += 1.0;
                    let block = self.resident.get_mut(&event.slot).unwrap();
                    self.samples[block.class].reuse((now_ms - block.last_ms) as f64);
                    (block.class, block.last_ms) = (class, now_ms);
                }
                EventKind::Keep => {
                    let block = self.gone.remove(&event.slot).unwrap();
                    self.resident.insert(event.slot, ModelBlock { class, last_ms: now_ms, ..block });
                }
                EventKind::Remove => drop(self.resident.remove(&event.slot)),
                EventKind::Pin | EventKind::Unpin => unreachable!("not among the steps"),
            }
        }
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
        self.refit_if_due(now_ms);
        for _ in 0..want {
            let Some(slot) = self.victim(now_ms) else { return };
            let block = self.resident.remove(&slot).unwrap();
            self.ghosts.insert(block.identity, (block.class, block.last_ms));
            self.gone.insert(slot, block);
            victims.push(Victim::new(slot));
        }
    }
}

proptest! {
    // Every step has its own time, because the model defines no order for blocks of one class and time.
    #[test]
    fn equals_a_full_scan(steps in steps(1..60_000, 4), slots in 1..16_u32) {
        let expected = run(&mut Model::default(), slots, &steps, true);
        prop_assert_eq!(run(&mut WorkloadAware::default(), slots, &steps, true), expected);
    }

    #[test]
    fn survives_any_words(words in words()) {
        feed(WorkloadAware::default(), &words);
    }

    #[test]
    fn keeps_the_books(said in said()) {
        keeps_books(WorkloadAware::default(), &said);
    }
}

#[test]
fn state_passes_on_and_bad_state_is_refused() {
    let mut policy = WorkloadAware::default();
    policy.samples[3] = Samples { uses: 9.0, reuses: 4.0, gaps_ms: 5e4, blocks: 5.0 };
    let state = policy.export_state();
    let mut successor = WorkloadAware::default();
    successor.import_state(&state).unwrap();
    successor.open(4);
    assert_eq!(successor.samples, policy.samples);
    assert_ne!(successor.fits[0], Fit::default());
    let mut negative = state.clone();
    negative[1..9].copy_from_slice(&(-1.0_f64).to_le_bytes());
    for bad in [&state[..40], &[], &negative] {
        assert!(successor.import_state(bad).is_err());
    }
}

#[test]
fn a_removed_parent_stays_away_when_its_last_child_goes() {
    let mut policy = Kept::new(Box::<WorkloadAware>::default());
    policy.open(&Layout::of(4).encode());
    let mut tell = |kind, slot, parent_or_uses| {
        let mut words = Vec::new();
        let time_ms = u64::from(slot) + 1;
        let (size_bytes, identity, depth) = (4096, time_ms, u32::from(slot > 0));
        let event = Event {
            kind,
            replayed: false,
            class: 0,
            slot,
            parent_or_uses,
            depth,
            size_bytes,
            time_ms,
            identity,
            tenant: 0,
        };
        event.encode(0, &mut words);
        policy.on_events(0, &words);
        policy.select_victims(10, u32::from(kind == EventKind::Hit)).collect::<Vec<_>>()
    };
    tell(EventKind::Insert, 0, NO_SLOT);
    tell(EventKind::Insert, 1, 0);
    tell(EventKind::Insert, 2, 0);
    assert_eq!(tell(EventKind::Hit, 2, 1), [1], "0 waits for its children");
    tell(EventKind::Remove, 0, 0);
    tell(EventKind::Remove, 2, 0);
    tell(EventKind::Insert, 3, NO_SLOT);
    assert_eq!(tell(EventKind::Hit, 3, 1), [3], "the only block");
}

#[test]
fn settings_are_documented_and_checked() {
    let given = |name: &str, value: &str| {
        let mut policy = WorkloadAware::default();
        let settings = Settings::new(&policy.describe(), &[(name.into(), value.into())])?;
        policy.configure(&settings).map(|()| policy.settings)
    };
    assert_eq!(given("forget", "60").unwrap().forget_ms, 60_000.0);
    assert_eq!(given("ghost-blocks", "5").unwrap().ghost_slots(), 8);
    assert_eq!(given("ghost-blocks", "0").unwrap().ghost_slots(), 0);
    for bad in [("forget", "0"), ("refit", "x"), ("ghost-blocks", "1e9"), ("ghosts", "1")] {
        assert!(given(bad.0, bad.1).is_err(), "{bad:?}");
    }
}
