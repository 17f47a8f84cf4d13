//! Evicts the block that is worth its place least: the chance that it is used again within some time, divided by the time it
//! is expected to stay for that, for the time that is best (the stopping ratio of Gittins).
//!
//! When blocks are used again is learned by age, from a sample of all blocks, whether in the pool or not; apart for partly
//! filled ends of requests, for how often a block was used, for how many blocks its last request brought and how
//! many were known, and for the host's classes (`model`). How often a block was used is remembered beyond its eviction for a while (`history`), so what is
//! popular comes back as popular, and what was forgotten counts as new.
//!
//! * Within a queue blocks lie in the order of their last use, and the one used longest ago is the candidate. Where the
//!   worth rises with age at first it is not the least of the queue; those are young, and not worth a search.
//! * A candidate with resident children is set aside until the last of them has left.
//! * New blocks are filed when an event has come that does not continue their chain. Only then is it known which was the last,
//!   and how many there were; the blocks before them, which the request used, move to the queues for such requests.
#![deny(clippy::disallowed_methods)]

mod ages;
mod cells;
mod curve;
mod heads;
mod history;
mod model;
mod samples;
mod tally;

use cells::{QUEUES, Request, class_of, queue_of};
use heads::{Head, Heads};
use history::History;
use kvasir_policy::books::{Books, Noted, Standing};
use kvasir_policy::evictor::{Event, EventKind, Events, Victim};
use kvasir_policy::list::{Lists, Walk};
use kvasir_policy::{Description, Evictor};
use model::Model;

/// The list of blocks set aside until their children have left.
const WAITING: u32 = QUEUES as u32;
/// How many older blocks a returning block is put behind, at most.
const MAX_RETURN_STEPS: u32 = 32;
/// How many known blocks each event lets move to other queues, and how many of these are saved up: a call's time follows its events, also
/// where new ends come again and again behind a chain of thousands that nobody uses.
const MOVES: u32 = 8;
const MAX_MOVES: u32 = 1 << 16;

/// See the module documentation.
#[derive(Default)]
pub struct Kvasir {
    blocks: Vec<Block>,
    books: Books,
    /// Least recently used first.
    queues: Lists,
    walk: Walk,
    history: History,
    model: Model,
    /// The last new block, if it and those that came before it in its chain are not filed yet.
    tip: Option<Tip>,
    /// Known blocks that may still be moved.
    moves: u32,
    /// Queues that ever had a block.
    used_queues: Vec<u16>,
    /// Those of them that had one during the last decision.
    live: Vec<u16>,
    /// By queue that ever had a block: where it stands among `live`, if it does.
    place_of: Vec<Option<u16>>,
    /// The candidates of `live`, for the time of a decision.
    heads: Heads,
}

#[derive(Clone, Copy)]
struct Tip {
    slot: u32,
    time_ms: u64,
    replayed: bool,
}

#[derive(Clone, Copy, Default)]
struct Block {
    identity: u64,
    last_ms: u64,
    depth: u32,
    /// After the first.
    uses: u32,
    /// The slot of the block before it in its chain when it came; another block may be there by now.
    parent: u32,
    queue: u16,
    /// Until it is used again: how many blocks of its request up to this one were new.
    brought: u16,
    stage: Stage,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// It came with the tip or before it in its chain.
    New,
    #[default]
    Filed,
    /// It was the front of its queue and had resident children.
    Waiting,
}

