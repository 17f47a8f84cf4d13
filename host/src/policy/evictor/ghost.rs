//! An evictor in shadow runs a ghost: a pool of names without bytes, which sees what the real pool sees and chooses its
//! own victims. A ghost of the active policy runs beside it, so that both hit rates come out of the same simulation.
//!
//! A large pool is simulated in miniature: the blocks whose identity hashes into a fixed share of all, in a pool of that
//! share of the size (Waldspurger et al., Cache Modeling and Optimization using Miniature Simulations, USENIX ATC '17). The
//! parent of a block there is the nearest of its ancestors that is simulated, so that chains stay chains.

use super::{EvictorEngine, EvictorHook, open};
use crate::policy::Fault;
use crate::policy::slot::{Around, Shadow, Worker};
use hashbrown::HashMap;
use kvasir_policy::evictor::{
    EVENT, EVENTS_MAX, Event, EventKind, Events, Layout, NO_SLOT, TierRow, VICTIMS_MAX, Victim,
};
use std::collections::HashSet;
use std::sync::Arc;

/// The most blocks in a ghost. Some 100 bytes each, beside what the policy keeps.
const BLOCKS_MAX: u32 = 1 << 17;
/// One in this many blocks goes when the pool is full, as in the real one between its watermarks.
const EMPTIED: u64 = 64;
/// The tier of the pool itself, in a row of tiers.
const DRAM: u8 = 2;

/// A batch of events of the real pool.
pub struct Heard {
    pub base_ms: u64,
    pub words: Vec<u32>,
    /// Block slots of the real pool.
    pub slots: u32,
    /// Rows of the tiers, as the active policy knows them; empty if they are not known.
    pub tiers: Arc<[f32]>,
}

#[derive(Default)]
pub struct EvictorShadow {
    newcomer: Ghost,
    active: Ghost,
    engine: Option<Active>,
    /// By slot of the real pool.
    names: HashMap<u32, Name>,
    /// Of the identities, and of the real pool's size. 0 = not chosen yet.
    share: f64,
}

/// A block of the real pool.
#[derive(Clone, Copy)]
struct Name {
    identity: u64,
    is_simulated: bool,
    /// The nearest ancestor that is simulated.
    above: Option<u64>,
}

impl Name {
    /// The nearest ancestor of its children that is simulated.
    fn nearest(&self) -> Option<u64> {
        if self.is_simulated { Some(self.identity) } else { self.above }
    }
}

/// The active policy, as its ghost has it.
struct Active {
    generation: u64,
    /// `None` means that it failed, and is not tried again.
    engine: Option<Box<dyn EvictorEngine>>,
}

impl Shadow<EvictorHook> for EvictorShadow {
    fn hear(&mut self, around: &Around<'_, EvictorHook>, worker: &mut Worker<EvictorHook>, heard: Heard) {
        let is_new = self.choose_share(&heard);
        let events = self.translate(&heard);
        let size = Size::of(&heard, self.share);
        let layout = Layout::of(heard.slots).encode();
        if worker.refresh() || is_new {
            self.newcomer = Ghost::default();
            let _ = worker.tell(|engine| open(engine, &layout, &heard.tiers)); // it is counted, and found failed below
        }
        match self.newcomer.run(&events, size, worker) {
            Ok(seen) => around.trial.tally.newcomer.accesses(seen.accesses, seen.hits),
            Err(Fault::Invalid(reason)) => {
                worker.record(&Fault::Invalid(reason));
                worker.drop_engine();
            }
            Err(_) => {} // counted; a fresh instance begins with an empty pool
        }
        self.take_up_active(around, &layout, &heard.tiers);
        let Some(active) = self.engine.as_mut() else { return };
        let Some(engine) = active.engine.as_deref_mut() else { return };
        match self.active.run(&events, size, &mut Plain(engine)) {
            Ok(seen) => around.trial.tally.active.accesses(seen.accesses, seen.hits),
            Err(_) => active.engine = None, // the slot counts what it does in service
        }
    }
}

