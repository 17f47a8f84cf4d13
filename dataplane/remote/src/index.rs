//! The blocks this host knows to be in the remote store, and the room that is left.

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::HashMap;

use kvasir_protocol::block::BlockKey;

/// Sizes by key, within a bound on blocks and one on bytes. About 40 B a block.
pub(super) struct Index {
    blocks_max: u64,
    capacity_bytes: u64,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    sizes: HashMap<BlockKey, u32>,
    /// Blocks known or being stored, and their bytes.
    blocks: u64,
    bytes: u64,
    /// Bytes of known blocks.
    known_bytes: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Room was taken; [`Index::settle`] tells whether the block was stored.
    Taken,
    Known,
    Full,
}

impl Index {
    pub(super) fn new(blocks_max: u64, capacity_bytes: u64) -> Self {
        Self { blocks_max, capacity_bytes, state: RwLock::default() }
    }

    /// Takes room for a block about to be stored. The caller keeps others off the key until it settles.
    pub(super) fn take_room(&self, key: BlockKey, size: u32) -> Room {
        let mut state = self.write();
        if state.sizes.contains_key(&key) {
            return Room::Known;
        }
        let bytes = state.bytes.saturating_add(size.into());
        if state.blocks >= self.blocks_max || bytes > self.capacity_bytes {
            return Room::Full;
        }
        state.blocks += 1;
        state.bytes = bytes;
        Room::Taken
    }

    /// Makes a block known, or gives its room back.
    pub(super) fn settle(&self, key: BlockKey, size: u32, stored: bool) {
        let mut state = self.write();
        if stored && state.sizes.insert(key, size).is_none() {
            state.known_bytes += u64::from(size);
        } else {
            state.blocks -= 1;
            state.bytes -= u64::from(size);
        }
    }

    /// Makes a block known that another host stored. Returns false if there is no room to remember it.
    pub(super) fn learn(&self, key: BlockKey, size: u32) -> bool {
        let room = self.take_room(key, size);
        if room == Room::Taken {
            self.settle(key, size, true);
        }
        room != Room::Full
    }

    pub(super) fn forget(&self, key: BlockKey) -> bool {
        let mut state = self.write();
        let Some(size) = state.sizes.remove(&key) else { return false };
        state.blocks -= 1;
        state.bytes -= u64::from(size);
        state.known_bytes -= u64::from(size);
        true
    }

    pub(super) fn size(&self, key: BlockKey) -> Option<u32> {
        self.read().sizes.get(&key).copied()
    }

    pub(super) fn sizes(&self, keys: &[BlockKey]) -> Vec<Option<u32>> {
        let state = self.read();
        keys.iter().map(|key| state.sizes.get(key).copied()).collect()
    }

    /// Known blocks and their bytes.
    pub(super) fn totals(&self) -> (u64, u64) {
        let state = self.read();
        (state.sizes.len() as u64, state.known_bytes)
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_given_back_and_bounded() {
        let index = Index::new(3, 100);
        let (a, b, c, d) = (BlockKey(1), BlockKey(2), BlockKey(3), BlockKey(4));
        assert_eq!((index.take_room(a, 60), index.take_room(b, 41)), (Room::Taken, Room::Full));
        assert_eq!((index.size(a), index.totals()), (None, (0, 0)), "not known before it is stored");
        index.settle(a, 60, true);
        assert_eq!((index.take_room(a, 60), index.totals()), (Room::Known, (1, 60)));
        assert_eq!(index.take_room(b, 40), Room::Taken);
        index.settle(b, 40, false);
        assert_eq!((index.totals(), index.size(b)), ((1, 60), None));
        assert!(index.learn(b, 1) && index.learn(c, 1) && index.learn(c, 1) && !index.learn(d, 1));
        assert_eq!((index.totals(), index.sizes(&[a, d])), ((3, 62), vec![Some(60), None]));
        assert!(index.forget(a) && !index.forget(a) && index.learn(d, 98));
        assert_eq!(index.totals(), (3, 100));
    }
}
