//! The thread that owns a pool's eviction policy.
//!
//! It tells the policy what happened, asks it for victims when the pool runs low, checks them and
//! hands them to the store. No put or get ever waits for a policy call: they take from the reserve
//! that this thread fills ahead of need. A policy that follows another is told of the pool beside it,
//! a piece between two choices, and chooses once it knows all.

use super::books::BadChoice;
use super::briefing::{Briefing, Progress};
use super::haste::{Haste, Patience};
use super::piece;
use super::tiers::{self, destination};
use crate::calendar::unix_ms;
use crate::explain::Explain;
use crate::explain::blocks::{Choice, Evicted};
use crate::policy::EvictorWorker;
use crate::policy::evictor::KnowsNothing;
use kvasir_dataplane::tier::dram::Pressure;
use kvasir_dataplane::tier::events::{AccessEvent, EventKind};
use kvasir_dataplane::tier::tiering::{Demotion, Tiering};
use kvasir_dataplane::{Clock, DramStore};
use kvasir_policy::evictor::{EVENT, EVENTS_MAX, Event, EventKind as Kind, VICTIMS_MAX, Victim};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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

/// The running thread; stopped and joined on drop.
pub struct Eviction {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    evicted: Arc<Evicted>,
    thread: Option<JoinHandle<()>>,
}

