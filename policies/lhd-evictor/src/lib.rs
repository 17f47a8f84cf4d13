//! Least hit density (Beckmann, Chen and Cidon, NSDI '18): evicts the block that is expected to bring the fewest hits for
//! the space and the time that it will take.
//!
//! Age is the number of events since a block was used. Per class, the ages at which blocks were used again or evicted
//! give what a block of an age can still expect: hits divided by time left. Of 32 candidates drawn at random the one with
//! the least goes. Classes are the host's, times how long ago the use before the last one was. Some blocks are kept
//! longer than they should be, so that the hits that come late are seen too (the paper's explorers). For chains of blocks,
//! only blocks without resident children are candidates.
#![deny(clippy::disallowed_methods)]

mod density;

use density::Densities;
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::Family;
use kvasir_policy::{Description, Evictor};

/// Of more candidates, so many are drawn.
const CANDIDATES: usize = 32;
/// One block in this many is an explorer.
const EXPLORERS: u64 = 64;
/// Host classes told apart; higher ones count as the last of these.
const HOST_CLASSES: u16 = 16;
/// How long ago the use before the last one was: there was none; longer, a little shorter, much shorter than it takes to
/// fill the pool.
const RECENCIES: u8 = 4;

/// See the module documentation.
#[derive(Default)]
pub struct Lhd {
    blocks: Vec<Block>,
    family: Family,
    /// Slots that can be chosen: those without children, and those that have some.
    sets: [Vec<u32>; 2],
    densities: Densities,
    /// Events so far.
    clock: u64,
    random: u64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    used: u64,
    size_bytes: u32,
    /// Its index in its set.
    at: u32,
    class: u8,
    explorer: bool,
    resident: bool,
    pinned: bool,
    has_children: bool,
}

impl Lhd {
    fn insert(&mut self, event: &Event) {
        self.leave(event.slot);
        self.family.insert(event.slot, event.parent_or_uses);
        self.join(event, 0);
        self.rank(event.parent_or_uses);
    }

    /// A block that was chosen and is in use is back. Whether it is.
    fn comes_back(&mut self, event: &Event) -> bool {
        if self.blocks.get(event.slot as usize).is_none_or(|block| block.resident) {
            return false;
        }
        self.family.stay(event.slot);
        self.join(event, 0);
        true
    }

    fn hit(&mut self, event: &Event) {
        if self.comes_back(event) {
            return;
        }
        let Some(&block) = self.blocks.get(event.slot as usize) else { return };
        let age = self.clock - block.used;
        self.densities.hit(block.class, age);
        let slots = self.blocks.len() as u64;
        let recency = if age >= slots {
            1
        } else if age >= slots / 8 {
            2
        } else {
            3
        };
        let class = class_of(event, recency);
        self.blocks[event.slot as usize] = Block { used: self.clock, class, explorer: false, ..block };
    }

    fn join(&mut self, event: &Event, recency: u8) {
        let Some(block) = self.blocks.get_mut(event.slot as usize) else { return };
        *block = Block {
            used: self.clock,
            size_bytes: event.size_bytes.max(1),
            class: class_of(event, recency),
            explorer: event.identity.is_multiple_of(EXPLORERS),
            resident: true,
            ..Block::default()
        };
        self.put(event.slot);
    }

    fn leave(&mut self, slot: u32) {
        self.take(slot);
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            (block.resident, block.pinned) = (false, false);
        }
        if let Some(parent) = self.family.leave(slot) {
            self.rank(parent);
        }
    }

    fn set_pinned(&mut self, event: &Event, pinned: bool) {
        self.comes_back(event);
        self.take(event.slot);
        if let Some(block) = self.blocks.get_mut(event.slot as usize) {
            block.pinned = pinned;
        }
        self.put(event.slot);
    }

    /// Whether the block has children may have changed.
    fn rank(&mut self, slot: u32) {
        self.take(slot);
        self.put(slot);
    }

    /// Puts a block that can be chosen into its set.
    fn put(&mut self, slot: u32) {
        let has_children = self.family.has_children(slot);
        let Some(block) = self.blocks.get_mut(slot as usize) else { return };
        block.has_children = has_children;
        if block.resident && !block.pinned {
            let set = &mut self.sets[usize::from(has_children)];
            block.at = set.len() as u32;
            set.push(slot);
        }
    }

    fn take(&mut self, slot: u32) {
        let Some(&Block { at, has_children, resident: true, pinned: false, .. }) =
            self.blocks.get(slot as usize)
        else {
            return;
        };
        let set = &mut self.sets[usize::from(has_children)];
        set.swap_remove(at as usize);
        if let Some(&moved) = set.get(at as usize) {
            self.blocks[moved as usize].at = at;
        }
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let slot = self.candidate()?;
            if self.blocks[slot as usize].has_children || !self.family.has_children(slot) {
                return Some(slot);
            }
            self.rank(slot); // a child of it came back
        }
    }

    fn candidate(&mut self) -> Option<u32> {
        // If all have children, then such that are pinned.
        let set = self.sets.iter().find(|set| !set.is_empty())?;
        let all = set.len() <= CANDIDATES;
        let mut least: Option<(f64, u64, u32)> = None;
        for i in 0..set.len().min(CANDIDATES) {
            let slot = set[if all { i } else { draw(&mut self.random, set.len()) }];
            let block = &self.blocks[slot as usize];
            let rank = (self.density(block), block.used, slot);
            if least.is_none_or(|least| rank < least) {
                least = Some(rank);
            }
        }
        least.map(|(.., slot)| slot)
    }

    /// Hits to expect for a MiB and an event of time.
    fn density(&self, block: &Block) -> f64 {
        let age = self.clock - block.used;
        let explores = block.explorer && age < 4 * self.blocks.len() as u64;
        if explores { f64::MAX } else { self.densities.at(block.class, age) / f64::from(block.size_bytes) }
    }
}

fn class_of(event: &Event, recency: u8) -> u8 {
    event.class.min(HOST_CLASSES - 1) as u8 * RECENCIES + recency
}

/// A number below `below` (xorshift64*; Vigna, 2016). The same one in every run: nothing depends on chance.
fn draw(state: &mut u64, below: usize) -> usize {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    let random = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
    ((random * below as u64) >> 32) as usize
}

impl Evictor for Lhd {
    fn describe(&self) -> Description {
        Description::evictor("lhd", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            family: Family::new(slots),
            densities: Densities::new(HOST_CLASSES as u8 * RECENCIES, slots),
            random: 0x9e37_79b9_7f4a_7c15,
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            self.clock += 1;
            match event.kind {
                EventKind::Insert => self.insert(&event),
                EventKind::Hit | EventKind::Keep => self.hit(&event),
                EventKind::Remove => self.leave(event.slot),
                EventKind::Pin => self.set_pinned(&event, true),
                EventKind::Unpin => self.set_pinned(&event, false),
            }
            self.densities.refit_if_due(self.clock);
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            let Block { class, used, .. } = self.blocks[slot as usize];
            self.densities.evicted(class, self.clock - used);
            self.leave(slot);
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Lhd);

#[cfg(test)]
mod tests;
