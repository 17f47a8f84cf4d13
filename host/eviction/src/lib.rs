//! The thread that owns a pool's eviction policy.
//!
//! It tells the policy what happened, asks it for victims when the pool runs low, checks them and
//! hands them to the store. No put or get ever waits for a policy call: they take from the reserve
//! that this thread fills ahead of need. A policy that follows another is told of the pool beside it,
//! a piece between two choices, and chooses once it knows all. What runs the policy is behind [`Chooser`]: in the product
//! an instance of a component, in a simulated world its native twin.
//!
//! # Files
//!
//! * `briefing`: how a new engine of the policy learns of a pool that lives on meanwhile.
//! * `haste`: whether puts wait for copies of victims.
//! * `books`: what an engine has been told, and so which answers are within the contract.
//! * `tiers`: the numbers that the contract has for tiers, and what it says of them.

mod books;
mod briefing;
mod haste;
mod tiers;

use books::BadChoice;
use briefing::{Briefing, Progress};
use haste::{Haste, Patience};
use kvasir_os::thread::{self, JoinHandle};
use kvasir_os::time::{Duration, Instant};
use kvasir_policy::evictor::{EVENT, EVENTS_MAX, Event, EventKind as Kind, TierRow, VICTIMS_MAX, Victim};
use kvasir_protocol::clock::Clock;
use kvasir_store::dram::{DramStore, Pressure};
use kvasir_store::events::{AccessEvent, EventKind};
use kvasir_store::tiering::{Demotion, Tiering};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

pub use tiers::number_of;

/// How long events wait for the policy while the pool has room.
const IDLE: Duration = Duration::from_millis(20);
/// How long to wait when nothing could be evicted: everything is lent, or being written.
const BACK_OFF: Duration = Duration::from_millis(2);
/// How long to wait for the order in which a new policy is told of the pool.
const PAST_WAIT: Duration = Duration::from_millis(1);
/// How often the policy is told of the tiers, if they have changed.
const TIERS_EVERY: Duration = Duration::from_secs(1);
/// Victims kept ready between the watermarks. Few: a choice ages.
const RESERVE: usize = 64;

/// What the thread did, in total.
#[derive(Debug, Default)]
pub struct Counts {
    pub events: AtomicU64,
    pub victims: AtomicU64,
    pub evicted: AtomicU64,
    /// Answers refused because a victim was outside the contract.
    pub invalid: AtomicU64,
    /// Resident pools told to an engine that was new.
    pub replays: AtomicU64,
    /// Engines that took over from another once they knew the pool.
    pub promotions: AtomicU64,
    /// Microseconds of the longest turn of the thread, during which it could not choose.
    pub stall_us: AtomicU64,
}

/// The engine that serves knows nothing of the pool: tell it what is resident before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnowsNothing;

/// What chooses victims for one pool: an engine of a policy that serves, and one that is to follow it, if there is one. It always
/// answers; an engine that fails has its place taken by another.
pub trait Chooser {
    /// Looks for a newer engine. Returns true if there is one now that should follow the one that serves, and knows nothing: it is
    /// told what is resident by `tell_next`, and then promoted. If there was one already, it is to be forgotten.
    fn refresh(&mut self) -> bool;

    /// Empties the engine that serves, when it cannot be told what it missed.
    fn open(&mut self);

    /// Tells every engine of the tiers that blocks can go to, if they are not as they were.
    ///
    /// # Errors
    /// [`KnowsNothing`]: the engine failed, and another serves now.
    fn update_tiers(&mut self, tiers: &[TierRow]) -> Result<(), KnowsNothing>;

    /// Tells the engine that serves what happened. `words`: records of [`EVENT`] words, oldest first.
    ///
    /// # Errors
    /// As `update_tiers`.
    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), KnowsNothing>;

    /// The same for the engine that will follow. Returns false if there is none (any more): it failed.
    fn tell_next(&mut self, base_ms: u64, words: &[u32]) -> bool;

    /// Gives up the engine that was to follow; it is built again.
    fn forget_next(&mut self);

    /// Puts the engine that was to follow into service.
    fn promote(&mut self);

    /// Appends up to `want` victims, unchecked.
    ///
    /// # Errors
    /// How the engine failed. Another serves now, which [`KnowsNothing`].
    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), String>;

    /// The last answer was not within the contract, for `reason`. Another engine serves now, which [`KnowsNothing`].
    fn invalid(&mut self, reason: &str);

    /// What was chosen, before the store acts on it.
    fn chosen(&mut self, _: &Choice<'_>) {}
}

/// An answer, or why there is none.
#[derive(Clone, Copy)]
pub struct Choice<'a> {
    pub store: &'a DramStore,
    pub now_ms: u64,
    /// How many victims were asked for.
    pub want: u32,
    pub victims: Result<&'a [Victim], &'a str>,
}

