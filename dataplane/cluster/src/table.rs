//! The hosts that hold each copy, as far as this host knows. No I/O, no clock, and no lock of its own except for the log, which hosts
//! that listen read beside all else: a heartbeat must not wait for a long look at the blocks.
//!
//! Every host speaks only for itself: it says which replicated blocks it holds and when it no longer does, in the order
//! of its [`Log`]. The others put together what they hear, so two hosts never disagree about the same fact, and a host
//! that was away is brought up to date by hearing all that the other holds. When a host is lost, all it said is forgotten.
//!
//! **Versions.** Two hosts may have computed the same block and hold other bytes under one key, because the sum of floating
//! point numbers depends on their order. Each version is as good as the other, so it counts as a copy, and nobody says which one it
//! holds: pool and disk of one host may differ, too. Who lends a block tells the checksum of what it lends.
//!
//! **Removals** are facts that every host tells on ([`removals`]). Puts and removals are ordered by their
//! [`Generation`]: a claim that is older than a removal of the block does not count, whichever host makes it.
//!
//! **Duty.** All holders put each other in the same order: the primary (the host that took the put) first, the rest by a
//! hash of block and name, which spreads the work. Of two primaries (two clients put the same block) the lesser counts. The first one has new copies made while there are too few; one that
//! has as many before it as are wanted lets its own copy go. Each host decides that for itself, from its own table.

mod removals;

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Place;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use self::removals::Removals;
pub use self::removals::{KEPT_FOR_US, REMOVALS_MAX};
use kvasir_os::planted::{self, Bug};
use kvasir_protocol::block::BlockKey;

/// The most hosts of a cluster, this one included.
pub const NODES_MAX: usize = 64;

/// A host's name, as a number that all hosts compute alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl NodeId {
    pub fn of(name: &str) -> Self {
        Self(XxHash3_64::oneshot(name.as_bytes()))
    }
}

/// When a block was put or removed: microseconds since 1970 by the clock of the host that did it, and more than any that
/// host had heard of. So what happens after something else, as far as anybody can tell, is later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Generation(pub u64);

/// What a host says of a block that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// Of the version of the host that says it.
    pub size: u32,
    /// How many hosts should hold it.
    pub target: u8,
    /// The host that took the put.
    pub primary: NodeId,
    /// When it took it.
    pub generation: Generation,
}

/// Why a host no longer holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gone {
    /// Its eviction policy had a better use for the space. It counts as a copy that was wanted and is not missed.
    LetGo,
    /// Removed, damaged, or one copy too many.
    Lost,
}

/// One entry of a host's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fact {
    Holds(BlockKey, Holding),
    Gone(BlockKey, Gone),
    /// Nobody holds what was put before that any more.
    Removed(BlockKey, Generation),
}

impl Fact {
    pub fn key(self) -> BlockKey {
        match self {
            Self::Holds(key, _) | Self::Gone(key, _) | Self::Removed(key, _) => key,
        }
    }

    /// When it happened, if that matters.
    pub fn generation(self) -> Generation {
        match self {
            Self::Holds(_, holding) => holding.generation,
            Self::Removed(_, at) => at,
            Self::Gone(..) => Generation::default(),
        }
    }
}

/// The result of something that was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    New,
    Known,
    /// The table has no room for a further block.
    Full,
    /// A claim of a block that was removed after it was put: it does not count.
    Outdated,
    /// A removal that is new here.
    Removal(Removal),
}

/// What a removal that is new here means for this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// What this host has, as its own claim says, was put before: it must go from all tiers.
    Drop,
    /// This host claims no copy. What its tiers have all the same must go, unless it was put since.
    DropEarlier,
    /// It was put again since: what is here stays.
    Keep,
}

/// What this host must do for a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Duty {
    Nothing,
    /// Have this many copies made on hosts that are not in `not_on`.
    Copy {
        missing: usize,
        size: u32,
        not_on: Nodes,
    },
    /// Drop its own copy: enough others hold the block.
    Trim,
}

