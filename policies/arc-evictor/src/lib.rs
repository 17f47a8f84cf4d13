//! ARC (Megiddo and Modha, FAST '03): two lists by last use, of blocks used once and of blocks used again, behind each the
//! identities of those that left it, and a target for the length of the first that moves toward the list whose
//! blocks come back.
//!
//! Two things differ from the paper. Victims are chosen ahead of need, so before it is known which block will take the
//! place: the target is moved by what came back until then. And for chains of blocks, one whose turn comes while
//! children of it are resident waits until the last of them has left, and is the next then.
#![deny(clippy::disallowed_methods)]

use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::ghosts::Ghosts;
use kvasir_policy::list::{Family, Lists};
use kvasir_policy::{Description, Evictor};

/// The lists, least recently used first: T1 and T2 of the paper; B1 and B2 have the same numbers among the ghosts.
const ONCE: u8 = 0;
const AGAIN: u8 = 1;
/// Of blocks that wait; each still belongs to one of the two.
const WAITING: u32 = 2;

/// See the module documentation.
#[derive(Default)]
pub struct Arc {
    slots: u32,
    blocks: Vec<Block>,
    lists: Lists,
    family: Family,
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
    fn insert(&mut self, event: &Event) {
        self.leave(event.slot);
        let [once, again] = [ONCE, AGAIN].map(|list| f64::from(self.ghosts.len(list)));
        let returned_from = self.ghosts.take(event.identity);
        match returned_from {
            Some(ONCE) => self.target = (self.target + (again / once).max(1.0)).min(self.slots.into()),
            Some(_) => self.target = (self.target - (once / again).max(1.0)).max(0.0),
            None => {}
        }
        self.family.insert(event.slot, event.parent_or_uses);
        self.join(event, if returned_from.is_some() { AGAIN } else { ONCE });
        self.trim();
    }

    /// A block that was chosen and is in use is back, as one used again. Whether it is.
    fn comes_back(&mut self, event: &Event) -> bool {
        if self.blocks.get(event.slot as usize).is_none_or(|block| block.resident) {
            return false;
        }
        self.ghosts.take(event.identity);
        self.family.stay(event.slot);
        self.join(event, AGAIN);
        true
    }

    fn hit(&mut self, event: &Event) {
        if !self.comes_back(event) {
            self.put_away(event.slot);
            self.join(event, AGAIN);
        }
    }

    /// Puts a block at the recent end of a list; a pinned one belongs there.
    fn join(&mut self, event: &Event, list: u8) {
        let Some(block) = self.blocks.get_mut(event.slot as usize) else { return };
        *block = Block { identity: event.identity, list, resident: true, waiting: false };
        self.lens[usize::from(list)] += 1;
        self.lists.push_back(list.into(), event.slot);
    }

    /// The block belongs to no list; the one it belonged to.
    fn put_away(&mut self, slot: u32) -> Option<Block> {
        let block = self.blocks.get_mut(slot as usize).filter(|block| block.resident)?;
        let left = std::mem::take(block);
        self.lens[usize::from(left.list)] -= 1;
        Some(left)
    }

    fn leave(&mut self, slot: u32) -> Option<Block> {
        let left = self.put_away(slot);
        self.lists.remove(slot);
        if let Some(parent) = self.family.leave(slot) {
            let block = &mut self.blocks[parent as usize];
            if std::mem::take(&mut block.waiting) {
                let list = block.list.into();
                self.lists.push_front(list, parent);
            }
        }
        left
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
            if !self.family.has_children(slot) {
                return Some(slot);
            }
            self.blocks[slot as usize].waiting = true;
            self.lists.push_back(WAITING, slot);
        }
    }

    /// The first list with its ghosts is no longer than the pool, both together no longer than twice that.
    fn trim(&mut self) {
        if self.lens[0] + self.ghosts.len(ONCE) > self.slots {
            self.ghosts.forget_oldest(ONCE);
        }
        let all = self.lens[0] + self.lens[1] + self.ghosts.len(ONCE) + self.ghosts.len(AGAIN);
        if all > self.slots.saturating_mul(2) {
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
            slots,
            blocks: vec![Block::default(); slots as usize],
            lists: Lists::new(slots, 3),
            family: Family::new(slots),
            ghosts: Ghosts::new(slots, 2),
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        for event in events {
            match event.kind {
                EventKind::Insert => self.insert(&event),
                EventKind::Hit | EventKind::Keep => self.hit(&event),
                EventKind::Remove => drop(self.leave(event.slot)),
                EventKind::Pin => {
                    self.comes_back(&event);
                    self.lists.hold(event.slot);
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
            if let Some(Block { list, identity, .. }) = self.leave(slot) {
                self.ghosts.insert(list, identity);
                self.trim();
            }
            victims.push(Victim::new(slot));
        }
    }
}

kvasir_policy::export_evictor!(Arc);

#[cfg(test)]
mod tests;
