//! Evicts the block that is worth its place least: the chance that it is used again within some time, divided by the time it
//! is expected to stay for that, for the time that is best (the stopping ratio of Gittins).
//!
//! When blocks are used again is learned by age, from a sample of all blocks, whether in the pool or not; apart for partly
//! filled ends of requests, for how often a block was used, and for the host's classes (`model`). How often a block was used
//! is remembered beyond its eviction for a while (`history`), so what is popular comes back as popular.
//!
//! * Within a cell blocks lie in the order of their last use, and the one used longest ago is the candidate. Where the
//!   worth rises with age at first it is not the least of the cell; those are young, and not worth a search.
//! * A candidate with resident children is set aside until the last of them has left.
//! * A new block is filed when the next event has told whether it was the last of its request.
#![deny(clippy::disallowed_methods)]

mod ages;
mod curve;
mod heads;
mod history;
mod model;
mod samples;

use heads::{Head, Heads};
use history::History;
use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::{Lists, Walk};
use kvasir_policy::{Description, Evictor};
use model::{CELLS, Model, cell_of};

/// The list of blocks set aside until their children have left.
const WAITING: u32 = CELLS as u32;
/// How many older blocks a returning block is put behind, at most.
const MAX_RETURN_STEPS: u32 = 32;

/// See the module documentation.
#[derive(Default)]
pub struct Kvasir {
    blocks: Vec<Block>,
    books: Books,
    /// By cell, least recently used first.
    queues: Lists,
    walk: Walk,
    history: History,
    model: Model,
    /// A new block that is not filed yet.
    unfiled: Option<Event>,
    /// Cells that ever had a block: those that a decision looks at.
    cells: Vec<u16>,
    /// By cell: where it stands among them.
    place_of: Vec<Option<u16>>,
    /// The candidates of `cells`, for the time of a decision.
    heads: Heads,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    last_ms: u64,
    depth: u32,
    /// After the first.
    uses: u32,
    cell: u16,
    waiting: bool,
}

impl Kvasir {
    fn note(&mut self, event: &Event) {
        let (noted, parents) = self.books.note(event);
        match (noted, event.kind) {
            (Noted::Came, _) => {
                self.queues.remove(event.slot);
                self.unfiled = Some(*event);
            }
            (Noted::Back | Noted::Used, EventKind::Hit) => {
                let uses = self.blocks[event.slot as usize].uses.saturating_add(event.parent_or_uses.max(1));
                self.used(event, cell_of(event.class, uses, false), uses);
            }
            (Noted::Back | Noted::Used, _) => {
                let Block { cell, uses, .. } = self.blocks[event.slot as usize];
                self.file(event, cell, uses);
            }
            (Noted::Left, _) => self.queues.remove(event.slot),
            (Noted::Nothing, _) => {}
        }
        if noted == Noted::Back {
            self.history.returns(self.blocks[event.slot as usize].identity);
        }
        match event.kind {
            EventKind::Pin => self.queues.hold(event.slot),
            EventKind::Unpin => self.unpin(event.slot),
            _ => {}
        }
        for parent in parents.into_iter().flatten() {
            self.end_wait(parent);
        }
    }

    /// Files the new block. `next`: the event behind it, if there is one.
    fn file_new(&mut self, next: Option<&Event>) {
        let Some(event) = self.unfiled.take() else { return };
        let follows = |next: &Event| next.kind == EventKind::Insert && next.parent_or_uses == event.slot;
        let uses = self.history.returns(event.identity).map_or(0, |uses| uses.saturating_add(1));
        self.used(&event, cell_of(event.class, uses, !next.is_some_and(follows)), uses);
    }

    fn used(&mut self, event: &Event, cell: u16, uses: u32) {
        if !event.replayed {
            self.model.used(event.identity, cell, event.time_ms);
        }
        self.blocks[event.slot as usize].identity = event.identity;
        self.file(event, cell, uses);
    }