/// The running thread; stopped and joined on drop.
pub struct Eviction {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Eviction {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        tiering: Arc<Tiering>,
        chooser: impl Chooser + Send + 'static,
        clock: Clock,
    ) -> io::Result<Self> {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let mut owner = Owner::new(tiering, chooser, clock, Arc::clone(&counts));
        let stopping = Arc::clone(&stop);
        let run = move || {
            while !stopping.load(Relaxed) {
                owner.turn();
            }
        };
        let thread = thread::Builder::new().name("kvasir-evict".into()).spawn(run)?;
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

struct Owner<C> {
    store: Arc<DramStore>,
    tiering: Arc<Tiering>,
    chooser: C,
    clock: Clock,
    counts: Arc<Counts>,
    /// What the engine that serves has been told.
    serving: Briefing,
    /// The same for the engine that will follow, if there is one.
    next: Option<Briefing>,
    /// Whether it is evicting: since the low watermark, and until the high one.
    evicting: bool,
    /// Hits were dropped: blocks that were struck off the books when they were chosen may still be resident.
    books_incomplete: bool,
    /// How long to wait for pressure at most.
    wait: Duration,
    patience: Patience,
    /// When to look at the tiers next.
    tiers_due: Instant,
    drained: Vec<AccessEvent>,
    events: Vec<AccessEvent>,
    words: Vec<u32>,
    victims: Vec<Victim>,
    slots: Vec<u32>,
}

impl<C: Chooser> Owner<C> {
    fn new(tiering: Arc<Tiering>, chooser: C, clock: Clock, counts: Arc<Counts>) -> Self {
        let store = Arc::clone(tiering.dram());
        let serving = Briefing::begin(&store, clock.now_ms(), EVENTS_MAX);
        counts.replays.fetch_add(1, Relaxed);
        let (drained, events, words, victims, slots) = Default::default();
        Self {
            store,
            tiering,
            chooser,
            clock,
            counts,
            serving,
            next: None,
            evicting: false,
            books_incomplete: false,
            wait: IDLE,
            patience: Patience::default(),
            tiers_due: Instant::now(),
            drained,
            events,
            words,
            victims,
            slots,
        }
    }

    /// Waits for pressure, or a little; then tells the policy the news and makes room.
    fn turn(&mut self) {
        let pressure = self.store.wait_pressure(self.wait);
        let start = Instant::now();
        self.follow();
        self.evicting = pressure.is_low() || (self.evicting && pressure.excess_bytes() > 0);
        let (most, copies) = (self.tiering.backpressure(), self.tiering.copies());
        let haste = self.patience.haste(&pressure, most, copies, start);
        let want = self.wanted(&pressure, haste);
        let offered = if want > 0 { self.choose(want, haste == Haste::Urgent) } else { 0 };
        // Also what was copied down since the last turn.
        let evicted =
            if self.evicting { self.store.reclaim(VICTIMS_MAX as usize, self.clock.now_ms()) } else { 0 };
        self.counts.evicted.fetch_add(evicted as u64, Relaxed);
        let past = self.tell_past();
        let (wait, back_off) = match past {
            Progress::Done => (IDLE, BACK_OFF),
            Progress::Waiting => (PAST_WAIT, PAST_WAIT),
            Progress::More => (Duration::ZERO, Duration::ZERO),
        };
        self.wait = wait;
        self.counts.stall_us.fetch_max(start.elapsed().as_micros() as u64, Relaxed);
        // Every block is lent, being written or copied, or waits in the reserve: asking again at once would not help.
        if (want > 0 || pressure.is_low()) && offered + evicted == 0 {
            if want > 0 && self.books_incomplete && self.serving.books.len() == 0 && past == Progress::Done {
                self.chooser.open();
                self.begin_anew();
            }
            thread::sleep(back_off);
        }
    }

    fn tell_tiers(&mut self) {
        let now = Instant::now();
        if now < self.tiers_due {
            return;
        }
        self.tiers_due = now + TIERS_EVERY;
        if let Err(KnowsNothing) = self.chooser.update_tiers(&tiers::rows(&self.tiering)) {
            self.begin_anew();
        }
    }

    /// Brings the engines up to date with what happened.
    fn follow(&mut self) {
        self.tell_tiers();
        if self.chooser.refresh() {
            self.counts.replays.fetch_add(1, Relaxed);
            self.next = Some(Briefing::begin(&self.store, self.clock.now_ms(), EVENTS_MAX));
        }
        self.drained.clear();
        let drained = self.store.drain_events(&mut self.drained);
        self.books_incomplete |= drained.hits_dropped > 0;
        if drained.start_over {
            self.store.restart_events();
            self.chooser.open();
            self.chooser.forget_next();
            self.next = None;
            return self.begin_anew();
        }
        self.counts.events.fetch_add(self.drained.len() as u64, Relaxed);
        self.events.clear();
        self.serving.live(&self.drained, &mut self.events);
        self.tell_serving();
        if let Some(next) = &mut self.next {
            self.events.clear();
            next.live(&self.drained, &mut self.events);
            self.tell_next();
        }
    }

    /// The engine that serves knows nothing: it is told the past from the start, and chooses from what it was told.
    fn begin_anew(&mut self) {
        self.counts.replays.fetch_add(1, Relaxed);
        self.books_incomplete = false;
        self.serving = Briefing::begin(&self.store, self.clock.now_ms(), EVENTS_MAX);
    }

    /// Tells each engine a piece of what it does not know; the one that knows all takes over.
    fn tell_past(&mut self) -> Progress {
        self.events.clear();
        let serving = self.serving.past(&mut self.events);
        self.tell_serving();
        let Some(next) = &mut self.next else { return serving };
        self.events.clear();
        let progress = next.past(&mut self.events);
        self.tell_next();
        if progress == Progress::Done
            && let Some(next) = self.next.take()
        {
            self.chooser.promote();
            self.counts.promotions.fetch_add(1, Relaxed);
            self.serving = next;
        }
        if serving == Progress::Done { progress } else { serving }
    }

    fn tell_serving(&mut self) {
        for events in self.events.chunks(EVENTS_MAX) {
            let base_ms = encode(events, &mut self.words);
            if let Err(KnowsNothing) = self.chooser.on_events(base_ms, &self.words) {
                return self.begin_anew();
            }
        }
    }

    fn tell_next(&mut self) {
        for events in self.events.chunks(EVENTS_MAX) {
            let base_ms = encode(events, &mut self.words);
            if !self.chooser.tell_next(base_ms, &self.words) {
                self.next = None;
                return;
            }
        }
    }

    /// How many victims to ask for.
    fn wanted(&self, pressure: &Pressure, haste: Haste) -> u32 {
        let used = pressure.pool_bytes - pressure.free_bytes;
        let mean_bytes = (used / u64::from(self.serving.books.len().max(1))).max(1);
        let excess = if self.evicting { pressure.excess_bytes().div_ceil(mean_bytes) } else { 0 };
        let near = pressure.excess_bytes() > 0 || pressure.is_low();
        let ready = if near { RESERVE.min(pressure.reserve_max) as u64 } else { 0 };
        // What is being copied will be ready without us, but not in time for a put that waits now.
        let coming = if haste == Haste::Urgent { 0 } else { self.tiering.copying() };
        let want = (excess + ready).saturating_sub((pressure.reserve + coming) as u64);
        let mut room = pressure.reserve_max.saturating_sub(pressure.reserve);
        // A block that finds the queue of copies full goes without one, but only when memory is really short and no put would wait.
        if haste == Haste::Patient || haste == Haste::None && pressure.free_bytes >= pressure.low_bytes / 2 {
            room = room.min(self.tiering.room(mean_bytes));
        }
        want.min(room as u64).min(u64::from(VICTIMS_MAX.min(self.serving.books.len()))) as u32
    }

    /// Asks for victims and offers them to the store; returns how many it took.
    fn choose(&mut self, want: u32, urgent: bool) -> usize {
        let now_ms = self.clock.now_ms();
        self.victims.clear();
        self.slots.clear();
        let asked = self.ask(now_ms, want);
        match &asked {
            Err(_) => self.begin_anew(),
            Ok(()) => {
                self.tell_next_of_choice(now_ms);
                self.counts.victims.fetch_add(self.slots.len() as u64, Relaxed);
            }
        }
        let victims = asked.as_ref().map(|()| &self.victims[..]).map_err(String::as_str);
        self.chooser.chosen(&Choice { store: &self.store, now_ms, want, victims });
        if asked.is_err() {
            return 0;
        }
        let demotion =
            |victim: &Victim| Demotion { slot: victim.slot, to: tiers::destination(victim.demote_to) };
        let victims: Vec<_> = self.victims.iter().map(demotion).collect();
        let offered = self.tiering.offer(&victims, urgent, now_ms);
        offered.taken + offered.replaced
    }

    /// What one engine chose has left for the other.
    fn tell_next_of_choice(&mut self, now_ms: u64) {
        let Some(next) = &mut self.next else { return };
        self.events.clear();
        next.taken_by_another(&self.slots, now_ms, &mut self.events);
        self.tell_next();
    }

    /// Has the policy's choice in `victims` and `slots`, or tells what was wrong with it.
    fn ask(&mut self, now_ms: u64, want: u32) -> Result<(), String> {
        self.chooser.select_victims(now_ms, want, &mut self.victims)?;
        self.check(want).map_err(|bad| {
            let reason = bad.to_string();
            self.counts.invalid.fetch_add(1, Relaxed);
            self.chooser.invalid(&reason);
            reason
        })
    }

    fn check(&mut self, wanted: u32) -> Result<(), BadChoice> {
        let (given, resident) = (self.victims.len(), self.serving.books.len());
        if given < wanted as usize {
            return Err(BadChoice::TooFew { given, wanted, resident });
        }
        self.serving.books.choose(&self.victims, &mut self.slots)
    }
}

/// Encodes events as the contract has them; returns the base of their times.
pub fn encode(events: &[AccessEvent], words: &mut Vec<u32>) -> u64 {
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
        Event {
            kind,
            replayed: event.replayed,
            class: event.class,
            slot: event.slot,
            parent_or_uses: event.parent_or_uses,
            depth: event.depth,
            size_bytes: event.size,
            time_ms: event.time_ms,
            identity: event.identity,
            tenant: event.tenant.into(),
        }
        .encode(base_ms, words);
    }
    base_ms
}
