//! The books that the contract asks of an evictor: which blocks may be chosen, whatever order the events come in.

use crate::evictor::{Event, EventKind};
use crate::list::Family;

/// Which blocks are in the pool, pinned or behind others in a chain.
#[derive(Clone, Debug, Default)]
pub struct Books {
    blocks: Vec<Block>,
    family: Family,
    resident: u32,
    full: u32,
    /// Blocks came since the last choice.
    came: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    resident: bool,
    pinned: bool,
}

/// What an event says of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// It is new.
    Came,
    /// It was chosen and is in use, so it stays.
    Back,
    /// It was used again.
    Used,
    /// It is gone.
    Left,
    /// Nothing but where it stands.
    Nothing,
}

/// Whether a block can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is not in the pool, was chosen, or is pinned.
    Out,
    /// Only if there are no leaves left: blocks behind it in its chain are resident.
    Parent,
    Leaf,
}

impl Books {
    /// An empty pool of blocks below `slots`; events of others are ignored.
    pub fn new(slots: u32) -> Self {
        let blocks = vec![Block::default(); slots as usize];
        Self { blocks, family: Family::new(slots), ..Self::default() }
    }

    /// What an event says, and the other blocks whose standing may have changed: the parent, and that of a block that was in
    /// its place.
    pub fn note(&mut self, event: &Event) -> (Noted, [Option<u32>; 2]) {
        let Some(block) = self.blocks.get_mut(event.slot as usize) else {
            return (Noted::Nothing, [None; 2]);
        };
        let was_resident = block.resident;
        block.resident = event.kind != EventKind::Remove;
        block.pinned = match event.kind {
            EventKind::Pin => true,
            EventKind::Hit | EventKind::Keep => block.pinned,
            EventKind::Insert | EventKind::Remove | EventKind::Unpin => false,
        };
        if !block.resident {
            self.resident -= u32::from(was_resident);
            return (Noted::Left, [self.family.leave(event.slot), None]);
        }
        if !was_resident {
            self.resident += 1;
            (self.came, self.full) = (true, self.full.max(self.resident));
        }
        match event.kind {
            EventKind::Insert => {
                // It may be there still: it was used after it was chosen, and before it was evicted all the same.
                let former = self.family.leave(event.slot);
                self.family.insert(event.slot, event.parent_or_uses);
                (Noted::Came, [Some(event.parent_or_uses), former])
            }
            _ if !was_resident => (Noted::Back, [self.family.stay(event.slot), None]),
            EventKind::Hit | EventKind::Keep => (Noted::Used, [None; 2]),
            _ => (Noted::Nothing, [None; 2]),
        }
    }

    /// Strikes off a block that the policy chose. Returns its parent if that has no other children.
    pub fn choose(&mut self, slot: u32) -> Option<u32> {
        let block = self.blocks.get_mut(slot as usize)?;
        if std::mem::take(&mut self.came) {
            self.full = self.resident;
        }
        self.resident -= u32::from(std::mem::take(&mut block.resident));
        self.family.leave(slot)
    }

    pub fn standing(&self, slot: u32) -> Standing {
        match self.blocks.get(slot as usize) {
            Some(Block { resident: true, pinned: false }) if self.family.has_children(slot) => {
                Standing::Parent
            }
            Some(Block { resident: true, pinned: false }) => Standing::Leaf,
            _ => Standing::Out,
        }
    }

    /// How many blocks the pool held when victims were last chosen, or holds by now if they are more: its capacity as far as
    /// it is known. A pool has more slots than its memory has blocks.
    pub fn full(&self) -> u32 {
        self.full
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evictor::NO_SLOT;

    #[test]
    fn blocks_come_leave_and_come_back() {
        let mut books = Books::new(3);
        let note = |books: &mut Books, kind, slot, parent_or_uses| {
            let event = Event {
                kind,
                replayed: false,
                class: 0,
                slot,
                parent_or_uses,
                depth: 0,
                size_bytes: 1,
                time_ms: 0,
                identity: 0,
                tenant: 0,
            };
            books.note(&event)
        };
        assert_eq!(note(&mut books, EventKind::Insert, 0, NO_SLOT), (Noted::Came, [Some(NO_SLOT), None]));
        assert_eq!(note(&mut books, EventKind::Insert, 1, 0), (Noted::Came, [Some(0), None]));
        let standings = |books: &Books| [0, 1, 2].map(|slot| books.standing(slot));
        assert_eq!(standings(&books), [Standing::Parent, Standing::Leaf, Standing::Out]);
        assert_eq!(books.choose(1), Some(0));
        assert_eq!(standings(&books), [Standing::Leaf, Standing::Out, Standing::Out]);
        assert_eq!(books.full(), 2, "one is to come in its place");
        assert_eq!(note(&mut books, EventKind::Pin, 1, 0), (Noted::Back, [Some(0), None]));
        assert_eq!(note(&mut books, EventKind::Hit, 1, 1), (Noted::Used, [None; 2]));
        assert_eq!(standings(&books), [Standing::Parent, Standing::Out, Standing::Out]);
        assert_eq!(note(&mut books, EventKind::Unpin, 1, 0), (Noted::Nothing, [None; 2]));
        assert_eq!(books.standing(1), Standing::Leaf);
        assert_eq!(note(&mut books, EventKind::Insert, 1, NO_SLOT), (Noted::Came, [Some(NO_SLOT), Some(0)]));
        assert_eq!(note(&mut books, EventKind::Remove, 1, 0), (Noted::Left, [None; 2]));
        assert_eq!(note(&mut books, EventKind::Hit, 3, 1), (Noted::Nothing, [None; 2]), "beyond the slots");
        assert_eq!(
            (standings(&books), books.choose(9)),
            ([Standing::Leaf, Standing::Out, Standing::Out], None)
        );
    }
}
