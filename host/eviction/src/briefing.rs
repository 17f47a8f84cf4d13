//! How an engine of the eviction policy learns of a pool that lives on meanwhile.
//!
//! It is told two things at once: what happens from now on, and, piece by piece, the past, which is what is resident already,
//! oldest first. Both are put together here so that the engine hears a story within the contract: no block is inserted
//! twice, none is used before it was inserted, and a parent comes before its children. The order of the past is made
//! on a thread of its own, which takes seconds for a pool of ten million blocks.

use crate::books::Books;
use kvasir_os::thread;
use kvasir_store::dram::DramStore;
use kvasir_store::dram::{History, Resident};
use kvasir_store::events::{AccessEvent, EventKind, NO_SLOT};
use std::sync::{Arc, mpsc};

/// Pieces of the past that wait for the engine.
const PIECES_READY: usize = 16;

/// One engine's knowledge of the pool.
pub(crate) struct Briefing {
    store: Arc<DramStore>,
    began_ms: u64,
    piece: usize,
    pub books: Books,
    past: Option<Past>,
    /// Events for the engine are appended here.
    out: Vec<AccessEvent>,
}

/// What is still to be told of the time before, a piece at a time. Ends with a piece that is empty.
struct Past(mpsc::Receiver<History>);

impl Past {
    /// Begins to make the order, on a thread that ends when its pieces are taken or no longer wanted.
    fn begin(store: &Arc<DramStore>, now_ms: u64, piece: usize) -> Self {
        let (sender, from) = mpsc::sync_channel(PIECES_READY);
        let store = Arc::clone(store);
        let make = move || {
            let history = store.history(now_ms);
            // Where all cores are busy, this would take half of the one on which victims are chosen. If that is refused, it does.
            let _ = thread::give_way();
            let History { entries, until } = history.in_order();
            let pieces = entries.chunks(piece).map(<[_]>::to_vec).chain([Vec::new()]);
            let _ = pieces.map(|entries| History { entries, until }).try_for_each(|piece| sender.send(piece));
        };
        // Without a thread nobody sends, and it is begun again later.
        let _ = thread::Builder::new().name("kvasir-history".into()).spawn(make);
        Self(from)
    }
}

/// How far the engine has been told the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The engine knows all there is.
    Done,
    /// More can be told at once.
    More,
    /// The order of the past is being made.
    Waiting,
}

impl Briefing {
    /// A briefing for an engine that is open and knows nothing. `piece` is how many entries of the past it is told at once.
    pub(crate) fn begin(store: &Arc<DramStore>, now_ms: u64, piece: usize) -> Self {
        let books = Books::new(store.slots());
        let past = Some(Past::begin(store, now_ms, piece));
        Self { store: Arc::clone(store), began_ms: now_ms, piece, books, past, out: Vec::new() }
    }

    /// Appends what the engine must be told of things that just happened.
    pub(crate) fn live(&mut self, events: &[AccessEvent], out: &mut Vec<AccessEvent>) {
        std::mem::swap(&mut self.out, out);
        events.iter().for_each(|&event| self.happened(event));
        std::mem::swap(&mut self.out, out);
    }

    /// Appends that blocks chosen by another engine left.
    pub(crate) fn taken_by_another(&mut self, slots: &[u32], now_ms: u64, out: &mut Vec<AccessEvent>) {
        for &slot in slots {
            if self.books.holds(slot) {
                let event = removal(slot, now_ms);
                self.books.note(&event);
                out.push(event);
            }
        }
    }

    /// Appends the next piece of the past.
    pub(crate) fn past(&mut self, out: &mut Vec<AccessEvent>) -> Progress {
        let Some(past) = &self.past else { return Progress::Done };
        let history = match past.0.try_recv() {
            Ok(history) if history.entries.is_empty() => {
                self.past = None;
                return Progress::Done;
            }
            Ok(history) => history,
            Err(mpsc::TryRecvError::Empty) => return Progress::Waiting,
            Err(mpsc::TryRecvError::Disconnected) => {
                self.past = Some(Past::begin(&self.store, self.began_ms, self.piece));
                return Progress::Waiting;
            }
        };
        std::mem::swap(&mut self.out, out);
        for entry in &history.entries {
            let slot = entry.slot();
            if !entry.is_use() {
                self.introduce(slot);
            } else if self.books.holds(slot)
                && let Some(hit) = self.store.past_use(slot, &history)
            {
                self.say(hit);
            }
        }
        std::mem::swap(&mut self.out, out);
        Progress::More
    }

    fn happened(&mut self, event: AccessEvent) {
        let slot = event.slot;
        match event.kind {
            EventKind::Insert => self.inserted(event),
            EventKind::Remove if self.books.knows(slot) => self.say(event),
            EventKind::Remove => {}
            EventKind::Pin | EventKind::Unpin => {
                self.introduce(slot);
                let pins = event.kind == EventKind::Pin;
                if self.books.holds(slot) && self.books.is_pinned(slot) != pins {
                    self.say(event);
                }
            }
            EventKind::Hit | EventKind::Keep => {
                self.introduce(slot);
                if self.books.knows(slot) {
                    self.say(event);
                }
            }
        }
    }

