//! Read-ahead: a caller that walks a chain a few blocks at a time finds the next ones in the pool.
//!
//! Blocks that go down or come up say what stands before them, so that the block after one is known, in a table of fixed
//! size. Two lookups in a row along a chain that a tier below had to serve are a walk: the blocks behind are asked of that
//! tier, and nobody waits. The lookup that asks for one of them has what it asks for put into the pool, and more where there is room
//! above the watermark, and the reading goes on; the rest is kept for the lookups that follow. What nobody asks for gives way to
//! other walks.

use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::onboard::{Onboarded, Read, Wanted, check};
use super::recent::Recent;
use super::{Level, Reach, Tiering};
use crate::store::Tier;
use crate::store::{Get, GetDone, Pending};
use kvasir_memory::buffer::Buffer;
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// The most walks that are read ahead of at the same time.
const FLIGHTS_MAX: usize = 64;
/// As many blocks are read ahead as the walk asks for in one step, or as this where its steps are smaller.
const STEP_MIN: usize = 8;
/// The most bytes of one walk that are read ahead, but for a single block.
const WALK_BYTES: u64 = 16 << 20;

pub(super) struct Ahead {
    followers: Mutex<Followers>,
    /// Last blocks of lookups that a tier below served, and of what was read ahead.
    walked: Mutex<Recent>,
    /// Oldest first.
    flights: Mutex<Vec<Flight>>,
    /// Length of `flights`, so that a caller that finds 0 needs no lock.
    open: AtomicUsize,
    pub(super) read: AtomicU64,
    pub(super) landed: AtomicU64,
}

/// Blocks that were read ahead and not asked for yet.
struct Flight {
    level: usize,
    blocks: Blocks,
}

enum Blocks {
    OnTheirWay(Pending<Vec<GetDone>>, Vec<Wanted>),
    /// What is left of a flight of which some were asked for.
    Here(Vec<Arc<Onboarded>>),
}

/// Blocks read ahead that their tier did not deliver in time: it is not asked for them again by the same lookup.
#[derive(Default)]
pub(super) struct Late(Vec<(Tier, BlockKey)>);

impl Late {
    pub(super) fn is(&self, level: &Level, key: BlockKey) -> bool {
        self.0.contains(&(level.tier, key))
    }
}

impl Flight {
    fn keys(&self) -> Vec<BlockKey> {
        match &self.blocks {
            Blocks::OnTheirWay(_, wanted) => wanted.iter().map(Wanted::key).collect(),
            Blocks::Here(blocks) => blocks.iter().map(|block| block.meta.key).collect(),
        }
    }

    fn has_any(&self, keys: &HashSet<BlockKey>) -> bool {
        match &self.blocks {
            Blocks::OnTheirWay(_, wanted) => wanted.iter().any(|wanted| keys.contains(&wanted.key())),
            Blocks::Here(blocks) => blocks.iter().any(|block| keys.contains(&block.meta.key)),
        }
    }
}

/// The block after each, one place per residue of a key; a newer one displaces an older one.
struct Followers(Vec<(u128, u128)>);

impl Followers {
    fn note(&mut self, parent: BlockKey, child: BlockKey) {
        let place = self.place(parent);
        self.0[place] = (parent.0, child.0);
    }

    fn after(&self, parent: BlockKey) -> Option<BlockKey> {
        let (known, child) = self.0[self.place(parent)];
        (known == parent.0 && child != 0).then_some(BlockKey(child))
    }

    fn place(&self, key: BlockKey) -> usize {
        (key.identity() % self.0.len() as u64) as usize
    }
}

impl Ahead {
    pub(super) fn new(places: usize) -> Self {
        Self {
            followers: Mutex::new(Followers(vec![(0, 0); places.max(1)])),
            walked: Mutex::new(Recent::new(places)),
            flights: Mutex::default(),
            open: AtomicUsize::new(0),
            read: AtomicU64::new(0),
            landed: AtomicU64::new(0),
        }
    }

