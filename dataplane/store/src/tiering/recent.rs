//! A bounded memory of blocks seen lately.

use kvasir_protocol::block::BlockKey;

/// Remembers when blocks were seen. A table with one place per residue of a key: a newer block displaces an older
/// one, so it forgets at about the rate that it is told, needs no clean-up, and costs 16 B a place.
#[derive(Debug)]
pub(super) struct Recent {
    /// (identity, milliseconds + 1); 0 = never.
    places: Vec<(u64, u64)>,
}

impl Recent {
    pub(super) fn new(places: usize) -> Self {
        Self { places: vec![(0, 0); places.max(1)] }
    }

    /// Milliseconds since the block was seen, if that is remembered.
    pub(super) fn seen_ms_ago(&self, key: BlockKey, now_ms: u64) -> Option<u64> {
        let (identity, seen) = self.places[self.place(key)];
        (seen > 0 && identity == key.identity()).then(|| (now_ms + 1).saturating_sub(seen))
    }

    pub(super) fn note(&mut self, key: BlockKey, now_ms: u64) {
        let place = self.place(key);
        self.places[place] = (key.identity(), now_ms + 1);
    }

    pub(super) fn forget(&mut self, key: BlockKey) {
        let place = self.place(key);
        if self.places[place].0 == key.identity() {
            self.places[place] = (0, 0);
        }
    }

    fn place(&self, key: BlockKey) -> usize {
        (key.identity() % self.places.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_block_of_a_place_is_remembered() {
        let mut recent = Recent::new(4);
        let [a, same_place, b] = [BlockKey(1), BlockKey(5), BlockKey(2)];
        assert_eq!(recent.seen_ms_ago(a, 0), None);
        recent.note(a, 0);
        recent.note(b, 10);
        assert_eq!((recent.seen_ms_ago(a, 0), recent.seen_ms_ago(a, 30)), (Some(0), Some(30)));
        recent.note(same_place, 40);
        assert_eq!([a, same_place, b].map(|key| recent.seen_ms_ago(key, 50)), [None, Some(10), Some(40)]);
        recent.forget(a);
        recent.forget(b);
        assert_eq!([same_place, b].map(|key| recent.seen_ms_ago(key, 50)), [Some(10), None]);
    }
}