    fn inserted(&mut self, event: AccessEvent) {
        let (slot, parent) = (event.slot, event.parent_or_uses);
        let is_new = !self.books.holds(slot);
        if is_new && (parent == NO_SLOT || self.books.knows(parent)) {
            return self.say(event);
        }
        // The past has told of it already, or of the block before it in this slot, which another engine chose.
        if self.books.knows(slot) {
            self.say(removal(slot, event.time_ms));
        }
        // Where the parent was there may be another block by now, even one that continues this one. So the engine is told
        // what is here now, and what that continues.
        self.introduce(slot);
        if !self.books.knows(slot) {
            self.say(AccessEvent { parent_or_uses: NO_SLOT, ..event });
        }
    }

    /// Tells of a resident block that the engine does not know, after those that it continues.
    fn introduce(&mut self, slot: u32) {
        let mut chain: Vec<Resident> = Vec::new();
        let mut next = slot;
        while next != NO_SLOT
            && !self.books.knows(next)
            && let Some(resident) = self.store.resident(next)
        {
            chain.push(resident);
            next = resident.insert.parent_or_uses;
        }
        while let Some(Resident { mut insert, pinned }) = chain.pop() {
            if !self.books.knows(insert.parent_or_uses) {
                insert.parent_or_uses = NO_SLOT;
            }
            self.say(insert);
            if pinned {
                self.say(AccessEvent { kind: EventKind::Pin, parent_or_uses: 0, ..insert });
            }
        }
    }

    fn say(&mut self, event: AccessEvent) {
        self.books.note(&event);
        self.out.push(event);
    }
}