impl EvictorShadow {
    /// Chooses the share by how many blocks of the size of those in the batch fit into the pool; takes half of it if more came than
    /// a ghost may hold. Returns true if it is another one than before: both ghosts begin anew.
    fn choose_share(&mut self, heard: &Heard) -> bool {
        let held = self.newcomer.by_identity.len().max(self.active.by_identity.len());
        if self.share == 0.0 {
            let sizes = Events::new(heard.base_ms, EVENT, &heard.words).into_iter();
            let sizes = sizes.map(|event| f64::from(event.size_bytes)).filter(|bytes| *bytes > 0.0);
            let (sum, count) = sizes.fold((0.0, 0.0), |(sum, count), bytes| (sum + bytes, count + 1.0));
            if count == 0.0 {
                return false; // nothing to be simulated yet
            }
            let fit = pool_bytes(heard).map_or(f64::MAX, |bytes| bytes * count / sum);
            self.share = (f64::from(BLOCKS_MAX) / fit.min(heard.slots.into()).max(1.0)).min(1.0);
        } else if held > BLOCKS_MAX as usize {
            self.share /= 2.0;
            self.names.clear();
            (self.active, self.engine) = Default::default();
            return true;
        }
        false
    }

    fn take_up_active(&mut self, around: &Around<'_, EvictorHook>, layout: &[u32], tiers: &[f32]) {
        let version = around.slot.current();
        if self.engine.as_ref().is_some_and(|active| active.generation == version.generation) {
            return;
        }
        let engine = around.slot.build(&version).ok();
        let opened = engine.and_then(|mut engine| open(engine.as_mut(), layout, tiers).ok().map(|()| engine));
        self.engine = Some(Active { generation: version.generation, engine: opened });
        self.active = Ghost::default();
    }

    /// The accesses in the batch, by identity. What is told of the past gives names and is no access.
    fn translate(&mut self, heard: &Heard) -> Vec<Access> {
        let mut accesses = Vec::new();
        for event in Events::new(heard.base_ms, EVENT, &heard.words) {
            let parent = self.names.get(&event.parent_or_uses).filter(|_| event.kind == EventKind::Insert);
            let above = parent.and_then(Name::nearest);
            let known = self.names.get(&event.slot).is_some_and(|name| name.identity == event.identity);
            match event.kind {
                EventKind::Hit | EventKind::Keep if known => {}
                EventKind::Insert | EventKind::Hit | EventKind::Keep => {
                    let (identity, is_simulated) = (event.identity, is_sampled(event.identity, self.share));
                    self.names.insert(event.slot, Name { identity, is_simulated, above });
                }
                EventKind::Remove | EventKind::Pin | EventKind::Unpin => {}
            }
            let Some(&name) = self.names.get(&event.slot) else { continue };
            if event.kind == EventKind::Remove {
                self.names.remove(&event.slot);
            }
            if name.is_simulated && !event.replayed && event.kind != EventKind::Keep {
                accesses.push(Access { identity: name.identity, parent: name.above, event });
            }
        }
        accesses
    }
}

/// The upper bits of a multiplicative hash: identities may themselves follow a pattern.
fn is_sampled(identity: u64, share: f64) -> bool {
    let mixed = identity.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    share >= 1.0 || (mixed as f64) < share * f64::from(u32::MAX)
}

/// Of the pool itself, if it is known.
fn pool_bytes(heard: &Heard) -> Option<f64> {
    let rows = heard.tiers.as_chunks::<{ TierRow::VALUES }>().0;
    let mib = rows.iter().find(|row| row[0] as u8 == DRAM).map(|row| f64::from(row[1]));
    mib.filter(|mib| *mib > 0.0).map(|mib| mib * f64::from(1 << 20))
}

struct Access {
    identity: u64,
    /// The nearest of its ancestors that is simulated.
    parent: Option<u64>,
    /// As the real pool tells it.
    event: Event,
}

