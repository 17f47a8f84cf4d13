//! Read-ahead: a caller that walks a chain a few blocks at a time finds the next ones in the pool.
//!
//! Blocks that are put, go down or come up say what stands before them, so that the block after one is known, in a table of fixed
//! size (16 B a block). Two lookups in a row along a chain that a tier below had to serve are a walk: the blocks behind are asked of that
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
use crate::store::{GetDone, Pending};
use kvasir_protocol::block::{BlockKey, BlockMeta};

/// The most walks that are read ahead of at the same time.
const FLIGHTS_MAX: usize = 64;
/// As many blocks are read ahead as the walk asks for in one step, or as this where its steps are smaller.
const STEP_MIN: usize = 8;
/// The most bytes of one step that are read ahead, but for a single block.
const STEP_BYTES: u64 = 16 << 20;
/// Followers that are remembered for each block of `tiering.recent_blocks`: many more blocks are below than were seen lately.
const FOLLOWERS: usize = 16;
/// How many steps a walk is read ahead: the tier reads one while what came of the one before goes into the pool.
const STEPS: usize = 2;

pub(super) struct Ahead {
    followers: Mutex<Followers>,
    /// What follows the last blocks of lookups that a tier below served, and of what was read ahead, or the last itself if that is not known:
    /// who asks for what is behind walks.
    expected: Mutex<Recent>,
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

    /// The last block of a flight that begins with `first`.
    fn last_behind(&self, first: BlockKey) -> Option<BlockKey> {
        let (begins, ends) = match &self.blocks {
            Blocks::OnTheirWay(_, wanted) => (wanted.first()?.key(), wanted.last()?.key()),
            Blocks::Here(blocks) => (blocks.first()?.meta.key, blocks.last()?.meta.key),
        };
        (begins == first).then_some(ends)
    }

    fn has_any(&self, keys: &HashSet<BlockKey>) -> bool {
        match &self.blocks {
            Blocks::OnTheirWay(_, wanted) => wanted.iter().any(|wanted| keys.contains(&wanted.key())),
            Blocks::Here(blocks) => blocks.iter().any(|block| keys.contains(&block.meta.key)),
        }
    }
}

/// The block after each, in sets of eight places by a block's identity, newest first; a newer one pushes the oldest out. (With sets of four,
/// 262,144 in a million places, one in 120 was lost.)
///
/// A place holds the follower's key, 0 for none, and in place of the tenant, which is that of the block before, a tag of that block: one
/// in 2^16 others has it as well. Then some blocks are read in vain.
///
/// An array, so that the zeros are the kernel's until a set is used.
struct Followers(Vec<[u128; WAYS]>);

const WAYS: usize = 8;

/// Of a key, the bits above are its tenant's.
const KEY_BITS: u32 = 112;
const KEY: u128 = (1 << KEY_BITS) - 1;

impl Followers {
    fn new(places: usize) -> Self {
        Self(vec![[0; WAYS]; (places / WAYS).max(1)])
    }

    fn note(&mut self, parent: BlockKey, child: BlockKey) {
        if (parent.0 ^ child.0) & !KEY != 0 || child.0 & KEY == 0 {
            return;
        }
        let (place, tag) = self.place(parent);
        let set = &mut self.0[place];
        let old = set.iter().position(|entry| entry & !KEY == tag).unwrap_or(set.len() - 1);
        set[..=old].rotate_right(1);
        set[0] = child.0 & KEY | tag;
    }

    fn after(&self, parent: BlockKey) -> Option<BlockKey> {
        let (place, tag) = self.place(parent);
        let entry = self.0[place].iter().find(|entry| **entry & KEY != 0 && **entry & !KEY == tag)?;
        Some(BlockKey(entry & KEY | parent.0 & !KEY))
    }

    fn place(&self, key: BlockKey) -> (usize, u128) {
        let identity = key.identity();
        let tag = u128::from(identity >> 48) << KEY_BITS;
        ((identity % self.0.len() as u64) as usize, tag)
    }
}

impl Ahead {
    pub(super) fn new(places: usize) -> Self {
        Self {
            followers: Mutex::new(Followers::new(FOLLOWERS * places)),
            expected: Mutex::new(Recent::new(places)),
            flights: Mutex::default(),
            open: AtomicUsize::new(0),
            read: AtomicU64::new(0),
            landed: AtomicU64::new(0),
        }
    }

