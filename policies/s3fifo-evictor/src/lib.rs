//! S3-FIFO (Yang et al., SOSP '23): a small queue for what is new, a main queue for what was used again there or came back
//! soon, both first in, first out, and the identities of what left the small one.
//!
//! A block at the front of the small queue goes to the main one if it was used more than once there, else it is evicted; at
//! the front of the main queue each use since is a turn more. For chains of blocks: one whose turn comes while children of
//! it are resident waits until the last of them has left, and is the next then.
//! Blocks of conversations come back later than a tenth of the pool, as in the paper, can tell: see `small` and `uses`.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::ghosts::Ghosts;
use kvasir_policy::list::Lists;
use kvasir_policy::{Description, Evictor, Settings};

/// The queues, oldest at the front. A waiting block still belongs to one of the first two.
const SMALL: u32 = 0;
const MAIN: u32 = 1;
const WAITING: u32 = 2;
/// Uses are counted up to this.
const USES_MAX: u32 = 3;
/// Blocks that get another turn before one is taken that should have had one: what a victim costs at most.
const TURNS_MAX: u32 = 4_096;

/// See the module documentation.
pub struct S3Fifo {
    small_percent: f64,
    /// Uses that bring a block from the small queue to the main one.
    uses: u8,
    blocks: Vec<Block>,
    books: Books,
    queues: Lists,
    /// Identities of blocks that left the small queue; as many as the main queue may have blocks.
    ghosts: Ghosts,
    /// Blocks of the main queue, with those that wait or are pinned.
    main: u32,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    /// Since it came into its queue.
    uses: u8,
    main: bool,
    waiting: bool,
}

impl Default for S3Fifo {
    fn default() -> Self {
        let (blocks, books, queues, ghosts) = Default::default();
        Self { small_percent: 10.0, uses: 2, blocks, books, queues, ghosts, main: 0 }
    }
}

impl S3Fifo {
    fn join(&mut self, event: &Event, main: bool) {
        self.leave(event.slot);
        let block = Block { identity: event.identity, main, ..Block::default() };
        self.blocks[event.slot as usize] = block;
        self.main += u32::from(main);
        self.queues.push_back(queue_of(&block), event.slot);
    }

    fn leave(&mut self, slot: u32) {
        let left = std::mem::take(&mut self.blocks[slot as usize]);
        self.main -= u32::from(left.main);
        self.queues.remove(slot);
    }

    fn unpin(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            block.waiting = false;
            let queue = queue_of(block);
            self.queues.remove(slot);
            self.queues.push_back(queue, slot);
        }
    }

    /// A block that waited is the next of its queue if its children have left.
    fn end_wait(&mut self, slot: u32) {
        if self.books.standing(slot) == Standing::Leaf
            && let block = &mut self.blocks[slot as usize]
            && std::mem::take(&mut block.waiting)
        {
            self.queues.push_front(queue_of(block), slot);
        }
    }

    /// Blocks that the main queue may have. It says which queue is too long: victims are chosen ahead of the blocks that take
    /// their place, and those will be in the small one.
    fn main_max(&self) -> u32 {
        let small = f64::from(self.books.full()) * self.small_percent / 100.0;
        self.books.full().saturating_sub((small as u32).max(1))
    }

    fn victim(&mut self) -> Option<u32> {
        let mut turns = 0;
        loop {
            let (small, main) = (self.queues.front(SMALL), self.queues.front(MAIN));
            let front = if self.main > self.main_max() { main.or(small) } else { small.or(main) };
            // If all wait, then for children that are pinned.
            let Some(slot) = front else { return self.queues.front(WAITING) };
            let block = &mut self.blocks[slot as usize];
            let enough = if block.main { 1 } else { self.uses };
            if block.uses >= enough && turns < TURNS_MAX {
                turns += 1;
                block.uses = if block.main { block.uses - 1 } else { 0 };
                self.main += u32::from(!std::mem::replace(&mut block.main, true));
                self.queues.push_back(MAIN, slot);
            } else if self.books.standing(slot) == Standing::Parent {
                block.waiting = true;
                self.queues.push_back(WAITING, slot);
            } else {
                return Some(slot);
            }
        }
    }

    fn evict(&mut self, slot: u32) {
        let Block { identity, main, .. } = self.blocks[slot as usize];
        self.leave(slot);
        if let Some(parent) = self.books.choose(slot) {
            self.end_wait(parent);
        }
        if !main {
            self.ghosts.insert(0, identity);
            while self.ghosts.len(0) > self.main_max() {
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
            .setting("small", 10, "the small queue's share of the pool, per cent")
            .setting("uses", 2, "uses that bring a block from the small queue to the main one, 1 to 3")
    }

    fn configure(&mut self, settings: &Settings) -> Result<(), String> {
        self.small_percent = settings.number("small", 0.0..=100.0)?;
        self.uses = settings.number("uses", 1.0..=3.0)? as u8;
        Ok(())
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            small_percent: self.small_percent,
            uses: self.uses,
            blocks: vec![Block::default(); slots as usize],
            books: Books::new(slots),
            queues: Lists::new(slots, 3),
            ghosts: Ghosts::new(slots, 1),
            main: 0,
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            let (noted, parents) = self.books.note(&event);
            match noted {
                Noted::Came | Noted::Back => {
                    let returns = self.ghosts.take(event.identity).is_some();
                    self.join(&event, returns || noted == Noted::Back);
                }
                Noted::Used => {
                    let block = &mut self.blocks[event.slot as usize];
                    block.uses = event.parent_or_uses.saturating_add(block.uses.into()).min(USES_MAX) as u8;
                }
                Noted::Left => self.leave(event.slot),
                Noted::Nothing => {}
            }
            match event.kind {
                EventKind::Pin => self.queues.hold(event.slot),
                EventKind::Unpin => self.unpin(event.slot),
                _ => {}
            }
            parents.into_iter().flatten().for_each(|parent| self.end_wait(parent));
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
