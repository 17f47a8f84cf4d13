//! The candidates of all queues during one decision, the least worth of them at hand.

/// The candidate of a queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Head {
    /// Infinite if the queue has none.
    pub(crate) worth: f64,
    pub(crate) slot: u32,
    pub(crate) depth: u32,
}

impl Head {
    pub(crate) const NONE: Self = Self { worth: f64::INFINITY, slot: 0, depth: 0 };

    /// Worth less, or the same and deeper in its chain.
    fn goes_before(&self, other: &Self) -> bool {
        self.worth < other.worth || (self.worth == other.worth && self.depth > other.depth)
    }
}

/// A tournament: of two heads that are equal the first stays.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heads {
    heads: Vec<Head>,
    /// How many were taken up; there is room for a power of two.
    taken: usize,
    /// Node `n` has the winner of its children `2n` and `2n + 1`; the leaves are the heads.
    winners: Vec<u16>,
}

impl Heads {
    /// Takes up the heads of a decision, at most 2^16.
    pub(crate) fn fill(&mut self, heads: impl Iterator<Item = Head>) {
        self.heads.clear();
        self.heads.extend(heads);
        self.taken = self.heads.len();
        self.heads.resize(self.heads.len().next_power_of_two(), Head::NONE);
        let leaves = self.heads.len();
        self.winners.clear();
        self.winners.resize(leaves, 0);
        self.winners.extend((0..leaves).map(|place| place as u16));
        (1..leaves).rev().for_each(|node| self.play(node));
    }

    /// Place and slot of the head that is worth least.
    pub(crate) fn least(&self) -> Option<(usize, u32)> {
        let place = usize::from(*self.winners.get(1)?);
        let head = self.heads.get(place).filter(|head| head.worth < f64::INFINITY)?;
        Some((place, head.slot))
    }

    /// Takes up one more, in the next place.
    pub(crate) fn push(&mut self, head: Head) {
        if self.taken < self.heads.len() {
            self.taken += 1;
            self.set(self.taken - 1, head);
        } else {
            let heads = std::mem::take(&mut self.heads);
            self.fill(heads.into_iter().chain([head]));
        }
    }

    pub(crate) fn set(&mut self, place: usize, head: Head) {
        if let Some(old) = self.heads.get_mut(place) {
            *old = head;
            let mut node = (place + self.heads.len()) / 2;
            while node > 0 {
                self.play(node);
                node /= 2;
            }
        }
    }

    fn play(&mut self, node: usize) {
        let [first, second] = [2 * node, 2 * node + 1].map(|child| self.winners[child]);
        let [a, b] = [first, second].map(|place| &self.heads[usize::from(place)]);
        self.winners[node] = if b.goes_before(a) { second } else { first };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head() -> impl Strategy<Value = Head> {
        (0..4_u8, any::<u32>(), 0..3_u32).prop_map(|(worth, slot, depth)| match worth {
            0 => Head::NONE,
            _ => Head { worth: worth.into(), slot, depth },
        })
    }

    proptest! {
        #[test]
        fn the_least_is_that_of_a_scan(
            first in prop::collection::vec(head(), 0..20),
            changes in prop::collection::vec((0..20_usize, head()), 0..40),
        ) {
            let (mut plain, mut heads) = (first.clone(), Heads::default());
            heads.fill(first.into_iter());
            for (place, head) in [(usize::MAX, Head::NONE)].into_iter().chain(changes) {
                if place < plain.len() {
                    plain[place] = head;
                    heads.set(place, head);
                } else if place < 20 {
                    plain.push(head);
                    heads.push(head);
                }
                let mut least: Option<(usize, &Head)> = None;
                for (place, head) in plain.iter().enumerate() {
                    if head.worth < f64::INFINITY && least.is_none_or(|(_, least)| head.goes_before(least)) {
                        least = Some((place, head));
                    }
                }
                prop_assert_eq!(heads.least(), least.map(|(place, head)| (place, head.slot)));
            }
        }
    }
}
