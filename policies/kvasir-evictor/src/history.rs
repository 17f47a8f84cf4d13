//! How often blocks that left were used, so that one that comes back need not prove itself again.

const WAYS: usize = 4;
/// The least blocks remembered: 1 MiB of them.
const PLACES_MIN: usize = 1 << 16;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// 0: none.
    identity: u64,
    uses: u32,
    /// Number of the departure, for age.
    left: u32,
}

/// Bounded by four blocks for each slot; of four places the one whose block left longest ago is given up.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    entries: Vec<Entry>,
    departures: u32,
}

impl History {
    pub(crate) fn new(slots: u32) -> Self {
        let places = (slots as usize * 4).max(PLACES_MIN).next_power_of_two();
        Self { entries: vec![Entry::default(); places], departures: 0 }
    }

    pub(crate) fn leaves(&mut self, identity: u64, uses: u32) {
        self.departures = self.departures.wrapping_add(1);
        let (left, now) = (self.departures, self.departures);
        let age = |entry: &Entry| if entry.identity == 0 { u32::MAX } else { now.wrapping_sub(entry.left) };
        if let Some(place) = self.set(identity).iter_mut().max_by_key(|entry| age(entry)) {
            *place = Entry { identity, uses, left };
        }
    }

    /// Forgets the block; how often it had been used.
    pub(crate) fn returns(&mut self, identity: u64) -> Option<u32> {
        let set = self.set(identity).iter_mut();
        let entry = set.into_iter().find(|entry| identity != 0 && entry.identity == identity)?;
        Some(std::mem::take(entry).uses)
    }

    fn set(&mut self, identity: u64) -> &mut [Entry] {
        let sets = self.entries.len() / WAYS;
        let first = (identity.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % sets.max(1) * WAYS;
        let end = (first + WAYS).min(self.entries.len());
        &mut self.entries[first..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_left_last_is_remembered() {
        let mut history = History::new(1);
        (1..=200_000).for_each(|identity| history.leaves(identity, identity as u32));
        assert_eq!(history.entries.len(), PLACES_MIN);
        let known = (190_001..=200_000).filter(|&id| history.returns(id) == Some(id as u32)).count();
        assert!(known > 9_900, "{known} of the last 10000");
        assert_eq!((history.returns(200_000), history.returns(0)), (None, None));
        assert_eq!(History::default().returns(1), None);
        History::default().leaves(1, 1);
    }
}