    /// Learns the follower of a block from a block on its way down or up.
    pub(super) fn learn(&self, meta: &BlockMeta) {
        if let Some(parent) = meta.parent {
            self.followers.lock().note(parent, meta.key);
        }
    }

    /// Takes out the first flight for which `wanted` is true.
    fn take_flight(&self, wanted: impl Fn(&Flight) -> bool) -> Option<Flight> {
        let mut flights = self.flights.lock();
        let at = flights.iter().position(wanted)?;
        let flight = flights.remove(at);
        self.open.store(flights.len(), Relaxed);
        Some(flight)
    }

    fn add_flight(&self, flight: Flight) {
        let mut flights = self.flights.lock();
        flights.push(flight);
        self.open.store(flights.len(), Relaxed);
    }

    /// At most `count` blocks behind one, up to the first that `asked` holds.
    fn behind(&self, mut key: BlockKey, count: usize, asked: &HashSet<BlockKey>) -> Vec<BlockKey> {
        let followers = self.followers.lock();
        let mut chain = Vec::new();
        while chain.len() < count
            && let Some(next) =
                followers.after(key).filter(|next| !asked.contains(next) && !chain.contains(next))
        {
            chain.push(next);
            key = next;
        }
        chain
    }
}

impl Tiering {
    /// Learns from what a lookup of `keys` loaded, and reads on if it is the next step of a walk.
    pub(super) fn walk_on(&self, keys: &[BlockKey], loads: &[Read], now_ms: u64) {
        let loaded = || {
            loads.iter().filter_map(|load| match load {
                Read::Onboarded(block) => Some(&block.meta),
                _ => None,
            })
        };
        loaded().for_each(|meta| self.ahead.learn(meta));
        let (Some(first), Some(last)) = (loaded().next(), loaded().next_back()) else { return };
        let mut walked = self.ahead.walked.lock();
        let is_walk = first.parent.is_some_and(|parent| walked.seen_ms_ago(parent, now_ms).is_some());
        walked.note(last.key, now_ms);
        drop(walked);
        if is_walk {
            self.read_ahead(last.key, &keys.iter().copied().collect(), now_ms);
        }
    }

    /// Asks the nearest tier that has the block behind `key` for it and for those that follow.
    fn read_ahead(&self, key: BlockKey, asked: &HashSet<BlockKey>, now_ms: u64) {
        let step = asked.len().max(STEP_MIN).min(self.config.read_ahead_blocks as usize);
        let mut chain = self.ahead.behind(key, step, asked);
        let Ok(resident) = self.dram.exists(&chain) else { return };
        let mut resident = resident.into_iter();
        chain.retain(|_| resident.next() == Some(false));
        let level = self.levels.iter().position(|level| {
            level.tier.takes_victims() && chain.first().is_some_and(|key| level.store.exists(&[*key])[0])
        });
        let Some(at) = level else { return };
        let level = &self.levels[at];
        let (mut count, mut bytes) = (0, 0);
        for size in level.store.sizes(&chain).into_iter().map(|size| u64::from(size.unwrap_or(0))) {
            if count > 0 && bytes + size > WALK_BYTES {
                break;
            }
            (count, bytes) = (count + 1, bytes + size);
        }
        chain.truncate(count);
        // Half of the memory is for loads that somebody waits for.
        let half = self.config.load_bytes / 2;
        if bytes > half {
            return;
        }
        while self.ahead.open.load(Relaxed) >= FLIGHTS_MAX || self.loading.used() + bytes > half {
            let Some(oldest) = self.ahead.take_flight(|_| true) else { return };
            if let Some(blocks) = self.arrive(oldest, Duration::ZERO) {
                drop(self.enter(blocks, &HashSet::new(), now_ms));
            }
        }
        let (open, mut left): (Vec<usize>, u64) = ((0..chain.len()).collect(), u64::MAX);
        let mut refused: Vec<Read> = chain.iter().map(|_| Read::Missing).collect();
        let sizes = |keys: &[BlockKey]| level.store.sizes(keys);
        let wanted = self.want(sizes, &chain, &open, &self.loading, &mut left, &mut refused);
        let Some(last) = wanted.last() else { return };
        self.ahead.walked.lock().note(last.key(), now_ms);
        self.ahead.read.fetch_add(wanted.len() as u64, Relaxed);
        let gets = wanted.iter().map(|w| Get { key: w.key(), buffer: Buffer::zeroed(w.size as usize) });
        let pending = level.store.get(gets.collect());
        self.ahead.add_flight(Flight { level: at, blocks: Blocks::OnTheirWay(pending, wanted) });
    }

