//! Drives an evictor as a host would, so that a policy can be tested without one.
//!
//! Compare an evictor with a slow, obvious model of it: give both the same steps to [`run`] and
//! compare what leaves the pool.

use crate::Evictor;
use crate::evictor::{EVENT, Event, EventKind, Events, NO_SLOT, Victim};
use std::collections::HashMap;

/// One thing that happens to the pool.
#[derive(Clone, Debug)]
pub struct Step {
    /// Time since the previous step, ms.
    pub wait_ms: u64,
    pub class: u16,
    /// Ids of a prompt's blocks, first block first.
    pub blocks: Vec<u64>,
    /// Remove the deepest resident block of the prompt, if it has no descendants, instead of using
    /// the prompt.
    pub remove: bool,
}

/// Runs `steps` through a pool of `slots` and returns the victims of each step, in order.
///
/// # Panics
/// The policy breaks the contract: it names a free slot, names a slot twice, gives too few victims,
/// or, with `leaves_first`, evicts a block with resident descendants outside the current prompt.
pub fn run(policy: &mut dyn Evictor, slots: u32, steps: &[Step], leaves_first: bool) -> Vec<Vec<u32>> {
    policy.open(slots);
    let mut pool = Pool { blocks: vec![None; slots as usize], by_prefix: HashMap::new(), now_ms: 0 };
    steps.iter().map(|step| pool.step(policy, step, leaves_first)).collect()
}

struct Pool {
    /// By slot: whole prefix.
    blocks: Vec<Option<Vec<u64>>>,
    by_prefix: HashMap<Vec<u64>, u32>,
    now_ms: u64,
}

impl Pool {
    fn step(&mut self, policy: &mut dyn Evictor, step: &Step, leaves_first: bool) -> Vec<u32> {
        self.now_ms += step.wait_ms;
        let length = step.blocks.len().min(self.blocks.len());
        let prompt: Vec<_> = (1..=length).map(|n| step.blocks[..n].to_vec()).collect();
        if step.remove {
            let deepest = prompt.iter().rev().find_map(|p| self.by_prefix.get(p).copied());
            if let Some(slot) = deepest.filter(|&slot| !self.has_descendants(slot)) {
                self.send(policy, step, EventKind::Remove, slot, 0);
                self.vacate(slot);
            }
            return Vec::new();
        }
        let resident: Vec<_> = prompt.iter().filter_map(|p| self.by_prefix.get(p).copied()).collect();
        for &slot in &resident {
            self.send(policy, step, EventKind::Hit, slot, 1);
        }
        let free = self.blocks.iter().filter(|b| b.is_none()).count();
        let need = (prompt.len() - resident.len()).saturating_sub(free);
        let victims = self.evict(policy, step, need, &resident, leaves_first);
        let mut parent = NO_SLOT;
        for prefix in prompt {
            parent = match self.by_prefix.get(&prefix) {
                Some(&slot) => slot,
                None => self.insert(policy, step, prefix, parent),
            };
        }
        victims
    }

    fn evict(
        &mut self,
        policy: &mut dyn Evictor,
        step: &Step,
        need: usize,
        resident: &[u32],
        leaves_first: bool,
    ) -> Vec<u32> {
        let (mut victims, mut kept) = (Vec::new(), Vec::new());
        while victims.len() < need {
            let mut answer: Vec<Victim> = Vec::new();
            policy.select_victims(self.now_ms, (need - victims.len()) as u32, &mut answer);
            assert!(!answer.is_empty(), "no victims although blocks are resident");
            for Victim { slot, .. } in answer {
                assert!(!kept.contains(&slot), "slot {slot} chosen twice");
                if resident.contains(&slot) {
                    kept.push(slot);
                    continue;
                }
                let prefix = self.blocks[slot as usize].as_ref().expect("a free slot was chosen");
                assert!(
                    !leaves_first || !self.has_descendants(slot),
                    "{prefix:?} evicted before its descendants"
                );
                self.vacate(slot);
                victims.push(slot);
            }
        }
        kept.sort_by_key(|&slot| self.blocks[slot as usize].as_ref().map(Vec::len));
        for slot in kept {
            self.send(policy, step, EventKind::Keep, slot, 1);
        }
        victims
    }

    fn insert(&mut self, policy: &mut dyn Evictor, step: &Step, prefix: Vec<u64>, parent: u32) -> u32 {
        let slot = self.blocks.iter().position(Option::is_none).expect("a slot was freed") as u32;
        self.blocks[slot as usize] = Some(prefix.clone());
        self.by_prefix.insert(prefix, slot);
        self.send(policy, step, EventKind::Insert, slot, parent);
        slot
    }

    fn has_descendants(&self, slot: u32) -> bool {
        let Some(prefix) = &self.blocks[slot as usize] else { return false };
        self.blocks.iter().flatten().any(|b| b.len() > prefix.len() && b.starts_with(prefix))
    }

    fn vacate(&mut self, slot: u32) {
        let prefix = self.blocks[slot as usize].take().expect("vacated slots hold a block");
        self.by_prefix.remove(&prefix);
    }

    fn send(&self, policy: &mut dyn Evictor, step: &Step, kind: EventKind, slot: u32, parent_or_uses: u32) {
        let prefix = self.blocks[slot as usize].as_ref().expect("events name resident blocks");
        let event = Event {
            kind,
            replayed: false,
            class: step.class,
            slot,
            parent_or_uses,
            depth: prefix.len() as u32 - 1,
            size_bytes: 1 << 20,
            time_ms: self.now_ms,
            // Distinct for prompts of up to 8 blocks with ids below 8, and for single blocks.
            identity: prefix.iter().fold(1, |hash, id| (hash << 3 | id & 7).wrapping_add(id >> 3 << 32)),
            tenant: u32::from(step.class),
        };
        let mut words = Vec::new();
        event.encode(self.now_ms, &mut words);
        policy.on_events(Events::new(self.now_ms, EVENT, &words));
    }
}