/// A set of hosts, by their places in [`Table::new`]'s list. Place 0 is this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nodes(pub(super) u64);

impl Nodes {
    pub fn one(place: usize) -> Self {
        Self(1 << place)
    }

    pub fn has(self, place: usize) -> bool {
        self.0 & 1 << place != 0
    }

    pub fn insert(&mut self, place: usize) {
        self.0 |= 1 << place;
    }

    pub fn remove(&mut self, place: usize) {
        self.0 &= !(1 << place);
    }

    /// The hosts in either.
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The hosts in both.
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let place = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (place < NODES_MAX).then_some(place)
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    holding: Holding,
    holders: Nodes,
    let_go: Nodes,
}

/// This host's own news, numbered; the oldest are dropped.
pub struct Log {
    facts: VecDeque<Fact>,
    /// Number of the first one kept.
    first: u64,
    max: usize,
}

/// See the [module](self).
pub struct Table {
    nodes: Vec<NodeId>,
    blocks: HashMap<BlockKey, Block>,
    /// The blocks that each host, by its place, holds or has let go: what one host said is found without a walk over all.
    spoken_of: Vec<BTreeSet<BlockKey>>,
    /// Blocks that this host holds, and those that too few hosts hold.
    own: usize,
    short: usize,
    /// Where the next search for duties begins.
    cursor: BlockKey,
    blocks_max: usize,
    /// Blocks that lost the last host which claimed them, since the last look; at most `blocks_max`.
    orphans: Vec<(BlockKey, Holding)>,
    removals: Removals,
    log: Arc<Mutex<Log>>,
    refused: u64,
}

impl Table {
    /// `nodes` are all hosts, this one first, at most [`NODES_MAX`]. It knows at most `blocks_max` blocks (about 80 B
    /// each, and 30 B for each copy) and keeps the last `log_max` of its own news.
    pub fn new(nodes: Vec<NodeId>, blocks_max: usize, log_max: usize) -> Self {
        debug_assert!((1..=NODES_MAX).contains(&nodes.len()));
        let log = Arc::new(Mutex::new(Log { facts: VecDeque::new(), first: 0, max: log_max }));
        Self {
            spoken_of: vec![BTreeSet::new(); nodes.len()],
            nodes,
            blocks: HashMap::new(),
            own: 0,
            short: 0,
            cursor: BlockKey::default(),
            blocks_max,
            orphans: Vec::new(),
            removals: Removals::new(REMOVALS_MAX),
            log,
            refused: 0,
        }
    }

    /// The host at `place` holds a block.
    pub fn holds(&mut self, place: usize, key: BlockKey, holding: Holding) -> Heard {
        if self.is_outdated(key, holding.generation) {
            return Heard::Outdated;
        }
        let full = self.blocks.len() >= self.blocks_max;
        let (known, block) = match self.blocks.entry(key) {
            Place::Occupied(known) => (Some(*known.get()), known.into_mut()),
            Place::Vacant(_) if full => {
                self.refused += 1;
                return Heard::Full;
            }
            Place::Vacant(free) => {
                (None, free.insert(Block { holding, holders: Nodes::default(), let_go: Nodes::default() }))
            }
        };
        let before = *block;
        // Nobody else says how large this host's own version is.
        block.holding.size = match (place, before.holders.has(0)) {
            (0, _) => holding.size,
            (_, true) => before.holding.size,
            (_, false) => before.holding.size.max(holding.size),
        };
        // A host that hears both of two claims comes to the same result, in either order.
        block.holding.target = before.holding.target.max(holding.target);
        block.holding.primary = before.holding.primary.min(holding.primary);
        block.holding.generation = before.holding.generation.max(holding.generation);
        block.holders.insert(place);
        block.let_go.remove(place);
        let after = *block;
        self.changed(key, known, Some(after));
        let new_here = place == 0 && !before.holders.has(0);
        if new_here || (after.holding != before.holding && after.holders.has(0)) {
            // Others may have heard only one of the claims.
            self.log().push(Fact::Holds(key, after.holding));
        }
        let news = after.holding != before.holding || after.holders != before.holders;
        if news { Heard::New } else { Heard::Known }
    }