    /// Brings blocks that were read ahead and are now requested into the pool, and reads on behind them. A caller that
    /// asks for one of them meanwhile waits for this.
    pub(super) fn land(&self, asked: &[BlockKey], now_ms: u64) -> Late {
        let mut late = Late::default();
        if self.ahead.open.load(Relaxed) == 0 {
            return late;
        }
        let asked: HashSet<BlockKey> = asked.iter().copied().collect();
        while let Some(flight) = self.ahead.take_flight(|flight| flight.has_any(&asked)) {
            let (level, keys) = (flight.level, flight.keys());
            let is_new = matches!(flight.blocks, Blocks::OnTheirWay(..));
            let mut parts = self.together.join(&keys, Reach::All);
            let Some(blocks) = self.arrive(flight, self.config.load_timeout) else {
                let tier = self.levels[level].tier;
                late.0.extend(keys.into_iter().map(|key| (tier, key)));
                continue;
            };
            let rest = self.enter(blocks.clone(), &asked, now_ms);
            // Before the rest is one of the flights that may give way: a walk does not push itself out.
            if let Some(&last) = keys.last().filter(|_| is_new) {
                self.read_ahead(last, &asked, now_ms);
            }
            if !rest.is_empty() {
                self.ahead.add_flight(Flight { level, blocks: Blocks::Here(rest) });
            }
            // Told after they are in the pool, because a caller that is told looks there first.
            let mut blocks = blocks.into_iter().peekable();
            for (key, part) in keys.iter().zip(&mut parts) {
                if let Some(block) = blocks.next_if(|block| block.meta.key == *key) {
                    part.tell_if_found(&Read::Onboarded(block));
                }
            }
        }
        late
    }

    /// The blocks of a flight that came intact. `None` if the tier is not done within `patience`; then nobody waits for it any
    /// more.
    fn arrive(&self, flight: Flight, patience: Duration) -> Option<Vec<Arc<Onboarded>>> {
        let level = &self.levels[flight.level];
        let (pending, wanted) = match flight.blocks {
            Blocks::Here(blocks) => return Some(blocks),
            Blocks::OnTheirWay(pending, wanted) => (pending, wanted),
        };
        match pending.wait_timeout(patience) {
            Ok(done) => {
                let came =
                    done.into_iter().zip(wanted).filter_map(|(done, wanted)| check(level, done, wanted));
                let blocks: Vec<_> = came.map(Arc::new).collect();
                blocks.iter().for_each(|block| self.ahead.learn(&block.meta));
                Some(blocks)
            }
            Err(pending) => {
                self.let_go(level, pending, wanted);
                None
            }
        }
    }

    /// Brings into the pool what is asked for, and what there is room for above the watermark. Returns the rest.
    fn enter(
        &self,
        mut blocks: Vec<Arc<Onboarded>>,
        asked: &HashSet<BlockKey>,
        now_ms: u64,
    ) -> Vec<Arc<Onboarded>> {
        blocks.retain(|block| {
            let enters = asked.contains(&block.meta.key) || self.has_room(block.meta.size);
            if enters {
                self.ahead.landed.fetch_add(u64::from(self.promote(block, now_ms)), Relaxed);
            }
            !enters
        });
        blocks
    }
}
