//! ARC (Megiddo and Modha, FAST '03): two lists by last use, of blocks used once and of blocks used again, behind each the
//! identities of those that left it, and a target for the length of the first that moves toward the list whose
//! blocks come back.
//!
//! Two things differ from the paper. Victims are chosen ahead of need, so before it is known which block will take the
//! place: the target is moved by what came back until then. And for chains of blocks, one whose turn comes while
//! children of it are resident waits until the last of them has left, and is the next then.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::ghosts::Ghosts;
use kvasir_policy::list::Lists;
use kvasir_policy::{Description, Evictor};

/// The lists, least recently used first: T1 and T2 of the paper; B1 and B2 have the same numbers among the ghosts.
const ONCE: u8 = 0;
const AGAIN: u8 = 1;
/// Of blocks that wait; each still belongs to one of the two.
const WAITING: u32 = 2;

/// See the module documentation.
#[derive(Default)]
pub struct Arc {
    blocks: Vec<Block>,
    books: Books,
    lists: Lists,
    ghosts: Ghosts,
    /// Blocks of each list, with those that wait or are pinned.
    lens: [u32; 2],
    /// How long the first list should be (p of the paper).
    target: f64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    list: u8,
    resident: bool,
    waiting: bool,
}

impl Arc {
    /// A new block; the list that it belongs to.
    fn arrives(&mut self, event: &Event) -> u8 {
        let [once, again] = [ONCE, AGAIN].map(|list| f64::from(self.ghosts.len(list)));
        let returned_from = self.ghosts.take(event.identity);
        match returned_from {
            Some(ONCE) => {
                self.target = (self.target + (again / once).max(1.0)).min(self.books.full().into());
            }
            Some(_) => self.target = (self.target - (once / again).max(1.0)).max(0.0),
            None => {}
        }
        if returned_from.is_some() { AGAIN } else { ONCE }
    }

    /// Puts a block at the recent end of a list; a pinned one belongs there.
    fn join(&mut self, event: &Event, list: u8) {
        self.put_away(event.slot);
        self.blocks[event.slot as usize] =
            Block { identity: event.identity, list, resident: true, waiting: false };
        self.lens[usize::from(list)] += 1;
        self.lists.push_back(list.into(), event.slot);
    }

    /// The block belongs to no list; the one it belonged to.
    fn put_away(&mut self, slot: u32) -> Block {
        let left = std::mem::take(&mut self.blocks[slot as usize]);
        self.lens[usize::from(left.list)] -= u32::from(left.resident);
        left
    }

    /// A block that waited is the next of its list if its children have left.
    fn end_wait(&mut self, slot: u32) {
        if self.books.standing(slot) == Standing::Leaf
            && let block = &mut self.blocks[slot as usize]
            && std::mem::take(&mut block.waiting)
        {
            self.lists.push_front(block.list.into(), slot);
        }
    }

    fn unpin(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            block.waiting = false;
            let list = block.list.into();
            self.lists.remove(slot);
            self.lists.push_back(list, slot);
        }
    }

    /// `REPLACE` of the paper.
    fn victim(&mut self) -> Option<u32> {
        loop {
            let [once, again] = [ONCE, AGAIN].map(|list| self.lists.front(list.into()));
            let from_once = f64::from(self.lens[0]) > self.target;
            let front = if from_once { once.or(again) } else { again.or(once) };
            // If all wait, then for children that are pinned.
            let Some(slot) = front else { return self.lists.front(WAITING) };
            if self.books.standing(slot) == Standing::Leaf {
                return Some(slot);
            }
            self.blocks[slot as usize].waiting = true;
            self.lists.push_back(WAITING, slot);
        }
    }

    /// The first list with its ghosts is no longer than the pool, both together no longer than twice that.
    fn trim(&mut self) {
        if self.lens[0] + self.ghosts.len(ONCE) > self.books.full() {
            self.ghosts.forget_oldest(ONCE);
        }
        let all = self.lens[0] + self.lens[1] + self.ghosts.len(ONCE) + self.ghosts.len(AGAIN);
        if all > self.books.full().saturating_mul(2) {
            self.ghosts.forget_oldest(AGAIN);
        }
    }
}

impl Evictor for Arc {
    fn describe(&self) -> Description {
        Description::evictor("arc", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            books: Books::new(slots),
            lists: Lists::new(slots, 3),
            ghosts: Ghosts::new(slots, 2),
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            let (noted, parents) = self.books.note(&event);
            match noted {
                Noted::Came => {
                    let list = self.arrives(&event);
                    self.lists.remove(event.slot);
                    self.join(&event, list);
                    self.trim();
                }
                Noted::Back => {
                    self.ghosts.take(event.identity);
                    self.join(&event, AGAIN);
                }
                Noted::Used => self.join(&event, AGAIN),
                Noted::Left => {
                    self.put_away(event.slot);
                    self.lists.remove(event.slot);
                }
                Noted::Nothing => {}
            }
            match event.kind {
                EventKind::Pin => self.lists.hold(event.slot),
                EventKind::Unpin => self.unpin(event.slot),
                _ => {}
            }
            parents.into_iter().flatten().for_each(|parent| self.end_wait(parent));
        }
    }

    fn select_victims(&mut self, _: u64, want: u32, victims: &mut Vec<Victim>) {
        for _ in 0..want {
            let Some(slot) = self.victim() else { return };
            let Block { list, identity, .. } = self.put_away(slot);
            self.lists.remove(slot);
            if let Some(parent) = self.books.choose(slot) {
                self.end_wait(parent);
            }
            self.ghosts.insert(list, identity);
            self.trim();
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Arc);

#[cfg(test)]
mod tests;
