//! Removals of which a host that was away must still be told.
//!
//! Whoever removes says so to all hosts, and also which ones it could not tell. Each of those that heard it keeps that in
//! mind, so the news survives the remover; the first that reaches the host which was away tells it, before it believes
//! anything the other says, and takes no copy of such a block from it until then. A block that somebody stores again is
//! owed to nobody: equal keys mean equal bytes.

use std::collections::{HashMap, VecDeque};

use crate::table::Nodes;
use kvasir_protocol::block::BlockKey;

/// The most blocks remembered, about 60 B each. Beyond it the oldest are forgotten and counted; a copy of one on a host
/// that was away comes back with it.
pub(super) const OWED_MAX: usize = 1 << 16;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Owed {
    /// Which hosts have not heard of the removal, and its number.
    blocks: HashMap<BlockKey, (Nodes, u64)>,
    /// In order of removal; some are settled since, or were removed again.
    order: VecDeque<(BlockKey, u64)>,
    next: u64,
    forgotten: u64,
}

impl Owed {
    /// These blocks are removed, and these hosts do not know it yet.
    pub(super) fn owe(&mut self, keys: &[BlockKey], nodes: Nodes) {
        if nodes.is_empty() {
            return;
        }
        for &key in keys {
            let (owed, number) = self.blocks.entry(key).or_default();
            (*owed, *number) = (owed.and(nodes), self.next);
            self.order.push_back((key, self.next));
            self.next += 1;
        }
        // Outdated numbers go first; after that, what exceeds the bound is forgotten.
        if self.order.len() > 2 * OWED_MAX {
            let Self { blocks, order, .. } = self;
            order.retain(|(key, number)| blocks.get(key).is_some_and(|(_, last)| last == number));
        }
        while self.blocks.len() > OWED_MAX {
            let Some((key, number)) = self.order.pop_front() else { return };
            if self.blocks.get(&key).is_some_and(|&(_, last)| last == number) {
                self.blocks.remove(&key);
                self.forgotten += 1;
            }
        }
    }

    pub(crate) fn has(&self, key: BlockKey, node: usize) -> bool {
        self.blocks.get(&key).is_some_and(|(owed, _)| owed.has(node))
    }

    /// What a host must be told.
    pub(super) fn to(&self, node: usize) -> Vec<BlockKey> {
        // Called all the time, mostly in vain.
        self.blocks.iter().filter(|(_, (owed, _))| owed.has(node)).map(|(key, _)| *key).collect()
    }

    /// A host has heard of them.
    pub(super) fn told(&mut self, keys: &[BlockKey], node: usize) {
        for key in keys {
            let Some((owed, _)) = self.blocks.get_mut(key) else { continue };
            owed.remove(node);
            if owed.is_empty() {
                self.blocks.remove(key);
            }
        }
    }

    /// Blocks are stored again: who was away may keep its copies.
    pub(crate) fn settle(&mut self, keys: impl IntoIterator<Item = BlockKey>) {
        if self.blocks.is_empty() {
            return;
        }
        for key in keys {
            self.blocks.remove(&key);
        }
    }

    /// Blocks owed to some host, and blocks forgotten since the start because there were too many.
    pub(crate) fn counts(&self) -> (usize, u64) {
        (self.blocks.len(), self.forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_hears_of_it_once() {
        let mut owed = Owed::default();
        let keys = [1, 2, 3].map(BlockKey);
        owed.owe(&keys, Nodes::one(1).and(Nodes::one(2)));
        owed.owe(&keys[..1], Nodes::default());
        assert!(owed.has(keys[0], 1) && owed.has(keys[0], 2) && !owed.has(keys[0], 3));
        let mut first = owed.to(1);
        first.sort();
        assert_eq!(first, keys);
        owed.told(&first, 1);
        assert!(owed.to(1).is_empty() && owed.to(2).len() == 3);
        owed.settle([keys[1], BlockKey(9)]);
        assert!(!owed.has(keys[1], 2), "stored again");
        owed.told(&keys, 2);
        assert_eq!(owed.counts(), (0, 0));
    }

    #[test]
    fn it_is_bounded_and_forgets_the_oldest() {
        let mut owed = Owed::default();
        let keys: Vec<_> = (0..OWED_MAX as u128).map(BlockKey).collect();
        owed.owe(&keys, Nodes::one(1));
        // Removed once more, so it is no longer the oldest.
        owed.owe(&keys[..1], Nodes::one(1));
        owed.owe(&[BlockKey(u128::MAX)], Nodes::one(1));
        assert_eq!(owed.counts(), (OWED_MAX, 1));
        assert!(owed.has(keys[0], 1) && !owed.has(keys[1], 1) && owed.has(BlockKey(u128::MAX), 1));
        for _ in 0..3 {
            owed.settle(keys.iter().copied());
            owed.owe(&keys, Nodes::one(2));
        }
        assert!(owed.order.len() <= 2 * OWED_MAX + keys.len() && owed.counts().0 == OWED_MAX);
    }
}
