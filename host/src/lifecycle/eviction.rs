//! The thread that owns a pool's eviction policy.
//!
//! It tells the policy what happened, asks it for victims when the pool runs low, checks them and
//! hands them to the store. No put or get ever waits for a policy call: they take from the reserve
//! that this thread fills ahead of need.

use super::books::Books;
use super::tiers::destination;
use crate::policy::EvictorWorker;
use crate::policy::evictor::WantsReplay;
use kvasir_dataplane::tier::dram::Pressure;
use kvasir_dataplane::tier::events::{AccessEvent, EventKind};
use kvasir_dataplane::tier::tiering::{Demotion, Tiering};
use kvasir_dataplane::{Clock, DramStore};
use kvasir_policy::evictor::{EVENT, Event, EventKind as Kind, Victim};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long events wait for the policy while the pool has room.
const IDLE: Duration = Duration::from_millis(20);
/// How long to wait when nothing could be evicted: everything is lent, or being written.
const BACK_OFF: Duration = Duration::from_millis(2);
/// Events in one call; the deadline grows with them.
const EVENTS_PER_CALL: usize = 2048;
/// Victims in one call.
const VICTIMS_PER_CALL: u32 = 256;
/// Victims kept ready between the watermarks. Few: a choice ages.
const RESERVE: usize = 64;

/// What the thread did, in sum.
#[derive(Debug, Default)]
pub struct Counts {
    pub events: AtomicU64,
    pub victims: AtomicU64,
    pub evicted: AtomicU64,
    /// Answers refused because a victim was outside the contract.
    pub invalid: AtomicU64,
    /// Resident pools told to a policy that was new.
    pub replays: AtomicU64,
}

