//! Sums over time, in memory that does not grow with it.

use std::ops::AddAssign;

/// Sums in equal parts of the time. When there would be too many parts, every two become one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parts<T> {
    most: usize,
    width_us: u64,
    sums: Vec<T>,
}

impl<T: Clone + Default + AddAssign> Parts<T> {
    /// `width_us`: of a part, as long as `most` of them are enough.
    pub(super) fn new(most: usize, width_us: u64) -> Self {
        Self { most, width_us, sums: Vec::new() }
    }

    /// Adds to the part that holds this time.
    pub(super) fn add(&mut self, at_us: u64, what: T) {
        while at_us / self.width_us >= self.most as u64 {
            self.widen();
        }
        let at = (at_us / self.width_us) as usize;
        if self.sums.len() <= at {
            self.sums.resize(at + 1, T::default());
        }
        self.sums[at] += what;
    }

    fn widen(&mut self) {
        self.width_us *= 2;
        let sum = |pair: &[T]| {
            let mut sum = pair[0].clone();
            pair[1..].iter().for_each(|other| sum += other.clone());
            sum
        };
        self.sums = self.sums.chunks(2).map(sum).collect();
    }

    /// Width of a part, µs.
    pub(super) fn width_us(&self) -> u64 {
        self.width_us
    }

    /// Each part's sum, up to the last that got something.
    pub(super) fn sums(&self) -> &[T] {
        &self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_part_is_the_sum_of_what_fell_into_it(
            most in 1_usize..9,
            width_us in 1_u64..50,
            added in prop::collection::vec((0_u64..5_000, 1_u64..9), 0..60),
        ) {
            let mut parts = Parts::new(most, width_us);
            added.iter().for_each(|&(at_us, what)| parts.add(at_us, what));
            prop_assert!(parts.sums().len() <= most);
            prop_assert_eq!(parts.width_us() % width_us, 0);
            prop_assert!((parts.width_us() / width_us).is_power_of_two());
            for (n, &sum) in parts.sums().iter().enumerate() {
                let inside = added.iter().filter(|(at_us, _)| (at_us / parts.width_us()) as usize == n);
                prop_assert_eq!(sum, inside.map(|(_, what)| what).sum::<u64>());
            }
            let last = added.iter().map(|(at_us, _)| at_us / parts.width_us()).max();
            prop_assert_eq!(parts.sums().len() as u64, last.map_or(0, |last| last + 1));
        }
    }
}
