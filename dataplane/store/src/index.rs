//! Where each block of a shard is: a table of fixed size that is changed under the shard's lock, and read with or without it.
//!
//! Groups of seven places and one word, which has a byte of each place's hash and a count of the blocks that found no place here or before
//! ("F14", Bronson and Shi, 2019): one word tells whether a group can have a block, a block never moves, and nothing that was
//! removed stays behind. Without the lock it is read as a sequence lock protects it (Boehm, "Can seqlocks get along with
//! programming language memory models?", MSPC 2012): readers write nothing, so any number of them do not slow each other down.
//! `tests/interleavings` proves it.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{TRIES, zeroed, zeroed_halves};
use kvasir_protocol::block::BlockKey;

/// Places of a group.
const PLACES: usize = 7;
/// The low bit of each byte that stands for a place; the eighth byte counts.
const LOWS: u64 = 0x01_0101_0101_0101;
const HIGHS: u64 = LOWS << 7;
const COUNT: u64 = 1 << 56;
/// A count that is never reduced again, as it may have been larger.
const MANY: u64 = 0xff;
/// In a place, beside the slot.
const SHOWN: u32 = 1 << 31;

// Each on lines of its own: those who change one shard do not disturb readers of another.
#[repr(align(64))]
pub(super) struct Index {
    /// Odd while a change is under way.
    version: AtomicU32,
    groups: Box<[AtomicU64]>,
    /// Seven for each group.
    places: Box<[AtomicU32]>,
    /// Two words for each slot: the key of its block.
    keys: Box<[AtomicU64]>,
}

/// Changes came in between each time: ask under the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Changing;

/// Where a block is in the table.
struct Found {
    group: usize,
    at: usize,
}

impl Index {
    /// Of blocks in slots below `slots_max`, with one and a half places for each. Memory that nobody touched is not resident.
    pub(super) fn new(slots_max: usize) -> Self {
        let groups = (slots_max + slots_max / 2) / PLACES + 1;
        Self {
            version: AtomicU32::new(0),
            groups: zeroed(groups),
            places: zeroed_halves(PLACES * groups),
            keys: zeroed(2 * slots_max),
        }
    }

    /// The slot of a block, whether it is shown or not. Under the shard's lock.
    pub(super) fn find(&self, hash: u64, key: BlockKey) -> Option<u32> {
        let found = self.search(hash, |local| self.key(local) == key)?;
        Some(self.place(&found) & !SHOWN)
    }

    /// The slot of a block if it is shown. Needs no lock.
    #[inline]
    pub(super) fn shown(&self, hash: u64, key: BlockKey) -> Result<Option<u32>, Changing> {
        self.shown_now(hash, key).or_else(|Changing| self.shown_later(hash, key))
    }

    #[inline]
    fn shown_now(&self, hash: u64, key: BlockKey) -> Result<Option<u32>, Changing> {
        let before = self.version.load(Ordering::Acquire);
        let found = self.search(hash, |local| self.key(local) == key);
        let place = found.map_or(0, |found| self.place(&found));
        fence(Ordering::Acquire);
        let after = self.version.load(Ordering::Relaxed);
        if before.is_multiple_of(2) && before == after {
            Ok((place & SHOWN != 0).then_some(place & !SHOWN))
        } else {
            Err(Changing)
        }
    }

    #[cold]
    fn shown_later(&self, hash: u64, key: BlockKey) -> Result<Option<u32>, Changing> {
        for _ in 0..TRIES {
            std::hint::spin_loop();
            if let Ok(shown) = self.shown_now(hash, key) {
                return Ok(shown);
            }
        }
        Err(Changing)
    }

    /// The key of the block in a slot. Under the shard's lock.
    pub(super) fn key(&self, local: u32) -> BlockKey {
        let [low, high] = [0, 1].map(|half| self.keys[2 * local as usize + half].load(Ordering::Relaxed));
        BlockKey(u128::from(high) << 64 | u128::from(low))
    }

    /// Adds a block that is not in it, and not shown yet. The three that change it are called by one thread at a time.
    pub(super) fn insert(&self, hash: u64, key: BlockKey, local: u32) {
        let _change = self.change();
        let [low, high] = [key.0 as u64, (key.0 >> 64) as u64];
        self.keys[2 * local as usize].store(low, Ordering::Relaxed);
        self.keys[2 * local as usize + 1].store(high, Ordering::Relaxed);
        let mut group = self.home(hash);
        loop {
            let word = self.load(group);
            let free = !word & HIGHS;
            if free != 0 {
                let at = free.trailing_zeros() as usize / 8;
                self.store(group, word | tag(hash) << (8 * at));
                return self.places[PLACES * group + at].store(local, Ordering::Relaxed);
            }
            if word / COUNT != MANY {
                self.store(group, word + COUNT);
            }
            group = self.after(group);
        }
    }

    pub(super) fn show(&self, hash: u64, local: u32) {
        let Some(found) = self.search(hash, |there| there == local) else { return };
        let _change = self.change();
        self.places[PLACES * found.group + found.at].store(local | SHOWN, Ordering::Relaxed);
    }

    pub(super) fn remove(&self, hash: u64, local: u32) {
        let Some(found) = self.search(hash, |there| there == local) else { return };
        let _change = self.change();
        let mut group = self.home(hash);
        while group != found.group {
            let word = self.load(group);
            if word / COUNT != MANY {
                self.store(group, word - COUNT);
            }
            group = self.after(group);
        }
        self.store(group, self.load(group) & !(0xff << (8 * found.at)));
    }

    /// Bytes that are touched when blocks have been in the first `slots` slots.
    pub(super) fn memory_bytes(&self, slots: usize) -> usize {
        8 * self.groups.len() + 4 * self.places.len() + 16 * slots
    }

    /// The block with this hash in a slot that `is_it`.
    #[inline]
    fn search(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<Found> {
        let (home, tags) = (self.home(hash), tag(hash) * LOWS);
        let mut group = home;
        loop {
            let word = self.load(group);
            // Bytes that are zero, and perhaps one above such a byte (Warren, "Hacker's Delight", 6-1).
            let differ = word ^ tags;
            let mut same = differ.wrapping_sub(LOWS) & !differ & HIGHS;
            while same != 0 {
                let found = Found { group, at: same.trailing_zeros() as usize / 8 };
                if is_it(self.place(&found) & !SHOWN) {
                    return Some(found);
                }
                same &= same - 1;
            }
            group = self.after(group);
            if word < COUNT || group == home {
                return None;
            }
        }
    }

    fn home(&self, hash: u64) -> usize {
        ((u64::from(hash as u32) * self.groups.len() as u64) >> 32) as usize
    }

    fn after(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    fn place(&self, found: &Found) -> u32 {
        self.places[PLACES * found.group + found.at].load(Ordering::Relaxed)
    }

    fn load(&self, group: usize) -> u64 {
        self.groups[group].load(Ordering::Relaxed)
    }

    fn store(&self, group: usize, word: u64) {
        self.groups[group].store(word, Ordering::Relaxed);
    }

    fn change(&self) -> Change<'_> {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        Change { of: self, done: version.wrapping_add(2) }
    }
}

/// The byte of a place that is taken. Its bits of the hash give neither the shard nor the group.
fn tag(hash: u64) -> u64 {
    hash >> 57 | 0x80
}

/// A change under way; done when dropped.
struct Change<'a> {
    of: &'a Index,
    done: u32,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.of.version.store(self.done, Ordering::Release);
    }
}