impl Kvasir {
    fn note(&mut self, event: &Event) {
        let (noted, parents) = self.books.note(event);
        match (noted, event.kind) {
            (Noted::Came, _) => self.came(event),
            (Noted::Back | Noted::Used, EventKind::Hit) => {
                let uses = self.blocks[event.slot as usize].uses.saturating_add(event.parent_or_uses.max(1));
                let queue = queue_of(event.class, known_until(event.depth), uses, false);
                if !event.replayed {
                    self.model.used(event.identity, queue, event.time_ms);
                }
                let block = &mut self.blocks[event.slot as usize];
                *block = Block { identity: event.identity, uses, brought: 0, ..*block };
                self.file(event, queue);
            }
            (Noted::Back | Noted::Used, _) => self.file(event, self.blocks[event.slot as usize].queue),
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

    /// A new block: it is filed with those behind it.
    fn came(&mut self, event: &Event) {
        let &Event { slot, identity, depth, time_ms, replayed, parent_or_uses: parent, .. } = event;
        self.queues.remove(slot);
        let known = self.history.returns(identity);
        let before = self.before(parent, depth).map_or(0, |before| before.brought);
        let brought = before.saturating_add(u16::from(known.is_none()));
        let uses = known.map_or(0, |uses| uses.saturating_add(1));
        let queue = queue_of(event.class, known_until(depth), uses, false);
        self.blocks[slot as usize] =
            Block { identity, last_ms: time_ms, depth, uses, parent, queue, brought, stage: Stage::New };
        self.tip = Some(Tip { slot, time_ms, replayed });
    }

    /// The block in a slot, if it can be the one before a block of this depth.
    fn before(&self, slot: u32, depth: u32) -> Option<&Block> {
        self.blocks.get(slot as usize).filter(|before| depth.checked_sub(1) == Some(before.depth))
    }

    fn continues(&self, tip: u32, next: &Event) -> bool {
        let follows = next.kind == EventKind::Insert && next.parent_or_uses == tip;
        let is_new = self.blocks.get(next.slot as usize).is_some_and(|at| at.stage == Stage::New);
        follows && !is_new && self.before(tip, next.depth).is_some()
    }

    /// Files the tip and the blocks before it, unless the next event, if there is one, continues the chain.
    fn settle(&mut self, next: Option<&Event>) {
        let Some(tip) = self.tip.filter(|tip| !next.is_some_and(|next| self.continues(tip.slot, next)))
        else {
            return;
        };
        self.tip = None;
        let Block { brought, depth, .. } = self.blocks[tip.slot as usize];
        let brought = u32::from(brought);
        let request = Request { brought, known: depth.saturating_add(1).saturating_sub(brought) };
        let mut at = tip.slot;
        while self.settle_block(at, request, &tip) {
            let Block { parent, depth, .. } = self.blocks[at as usize];
            if self.before(parent, depth).is_none() {
                break;
            }
            at = parent;
        }
    }

    /// Files one of them, behind those that are deeper. False if it is where it belongs, and so are those before it; or no more may move.
    fn settle_block(&mut self, slot: u32, request: Request, tip: &Tip) -> bool {
        let Block { identity, uses, queue: old, stage, .. } = self.blocks[slot as usize];
        let queue = queue_of(class_of(old) as u16, request, uses, slot == tip.slot);
        match stage {
            Stage::New if tip.replayed => {}
            Stage::New => self.model.used(identity, queue, tip.time_ms),
            _ if queue == old || self.moves == 0 => return false,
            _ => {
                self.moves -= 1;
                self.model.moved(identity, queue);
            }
        }
        let block = &mut self.blocks[slot as usize];
        *block = Block { last_ms: tip.time_ms, queue, stage: Stage::Filed, ..*block };
        if self.books.standing(slot) != Standing::Out {
            self.append(slot, queue);
        }
        true
    }

    /// Puts the block at the recent end of its queue, behind deeper blocks of the same request.
    fn file(&mut self, event: &Event, queue: u16) {
        let (slot, last_ms) = (event.slot, event.time_ms);
        let before = self.walk.shallower(event).filter(|&at| {
            let at = self.blocks.get(at as usize);
            at.is_some_and(|at| at.queue == queue && at.last_ms == last_ms && at.stage == Stage::Filed)
        });
        let block = &mut self.blocks[slot as usize];
        *block = Block { last_ms, depth: event.depth, queue, stage: Stage::Filed, ..*block };
        if !before.is_some_and(|at| self.queues.insert_before(at, slot)) {
            self.append(slot, queue);
        }
    }

    fn append(&mut self, slot: u32, queue: u16) {
        self.queues.push_back(queue.into(), slot);
        let place = &mut self.place_of[usize::from(queue)];
        if place.is_none() {
            *place = Some(0);
            self.used_queues.push(queue);
        }
    }

    fn unpin(&mut self, slot: u32) {
        if let Some(block) = self.blocks.get_mut(slot as usize) {
            block.stage = Stage::Filed;
            let queue = block.queue;
            self.queues.remove(slot);
            if self.books.standing(slot) != Standing::Out {
                self.append(slot, queue);
            }
        }
    }

    /// A block that waited is a candidate again if its children have left. Its queue, if so.
    fn end_wait(&mut self, slot: u32) -> Option<u16> {
        let leaf = self.books.standing(slot) == Standing::Leaf;
        let block =
            self.blocks.get_mut(slot as usize).filter(|block| leaf && block.stage == Stage::Waiting)?;
        block.stage = Stage::Filed;
        let Block { queue, last_ms, .. } = *block;
        // It was the front of its queue, so all that is older now came back before it.
        let mut at = self.queues.front(queue.into());
        for _ in 0..MAX_RETURN_STEPS {
            match at {
                Some(older) if self.blocks[older as usize].last_ms < last_ms => at = self.queues.next(older),
                _ => break,
            }
        }
        if !at.is_some_and(|at| self.queues.insert_before(at, slot)) {
            self.queues.push_back(queue.into(), slot);
        }
        Some(queue)
    }

    fn head(&self, queue: u16, now_ms: u64) -> Head {
        let Some(slot) = self.queues.front(queue.into()) else {
            return Head::NONE;
        };
        let Block { last_ms, depth, .. } = self.blocks[slot as usize];
        Head { worth: self.model.worth(queue, now_ms.saturating_sub(last_ms)), slot, depth }
    }

    /// Takes the candidate that is worth least, and has no resident children, off the queues.
    fn victim(&mut self, now_ms: u64) -> Option<u32> {
        while let Some((place, slot)) = self.heads.least() {
            self.queues.remove(slot);
            let leaf = self.books.standing(slot) == Standing::Leaf;
            if !leaf {
                self.blocks[slot as usize].stage = Stage::Waiting;
                self.queues.push_back(WAITING, slot);
            }
            self.heads.set(place, self.head(self.live[place], now_ms));
            if leaf {
                return Some(slot);
            }
        }
        // Only ancestors of pinned blocks are left.
        self.queues.pop_front(WAITING)
    }

    fn evict(&mut self, slot: u32, now_ms: u64) {
        let block = &mut self.blocks[slot as usize];
        block.stage = Stage::Filed;
        self.history.leaves(block.identity, block.uses);
        let candidate_again = self.books.choose(slot).and_then(|parent| self.end_wait(parent));
        if let Some(queue) = candidate_again {
            let place = self.place_of[usize::from(queue)].map_or(0, usize::from);
            let head = self.head(queue, now_ms);
            if self.live.get(place) == Some(&queue) {
                self.heads.set(place, head);
            } else {
                self.place_of[usize::from(queue)] = Some(self.live.len() as u16);
                self.live.push(queue);
                self.heads.push(head);
            }
        }
    }

    /// Takes up the candidate of every queue that has one.
    fn line_up(&mut self, now_ms: u64) {
        self.live.clear();
        for &queue in self.used_queues.iter().filter(|&&queue| self.queues.front(queue.into()).is_some()) {
            self.place_of[usize::from(queue)] = Some(self.live.len() as u16);
            self.live.push(queue);
        }
        let mut heads = std::mem::take(&mut self.heads);
        heads.fill(self.live.iter().map(|&queue| self.head(queue, now_ms)));
        self.heads = heads;
    }
}

/// What is known of a request that uses a block of this depth, before it brings anything.
fn known_until(depth: u32) -> Request {
    Request { brought: 0, known: depth.saturating_add(1) }
}

impl Evictor for Kvasir {
    fn describe(&self) -> Description {
        Description::evictor("kvasir", env!("CARGO_PKG_VERSION"))
    }

    fn open(&mut self, slots: u32) {
        *self = Self {
            blocks: vec![Block::default(); slots as usize],
            books: Books::new(slots),
            queues: Lists::new(slots, QUEUES as u32 + 1),
            history: History::new(slots),
            model: self.model.reopened(),
            place_of: vec![None; QUEUES],
            ..Self::default()
        };
    }

    fn on_events(&mut self, events: Events<'_>) {
        let (mut passed, mut now_ms) = (0, 0);
        for event in events {
            self.moves = (self.moves + MOVES).min(MAX_MOVES);
            self.settle(Some(&event));
            self.note(&event);
            (passed, now_ms) = (passed + 1, event.time_ms);
        }
        self.model.fit_if_due(passed, now_ms, self.books.full());
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
        self.settle(None);
        self.line_up(now_ms);
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