/// How large a ghost is.
#[derive(Clone, Copy)]
struct Size {
    blocks: u32,
    bytes: u64,
    /// Block slots of the real pool, among which those of the ghost are.
    slots: u32,
}

impl Size {
    /// `share`: of the real pool.
    fn of(heard: &Heard, share: f64) -> Self {
        let bytes = pool_bytes(heard).map_or(u64::MAX, |bytes| (bytes * share) as u64);
        // One less than there are slots: a block is taken in before room is made for it.
        let blocks = ((f64::from(heard.slots) * share) as u32).min(heard.slots.saturating_sub(1)).max(1);
        Self { blocks, bytes, slots: heard.slots }
    }
}

/// An evictor, owned or borrowed.
trait Asked {
    fn tell(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault>;
    fn choose(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault>;
}

impl Asked for Worker<EvictorHook> {
    fn tell(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        Worker::tell(self, |engine| engine.on_events(base_ms, words))
    }

    fn choose(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        self.ask(|engine| engine.select_victims(now_ms, want, victims))
    }
}

struct Plain<'a>(&'a mut dyn EvictorEngine);

impl Asked for Plain<'_> {
    fn tell(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        self.0.on_events(base_ms, words)
    }

    fn choose(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        self.0.select_victims(now_ms, want, victims)
    }
}

/// What a ghost saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    accesses: u64,
    hits: u64,
}

/// A pool of names.
#[derive(Default)]
struct Ghost {
    slots: Vec<Option<Block>>,
    free: Vec<u32>,
    by_identity: HashMap<u64, u32>,
    used_bytes: u64,
    pinned: usize,
    /// Events that the policy has not been told yet.
    untold: Vec<Event>,
    words: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Block {
    identity: u64,
    bytes: u32,
    is_pinned: bool,
}

impl Ghost {
    fn run(&mut self, accesses: &[Access], size: Size, policy: &mut impl Asked) -> Result<Seen, Fault> {
        let mut seen = Seen::default();
        for access in accesses {
            let uses = u64::from(access.event.parent_or_uses.max(1));
            let held = self.by_identity.get(&access.identity).copied();
            match (access.event.kind, held) {
                (EventKind::Insert, Some(slot)) => {
                    // The real pool had to take it again; here it is found.
                    self.say(access, EventKind::Hit, slot, 1);
                    seen.accesses += 1;
                    seen.hits += 1;
                }
                (EventKind::Hit, Some(slot)) => {
                    self.say(access, EventKind::Hit, slot, uses as u32);
                    seen.accesses += uses;
                    seen.hits += uses;
                }
                (EventKind::Insert, None) => {
                    seen.accesses += 1;
                    self.insert(access);
                }
                (EventKind::Hit, None) => {
                    // A miss here, after which it would be there for the other uses.
                    seen.accesses += uses;
                    seen.hits += uses - 1;
                    self.insert(access);
                }
                (EventKind::Remove, Some(slot)) => {
                    self.say(access, EventKind::Remove, slot, 0);
                    self.take(slot);
                }
                (kind @ (EventKind::Pin | EventKind::Unpin), Some(slot)) => {
                    self.pin(slot, kind == EventKind::Pin);
                    self.say(access, kind, slot, 0);
                }
                (EventKind::Remove | EventKind::Pin | EventKind::Unpin, None) | (EventKind::Keep, _) => {}
            }
            if self.is_over(size, 0) {
                self.make_room(size, access.event.time_ms, policy)?;
            }
        }
        self.tell(policy)?;
        Ok(seen)
    }

    fn insert(&mut self, access: &Access) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        let bytes = access.event.size_bytes;
        self.slots[slot as usize] = Some(Block { identity: access.identity, bytes, is_pinned: false });
        self.by_identity.insert(access.identity, slot);
        self.used_bytes += u64::from(bytes);
        let parent = access.parent.and_then(|parent| self.by_identity.get(&parent).copied());
        self.say(access, EventKind::Insert, slot, parent.unwrap_or(NO_SLOT));
    }

