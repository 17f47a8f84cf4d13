//! Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1): evicts the block with the least `clock + uses × cost / size`, and
//! the clock moves up to what left last, so that what is no longer used is overtaken.
//!
//! The cost of a block is that of computing it again, which attention makes larger further along a chain:
//! `1 + cost-per-depth × depth`. Without that the policy strives for hits, with it for time. Sizes count in MiB. For chains
//! of blocks: one whose turn comes while children of it are resident waits until the last of them has left.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::Family;
use kvasir_policy::{Description, Evictor, Settings};
use std::collections::BTreeSet;

/// What a block is ordered by: its priority as bits, which order as the floats do if these are not negative; the number of
/// its last use; its slot. Of equals the one used longest ago is first.
type Rank = (u64, u64, u32);

/// See the module documentation.
#[derive(Default)]
pub struct Gdsf {
    cost_per_depth: f64,
    blocks: Vec<Block>,
    family: Family,
    /// Blocks that can be chosen.
    ranks: BTreeSet<Rank>,
    /// Those that wait for their children.
    waiting: BTreeSet<Rank>,
    /// Priority of what left last (L of the paper).
    clock: f64,
    events: u64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    priority: f64,
    uses: f64,
    /// Number of the event.
    used: u64,
    resident: bool,
    pinned: bool,
    waiting: bool,
}

impl Gdsf {
    fn insert(&mut self, event: &Event) {
        self.leave(event.slot);
        self.family.insert(event.slot, event.parent_or_uses);
        if let Some(block) = self.blocks.get_mut(event.slot as usize) {
            *block = Block { resident: true, ..Block::default() };
        }
        self.used(event, 1.0);
    }

    /// A block that was chosen is back, with the uses it had. Whether it is.
    fn comes_back(&mut self, event: &Event) -> bool {
        let Some(block) = self.blocks.get_mut(event.slot as usize).filter(|block| !block.resident) else {
            return false;
        };
        block.resident = true;
        self.family.stay(event.slot);
        self.used(event, 0.0);
        true
    }

    /// The block was used so many times more: it has another rank.
    fn used(&mut self, event: &Event, uses: f64) {
        let Some(&block) = self.blocks.get(event.slot as usize) else { return };
        self.unrank(event.slot);
        self.events += 1;
        let cost = 1.0 + self.cost_per_depth * f64::from(event.depth);
        let size_mib = f64::from(event.size_bytes.max(1)) / f64::from(1 << 20);
        let uses = block.uses + uses;
        let priority = self.clock + uses * cost / size_mib;
        self.blocks[event.slot as usize] =
            Block { priority, uses, used: self.events, waiting: false, ..block };
        self.rank(event.slot);
    }

    fn set_pinned(&mut self, event: &Event, pinned: bool) {
        self.comes_back(event);
        self.unrank(event.slot);
        if let Some(block) = self.blocks.get_mut(event.slot as usize) {
            (block.pinned, block.waiting) = (pinned, false);
        }
        self.rank(event.slot);
    }

    fn leave(&mut self, slot: u32) {
        self.unrank(slot);
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            // Its uses stay, in case it comes back.
            (block.resident, block.pinned, block.waiting) = (false, false, false);
        }
        if let Some(parent) = self.family.leave(slot) {
            self.unrank(parent);
            self.blocks[parent as usize].waiting = false;
            self.rank(parent);
        }
    }

    fn rank(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get(slot as usize).filter(|block| block.resident && !block.pinned) {
            let ranks = if block.waiting { &mut self.waiting } else { &mut self.ranks };
            ranks.insert(rank_of(block, slot));
        }
    }

    fn unrank(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get(slot as usize) {
            let ranks = if block.waiting { &mut self.waiting } else { &mut self.ranks };
            ranks.remove(&rank_of(block, slot));
        }
    }

    fn victim(&mut self) -> Option<u32> {
        while let Some((.., slot)) = self.ranks.pop_first() {
            if !self.family.has_children(slot) {
                return Some(slot);
            }
            self.blocks[slot as usize].waiting = true;
            self.rank(slot);
        }
        // All wait for children that are pinned.
        self.waiting.first().map(|&(.., slot)| slot)
    }
}

fn rank_of(block: &Block, slot: u32) -> Rank {
    (block.priority.to_bits(), block.used, slot)
}

impl Evictor for Gdsf {
    fn describe(&self) -> Description {
        Description::evictor("gdsf", env!("CARGO_PKG_VERSION")).setting(
            "cost-per-depth",
            0,
            "how much more a block costs than the one before it in its chain, the first one being 1",
        )
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.cost_per_depth = settings.number("cost-per-depth", 0.0..=1e6)?;
        Ok(())
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            cost_per_depth: self.cost_per_depth,
            blocks: vec![Block::default(); slots as usize],
            family: Family::new(slots),
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert => self.insert(&event),
                EventKind::Hit => {
                    self.comes_back(&event);
                    self.used(&event, event.parent_or_uses.into());
                }
                EventKind::Keep => drop(self.comes_back(&event)),
                EventKind::Remove => self.leave(event.slot),
                EventKind::Pin => self.set_pinned(&event, true),
                EventKind::Unpin => self.set_pinned(&event, false),
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            self.clock = self.clock.max(self.blocks[slot as usize].priority);
            self.leave(slot);
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Gdsf);

#[cfg(test)]
mod tests;
