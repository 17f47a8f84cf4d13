//! Which blocks are on their way between tiers.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use kvasir_protocol::block::BlockKey;

/// The blocks under way, so that a removal reaches them too. A removal that only looked into the tiers could miss a
/// block that is in neither at that moment, and see it come back.
///
/// The rule: a mover of a block begins the move before it looks for the block, and at its end takes back what it
/// brought if the block was removed meanwhile. Once removed, a block stays so until its last move is over.
#[derive(Debug, Default)]
pub(super) struct Moves {
    blocks: Mutex<HashMap<BlockKey, Block>>,
}

#[derive(Debug, Default)]
struct Block {
    moves: u32,
    removals: u32,
    removed: bool,
}

/// One move of one block; over when dropped.
#[derive(Debug)]
pub(super) struct Moving {
    moves: Arc<Moves>,
    key: BlockKey,
}

/// A removal at work: every move of these blocks, present or future, knows of it. Over when dropped.
#[derive(Debug)]
pub(super) struct Removing<'a> {
    moves: &'a Moves,
    keys: &'a [BlockKey],
}

impl Moves {
    pub(super) fn begin(self: &Arc<Self>, key: BlockKey) -> Moving {
        let mut blocks = self.blocks.lock();
        let block = blocks.entry(key).or_default();
        block.moves += 1;
        block.removed |= block.removals > 0;
        drop(blocks);
        Moving { moves: Arc::clone(self), key }
    }

    pub(super) fn remove<'a>(&'a self, keys: &'a [BlockKey]) -> Removing<'a> {
        let mut blocks = self.blocks.lock();
        for &key in keys {
            let block = blocks.entry(key).or_default();
            block.removals += 1;
            block.removed = true;
        }
        Removing { moves: self, keys }
    }

    /// Takes back what `begin` or `remove` did, and forgets the block if that was all.
    fn end(blocks: &mut HashMap<BlockKey, Block>, key: BlockKey, count: fn(&mut Block) -> &mut u32) {
        let Some(block) = blocks.get_mut(&key) else { return };
        *count(block) -= 1;
        if block.moves == 0 && block.removals == 0 {
            blocks.remove(&key);
        }
    }
}

impl Moving {
    pub(super) fn key(&self) -> BlockKey {
        self.key
    }

    /// Whether the block was removed since the move began.
    pub(super) fn is_removed(&self) -> bool {
        self.moves.blocks.lock().get(&self.key).is_some_and(|block| block.removed)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        Moves::end(&mut self.moves.blocks.lock(), self.key, |block| &mut block.moves);
    }
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        let mut blocks = self.moves.blocks.lock();
        self.keys.iter().for_each(|&key| Moves::end(&mut blocks, key, |block| &mut block.removals));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_known_until_the_last_move_is_over() {
        let moves = Arc::new(Moves::default());
        let (a, other) = (moves.begin(BlockKey(1)), moves.begin(BlockKey(9)));
        let keys = [BlockKey(1), BlockKey(2)];
        let removing = moves.remove(&keys);
        let (b, late) = (moves.begin(BlockKey(1)), moves.begin(BlockKey(2)));
        drop((removing, a));
        assert_eq!([&b, &late, &other].map(Moving::is_removed), [true, true, false]);
        assert!(
            moves.begin(BlockKey(1)).is_removed(),
            "it may find what another move has not taken back yet"
        );
        drop((b, late, other));
        assert!(!moves.begin(BlockKey(1)).is_removed());
        assert!(moves.blocks.lock().is_empty());
    }
}
