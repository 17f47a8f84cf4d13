//! Where each block is: 58 bytes a block in slabs, found through tables of 32-bit slots.
//!
//! An entry holds everything that a get reports besides the bytes, so that a get reads the payload and nothing else.
//! Only the engine's thread writes; anyone may look up.

use hashbrown::HashTable;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::format::Place;
use kvasir_protocol::block::{BlockKey, BlockMeta};
use kvasir_store::hash_of;

const SHARDS: usize = 16;
/// How many slots are allocated at a time, so that growing never doubles.
const CHUNK: usize = 1024;
/// In `segment`: the block has a parent.
const HAS_PARENT: u32 = 1 << 31;

/// A block that the tier holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) meta: BlockMeta,
    pub(super) checksum: u64,
    pub(super) place: Place,
}

/// Packed, because there are very many entries: aligned, one would take 80 bytes.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
struct Slot {
    key: u128,
    parent: u128,
    checksum: u64,
    segment: u32,
    size: u32,
    depth: u32,
    /// Segments have at most 65,536 pages.
    page: u16,
    class: u16,
    tenant: u16,
}

const _: () = assert!(size_of::<Slot>() == 58);

pub(super) struct Index {
    shards: Vec<RwLock<Shard>>,
    seed: u64,
}

#[derive(Default)]
struct Shard {
    table: HashTable<u32>,
    chunks: Vec<Vec<Slot>>,
    free: Vec<u32>,
}

impl Index {
    pub(super) fn new(seed: u64) -> Self {
        Self { shards: (0..SHARDS).map(|_| RwLock::default()).collect(), seed }
    }

    pub(super) fn get(&self, key: BlockKey) -> Option<Found> {
        let hash = hash_of(key, self.seed);
        let shard = self.read(hash);
        shard.find(hash, key).map(|slot| shard.slot(slot).found())
    }

    pub(super) fn contains(&self, key: BlockKey) -> bool {
        let hash = hash_of(key, self.seed);
        self.read(hash).find(hash, key).is_some()
    }

    /// Enters a block, or gives an existing one a new place. Returns what was there.
    pub(super) fn insert(&self, found: &Found) -> Option<Found> {
        let (hash, key) = (hash_of(found.meta.key, self.seed), found.meta.key);
        let mut shard = self.write(hash);
        if let Some(slot) = shard.find(hash, key) {
            return Some(std::mem::replace(shard.slot_mut(slot), Slot::of(found)).found());
        }
        shard.add(hash, Slot::of(found), self.seed);
        None
    }

    /// Drops a block, if it is there and (where given) at that place.
    pub(super) fn remove(&self, key: BlockKey, place: Option<Place>) -> Option<Found> {
        let hash = hash_of(key, self.seed);
        let mut shard = self.write(hash);
        let slot = shard.find(hash, key)?;
        let found = shard.slot(slot).found();
        if place.is_some_and(|place| place != found.place) {
            return None;
        }
        shard.drop_slot(hash, slot);
        Some(found)
    }

    /// Every block in a segment, found by looking at all: for segments whose own headers cannot be read.
    pub(super) fn in_segment(&self, segment: u32) -> Vec<Found> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.read();
            let slots = shard.table.iter().map(|&slot| shard.slot(slot));
            found.extend(slots.map(Slot::found).filter(|found| found.place.segment == segment));
        }
        found
    }

    /// Bytes of memory in use, allocated but empty slots included.
    pub(super) fn memory_bytes(&self) -> u64 {
        let of = |shard: &RwLock<Shard>| {
            let shard = shard.read();
            let slots = shard.chunks.iter().map(|chunk| chunk.capacity() * size_of::<Slot>()).sum::<usize>();
            (slots + shard.free.capacity() * 4 + shard.table.allocation_size()) as u64
        };
        self.shards.iter().map(of).sum()
    }

    fn read(&self, hash: u64) -> RwLockReadGuard<'_, Shard> {
        self.shards[(hash >> 32) as usize % SHARDS].read()
    }

    fn write(&self, hash: u64) -> RwLockWriteGuard<'_, Shard> {
        self.shards[(hash >> 32) as usize % SHARDS].write()
    }
}