    /// The host at `place` no longer holds a block. Returns whether it was known to hold it.
    pub fn gone(&mut self, place: usize, key: BlockKey, why: Gone) -> bool {
        let Some(block) = self.blocks.get_mut(&key).filter(|block| block.holders.has(place)) else {
            return false;
        };
        let before = *block;
        block.holders.remove(place);
        if why == Gone::LetGo {
            block.let_go.insert(place);
        }
        if self.after_a_loss(key, before) && why == Gone::Lost {
            self.orphan(key, before.holding);
        }
        if place == 0 {
            self.log().push(Fact::Gone(key, why));
        }
        true
    }

    /// Takes in a fact of the host at `place`.
    pub fn hear(&mut self, place: usize, fact: Fact) -> Heard {
        match fact {
            Fact::Holds(key, holding) => self.holds(place, key, holding),
            Fact::Gone(key, why) if self.gone(place, key, why) => Heard::New,
            Fact::Gone(..) => Heard::Known,
            Fact::Removed(key, at) => self.remove(key, at).map_or(Heard::Known, Heard::Removal),
        }
    }

    /// Notes that a block was removed everywhere. Returns `None` if that is known already, or too old to be believed.
    pub fn remove(&mut self, key: BlockKey, at: Generation) -> Option<Removal> {
        if !self.removals.note(key, at) {
            return None;
        }
        self.log().push(Fact::Removed(key, at));
        if self.was_put_since(key, at) {
            return Some(Removal::Keep);
        }
        let block = self.blocks.remove(&key);
        self.changed(key, block, None);
        if block.is_none_or(|block| !block.holders.has(0)) {
            return Some(Removal::DropEarlier);
        }
        self.log().push(Fact::Gone(key, Gone::Lost));
        Some(Removal::Drop)
    }

    /// Whether this removal is known as the last one of the block, and a put that came later is not.
    pub fn is_removed(&self, key: BlockKey, at: Generation) -> bool {
        self.removals.last(key) == Some(at) && !self.was_put_since(key, at)
    }

    /// Whether a removal of the block is known, and a put that came later is not.
    pub fn was_removed(&self, key: BlockKey) -> bool {
        self.removed_at(key).is_some()
    }

    /// When it was removed last, if no put that came later is known.
    pub fn removed_at(&self, key: BlockKey) -> Option<Generation> {
        self.removals.last(key).filter(|&at| !self.was_put_since(key, at))
    }

    /// All such blocks.
    pub fn removed(&self) -> Vec<BlockKey> {
        self.removals.iter().map(|(key, _)| key).filter(|&key| self.was_removed(key)).collect()
    }

    /// The latest put or removal of the block that a removal at `at` does not come after: it leaves the block where it is.
    pub fn later_than(&self, key: BlockKey, at: Generation) -> Option<Generation> {
        let removed = Some(self.removals.heard(key)).filter(|&heard| heard > at);
        removed.max(self.put_since(key, at))
    }

    fn put_since(&self, key: BlockKey, at: Generation) -> Option<Generation> {
        let put = self.blocks.get(&key).map(|block| block.holding.generation);
        put.filter(|&put| put >= at)
    }

    fn was_put_since(&self, key: BlockKey, at: Generation) -> bool {
        self.put_since(key, at).is_some()
    }

    /// Takes in a removal that this host knew of before it was started.
    pub fn recall(&mut self, key: BlockKey, at: Generation) {
        self.removals.note(key, at);
    }

    /// Whether a block that was put at `put` was removed after that.
    pub fn is_outdated(&self, key: BlockKey, put: Generation) -> bool {
        self.removals.is_after(key, put)
    }

    /// A generation after which this host's version of a block was put, or that of the put itself: the last removal of it that was
    /// carried out here, if that is later.
    pub fn put_after(&self, key: BlockKey) -> Generation {
        let own = self.blocks.get(&key).filter(|block| block.holders.has(0));
        let put = own.map(|block| block.holding.generation).unwrap_or_default();
        put.max(self.removals.heard(key))
    }

