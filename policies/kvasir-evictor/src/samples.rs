//! Blocks followed from use to use, whether they are in the pool or not, to learn when blocks are used again.
//!
//! Which blocks is a matter of their hash, so the sample is the same whatever the policy evicts: a block that left and comes
//! back is a reuse, and one that never does is time without reuse. The table is bounded: of four places the oldest is
//! given up, which ends what is known of that block and biases nothing.

use crate::ages;
use crate::curve::Counts;

/// Blocks followed at once.
const PLACES: usize = 1 << 14;
const WAYS: usize = 4;
/// How many times the pool's blocks the sample stands for, at least: what is evicted is followed for longer than it stays.
const SPAN: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// 0: none.
    identity: u64,
    used_ms: u64,
    cell: u16,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    places: Vec<Sample>,
    /// One block in 2^`thinning` is followed.
    thinning: u32,
    /// Until when time was counted.
    counted_ms: u64,
}

impl Samples {
    /// Follows no block yet; the default follows none ever.
    pub(crate) fn new() -> Self {
        Self { places: vec![Sample::default(); PLACES], ..Self::default() }
    }

    /// How many blocks each stands for.
    pub(crate) fn weight(&self) -> f64 {
        (1_u64 << self.thinning) as f64
    }

    /// A block is used and is in `cell` from now on.
    pub(crate) fn used(&mut self, identity: u64, cell: u16, now_ms: u64, counts: &mut [Counts]) {
        let hash = identity.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if identity == 0 || self.places.is_empty() || !is_followed(hash, self.thinning) {
            return;
        }
        let (weight, counted_ms) = (self.weight(), self.counted_ms);
        let first = (hash >> 40) as usize % (PLACES / WAYS) * WAYS;
        let set = &mut self.places[first..first + WAYS];
        let next = Sample { identity, used_ms: now_ms, cell };
        if let Some(last) = set.iter_mut().find(|sample| sample.identity == identity) {
            last.count(counted_ms, now_ms, weight, counts);
            let age_ms = now_ms.saturating_sub(last.used_ms);
            counts[usize::from(last.cell)].reuses[ages::bin_of(age_ms)] += weight;
            *last = next;
        } else if let Some(oldest) =
            set.iter_mut().min_by_key(|sample| (sample.identity != 0, sample.used_ms))
        {
            oldest.count(counted_ms, now_ms, weight, counts);
            *oldest = next;
        }
    }

    /// Counts the time that has passed for all of them.
    pub(crate) fn count(&mut self, now_ms: u64, pool_blocks: u32, counts: &mut [Counts]) {
        let (weight, counted_ms) = (self.weight(), self.counted_ms);
        self.places.iter().for_each(|sample| sample.count(counted_ms, now_ms, weight, counts));
        self.counted_ms = self.counted_ms.max(now_ms);
        while (u64::from(pool_blocks) * SPAN) >> self.thinning > PLACES as u64 {
            self.thinning += 1;
        }
        if self.weight() > weight {
            let thinning = self.thinning;
            let hash = |sample: &Sample| sample.identity.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let gone = self.places.iter_mut().filter(|sample| !is_followed(hash(sample), thinning));
            gone.for_each(|sample| *sample = Sample::default());
        }
    }
}

fn is_followed(hash: u64, thinning: u32) -> bool {
    (hash >> 16) & ((1 << thinning) - 1) == 0
}

impl Sample {
    fn count(&self, counted_ms: u64, now_ms: u64, weight: f64, counts: &mut [Counts]) {
        if self.identity != 0 {
            let from_ms = counted_ms.saturating_sub(self.used_ms);
            let to_ms = now_ms.saturating_sub(self.used_ms);
            ages::add_span(&mut counts[usize::from(self.cell)].exposure_ms, from_ms, to_ms, weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_time_between_uses_is_counted_once() {
        let (mut samples, mut counts) = (Samples::new(), vec![Counts::default(); 2]);
        samples.used(7, 0, 1_000, &mut counts);
        samples.count(2_500, 1, &mut counts);
        samples.used(7, 1, 4_000, &mut counts);
        samples.count(4_000, 1, &mut counts);
        samples.used(0, 1, 4_500, &mut counts); // no identity: not followed
        samples.count(9_000, 1, &mut counts);
        let told = counts.iter().map(|c| (c.reused(), c.exposure_ms.iter().sum::<f64>()));
        assert_eq!(told.collect::<Vec<_>>(), [(1.0, 3_000.0), (0.0, 5_000.0)]);
        assert_eq!(counts[0].reuses[ages::bin_of(3_000)], 1.0);
    }

    #[test]
    fn a_large_pool_is_sampled() {
        let (mut samples, mut counts) = (Samples::new(), vec![Counts::default(); 1]);
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 0, &mut counts));
        samples.count(0, 1 << 15, &mut counts);
        assert_eq!(samples.weight(), 16.0);
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 10, &mut counts));
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 20, &mut counts));
        let reused = counts[0].reused();
        assert!((40_000.0..80_000.0).contains(&reused), "{reused}");
    }
}