    fn pin(&mut self, slot: u32, is_pinned: bool) {
        if let Some(block) = &mut self.slots[slot as usize] {
            let was_pinned = std::mem::replace(&mut block.is_pinned, is_pinned);
            self.pinned = self.pinned + usize::from(is_pinned) - usize::from(was_pinned);
        }
    }

    fn take(&mut self, slot: u32) {
        self.pin(slot, false);
        if let Some(block) = self.slots[slot as usize].take() {
            self.by_identity.remove(&block.identity);
            self.used_bytes -= u64::from(block.bytes);
            self.free.push(slot);
        }
    }

    fn say(&mut self, access: &Access, kind: EventKind, slot: u32, parent_or_uses: u32) {
        self.untold.push(Event { kind, slot, parent_or_uses, replayed: false, ..access.event });
    }

    fn tell(&mut self, policy: &mut impl Asked) -> Result<(), Fault> {
        for events in self.untold.chunks(EVENTS_MAX) {
            let base_ms = events.iter().map(|event| event.time_ms).min().unwrap_or(0);
            self.words.clear();
            events.iter().for_each(|event| event.encode(base_ms, &mut self.words));
            policy.tell(base_ms, &self.words)?;
        }
        self.untold.clear();
        Ok(())
    }

    /// Whether it holds more than it may, less a part.
    fn is_over(&self, size: Size, part: u64) -> bool {
        let less = |of: u64| of - part * (of / EMPTIED);
        self.used_bytes > less(size.bytes) || self.by_identity.len() as u64 > less(size.blocks.into())
    }

    fn make_room(&mut self, size: Size, now_ms: u64, policy: &mut impl Asked) -> Result<(), Fault> {
        self.tell(policy)?;
        let mut victims = Vec::new();
        while self.is_over(size, 1) {
            let held = self.by_identity.len();
            let want = (held as u64).div_ceil(EMPTIED).min(VICTIMS_MAX.into());
            let want = want.min((held - self.pinned) as u64) as u32;
            if want == 0 {
                return Ok(()); // all is pinned
            }
            victims.clear();
            policy.choose(now_ms, want, &mut victims)?;
            self.evict(&victims, want, size.slots)?;
        }
        Ok(())
    }