    /// Forgets removals before `horizon`. Returns all that are no longer kept since the last call.
    pub fn expire_removals(&mut self, horizon: Generation) -> Vec<BlockKey> {
        self.removals.expire(horizon);
        self.removals.take_dropped()
    }

    /// Removals kept, and those forgotten since the start because there were too many.
    pub fn removals(&self) -> (usize, u64) {
        self.removals.counts()
    }

    /// Forgets all that the host at `place` said: it is lost, or starts over. Returns how many blocks it held.
    pub fn lose(&mut self, place: usize) -> usize {
        let mut lost = 0;
        for key in std::mem::take(&mut self.spoken_of[place]) {
            let Some(block) = self.blocks.get_mut(&key) else { continue };
            let before = *block;
            lost += usize::from(before.holders.has(place));
            block.holders.remove(place);
            block.let_go.remove(place);
            if self.after_a_loss(key, before) {
                self.orphan(key, before.holding);
            }
        }
        lost
    }

    fn orphan(&mut self, key: BlockKey, holding: Holding) {
        if self.orphans.len() < self.blocks_max {
            self.orphans.push((key, holding));
        }
    }

    /// Blocks that nobody claims any more, though nobody removed them or let them go, since the last call.
    pub fn take_orphans(&mut self) -> Vec<(BlockKey, Holding)> {
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain(|(key, _)| !self.blocks.contains_key(key));
        orphans
    }

    /// A host no longer holds a block, which was `before`. If no host does, nothing is known of it. Returns
    /// whether that is so.
    fn after_a_loss(&mut self, key: BlockKey, before: Block) -> bool {
        let Some(block) = self.blocks.get_mut(&key) else { return false };
        let after = Some(*block).filter(|block| !block.holders.is_empty());
        if after.is_none() {
            self.blocks.remove(&key);
        }
        self.changed(key, Some(before), after);
        after.is_none()
    }

    /// Keeps the counts and lists of blocks true.
    fn changed(&mut self, key: BlockKey, before: Option<Block>, after: Option<Block>) {
        let spoke = |block: Option<Block>| block.map_or(0, |block| block.holders.union(block.let_go).0);
        for place in Nodes(spoke(before) & !spoke(after)).iter() {
            self.spoken_of[place].remove(&key);
        }
        for place in Nodes(spoke(after) & !spoke(before)).iter() {
            self.spoken_of[place].insert(key);
        }
        let own = |block: Option<Block>| usize::from(block.is_some_and(|block| block.holders.has(0)));
        let short = |block: Option<Block>| usize::from(block.is_some_and(|block| block.missing() > 0));
        self.own = self.own + own(after) - own(before);
        self.short = self.short + short(after) - short(before);
    }

    /// What is known of a block, whichever host holds it.
    pub fn holding(&self, key: BlockKey) -> Option<Holding> {
        self.blocks.get(&key).map(|block| block.holding)
    }

    pub fn holders(&self, key: BlockKey) -> Nodes {
        self.blocks.get(&key).map_or(Nodes::default(), |block| block.holders)
    }

    /// Holders in the order in which they are responsible for a block.
    pub fn in_order(&self, key: BlockKey) -> Vec<usize> {
        let Some(block) = self.blocks.get(&key) else { return Vec::new() };
        let mut order: Vec<usize> = block.holders.iter().collect();
        order.sort_by_cached_key(|&place| self.rank(key, block, place));
        order
    }

    /// Holders that are responsible for a block before this host is.
    pub fn before(&self, key: BlockKey) -> Nodes {
        let Some(block) = self.blocks.get(&key) else { return Nodes::default() };
        let own = self.rank(key, block, 0);
        let before = block.holders.iter().filter(|&place| self.rank(key, block, place) < own);
        before.fold(Nodes::default(), |all, place| all.union(Nodes::one(place)))
    }

