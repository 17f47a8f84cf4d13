//! S3-FIFO (Yang et al., SOSP '23): a small queue for what is new, a main queue for what was used again there or came back
//! soon, both first in, first out, and the identities of what left the small one.
//!
//! A block at the front of the small queue goes to the main one if it was used more than once there, else it is evicted; at
//! the front of the main queue each use since is a turn more. For chains of blocks: one whose turn comes while children of
//! it are resident waits until the last of them has left, and is the next then.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::ghosts::Ghosts;
use kvasir_policy::list::{Family, Lists};
use kvasir_policy::{Description, Evictor};

/// The queues, oldest at the front. A waiting block still belongs to one of the first two.
const SMALL: u32 = 0;
const MAIN: u32 = 1;
const WAITING: u32 = 2;
/// Uses are counted up to this.
const USES_MAX: u32 = 3;
/// Blocks that get another turn before one is taken that should have had one: what a victim costs at most.
const TURNS_MAX: u32 = 4_096;

/// See the module documentation.
#[derive(Default)]
pub struct S3Fifo {
    blocks: Vec<Block>,
    queues: Lists,
    family: Family,
    /// Identities of blocks that left the small queue; as many as the main queue may have blocks.
    ghosts: Ghosts,
    ghosts_max: u32,
    /// Blocks of the small queue, with those that wait or are pinned.
    small: u32,
    small_max: u32,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    /// Since it came into its queue.
    uses: u8,
    main: bool,
    resident: bool,
    waiting: bool,
}

impl S3Fifo {
    /// A new block.
    fn insert(&mut self, event: &Event) {
        self.leave(event.slot);
        let returns = self.ghosts.take(event.identity).is_some();
        self.family.insert(event.slot, event.parent_or_uses);
        self.join(event.slot, Block { identity: event.identity, main: returns, ..Block::default() });
    }

    /// A block that was chosen and is in use is back, as one that returned. Whether it is.
    fn comes_back(&mut self, event: &Event) -> bool {
        if self.blocks.get(event.slot as usize).is_none_or(|block| block.resident) {
            return false;
        }
        self.ghosts.take(event.identity);
        self.family.stay(event.slot);
        self.join(event.slot, Block { identity: event.identity, main: true, ..Block::default() });
        true
    }

    fn hit(&mut self, event: &Event) {
        if !self.comes_back(event)
            && let Some(block) = self.blocks.get_mut(event.slot as usize)
        {
            block.uses = event.parent_or_uses.saturating_add(block.uses.into()).min(USES_MAX) as u8;
        }
    }

    fn join(&mut self, slot: u32, block: Block) {
        let Some(place) = self.blocks.get_mut(slot as usize) else { return };
        *place = Block { resident: true, ..block };
        self.small += u32::from(!block.main);
        self.queues.push_back(queue_of(&block), slot);
    }

    fn leave(&mut self, slot: u32) {
        let Some(block) = self.blocks.get_mut(slot as usize) else { return };
        let left = std::mem::take(block);
        self.queues.remove(slot);
        self.small -= u32::from(left.resident && !left.main);
        if let Some(parent) = self.family.leave(slot) {
            self.end_wait(parent);
        }
    }

    fn unpin(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            block.waiting = false;
            let queue = queue_of(block);
            self.queues.remove(slot);
            self.queues.push_back(queue, slot);
        }
    }

    fn end_wait(&mut self, slot: u32) {
        let block = &mut self.blocks[slot as usize];
        if std::mem::take(&mut block.waiting) {
            let queue = queue_of(block);
            self.queues.push_front(queue, slot);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let mut turns = 0;
        loop {
            let (small, main) = (self.queues.front(SMALL), self.queues.front(MAIN));
            let front = if self.small >= self.small_max { small.or(main) } else { main.or(small) };
            // If all wait, then for children that are pinned.
            let Some(slot) = front else { return self.queues.front(WAITING) };
            let block = &mut self.blocks[slot as usize];
            let enough = if block.main { 0 } else { 1 };
            if block.uses > enough && turns < TURNS_MAX {
                turns += 1;
                block.uses = if block.main { block.uses - 1 } else { 0 };
                self.small -= u32::from(!std::mem::replace(&mut block.main, true));
                self.queues.push_back(MAIN, slot);
            } else if self.family.has_children(slot) {
                block.waiting = true;
                self.queues.push_back(WAITING, slot);
            } else {
                return Some(slot);
            }
        }
    }

    fn evict(&mut self, slot: u32) {
        let block = self.blocks[slot as usize];
        self.leave(slot);
        if !block.main {
            self.ghosts.insert(0, block.identity);
            if self.ghosts.len(0) > self.ghosts_max {
                self.ghosts.forget_oldest(0);
            }
        }
    }
}

fn queue_of(block: &Block) -> u32 {
    if block.main { MAIN } else { SMALL }
}

impl Evictor for S3Fifo {
    fn describe(&self) -> Description {
        Description::evictor("s3fifo", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        let small_max = (slots / 10).max(1);
        let ghosts_max = slots.saturating_sub(small_max);
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            queues: Lists::new(slots, 3),
            family: Family::new(slots),
            ghosts: Ghosts::new(ghosts_max, 1),
            ghosts_max,
            small: 0,
            small_max,
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert => self.insert(&event),
                EventKind::Hit | EventKind::Keep => self.hit(&event),
                EventKind::Remove => self.leave(event.slot),
                EventKind::Pin => {
                    self.comes_back(&event);
                    self.queues.hold(event.slot);
                }
                EventKind::Unpin => {
                    self.comes_back(&event);
                    self.unpin(event.slot);
                }
            }
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            self.evict(slot);
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(S3Fifo);

#[cfg(test)]
mod tests;