impl Eviction {
    /// Starts the thread, which remembers no choice.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(tiering: Arc<Tiering>, worker: EvictorWorker, clock: Clock) -> io::Result<Self> {
        Self::remembering(tiering, worker, clock, Evicted::new(0), Explain::off())
    }

    /// Starts the thread, which remembers what was chosen, and gives a sample of it to `explain`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn remembering(
        tiering: Arc<Tiering>,
        worker: EvictorWorker,
        clock: Clock,
        evicted: Evicted,
        explain: Arc<Explain>,
    ) -> io::Result<Self> {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let evicted = Arc::new(evicted);
        let mut owner = Owner::new(tiering, worker, clock, Arc::clone(&counts));
        (owner.evicted, owner.explain) = (Arc::clone(&evicted), explain);
        let stopping = Arc::clone(&stop);
        let run = move || {
            while !stopping.load(Relaxed) {
                owner.turn();
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-evict".into()).spawn(run)?;
        Ok(Self { stop, counts, evicted, thread: Some(thread) })
    }

    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// What was chosen lately.
    pub fn evicted(&self) -> &Evicted {
        &self.evicted
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
    evicted: Arc<Evicted>,
    explain: Arc<Explain>,
    /// Answers so far.
    chosen: u64,
    /// Name of the policy that chooses, by its generation.
    name: (u64, Arc<str>),
    choices: Vec<Choice>,
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

impl Owner {
    fn new(tiering: Arc<Tiering>, worker: EvictorWorker, clock: Clock, counts: Arc<Counts>) -> Self {
        let store = Arc::clone(tiering.dram());
        let serving = Briefing::begin(&store, clock.now_ms(), EVENTS_MAX);
        counts.replays.fetch_add(1, Relaxed);
        let (drained, events, words, victims, slots) = Default::default();
        Self {
            store,
            tiering,
            worker,
            clock,
            counts,
            evicted: Arc::new(Evicted::new(0)),
            explain: Explain::off(),
            chosen: 0,
            name: (0, Arc::from("")),
            choices: Vec::new(),
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
                self.worker.open();
                self.begin_anew();
            }
            std::thread::sleep(back_off);
        }
    }

    fn tell_tiers(&mut self) {
        let now = Instant::now();
        if now < self.tiers_due {
            return;
        }
        self.tiers_due = now + TIERS_EVERY;
        if let Err(KnowsNothing) = self.worker.update_tiers(&tiers::rows(&self.tiering)) {
            self.begin_anew();
        }
    }

    /// Brings the engines up to date with what happened.
    fn follow(&mut self) {
        self.tell_tiers();
        if self.worker.refresh() {
            self.counts.replays.fetch_add(1, Relaxed);
            self.next = Some(Briefing::begin(&self.store, self.clock.now_ms(), EVENTS_MAX));
        }
        self.drained.clear();
        let drained = self.store.drain_events(&mut self.drained);
        self.books_incomplete |= drained.hits_dropped > 0;
        if drained.start_over {
            self.store.restart_events();
            self.worker.open();
            self.worker.forget_next();
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
            self.worker.promote();
            self.counts.promotions.fetch_add(1, Relaxed);
            self.serving = next;
        }
        if serving == Progress::Done { progress } else { serving }
    }

    fn tell_serving(&mut self) {
        for events in self.events.chunks(EVENTS_MAX) {
            let base_ms = encode(events, &mut self.words);
            if let Err(KnowsNothing) = self.worker.on_events(base_ms, &self.words) {
                return self.begin_anew();
            }
        }
    }

    fn tell_next(&mut self) {
        for events in self.events.chunks(EVENTS_MAX) {
            let base_ms = encode(events, &mut self.words);
            if !self.worker.tell_next(base_ms, &self.words) {
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
        self.chosen += 1;
        let natively = self.worker.on_fallback();
        if let Err(reason) = self.ask(now_ms, want) {
            self.begin_anew();
            if !natively {
                self.sample(now_ms, want, Some(reason));
            }
            return 0;
        }
        if let Some(next) = &mut self.next {
            self.events.clear();
            next.taken_by_another(&self.slots, now_ms, &mut self.events);
            self.tell_next();
        }
        self.counts.victims.fetch_add(self.slots.len() as u64, Relaxed);
        self.remember(now_ms);
        // What the native twin chose in place of a policy says nothing about that policy.
        if !natively {
            self.sample(now_ms, want, None);
        }
        let demotion = |victim: &Victim| Demotion { slot: victim.slot, to: destination(victim.demote_to) };
        let victims: Vec<_> = self.victims.iter().map(demotion).collect();
        let offered = self.tiering.offer(&victims, urgent, now_ms);
        offered.taken + offered.replaced
    }

    /// Has the policy's choice in `victims` and `slots`, or tells what was wrong with it.
    fn ask(&mut self, now_ms: u64, want: u32) -> Result<(), String> {
        let asked = self.worker.select_victims(now_ms, want, &mut self.victims);
        asked.map_err(|fault| fault.to_string())?;
        self.check(want).map_err(|bad| {
            let reason = bad.to_string();
            self.counts.invalid.fetch_add(1, Relaxed);
            self.worker.invalid(reason.clone());
            reason
        })
    }

    /// Writes the last choice to the file of samples, if it is one of them; with `failure`, that the policy made none.
    fn sample(&self, now_ms: u64, want: u32, failure: Option<String>) {
        if !self.explain.takes(self.chosen) {
            return;
        }
        let victims = if failure.is_some() { &[] } else { &self.victims[..] };
        let (policy, tiers) = (self.worker.policy_of(), self.worker.tiers());
        let (id, at_ms) = (self.chosen, unix_ms());
        let chosen = piece::Chosen { id, now_ms, at_ms, policy, want, victims, tiers };
        let mut record = piece::record(&self.store, chosen);
        if failure.is_none() {
            return self.explain.write(self.worker.answered(record));
        }
        record.fallback = failure;
        self.explain.write(move || Some(record));
    }

    /// Keeps what was chosen, for callers that ask, before the store acts on it.
    fn remember(&mut self, now_ms: u64) {
        if !self.evicted.is_on() {
            return;
        }
        let generation = self.worker.generation();
        if self.name.0 != generation {
            self.name = (generation, Arc::from(self.worker.policy()));
        }
        let (of, fallback) = (self.victims.len() as u16, self.worker.on_fallback());
        self.choices.clear();
        for (victim, rank) in self.victims.iter().zip(1..) {
            let Some(stat) = self.store.stat_at(victim.slot) else { continue };
            self.choices.push(Choice {
                key: stat.key,
                at_ms: now_ms,
                inserted_ms: stat.inserted_ms,
                used_ms: stat.used_ms,
                uses: stat.uses,
                policy: Arc::clone(&self.name.1),
                generation,
                rank,
                of,
                to: victim.demote_to,
                fallback,
            });
        }
        self.evicted.note(self.choices.drain(..));
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
pub(super) fn encode(events: &[AccessEvent], words: &mut Vec<u32>) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PolicyConfig, PolicyHost, SlotKind, Source, Wanted};
    use kvasir_dataplane::tier::store::{BlockStore, Tier};
    use kvasir_dataplane::tier::tiering::{AdmitAll, TieringConfig};
    use kvasir_dataplane::{BlockKey, BlockMeta, DramConfig};
    use kvasir_store::memory::MemoryStore;

    /// A policy's log says what it was told of the tiers: the pool as it fills, the disk, and nothing of peers.
    #[test]
    fn every_evictor_is_told_of_the_tiers_and_again_when_they_change() {
        let config = DramConfig { pool_bytes: 64 << 20, blocks_max: 256, ..DramConfig::default() };
        let store = Arc::new(DramStore::open(config).unwrap());
        let config = PolicyConfig { evictor_slots: store.slots(), ..PolicyConfig::default() };
        let policies = PolicyHost::open(&config, Wanted::default(), None).unwrap();
        let tier = |tier| -> Arc<dyn BlockStore> { Arc::new(MemoryStore::new(tier, 512 << 20)) };
        let below = vec![tier(Tier::Nvme), tier(Tier::Peer), tier(Tier::Remote)];
        let clock = Clock::start();
        let admit = Box::new(AdmitAll);
        let tiering =
            Tiering::start(Arc::clone(&store), below, admit, TieringConfig::default(), clock).unwrap();
        let _eviction =
            Eviction::start(Arc::new(tiering), policies.evictor_worker(store.slots()), clock).unwrap();
        let bytes = kvasir_tests::guest("evictor").to_vec();
        policies.load(SlotKind::Evictor, Source::Bytes { name: "bad".into(), bytes }, Vec::new()).unwrap();
        let told = |used_mib: u32| {
            let pool = format!("TierRow {{ tier: 2, capacity_mib: 64.0, used_mib: {used_mib}.0, ");
            while !policies.logs(SlotKind::Evictor).0.iter().any(|line| line.text.starts_with(&pool)) {
                std::thread::yield_now(); // the test runner's time limit ends this if it is never told
            }
        };
        told(0);
        let meta = BlockMeta::single(BlockKey::from_engine_hash("tiers", b"1"), 3 << 20);
        store.put(store.new_owner(), &meta, &vec![7; 3 << 20], clock.now_ms()).unwrap();
        told(3);
        let lines = policies.logs(SlotKind::Evictor).0;
        let tiers = |tier| lines.iter().filter(|l| l.text.contains(&format!("tier: {tier},"))).count();
        assert!(tiers(3) > 0 && tiers(4) > 0);
        assert_eq!(
            tiers(2) + tiers(3) + tiers(4),
            lines.iter().filter(|l| l.text.contains("tier: ")).count()
        );
        let below = "capacity_mib: 512.0, used_mib: 0.0, load_fixed_ms: 0.0, load_ms_per_mib: 0.0, takes_copies: true";
        assert!(lines.iter().any(|l| l.text.contains(below)), "{lines:?}");
    }
}
