//! What chooses the blocks that go down to a host's disk: the product's own thread with a policy that ships, or chance.

use std::collections::BTreeSet;

use kvasir_eviction::{Chooser, KnowsNothing};
use kvasir_lru_evictor::Lru;
use kvasir_os::thread;
use kvasir_os::time::Duration;
use kvasir_os::world::{self, Chance};
use kvasir_policy::Evictor;
use kvasir_policy::evictor::{Kept, Layout, TierRow, Victim};
use kvasir_protocol::clock::Clock;
use kvasir_store::events::EventKind;
use kvasir_store::store::Tier;
use kvasir_store::tiering::{Demotion, Destination, Tiering};

/// Pause of a thread that evicts by chance, at most, and how many blocks it chooses at a time.
const EVICT_US: u64 = 150_000;
const VICTIMS: u64 = 6;
/// Of so many turns of the product's thread one finds a new policy, and of so many calls of a policy one fails.
const TURNS_A_SWAP: u64 = 100;
const CALLS_A_FAULT: u64 = 100;

/// What the thread that owns the eviction policy does, with a policy that chooses by chance: whatever a real one chooses, this
/// one may, and it does not wait until the pool runs low.
pub(crate) fn by_chance(tiering: &Tiering, clock: Clock, mut chance: Chance) {
    let (dram, mut books, mut events) = (tiering.dram(), BTreeSet::new(), Vec::new());
    loop {
        thread::sleep(Duration::from_micros(chance.below(EVICT_US)));
        events.clear();
        dram.drain_events(&mut events);
        for event in &events {
            match event.kind {
                EventKind::Insert | EventKind::Keep => drop(books.insert(event.slot)),
                EventKind::Remove => drop(books.remove(&event.slot)),
                EventKind::Hit | EventKind::Pin | EventKind::Unpin => {}
            }
        }
        let mut victims = Vec::new();
        for _ in 0..chance.below(VICTIMS + 1).min(books.len() as u64) {
            let at = chance.below(books.len() as u64) as usize;
            let slot = books.iter().nth(at).copied().unwrap_or_default();
            books.remove(&slot);
            victims.push(Demotion { slot, to: Destination::Tier(Tier::Nvme) });
        }
        tiering.offer(&victims, false, clock.now_ms());
        dram.reclaim(usize::MAX, clock.now_ms());
    }
}

/// The native twins of two policies, for the product's thread. Now and then the other one follows, or the one that serves fails.
pub(crate) struct Twins {
    layout: Layout,
    rows: Vec<f32>,
    serving: Kept<dyn Evictor>,
    next: Option<Kept<dyn Evictor>>,
    /// Which of the two is the newer.
    is_lru: bool,
    chance: Chance,
}

impl Twins {
    pub(crate) fn new(slots: u32, chance: Chance) -> Self {
        let (layout, rows) = (Layout::of(slots), Vec::new());
        let serving = open(layout, &rows, false);
        Self { layout, rows, serving, next: None, is_lru: false, chance }
    }

    fn fails(&mut self) -> bool {
        let fails = self.chance.below(CALLS_A_FAULT) == 0;
        if fails {
            self.open();
        }
        fails
    }
}

fn open(layout: Layout, rows: &[f32], is_lru: bool) -> Kept<dyn Evictor> {
    let evictor: Box<dyn Evictor> =
        if is_lru { Box::new(Lru::default()) } else { Box::new(kvasir_evictor::Kvasir::default()) };
    let mut evictor = Kept::new(evictor);
    evictor.open(&layout.encode());
    evictor.update_tiers(rows);
    evictor
}

impl Chooser for Twins {
    fn refresh(&mut self) -> bool {
        if self.chance.below(TURNS_A_SWAP) > 0 {
            return false;
        }
        self.is_lru = !self.is_lru;
        self.next = Some(open(self.layout, &self.rows, self.is_lru));
        true
    }

    fn open(&mut self) {
        self.serving = open(self.layout, &self.rows, self.is_lru);
    }

    fn update_tiers(&mut self, tiers: &[TierRow]) -> Result<(), KnowsNothing> {
        self.rows = tiers.iter().flat_map(TierRow::encode).collect();
        for engine in self.next.iter_mut().chain([&mut self.serving]) {
            engine.update_tiers(&self.rows);
        }
        Ok(())
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), KnowsNothing> {
        if self.fails() {
            return Err(KnowsNothing);
        }
        self.serving.on_events(base_ms, words);
        Ok(())
    }

    fn tell_next(&mut self, base_ms: u64, words: &[u32]) -> bool {
        if self.chance.below(CALLS_A_FAULT) == 0 {
            self.next = None;
        }
        self.next.as_mut().map(|next| next.on_events(base_ms, words)).is_some()
    }

    fn forget_next(&mut self) {
        self.next = None;
    }

    fn promote(&mut self) {
        if let Some(next) = self.next.take() {
            world::note("another evictor chooses");
            self.serving = next;
        }
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), String> {
        if self.fails() {
            return Err("by chance".into());
        }
        self.serving.evictor().select_victims(now_ms, want, victims);
        Ok(())
    }

    fn invalid(&mut self, reason: &str) {
        crate::violated(&format!("an evictor that ships answered what is not within the contract: {reason}"));
    }
}
