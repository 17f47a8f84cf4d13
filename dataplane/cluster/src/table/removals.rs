//! Which blocks were removed, and when, so that a host that was away cannot bring them back.
//!
//! Every host that hears of a removal keeps it and tells it on, as a fact. So a host that returns hears it from the first host
//! that it reaches. A removal says nothing about a block that was put later; and it is carried out once, when it is new,
//! so that one that is told late drops nothing that was stored since.
//!
//! What is no longer kept must not count as new again, or it would do just that. Hence [`Removals::horizon`]: a removal
//! at or before it is not believed.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::Generation;
use kvasir_protocol::block::BlockKey;

/// The most removals kept, about 100 B each in memory: a removal of 64,000 blocks while a host is away. Beyond that the
/// oldest are forgotten and counted; a copy of one on a host that was away comes back with it.
pub const REMOVALS_MAX: usize = 1 << 16;
/// How long they are kept: longer than a long weekend. A host that comes back later may bring back what it has.
pub const KEPT_FOR_US: u64 = 7 * 24 * 3600 * 1_000_000;

/// See the [module](self).
pub(super) struct Removals {
    latest: HashMap<BlockKey, Generation>,
    /// The same, oldest first.
    by_age: BTreeSet<(Generation, BlockKey)>,
    max: usize,
    horizon: Generation,
    /// No longer kept; to be taken from the disk as well.
    dropped: Vec<BlockKey>,
    forgotten: u64,
}

impl Removals {
    pub(super) fn new(max: usize) -> Self {
        Self {
            latest: HashMap::new(),
            by_age: BTreeSet::new(),
            max,
            horizon: Generation::default(),
            dropped: Vec::new(),
            forgotten: 0,
        }
    }

    /// Keeps a removal. Returns false if it, or a later one of the block, is known, or it is too old to be believed.
    pub(super) fn note(&mut self, key: BlockKey, at: Generation) -> bool {
        let known = self.latest.get(&key).copied();
        if at <= self.horizon || known.is_some_and(|known| known >= at) {
            return false;
        }
        known.map(|known| self.by_age.remove(&(known, key)));
        self.latest.insert(key, at);
        self.by_age.insert((at, key));
        if self.latest.len() > self.max {
            self.drop_oldest();
            self.forgotten += 1;
        }
        true
    }

    /// Whether a block that was put at `put` was removed after that.
    pub(super) fn is_after(&self, key: BlockKey, put: Generation) -> bool {
        self.latest.get(&key).is_some_and(|&at| at > put)
    }

    /// The last removal of a block that is kept.
    pub(super) fn last(&self, key: BlockKey) -> Option<Generation> {
        self.latest.get(&key).copied()
    }

    /// The last removal of a block, or one before which none is believed any more.
    pub(super) fn heard(&self, key: BlockKey) -> Generation {
        self.last(key).unwrap_or(self.horizon)
    }

    /// Forgets what was removed before `horizon`, and believes no such removal any more.
    pub(super) fn expire(&mut self, horizon: Generation) {
        self.horizon = self.horizon.max(horizon);
        while self.by_age.first().is_some_and(|&(at, _)| at <= self.horizon) {
            self.drop_oldest();
        }
    }

    /// The removals dropped since the last call.
    pub(super) fn take_dropped(&mut self) -> Vec<BlockKey> {
        let mut dropped = std::mem::take(&mut self.dropped);
        dropped.retain(|key| !self.latest.contains_key(key));
        dropped
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockKey, Generation)> {
        self.by_age.iter().map(|&(at, key)| (key, at))
    }

    /// How many are kept, and how many were forgotten since the start because there were too many.
    pub(super) fn counts(&self) -> (usize, u64) {
        (self.latest.len(), self.forgotten)
    }

    fn drop_oldest(&mut self) {
        let Some((at, key)) = self.by_age.pop_first() else { return };
        self.latest.remove(&key);
        self.horizon = self.horizon.max(at);
        self.dropped.push(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: BlockKey = BlockKey(1);
    const TWO: BlockKey = BlockKey(2);

    #[test]
    fn a_removal_is_new_once_and_says_nothing_about_what_was_put_later() {
        let mut removals = Removals::new(9);
        assert!(removals.note(ONE, Generation(5)) && !removals.note(ONE, Generation(5)));
        assert!(!removals.note(ONE, Generation(4)), "an earlier one that is told late");
        let after = |put: u64| removals.is_after(ONE, Generation(put));
        assert!(after(4) && !after(5) && !after(6) && !removals.is_after(TWO, Generation(4)));
        assert!(removals.note(ONE, Generation(7)) && removals.is_after(ONE, Generation(6)));
        assert_eq!((removals.counts(), removals.iter().count()), ((1, 0), 1));
    }

    #[test]
    fn it_is_bounded_and_what_was_forgotten_is_not_believed_again() {
        let mut removals = Removals::new(2);
        for (key, at) in [(ONE, 5), (TWO, 6), (ONE, 7), (BlockKey(3), 8)] {
            assert!(removals.note(key, Generation(at)));
        }
        assert_eq!((removals.counts(), removals.take_dropped()), ((2, 1), vec![TWO]));
        assert!(!removals.note(TWO, Generation(6)) && removals.note(TWO, Generation(9)));
        assert_eq!(removals.take_dropped(), [ONE]);
        removals.expire(Generation(8));
        assert_eq!((removals.counts(), removals.take_dropped()), ((1, 2), vec![BlockKey(3)]));
        assert!(!removals.note(BlockKey(4), Generation(8)) && removals.note(BlockKey(4), Generation(9)));
    }
}
