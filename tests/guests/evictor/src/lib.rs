//! An evictor that misbehaves as its setting `mode` says; otherwise it evicts in order of slots.

use guest_harm::Harm;
use kvasir_policy::evictor::{EventKind, Events, TierRow, Victim};
use kvasir_policy::{Description, Evictor, Settings};
use std::collections::BTreeSet;

#[derive(Default)]
pub struct Bad {
    harm: Harm,
    slots: u32,
    resident: BTreeSet<u32>,
}

impl Evictor for Bad {
    fn describe(&self) -> Description {
        Harm::describe(Description::evictor("bad", "0.1.0"))
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.harm.configure(
            settings,
            &["free", "out-of-range", "repeat", "too-few", "too-many", "huge", "unknown-tier"],
        )
    }

    fn open(&mut self, slots: u32) {
        self.slots = slots;
        self.resident.clear();
    }

    fn update_tiers(&mut self, tiers: &[TierRow]) {
        for tier in tiers {
            kvasir_policy::log::info(&format!("{tier:?}"));
        }
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert | EventKind::Hit | EventKind::Keep | EventKind::Unpin => {
                    self.resident.insert(event.slot);
                }
                EventKind::Remove | EventKind::Pin => {
                    self.resident.remove(&event.slot);
                }
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        let take = |resident: &mut BTreeSet<u32>| resident.pop_first();
        match self.harm.call() {
            "free" => {
                let free = (0..self.slots).filter(|slot| !self.resident.contains(slot));
                victims.extend(free.take(want as usize).map(Victim::new));
            }
            "out-of-range" => victims.extend((0..want).map(|i| Victim::new(self.slots + i))),
            "repeat" => {
                let first = self.resident.first().copied().unwrap_or(0);
                victims.extend((0..want).map(|_| Victim::new(first)));
            }
            "too-few" => victims.extend(take(&mut self.resident).map(Victim::new)),
            "too-many" => {
                victims.extend((0..4 * want).map_while(|_| take(&mut self.resident)).map(Victim::new))
            }
            "huge" => victims.extend((0..1 << 19).map(Victim::new)),
            "unknown-tier" => {
                let next = (0..want).map_while(|_| take(&mut self.resident));
                victims.extend(next.map(|slot| Victim { slot, demote_to: 15 }));
            }
            _ => victims.extend((0..want).map_while(|_| take(&mut self.resident)).map(Victim::new)),
        }
    }
}

kvasir_policy::export_evictor!(Bad);