fn removal(slot: u32, time_ms: u64) -> AccessEvent {
    AccessEvent {
        kind: EventKind::Remove,
        replayed: false,
        class: 0,
        slot,
        parent_or_uses: 0,
        depth: 0,
        size: 0,
        time_ms,
        identity: 0,
        tenant: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_policy::evictor::Victim;
    use kvasir_protocol::block::{BlockKey, BlockMeta, Pin};
    use kvasir_store::config::DramConfig;
    use kvasir_store::dram::{Lookup, OwnerId, Reserve};
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::time::Duration;

    const OWNER: OwnerId = OwnerId(0);
    const KEYS: u64 = 40;

    fn key(n: u64) -> BlockKey {
        BlockKey::from_engine_hash("briefing", &n.to_le_bytes())
    }

    fn pool() -> Arc<DramStore> {
        let config = DramConfig {
            pool_bytes: 24 * 4096,
            blocks_max: 64,
            put_wait: Duration::ZERO,
            pin_share: 1.0,
            ..DramConfig::default()
        };
        Arc::new(DramStore::open(config).unwrap())
    }

    /// An engine that knows what the contract promises it, and holds us to it.
    #[derive(Default)]
    struct Strict {
        /// Slot → (identity, pinned); what it chose is still known until it is inserted again.
        resident: HashMap<u32, (u64, bool)>,
        known: HashMap<u32, u64>,
    }

    impl Strict {
        fn hear(&mut self, events: &[AccessEvent]) {
            for event in events {
                let slot = event.slot;
                match event.kind {
                    EventKind::Insert => {
                        let parent = event.parent_or_uses;
                        assert!(parent == NO_SLOT || self.known.contains_key(&parent), "{event:?}");
                        assert_ne!(parent, slot, "{event:?}");
                        assert_eq!(self.resident.insert(slot, (event.identity, false)), None, "{event:?}");
                        self.known.insert(slot, event.identity);
                    }
                    EventKind::Hit | EventKind::Keep => {
                        let identity = *self.known.get(&slot).unwrap_or_else(|| panic!("{event:?}"));
                        self.resident.entry(slot).or_insert((identity, false));
                    }
                    EventKind::Remove => {
                        self.resident.remove(&slot);
                        assert!(self.known.remove(&slot).is_some(), "{event:?}");
                    }
                    EventKind::Pin | EventKind::Unpin => {
                        let pinned = &mut self.resident.get_mut(&slot).unwrap().1;
                        assert_ne!(*pinned, event.kind == EventKind::Pin, "{event:?}");
                        *pinned = !*pinned;
                    }
                }
            }
        }

        fn choose(&mut self, want: usize) -> Vec<u32> {
            let free = self.resident.iter().filter(|(_, (_, pinned))| !pinned);
            let mut slots: Vec<u32> = free.map(|(&slot, _)| slot).collect();
            slots.sort_unstable();
            slots.truncate(want);
            self.resident.retain(|slot, _| !slots.contains(slot));
            slots
        }
    }

    /// The pool, the engine that serves, and the one that is to follow once it has been begun.
    struct World {
        store: Arc<DramStore>,
        now: u64,
        serving: (Briefing, Strict),
        next: Option<(Briefing, Strict)>,
    }

    #[derive(Clone, Debug)]
    enum Op {
        Put(u64),
        Use(u64),
        Remove(u64),
        Pin(u64),
        Unpin(u64),
        Follow,
        Choose(usize),
        Reclaim(usize),
        Begin,
        Past,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0..KEYS).prop_map(Op::Put),
            4 => (0..KEYS).prop_map(Op::Use),
            2 => (0..KEYS).prop_map(Op::Remove),
            1 => (0..KEYS).prop_map(Op::Pin),
            1 => (0..KEYS).prop_map(Op::Unpin),
            6 => Just(Op::Follow),
            3 => (1..5usize).prop_map(Op::Choose),
            3 => (1..5usize).prop_map(Op::Reclaim),
            1 => Just(Op::Begin),
            4 => Just(Op::Past),
        ]
    }

    impl World {
        fn new() -> Self {
            let store = pool();
            let serving = (Briefing::begin(&store, 0, 3), Strict::default());
            Self { store, now: 0, serving, next: None }
        }

        fn step(&mut self, op: &Op) {
            self.now += 7;
            let Self { store, now, .. } = self;
            match *op {
                Op::Put(n) => {
                    // Chains of eight.
                    let parent = (n % 8 > 0).then(|| key(n - 1));
                    let meta = BlockMeta { parent, depth: (n % 8) as u32, ..BlockMeta::single(key(n), 4096) };
                    let _: Reserve = store.put(OWNER, &meta, &[n as u8; 4096], *now).unwrap();
                }
                Op::Use(n) => {
                    if let Lookup::Hit(lease) = store.get(OWNER, &[key(n)], 0, *now).unwrap()[0] {
                        store.release(OWNER, &[lease.id]).unwrap();
                    }
                }
                Op::Remove(n) => drop(store.remove(&[key(n)], *now).unwrap()),
                Op::Pin(n) => drop(store.pin(0, &[key(n)], Pin::Hard { duration_ms: 10_000 }, *now).unwrap()),
                Op::Unpin(n) => drop(store.unpin(0, &[key(n)], *now).unwrap()),
                Op::Follow => self.follow(),
                Op::Choose(want) => self.choose(want),
                Op::Reclaim(blocks) => drop(store.reclaim(blocks, *now)),
                Op::Begin => self.next = Some((Briefing::begin(store, *now, 3), Strict::default())),
                Op::Past => {
                    self.past();
                }
            }
        }

        fn follow(&mut self) {
            let (mut drained, mut events) = (Vec::new(), Vec::new());
            assert!(!self.store.drain_events(&mut drained).start_over);
            for (briefing, engine) in [&mut self.serving].into_iter().chain(&mut self.next) {
                events.clear();
                briefing.live(&drained, &mut events);
                engine.hear(&events);
            }
        }

        fn choose(&mut self, want: usize) {
            self.follow();
            let (briefing, engine) = &mut self.serving;
            let victims: Vec<Victim> = engine.choose(want).into_iter().map(Victim::new).collect();
            let mut slots = Vec::new();
            briefing.books.choose(&victims, &mut slots).unwrap();
            if let Some((briefing, engine)) = &mut self.next {
                let mut events = Vec::new();
                briefing.taken_by_another(&slots, self.now, &mut events);
                engine.hear(&events);
            }
            self.store.offer_victims(&slots, self.now);
        }

        fn past(&mut self) -> Progress {
            let mut events = Vec::new();
            let first = self.serving.0.past(&mut events);
            self.serving.1.hear(&events);
            let Some((briefing, engine)) = &mut self.next else { return first };
            events.clear();
            let progress = briefing.past(&mut events);
            engine.hear(&events);
            if progress == Progress::Done {
                self.serving = self.next.take().unwrap();
            }
            if first == Progress::Done { progress } else { first }
        }

        /// Nothing is told any more that is not known, and the engine counts as resident what is.
        fn check(&mut self) {
            while self.past() != Progress::Done || self.next.is_some() {
                std::thread::yield_now();
            }
            self.follow();
            let engine = &self.serving.1;
            for slot in 0..self.store.slots() {
                let there = self.store.resident(slot).map(|r| (r.insert.identity, r.pinned));
                assert_eq!(engine.resident.get(&slot).copied(), there, "slot {slot}");
            }
        }
    }

    proptest! {
        /// However calls, choices and the past interleave, each engine hears a story within the contract and ends
        /// with what is resident.
        #[test]
        fn an_engine_learns_a_pool_that_lives_on(ops in prop::collection::vec(op(), 1..300)) {
            let mut world = World::new();
            ops.iter().for_each(|op| world.step(op));
            world.check();
            world.step(&Op::Begin);
            ops.iter().for_each(|op| world.step(op));
            world.check();
        }
    }
}