    pub fn duty(&self, key: BlockKey) -> Duty {
        let Some(block) = self.blocks.get(&key).filter(|block| block.holders.has(0)) else {
            return Duty::Nothing;
        };
        let target = usize::from(block.holding.target);
        let before = self.before(key).len();
        if before >= target {
            return Duty::Trim;
        }
        let missing = block.missing();
        if before > 0 || missing == 0 {
            return Duty::Nothing;
        }
        Duty::Copy { missing, size: block.holding.size, not_on: block.holders.union(block.let_go) }
    }

    /// At most `max` blocks for which this host has something to do. The next call goes on behind them, so one for which
    /// nothing can be done keeps no other from its turn.
    pub fn next_duties(&mut self, max: usize) -> Vec<BlockKey> {
        let behind = self.spoken_of[0].range((Excluded(self.cursor), Unbounded));
        let all = behind.chain(self.spoken_of[0].range(..=self.cursor));
        let due = all.copied().filter(|&key| self.duty(key) != Duty::Nothing);
        let due: Vec<BlockKey> = due.take(max).collect();
        self.cursor = due.last().copied().unwrap_or(self.cursor);
        due
    }

    /// All that this host holds, and the number of the first news after that.
    pub fn own(&self) -> (Vec<Fact>, u64) {
        let held =
            |&key: &BlockKey| self.blocks.get(&key).filter(|block| block.holders.has(0)).map(|b| (key, b));
        let own = self.spoken_of[0].iter().filter_map(held);
        (own.map(|(key, block)| Fact::Holds(key, block.holding)).collect(), self.log().end())
    }

    /// All that this host has to say: which blocks were removed, then what it holds. And the number of the first news after
    /// that.
    pub fn all(&self) -> (Vec<Fact>, u64) {
        let (own, end) = self.own();
        let told = |_: &(BlockKey, Generation)| !planted::is(Bug::LeavesRemovalsUntold);
        let removed = self.removals.iter().filter(told).map(|(key, at)| Fact::Removed(key, at));
        (removed.chain(own).collect(), end)
    }

    pub fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock()
    }

    /// The same log, for threads that only listen. Its lock is taken after the table's, if both are.
    pub fn shared_log(&self) -> Arc<Mutex<Log>> {
        Arc::clone(&self.log)
    }

    /// Whether there is enough room to hear everything again, after something was not taken in.
    pub fn has_room(&self) -> bool {
        self.blocks_max - self.blocks.len() > self.blocks_max / 16
    }

    /// Blocks known.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks not taken in because the table was full, since the start.
    pub fn refusals(&self) -> u64 {
        self.refused
    }

    /// Copies on this host, and blocks that too few hosts hold.
    pub fn counts(&self) -> (usize, usize) {
        (self.own, self.short)
    }

    fn rank(&self, key: BlockKey, block: &Block, place: usize) -> (bool, u64, NodeId) {
        let node = self.nodes[place];
        let spread = XxHash3_64::oneshot_with_seed(node.0, &key.0.to_le_bytes());
        (node != block.holding.primary, spread, node)
    }
}

impl Block {
    /// Copies that are wanted and not there, less those that were let go.
    fn missing(&self) -> usize {
        usize::from(self.holding.target).saturating_sub(self.holders.len() + self.let_go.len())
    }
}

impl Log {
    fn push(&mut self, fact: Fact) {
        if self.facts.len() == self.max {
            self.facts.pop_front();
            self.first += 1;
        }
        self.facts.push_back(fact);
    }

    /// The number that the next fact will have.
    pub fn end(&self) -> u64 {
        self.first + self.facts.len() as u64
    }

    /// At most `max` facts from number `from` on. Returns `None` if some of them are no longer kept, or were never written.
    pub fn since(&self, from: u64, max: usize) -> Option<Vec<Fact>> {
        let skip = usize::try_from(from.checked_sub(self.first)?).ok()?;
        (skip <= self.facts.len()).then(|| self.facts.iter().skip(skip).take(max).copied().collect())
    }
}

#[cfg(test)]
mod tests;