impl Shard {
    fn find(&self, hash: u64, key: BlockKey) -> Option<u32> {
        self.table.find(hash, |&slot| { self.slot(slot).key } == key.0).copied()
    }

    fn slot(&self, slot: u32) -> &Slot {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn add(&mut self, hash: u64, new: Slot, seed: u64) {
        let slot = match self.free.pop() {
            Some(slot) => {
                *self.slot_mut(slot) = new;
                slot
            }
            None => self.push(new),
        };
        let chunks = &self.chunks;
        let rehash =
            |&slot: &u32| hash_of(BlockKey(chunks[slot as usize / CHUNK][slot as usize % CHUNK].key), seed);
        self.table.insert_unique(hash, slot, rehash);
    }

    fn push(&mut self, new: Slot) -> u32 {
        if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let before = (self.chunks.len() - 1) * CHUNK;
        let last = self.chunks.len() - 1;
        self.chunks[last].push(new);
        (before + self.chunks[last].len() - 1) as u32
    }

    fn drop_slot(&mut self, hash: u64, slot: u32) {
        if let Ok(entry) = self.table.find_entry(hash, |&found| found == slot) {
            entry.remove();
            self.free.push(slot);
        }
    }
}

impl Slot {
    fn of(found: &Found) -> Self {
        let Found { meta, checksum, place } = found;
        Self {
            key: meta.key.0,
            parent: meta.parent.unwrap_or_default().0,
            checksum: *checksum,
            segment: place.segment | if meta.parent.is_some() { HAS_PARENT } else { 0 },
            size: meta.size,
            depth: meta.depth,
            page: place.page as u16,
            class: meta.class,
            tenant: meta.tenant,
        }
    }

    fn found(&self) -> Found {
        let Self { key, parent, checksum, segment, size, depth, page, class, tenant } = *self;
        let (key, parent) = (BlockKey(key), (segment & HAS_PARENT != 0).then_some(BlockKey(parent)));
        let meta = BlockMeta { key, parent, depth, class, tenant, ttl_ms: 0, size };
        Found { meta, checksum, place: Place { segment: segment & !HAS_PARENT, page: page.into() } }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn found(key: u128, n: u32) -> Found {
        let parent = n.is_multiple_of(3).then_some(BlockKey(key ^ 1));
        let (class, tenant) = (n as u16, (n >> 3) as u16);
        let meta = BlockMeta { key: BlockKey(key), parent, depth: n, class, tenant, ttl_ms: 0, size: n + 1 };
        Found { meta, checksum: u64::from(n) << 33, place: Place { segment: n % 5, page: n % 65536 } }
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_map(steps in proptest::collection::vec((0..4u8, 0..200u128, any::<u32>()), 1..400)) {
            let index = Index::new(5);
            let mut model: HashMap<u128, Found> = HashMap::new();
            for (step, key, n) in steps {
                let (wide, n) = (key << 80 | key, n >> 1);
                match step {
                    0 | 1 => prop_assert_eq!(index.insert(&found(wide, n)), model.insert(wide, found(wide, n))),
                    2 => {
                        let gone = model.remove(&wide);
                        prop_assert_eq!(index.remove(BlockKey(wide), gone.map(|gone| gone.place)), gone);
                    }
                    _ => {
                        let elsewhere = Place { segment: 99, page: 0 };
                        prop_assert_eq!(index.remove(BlockKey(wide), Some(elsewhere)), None);
                    }
                }
                prop_assert_eq!(index.get(BlockKey(wide)), model.get(&wide).copied());
            }
            let in_two = model.values().filter(|found| found.place.segment == 2).count();
            prop_assert_eq!(index.in_segment(2).len(), in_two);
        }
    }

    #[test]
    fn a_block_costs_at_most_68_bytes_once_there_are_many() {
        let index = Index::new(1);
        let blocks = 400_000;
        for n in 0..blocks {
            index.insert(&found(u128::from(n) * 0x9e37_79b9_7f4a_7c15, n));
        }
        let each = index.memory_bytes() as f64 / f64::from(blocks);
        assert!(each < 68.0, "{each} bytes a block");
    }
}
