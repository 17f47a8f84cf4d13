//! Least hit density (Beckmann, Chen and Cidon, NSDI '18): evicts the block that is expected to bring the fewest hits for
//! the space and the time that it will take.
//!
//! Age is the number of events since a block was used. Per class, the ages at which blocks were used again or evicted
//! give what a block of an age can still expect: hits divided by time left. Of 32 candidates drawn at random the one with
//! the least goes. For chains of blocks, only those without resident children are candidates; so there are none of the
//! paper's explorers, kept so that late hits are seen: each would hold all blocks before it in its chain.
#![deny(clippy::disallowed_methods)]

mod density;

use density::Densities;
use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::draw::Bags;
use kvasir_policy::evictor::{Events, Victim};
use kvasir_policy::{Description, Evictor};
use std::cmp::Ordering::Equal;

/// Of more candidates, so many are drawn.
const CANDIDATES: usize = 32;
/// Host classes told apart; higher ones count as the last of these.
const HOST_CLASSES: u16 = 16;
/// A class again by when the use before the last was: never; longer, a little shorter, much shorter ago than a pool fills.
const RECENCIES: u8 = 4;
/// Bags of blocks that can be chosen: without children, and with some.
const LEAVES: u32 = 0;
const PARENTS: u32 = 1;

/// See the module documentation.
#[derive(Default)]
pub struct Lhd {
    blocks: Vec<Block>,
    books: Books,
    bags: Bags,
    densities: Densities,
    /// Events so far.
    clock: u64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    used: u64,
    size_bytes: u32,
    class: u8,
}

impl Lhd {
    fn hit(&mut self, slot: u32, class: u8) {
        let (block, full) = (&mut self.blocks[slot as usize], u64::from(self.books.full()));
        let age = self.clock - block.used;
        self.densities.ended(block.class, age, true);
        let recency = 1 + u8::from(age < full) + u8::from(age < full / 8);
        (block.used, block.class) = (self.clock, class + recency);
    }

    /// Puts a block where it stands now.
    fn sort(&mut self, slot: u32) {
        match self.books.standing(slot) {
            Standing::Leaf => self.bags.put(LEAVES, slot),
            Standing::Parent => self.bags.put(PARENTS, slot),
            Standing::Out => self.bags.remove(slot),
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let Self { bags, blocks, densities, clock, .. } = self;
        // If all have children, then such that are pinned.
        let bag = if bags.is_empty(LEAVES) { PARENTS } else { LEAVES };
        let rank = |&slot: &u32| {
            let Block { used, size_bytes, class } = blocks[slot as usize];
            (densities.at(class, *clock - used) / f64::from(size_bytes), used, slot)
        };
        let ranks = bags.draw(bag, CANDIDATES).iter().map(rank);
        ranks.min_by(|a, b| a.partial_cmp(b).unwrap_or(Equal)).map(|(.., slot)| slot)
    }
}

impl Evictor for Lhd {
    fn describe(&self) -> Description {
        Description::evictor("lhd", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            books: Books::new(slots),
            bags: Bags::new(slots, 2),
            densities: Densities::new(HOST_CLASSES as u8 * RECENCIES),
            clock: 0,
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            self.clock += 1;
            let (noted, parents) = self.books.note(&event);
            let class = event.class.min(HOST_CLASSES - 1) as u8 * RECENCIES;
            match noted {
                Noted::Came | Noted::Back => {
                    let size_bytes = event.size_bytes.max(1);
                    self.blocks[event.slot as usize] = Block { used: self.clock, size_bytes, class };
                }
                Noted::Used => self.hit(event.slot, class),
                Noted::Left | Noted::Nothing => {}
            }
            self.sort(event.slot);
            parents.into_iter().flatten().for_each(|parent| self.sort(parent));
            self.densities.refit_if_due(self.clock, u64::from(self.books.full()) / 2);
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            let Block { used, class, .. } = self.blocks[slot as usize];
            self.densities.ended(class, self.clock - used, false);
            let parent = self.books.choose(slot);
            [Some(slot), parent].into_iter().flatten().for_each(|slot| self.sort(slot));
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Lhd);

#[cfg(test)]
mod tests;