    fn evict(&mut self, victims: &[Victim], want: u32, slots: u32) -> Result<(), Fault> {
        let invalid = |reason: String| Err(Fault::Invalid(reason));
        if victims.len() != want as usize {
            return invalid(format!("{} victims where {want} were wanted", victims.len()));
        }
        let mut seen = HashSet::new();
        for victim in victims {
            if victim.slot >= slots {
                return invalid(format!("victim {} is outside the pool of {slots} slots", victim.slot));
            }
            let block = self.slots.get(victim.slot as usize).copied().flatten();
            if block.is_none_or(|block| block.is_pinned) || !seen.insert(victim.slot) {
                return invalid(format!("victim {} is not resident, is pinned, or comes twice", victim.slot));
            }
        }
        victims.iter().for_each(|victim| self.take(victim.slot));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::evictor::NativeEvictor;

    /// The native twin of a default policy, in a pool of blocks of 1 MiB.
    struct Rig {
        engine: Box<dyn EvictorEngine>,
        shadow: EvictorShadow,
        blocks: u32,
        now_ms: u64,
    }

    fn rig(policy: &str, blocks: u32) -> Rig {
        let found = kvasir_default_policies::EVICTORS.iter().find(|d| d.name == policy).unwrap();
        let mut engine: Box<dyn EvictorEngine> = Box::new(NativeEvictor::new((found.native)()));
        open(engine.as_mut(), &Layout::of(2 * blocks).encode(), &[]).unwrap();
        Rig { engine, shadow: EvictorShadow::default(), blocks, now_ms: 0 }
    }

    impl Rig {
        fn hear(&mut self, events: impl IntoIterator<Item = (EventKind, u64)>) -> Seen {
            let mut words = Vec::new();
            for (kind, identity) in events {
                self.now_ms += 1;
                let parent_or_uses = if kind == EventKind::Insert { NO_SLOT } else { 1 };
                let event = Event {
                    kind,
                    replayed: false,
                    class: 0,
                    slot: identity as u32,
                    parent_or_uses,
                    depth: 0,
                    size_bytes: 1 << 20,
                    time_ms: self.now_ms,
                    identity,
                    tenant: 0,
                };
                event.encode(0, &mut words);
            }
            let dram = [f32::from(DRAM), self.blocks as f32, 0.0, 0.0, 0.0, 0.0];
            let heard = Heard { base_ms: 0, words, slots: 2 * self.blocks, tiers: dram.into() };
            self.shadow.choose_share(&heard);
            let accesses = self.shadow.translate(&heard);
            let ghost = &mut self.shadow.newcomer;
            let size = Size::of(&heard, self.shadow.share);
            let seen = ghost.run(&accesses, size, &mut Plain(self.engine.as_mut())).unwrap();
            assert!(ghost.by_identity.len() <= self.blocks as usize);
            assert_eq!(ghost.used_bytes, ghost.by_identity.len() as u64 * (1 << 20));
            seen
        }
    }

    #[test]
    fn a_ghost_keeps_what_its_own_policy_would_keep() {
        use EventKind::{Hit, Insert};
        // The working set fits less than fully: LRU loses all of a loop that is longer than its pool.
        let mut lru = rig("lru", 100);
        assert_eq!(lru.hear((0..90).map(|id| (Insert, id))), Seen { accesses: 90, hits: 0 });
        assert_eq!(lru.hear((0..90).map(|id| (Hit, id))), Seen { accesses: 90, hits: 90 });
        for _ in 0..3 {
            lru.hear((0..150).map(|id| (Insert, id)));
        }
        assert_eq!(lru.hear((0..150).map(|id| (Insert, id))).hits, 0);
        // What the real pool evicted and took again is a hit of a ghost that kept it.
        let mut fifo = rig("fifo", 100);
        fifo.hear((0..50).map(|id| (Insert, id)));
        assert_eq!(fifo.hear((0..50).map(|id| (Insert, id))), Seen { accesses: 50, hits: 50 });
    }

    #[test]
    fn what_is_removed_or_pinned_is_so_in_the_ghost() {
        use EventKind::{Insert, Pin, Remove, Unpin};
        let mut rig = rig("lru", 10);
        rig.hear((0..5).map(|id| (Insert, id)));
        rig.hear([(Remove, 1), (Pin, 0)]);
        assert_eq!(rig.hear([(Insert, 1)]).hits, 0);
        rig.hear((100..200).map(|id| (Insert, id)));
        assert!(rig.shadow.newcomer.by_identity.contains_key(&0), "pinned");
        rig.hear([(Unpin, 0)]);
        rig.hear((200..300).map(|id| (Insert, id)));
        assert!(!rig.shadow.newcomer.by_identity.contains_key(&0));
    }

    /// Batches of chains of `length` blocks, each new, as the real pool tells of them.
    fn chains(count: u64, length: u64, slots: u32, tiers: &[f32]) -> Heard {
        let mut words = Vec::new();
        for n in 0..count * length {
            let depth = n % length;
            let parent_or_uses = if depth == 0 { NO_SLOT } else { n as u32 - 1 };
            let event = Event {
                kind: EventKind::Insert,
                replayed: false,
                class: 0,
                slot: n as u32,
                parent_or_uses,
                depth: depth as u32,
                size_bytes: 16 << 10,
                time_ms: 0,
                identity: n.wrapping_mul(0x0123_4567_89ab_cdef),
                tenant: 0,
            };
            event.encode(0, &mut words);
        }
        Heard { base_ms: 0, words, slots, tiers: tiers.into() }
    }

    #[test]
    fn a_pool_of_few_blocks_is_simulated_whole_however_many_it_could_name() {
        let heard = chains(100, 8, 1 << 20, &[2.0, 16.0, 0., 0., 0., 0.]);
        let mut shadow = EvictorShadow::default();
        assert!(!shadow.choose_share(&heard));
        assert_eq!(shadow.share, 1.0, "a thousand blocks of 16 KiB fit into 16 MiB");
        let accesses = shadow.translate(&heard);
        assert_eq!(accesses.iter().filter(|access| access.parent.is_some()).count(), 700);
        assert_eq!(accesses.len(), 800);
    }

    #[test]
    fn a_large_pool_is_simulated_in_miniature_and_chains_stay_chains() {
        let gib = 16 * 1024;
        let heard = chains(2_000, 40, 8 * BLOCKS_MAX, &[2.0, gib as f32, 0., 0., 0., 0.]);
        let mut shadow = EvictorShadow::default();
        shadow.choose_share(&heard);
        let size = Size::of(&heard, shadow.share);
        assert_eq!((shadow.share, size.blocks, size.bytes), (0.125, BLOCKS_MAX, 2 << 30));
        let accesses = shadow.translate(&heard);
        assert!((9_000..11_000).contains(&accesses.len()), "{}", accesses.len());
        let known: HashMap<u64, u32> = accesses.iter().map(|a| (a.identity, a.event.slot)).collect();
        let mut last = HashMap::new();
        for access in &accesses {
            // The one before it in the same chain, if there is one.
            let chain = access.event.slot / 40;
            let above = access.parent.map(|parent| known[&parent]);
            assert_eq!(above, last.insert(chain, access.event.slot), "{}", access.event.slot);
        }
    }

    #[test]
    fn a_ghost_names_no_slot_that_the_pool_has_not() {
        let mut rig = rig("lru", 10);
        let heard = chains(5, 8, 8, &[]);
        rig.shadow.choose_share(&heard);
        let (accesses, size) = (rig.shadow.translate(&heard), Size::of(&heard, rig.shadow.share));
        rig.shadow.newcomer.run(&accesses, size, &mut Plain(rig.engine.as_mut())).unwrap();
        let slots = rig.shadow.newcomer.slots.len();
        assert!((2..=8).contains(&slots), "{slots} slots named in a pool of 8");
    }

    #[test]
    fn a_ghost_that_grows_too_large_begins_anew_in_half_the_size() {
        let tiers = [2.0, 1024.0, 0., 0., 0., 0.];
        let mut shadow = EvictorShadow::default();
        assert!(!shadow.choose_share(&chains(10, 2, 1 << 20, &tiers)));
        let share = shadow.share;
        shadow.newcomer.by_identity.extend((0..=u64::from(BLOCKS_MAX)).map(|identity| (identity, 0)));
        assert!(shadow.choose_share(&chains(10, 2, 1 << 20, &tiers)));
        assert_eq!(shadow.share, share / 2.0);
    }

    #[test]
    fn victims_that_a_pool_does_not_hold_are_refused() {
        let mut rig = rig("lru", 10);
        rig.hear((0..5).map(|id| (EventKind::Insert, id)));
        let ghost = &mut rig.shadow.newcomer;
        for (bad, why) in [
            (&[Victim::new(9)][..], "is not resident"),
            (&[Victim::new(0), Victim::new(0)], "comes twice"),
            (&[], "0 victims where 1 were wanted"),
            (&[Victim::new(20)], "victim 20 is outside the pool of 20 slots"),
        ] {
            let fault = ghost.evict(bad, bad.len().max(1) as u32, 20).unwrap_err();
            assert!(matches!(&fault, Fault::Invalid(text) if text.contains(why)), "{fault}");
        }
        assert_eq!(ghost.by_identity.len(), 5, "none of them went");
    }
}
