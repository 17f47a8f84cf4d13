//! The words that schedulers leave for later decisions, by session and by tenant.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Memos by key. What was written longest ago is forgotten first.
#[derive(Debug)]
pub(super) struct Memos<K> {
    memos: HashMap<K, Memo>,
    /// Keys by when they were written last.
    order: BTreeMap<u64, K>,
    writes: u64,
    limit: usize,
    forgotten: u64,
}

#[derive(Clone, Copy, Debug)]
struct Memo {
    word: u64,
    written: u64,
}

impl<K: Copy + Eq + Hash> Memos<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self { memos: HashMap::new(), order: BTreeMap::new(), writes: 0, limit, forgotten: 0 }
    }

    /// 0 means that none was written, or that it was forgotten.
    pub(super) fn get(&self, key: K) -> u64 {
        self.memos.get(&key).map_or(0, |memo| memo.word)
    }

    /// A memo of 0 is none, and takes no room.
    pub(super) fn set(&mut self, key: K, word: u64) {
        if let Some(old) = self.memos.remove(&key) {
            self.order.remove(&old.written);
        }
        if word == 0 {
            return;
        }
        if self.memos.len() >= self.limit
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.memos.remove(&oldest);
            self.forgotten += 1;
        }
        self.writes += 1;
        self.order.insert(self.writes, key);
        self.memos.insert(key, Memo { word, written: self.writes });
    }

    /// Memos that made room for others.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_written_last_is_kept(
            writes in prop::collection::vec((0..12u32, 0..4u64), 0..100),
            limit in 1..8usize,
        ) {
            let mut memos = Memos::new(limit);
            let mut model: Vec<(u32, u64)> = Vec::new(); // oldest first
            for (key, word) in writes {
                memos.set(key, word);
                model.retain(|(known, _)| *known != key);
                if word > 0 {
                    model.push((key, word));
                }
                if model.len() > limit {
                    model.remove(0);
                }
                for key in 0..12 {
                    let expected = model.iter().find(|(known, _)| *known == key).map_or(0, |(_, word)| *word);
                    prop_assert_eq!(memos.get(key), expected);
                }
                prop_assert_eq!(memos.order.len(), memos.memos.len());
            }
        }
    }
}
