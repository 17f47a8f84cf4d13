//! Which blocks are on their way between tiers.

use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;

use kvasir_os::planted::{self, Bug};
use kvasir_os::time::Instant;
use kvasir_protocol::block::BlockKey;

/// The blocks under way, so that a removal reaches them too. A removal that only looked into the tiers could miss a
/// block that is in neither at that moment, and see it come back.
///
/// The rule: a mover of a block begins the move before it looks for the block, and at its end takes back what it
/// brought if the block was removed meanwhile. Once removed, a block stays so until its last move is over.
///
/// What a tier below takes may outlive this process. So a removal waits for copies that are on their way there, and learns which
/// of them could not be taken back.
#[derive(Debug, Default)]
pub(super) struct Moves {
    blocks: Mutex<HashMap<BlockKey, Block>>,
    /// A copy of a block that is being removed has come to its tier, or was taken back there.
    came_down: Condvar,
}

#[derive(Debug, Default)]
struct Block {
    moves: u32,
    removals: u32,
    removed: bool,
    /// Moves whose copy a tier below is taking.
    going_down: u32,
    /// How many of them have left there what was removed meanwhile.
    left_below: u32,
}

/// One move of one block; over when dropped.
#[derive(Debug)]
pub(super) struct Moving {
    moves: Arc<Moves>,
    key: BlockKey,
    goes_down: bool,
}

/// A removal at work: every move of these blocks, present or future, knows of it. Over when dropped.
#[derive(Debug)]
pub(super) struct Removing<'a> {
    moves: &'a Moves,
    keys: &'a [BlockKey],
    /// What earlier moves of each had left below.
    left_before: Vec<u32>,
}

impl Moves {
    pub(super) fn begin(self: &Arc<Self>, key: BlockKey) -> Moving {
        let mut blocks = self.blocks.lock();
        let block = blocks.entry(key).or_default();
        block.moves += 1;
        block.removed |= block.removals > 0;
        drop(blocks);
        Moving { moves: Arc::clone(self), key, goes_down: false }
    }

    pub(super) fn remove<'a>(&'a self, keys: &'a [BlockKey]) -> Removing<'a> {
        let mut blocks = self.blocks.lock();
        let remove = |&key: &BlockKey| {
            let block = blocks.entry(key).or_default();
            block.removals += 1;
            block.removed = true;
            block.left_below
        };
        let left_before = keys.iter().map(remove).collect();
        Removing { moves: self, keys, left_before }
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

    /// Before a tier below is given the block. False if it was removed since the move began: then it must not go there.
    pub(super) fn goes_down(&mut self) -> bool {
        let mut blocks = self.moves.blocks.lock();
        let Some(block) = blocks.get_mut(&self.key) else { return false };
        self.goes_down = !block.removed || planted::is(Bug::KeepsRemovedOnItsWayDown);
        block.going_down += u32::from(self.goes_down);
        self.goes_down
    }

    /// When the tier has answered. False if the block was removed meanwhile: then it must be taken back. A later removal finds it
    /// in the tier.
    pub(super) fn has_come_down(&mut self) -> bool {
        let is_well = |block: &Block| !block.removed || planted::is(Bug::KeepsRemovedOnItsWayDown);
        self.end_way_down(is_well)
    }

    /// The tier does not have it any more.
    pub(super) fn is_taken_back(&mut self) {
        self.end_way_down(|_| true);
    }

    /// Returns whether the way down is over now.
    fn end_way_down(&mut self, is_well: impl FnOnce(&Block) -> bool) -> bool {
        let mut blocks = self.moves.blocks.lock();
        let Some(block) = blocks.get_mut(&self.key).filter(|block| is_well(block)) else { return false };
        block.going_down -= u32::from(std::mem::take(&mut self.goes_down));
        self.moves.came_down.notify_all();
        true
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        let mut blocks = self.moves.blocks.lock();
        if let Some(block) = blocks.get_mut(&self.key).filter(|_| self.goes_down) {
            block.going_down -= 1;
            block.left_below += u32::from(block.removed);
            self.moves.came_down.notify_all();
        }
        Moves::end(&mut blocks, self.key, |block| &mut block.moves);
    }
}

impl Removing<'_> {
    /// Waits, until then at most, for copies of the blocks that tiers below are taking. Says of each block whether none is left
    /// there.
    pub(super) fn wait(&self, until: Instant) -> Vec<bool> {
        let mut blocks = self.moves.blocks.lock();
        let some_go_down = |blocks: &mut HashMap<BlockKey, Block>| {
            let goes_down = |key| blocks.get(key).is_some_and(|block| block.going_down > 0);
            self.keys.iter().any(goes_down)
        };
        let time = until.saturating_duration_since(Instant::now());
        self.moves.came_down.wait_while_for(&mut blocks, some_go_down, time);
        let none_left = |(key, &left_before): (&BlockKey, &u32)| {
            let is_well = |block: &Block| block.going_down == 0 && block.left_below == left_before;
            blocks.get(key).is_some_and(is_well)
        };
        self.keys.iter().zip(&self.left_before).map(none_left).collect()
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

    #[test]
    fn a_removal_learns_what_is_left_below() {
        let (moves, now) = (Arc::new(Moves::default()), Instant::now());
        let keys = [1, 2, 3, 4, 5, 6].map(BlockKey);
        let [mut before, mut back, mut left, mut under_way, mut queued, up] =
            keys.map(|key| moves.begin(key));
        for moving in [&mut before, &mut back, &mut left, &mut under_way] {
            assert!(moving.goes_down());
        }
        assert!(before.has_come_down());
        let removing = moves.remove(&keys);
        assert!(!queued.goes_down(), "it was removed while it waited");
        assert!(!back.has_come_down() && !left.has_come_down());
        back.is_taken_back();
        drop((before, back, left));
        assert_eq!(removing.wait(now), [true, true, false, false, true, true]);
        let again = moves.remove(&keys[2..4]);
        assert_eq!(again.wait(now), [true, false], "what was left is asked for by this removal itself");
        drop(under_way);
        assert_eq!(again.wait(now), [true, false]);
        drop((removing, again, queued, up));
        assert!(moves.blocks.lock().is_empty());
    }
}