    /// Learns which block follows which from blocks that are put, or on their way down or up. A put always names the block before;
    /// of a block on its way that may be forgotten.
    pub(super) fn learn<'a>(&self, blocks: impl IntoIterator<Item = &'a BlockMeta>) {
        let mut followers = self.followers.lock();
        let links = blocks.into_iter().filter_map(|meta| Some((meta.parent?, meta.key)));
        links.for_each(|(parent, child)| followers.note(parent, child));
    }

    fn expect_behind(&self, last: BlockKey, now_ms: u64) {
        let next = self.followers.lock().after(last);
        self.expected.lock().note(next.unwrap_or(last), now_ms);
    }

    fn is_expected(&self, first: &BlockMeta, now_ms: u64) -> bool {
        let expected = self.expected.lock();
        let is = |key| expected.seen_ms_ago(key, now_ms).is_some();
        is(first.key) || first.parent.is_some_and(is)
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

    /// The last block that is read ahead behind `key` already, and in how many steps of at most [`STEPS`].
    fn end(&self, mut key: BlockKey) -> (BlockKey, usize) {
        let (followers, flights) = (self.followers.lock(), self.flights.lock());
        let mut steps = 0;
        while steps < STEPS
            && let Some(next) = followers.after(key)
            && let Some(last) = flights.iter().find_map(|flight| flight.last_behind(next))
        {
            (key, steps) = (last, steps + 1);
        }
        (key, steps)
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
        self.ahead.learn(loaded());
        let (Some(first), Some(last)) = (loaded().next(), loaded().next_back()) else { return };
        let is_walk = self.ahead.is_expected(first, now_ms);
        self.ahead.expect_behind(last.key, now_ms);
        if is_walk {
            self.read_ahead(last.key, &keys.iter().copied().collect(), now_ms);
        }
    }

    /// Keeps [`STEPS`] steps behind `key` on their way; of these only the first takes the memory of other walks.
    fn read_ahead(&self, key: BlockKey, asked: &HashSet<BlockKey>, now_ms: u64) {
        let (mut last, steps) = self.ahead.end(key);
        for step in steps..STEPS {
            let Some(next) = self.read_step(last, asked, step == 0, now_ms) else { return };
            last = next;
        }
    }

    /// Asks the nearest tier that has the block behind `key` for it and for those that follow. Returns the last of them.
    fn read_step(
        &self,
        key: BlockKey,
        asked: &HashSet<BlockKey>,
        others_give_way: bool,
        now_ms: u64,
    ) -> Option<BlockKey> {
        let step = asked.len().max(STEP_MIN).min(self.config.read_ahead_blocks as usize);
        let mut chain = self.ahead.behind(key, step, asked);
        let mut resident = self.dram.exists(&chain).ok()?.into_iter();
        chain.retain(|_| resident.next() == Some(false));
        let level = self.levels.iter().position(|level| {
            level.tier.takes_victims() && chain.first().is_some_and(|key| level.store.exists(&[*key])[0])
        });
        let at = level?;
        let level = &self.levels[at];
        let (mut count, mut bytes) = (0, 0);
        for size in level.store.sizes(&chain).into_iter().map(|size| u64::from(size.unwrap_or(0))) {
            if count > 0 && bytes + size > STEP_BYTES {
                break;
            }
            (count, bytes) = (count + 1, bytes + size);
        }
        chain.truncate(count);
        // Half of the memory is for loads that somebody waits for.
        let half = self.config.load_bytes / 2;
        if bytes > half {
            return None;
        }
        while self.ahead.open.load(Relaxed) >= FLIGHTS_MAX || self.loading.used() + bytes > half {
            let oldest = self.ahead.take_flight(|_| others_give_way)?;
            if let Some(blocks) = self.arrive(oldest, Duration::ZERO) {
                drop(self.enter(blocks, &HashSet::new(), now_ms));
            }
        }
        let (open, mut left): (Vec<usize>, u64) = ((0..chain.len()).collect(), u64::MAX);
        let mut refused: Vec<Read> = chain.iter().map(|_| Read::Missing).collect();
        let sizes = |keys: &[BlockKey]| level.store.sizes(keys);
        let wanted = self.want(sizes, &chain, &open, &self.loading, &mut left, &mut refused);
        let last = wanted.last()?.key();
        self.ahead.expect_behind(last, now_ms);
        self.ahead.read.fetch_add(wanted.len() as u64, Relaxed);
        let pending = level.store.get(wanted.iter().map(|wanted| self.get_of(wanted)).collect());
        self.ahead.add_flight(Flight { level: at, blocks: Blocks::OnTheirWay(pending, wanted) });
        Some(last)
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
            // Before these go into the pool, so that the tier reads meanwhile; and before the rest is one of the flights that may give
            // way: a walk does not push itself out.
            if let Some(&last) = keys.last().filter(|_| is_new) {
                self.read_ahead(last, &asked, now_ms);
            }
            let rest = self.enter(blocks.clone(), &asked, now_ms);
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
                self.ahead.learn(blocks.iter().map(|block| &block.meta));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn followers_are_told_of_the_newest_of_a_set_and_of_no_other_tenant() {
        let mut followers = Followers::new(WAYS);
        let parent = |n: u128| BlockKey((n << 48) | (7 << KEY_BITS));
        let child = |n: u128| BlockKey((1000 + n) | (7 << KEY_BITS));
        (1..=8).for_each(|n| followers.note(parent(n), child(n)));
        assert!((1..=8).all(|n| followers.after(parent(n)) == Some(child(n))));
        followers.note(parent(1), child(99));
        followers.note(parent(9), child(9));
        let found = [1, 2, 3, 9].map(|n| followers.after(parent(n)));
        assert_eq!(found, [Some(child(99)), None, Some(child(3)), Some(child(9))]);
        followers.note(parent(10), BlockKey(3));
        assert_eq!(followers.after(parent(10)), None, "the follower is another tenant's");
    }

    #[test]
    fn of_a_quarter_of_its_places_next_to_none_is_lost() {
        let mut followers = Followers::new(1 << 16);
        let chain: Vec<BlockKey> =
            (0..1 << 14).map(|n: u32| BlockKey::from_engine_hash("chain", &n.to_le_bytes())).collect();
        chain.windows(2).for_each(|pair| followers.note(pair[0], pair[1]));
        let lost = chain.windows(2).filter(|pair| followers.after(pair[0]) != Some(pair[1])).count();
        assert!(lost < chain.len() / 1000, "{lost} of {}", chain.len());
    }
}
