//! The order in which the rails to a peer are used.

/// Sets of rails, best first: a later set carries something only while no rail of an earlier one works. Within a set
/// rails share by what they can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order([u64; SETS]);

/// The most sets; what would come later shares the last one.
const SETS: usize = 6;

impl Default for Order {
    /// All rails alike.
    fn default() -> Self {
        Self([0; SETS])
    }
}

impl Order {
    /// Rails in the order of those given to [`Engine::connect`](super::Engine::connect): rails of one rank are a set, and
    /// the lowest rank is the best. Rails beyond those given come last.
    pub fn of_ranks<R: Ord>(ranks: &[R]) -> Self {
        let mut distinct: Vec<&R> = ranks.iter().collect();
        distinct.sort_unstable();
        distinct.dedup();
        let mut sets = [0; SETS];
        for (rail, rank) in ranks.iter().enumerate() {
            let set = distinct.partition_point(|other| *other < rank).min(SETS - 1);
            sets[set] |= bit(rail);
        }
        Self(sets)
    }

    /// The same order, but these rails are used only if no other works.
    pub(super) fn without(self, bits: u64) -> Self {
        Self(self.0.map(|set| set & !bits))
    }

    /// The sets in order, and last a set of all rails.
    fn sets(self) -> impl Iterator<Item = u64> {
        self.0.into_iter().chain([u64::MAX])
    }

    /// The candidates in the first set that has one, as a predicate over rails. `rails` is how many rails there are.
    pub fn first(self, rails: usize, candidate: impl Fn(usize) -> bool) -> impl Fn(usize) -> bool {
        let here = |set: u64, rail: usize| bit(rail) == 0 || set & bit(rail) != 0;
        let set = self.sets().find(|&set| (0..rails).any(|rail| here(set, rail) && candidate(rail)));
        move |rail| set.is_some_and(|set| here(set, rail)) && candidate(rail)
    }
}

/// The rail's bit, or 0 for a rail beyond the 64th, which counts as a member of every set.
pub(super) fn bit(rail: usize) -> u64 {
    1u64.checked_shl(rail as u32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_set_waits_for_the_earlier_ones_to_fail() {
        let check = |ranks: &[u8], working: &[usize], expected: &[usize]| {
            let rails = ranks.len().max(4);
            let first = Order::of_ranks(ranks).first(rails, |rail| working.contains(&rail));
            let found: Vec<usize> = (0..rails).filter(|&rail| first(rail)).collect();
            assert_eq!(found, expected, "{ranks:?} {working:?}");
        };
        check(&[], &[0, 2, 3], &[0, 2, 3]);
        check(&[2, 1, 2, 1], &[0, 1, 2, 3], &[1, 3]);
        check(&[2, 1, 2, 1], &[0, 2, 3], &[3]);
        check(&[2, 1, 2, 1], &[0, 2], &[0, 2]);
        check(&[2, 1, 2, 1], &[], &[]);
        check(&[1, 1], &[3], &[3]);
        let without = Order::of_ranks(&[0, 1]).without(1);
        assert!(without.first(2, |_| true)(1) && !without.first(2, |_| true)(0));
        assert!(without.first(2, |rail| rail == 0)(0), "rather than nothing");
        // More ranks than sets: the last ones share.
        check(&[0, 1, 2, 3, 4, 5, 6, 7], &[5, 6, 7], &[5, 6, 7]);
        check(&[0, 1, 2, 3, 4, 5, 6, 7], &[4, 5, 6, 7], &[4]);
    }
}