    /// Puts the block at the recent end of its cell, behind deeper blocks of the same request.
    fn file(&mut self, event: &Event, cell: u16, uses: u32) {
        let (slot, last_ms) = (event.slot, event.time_ms);
        let before = self.walk.shallower(event).filter(|&at| {
            let at = self.blocks.get(at as usize);
            at.is_some_and(|at| at.cell == cell && at.last_ms == last_ms && !at.waiting)
        });
        let block = &mut self.blocks[slot as usize];
        *block = Block { last_ms, depth: event.depth, uses, cell, waiting: false, ..*block };
        if !before.is_some_and(|at| self.queues.insert_before(at, slot)) {
            self.queues.push_back(cell.into(), slot);
        }
        if self.place_of[usize::from(cell)].is_none() {
            self.place_of[usize::from(cell)] = Some(self.cells.len() as u16);
            self.cells.push(cell);
        }
    }

    fn unpin(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            block.waiting = false;
            let cell = block.cell;
            self.queues.remove(slot);
            if self.books.standing(slot) != Standing::Out {
                self.queues.push_back(cell.into(), slot);
            }
        }
    }

    /// A block that waited is a candidate again if its children have left. Its cell, if so.
    fn end_wait(&mut self, slot: u32) -> Option<u16> {
        let leaf = self.books.standing(slot) == Standing::Leaf;
        let block = self.blocks.get_mut(slot as usize).filter(|block| leaf && block.waiting)?;
        block.waiting = false;
        let Block { cell, last_ms, .. } = *block;
        // It was the front of its cell, so all that is older now came back before it.
        let mut at = self.queues.front(cell.into());
        for _ in 0..MAX_RETURN_STEPS {
            match at {
                Some(older) if self.blocks[older as usize].last_ms < last_ms => at = self.queues.next(older),
                _ => break,
            }
        }
        if !at.is_some_and(|at| self.queues.insert_before(at, slot)) {
            self.queues.push_back(cell.into(), slot);
        }
        Some(cell)
    }

    fn head(&self, cell: u16, now_ms: u64) -> Head {
        let Some(slot) = self.queues.front(cell.into()) else {
            return Head::NONE;
        };
        let Block { last_ms, depth, .. } = self.blocks[slot as usize];
        Head { worth: self.model.worth(cell, now_ms.saturating_sub(last_ms)), slot, depth }
    }

    /// Takes the candidate that is worth least, and has no resident children, off the queues.
    fn victim(&mut self, now_ms: u64) -> Option<u32> {
        while let Some((place, slot)) = self.heads.least() {
            self.queues.remove(slot);
            let leaf = self.books.standing(slot) == Standing::Leaf;
            if !leaf {
                self.blocks[slot as usize].waiting = true;
                self.queues.push_back(WAITING, slot);
            }
            self.heads.set(place, self.head(self.cells[place], now_ms));
            if leaf {
                return Some(slot);
            }
        }
        // Only ancestors of pinned blocks are left.
        self.queues.pop_front(WAITING)
    }

    fn evict(&mut self, slot: u32, now_ms: u64) {
        let block = &mut self.blocks[slot as usize];
        block.waiting = false;
        self.history.leaves(block.identity, block.uses);
        let candidate_again = self.books.choose(slot).and_then(|parent| self.end_wait(parent));
        if let Some(cell) = candidate_again
            && let Some(place) = self.place_of[usize::from(cell)]
        {
            self.heads.set(usize::from(place), self.head(cell, now_ms));
        }
    }
}

impl Evictor for Kvasir {
    fn describe(&self) -> Description {
        Description::evictor("kvasir", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            books: Books::new(slots),
            queues: Lists::new(slots, CELLS as u32 + 1),
            history: History::new(slots),
            model: self.model.reopened(),
            place_of: vec![None; CELLS],
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        let (mut passed, mut now_ms) = (0, 0);
        for event in events {
            self.file_new(Some(&event));
            self.note(&event);
            (passed, now_ms) = (passed + 1, event.time_ms);
        }
        self.model.fit_if_due(passed, now_ms, self.books.full());
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
        self.file_new(None);
        let mut heads = std::mem::take(&mut self.heads);
        heads.fill(self.cells.iter().map(|&cell| self.head(cell, now_ms)));
        self.heads = heads;
        for _ in 0..want {
            let Some(slot) = self.victim(now_ms) else { return };
            self.evict(slot, now_ms);
            victims.push(Victim::new(slot));
        }
    }

    fn export_state(&self) -> Vec<u8> {
        self.model.export()
    }

    fn import_state(&mut self, state: &[u8]) -> Result<(), String> {
        self.model.import(state)
    }
}

kvasir_policy::export_evictor!(Kvasir);

#[cfg(test)]
mod tests;