/// The running thread; stopped and joined on drop.
pub struct Eviction {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Eviction {
    /// # Errors
    /// No thread can be started.
    pub fn start(tiering: Arc<Tiering>, worker: EvictorWorker, clock: Clock) -> io::Result<Self> {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let mut owner = Owner::new(tiering, worker, clock, Arc::clone(&counts));
        let stopping = Arc::clone(&stop);
        let run = move || {
            while !stopping.load(Relaxed) {
                owner.turn();
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-evict".into()).spawn(run)?;
        Ok(Self { stop, counts, thread: Some(thread) })
    }

    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// Whether the thread is alive.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Eviction {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Owner {
    store: Arc<DramStore>,
    tiering: Arc<Tiering>,
    worker: EvictorWorker,
    clock: Clock,
    counts: Arc<Counts>,
    books: Books,
    /// Evicting since the low watermark, until the high one.
    evicting: bool,
    /// Hits were dropped: blocks that left the books by being chosen may be resident still.
    books_incomplete: bool,
    events: Vec<AccessEvent>,
    words: Vec<u32>,
    victims: Vec<Victim>,
    slots: Vec<u32>,
}

impl Owner {
    fn new(tiering: Arc<Tiering>, worker: EvictorWorker, clock: Clock, counts: Arc<Counts>) -> Self {
        let store = Arc::clone(tiering.dram());
        let books = Books::new(store.slots());
        let (events, words, victims, slots) = Default::default();
        Self {
            store,
            tiering,
            worker,
            clock,
            counts,
            books,
            evicting: false,
            books_incomplete: false,
            events,
            words,
            victims,
            slots,
        }
    }

    /// Waits for pressure, or a little; then tells the policy the news and makes room.
    fn turn(&mut self) {
        let pressure = self.store.wait_pressure(IDLE);
        self.follow();
        self.evicting = pressure.is_low() || (self.evicting && pressure.excess_bytes() > 0);
        let want = self.wanted(&pressure);
        let offered = if want > 0 { self.choose(want, is_urgent(&pressure)) } else { 0 };
        // Also what was copied down since the last turn.
        let evicted = if self.evicting {
            self.store.reclaim(VICTIMS_PER_CALL as usize, self.clock.now_ms())
        } else {
            0
        };
        self.counts.evicted.fetch_add(evicted as u64, Relaxed);
        if want == 0 && !pressure.is_low() {
            return;
        }
        // Every block is lent, being written or copied, or waits in the reserve: asking again at once would not help.
        if offered + evicted == 0 {
            if want > 0 && self.books_incomplete && self.books.len() == 0 {
                self.replay();
            }
            std::thread::sleep(BACK_OFF);
        }
    }

    /// Brings the policy up to date.
    fn follow(&mut self) {
        if self.worker.refresh().is_err() {
            return self.replay();
        }
        self.events.clear();
        let drained = self.store.drain_events(&mut self.events);
        self.books_incomplete |= drained.hits_dropped > 0;
        if drained.start_over || self.tell().is_err() {
            self.replay();
        }
    }

    /// Passes `self.events` on.
    fn tell(&mut self) -> Result<(), WantsReplay> {
        self.counts.events.fetch_add(self.events.len() as u64, Relaxed);
        for events in self.events.chunks(EVENTS_PER_CALL) {
            events.iter().for_each(|event| self.books.note(event));
            let base_ms = encode(events, &mut self.words);
            self.worker.on_events(base_ms, &self.words)?;
        }
        Ok(())
    }

    /// Tells a policy that knows nothing what is resident. A component that fails on the way is
    /// followed by its native twin, which does not.
    fn replay(&mut self) {
        // The policy, its native twin, and one more in case the pool outran the first two.
        for _ in 0..3 {
            self.counts.replays.fetch_add(1, Relaxed);
            self.books.clear();
            self.books_incomplete = false;
            self.events.clear();
            self.store.replay_resident(&mut self.events);
            self.worker.replay(0, &[]);
            if self.tell().is_ok() {
                return;
            }
        }
    }

    /// How many victims to ask for.
    fn wanted(&self, pressure: &Pressure) -> u32 {
        let used = pressure.pool_bytes - pressure.free_bytes;
        let mean_bytes = (used / u64::from(self.books.len().max(1))).max(1);
        let excess = if self.evicting { pressure.excess_bytes().div_ceil(mean_bytes) } else { 0 };
        let near = pressure.excess_bytes() > 0 || pressure.is_low();
        let ready = if near { RESERVE.min(pressure.reserve_max) as u64 } else { 0 };
        // What is being copied will be ready without us, but not in time for a put that waits now.
        let coming = if is_urgent(pressure) { 0 } else { self.tiering.copying() };
        let want = (excess + ready).saturating_sub((pressure.reserve + coming) as u64);
        let mut room = pressure.reserve_max.saturating_sub(pressure.reserve);
        // A block that finds the queue of copies full goes without one: not before memory is really short.
        if !is_urgent(pressure) && pressure.free_bytes >= pressure.low_bytes / 2 {
            room = room.min(self.tiering.room(mean_bytes));
        }
        want.min(room as u64).min(u64::from(VICTIMS_PER_CALL.min(self.books.len()))) as u32
    }

    /// Asks for victims and offers them to the store; returns how many it took.
    fn choose(&mut self, want: u32, urgent: bool) -> usize {
        let now_ms = self.clock.now_ms();
        self.victims.clear();
        self.slots.clear();
        if self.worker.select_victims(now_ms, want, &mut self.victims).is_err() {
            self.replay();
            return 0;
        }
        if let Err(reason) = self.check(want) {
            self.counts.invalid.fetch_add(1, Relaxed);
            self.worker.invalid(reason);
            self.replay();
            return 0;
        }
        self.counts.victims.fetch_add(self.slots.len() as u64, Relaxed);
        let demotion = |victim: &Victim| Demotion { slot: victim.slot, to: destination(victim.demote_to) };
        let victims: Vec<_> = self.victims.iter().map(demotion).collect();
        let offered = self.tiering.offer(&victims, urgent, now_ms);
        offered.taken + offered.replaced
    }

    fn check(&mut self, want: u32) -> Result<(), String> {
        let (given, resident) = (self.victims.len(), self.books.len());
        if given < want as usize {
            return Err(format!("{given} victims where {want} of {resident} resident were wanted"));
        }
        self.books.choose(&self.victims, &mut self.slots)
    }
}

/// A put waits for victims.
fn is_urgent(pressure: &Pressure) -> bool {
    pressure.waiting_puts > 0 || pressure.slots_full
}

/// Encodes events as the contract has them; returns the base of their times.
fn encode(events: &[AccessEvent], words: &mut Vec<u32>) -> u64 {
    let base_ms = events.iter().map(|event| event.time_ms).min().unwrap_or(0);
    words.clear();
    words.reserve(events.len() * EVENT);
    for event in events {
        let kind = match event.kind {
            EventKind::Insert => Kind::Insert,
            EventKind::Hit => Kind::Hit,
            EventKind::Remove => Kind::Remove,
            EventKind::Keep => Kind::Keep,
            EventKind::Pin => Kind::Pin,
            EventKind::Unpin => Kind::Unpin,
        };
        let AccessEvent { replayed, class, slot, parent_or_uses, depth, time_ms, identity, .. } = *event;
        let size_bytes = event.size;
        Event { kind, replayed, class, slot, parent_or_uses, depth, size_bytes, time_ms, identity }
            .encode(base_ms, words);
    }
    base_ms
}
