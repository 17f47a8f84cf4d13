//! Blocks followed from use to use, whether they are in the pool or not, to learn when blocks are used again.
//!
//! Which blocks is a matter of their hash, so the sample is the same whatever the policy evicts: a block that left and comes
//! back is a reuse, and one that never does is time without reuse. The table is bounded: of four places the oldest is
//! given up, which ends what is known of that block and biases nothing.

use crate::tally::Tally;

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
    queue: u16,
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

    /// A block is used and is in `queue` from now on.
    pub(crate) fn used(&mut self, identity: u64, queue: u16, now_ms: u64, tally: &mut Tally) {
        let (weight, counted_ms) = (self.weight(), self.counted_ms);
        let Some(set) = self.set(identity) else { return };
        let next = Sample { identity, used_ms: now_ms, queue };
        if let Some(last) = set.iter_mut().find(|sample| sample.identity == identity) {
            last.count(counted_ms, now_ms, weight, tally);
            tally.reuse(last.queue, now_ms.saturating_sub(last.used_ms), weight);
            *last = next;
        } else if let Some(oldest) =
            set.iter_mut().min_by_key(|sample| (sample.identity != 0, sample.used_ms))
        {
            oldest.count(counted_ms, now_ms, weight, tally);
            *oldest = next;
        }
    }

    /// The block is in `queue` since its last use; so the time since then, as far as it is not counted yet.
    pub(crate) fn moved(&mut self, identity: u64, queue: u16) {
        let sample =
            self.set(identity).and_then(|set| set.iter_mut().find(|sample| sample.identity == identity));
        if let Some(sample) = sample {
            sample.queue = queue;
        }
    }

    /// The places where a block is followed, if it is.
    fn set(&mut self, identity: u64) -> Option<&mut [Sample]> {
        let hash = identity.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if identity == 0 || !is_followed(hash, self.thinning) {
            return None;
        }
        let first = (hash >> 40) as usize % (PLACES / WAYS) * WAYS;
        self.places.get_mut(first..first + WAYS)
    }

    /// Counts the time that has passed for all of them.
    pub(crate) fn count(&mut self, now_ms: u64, pool_blocks: u32, tally: &mut Tally) {
        let (weight, counted_ms) = (self.weight(), self.counted_ms);
        self.places.iter().for_each(|sample| sample.count(counted_ms, now_ms, weight, tally));
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
    fn count(&self, counted_ms: u64, now_ms: u64, weight: f64, tally: &mut Tally) {
        if self.identity != 0 {
            let from_ms = counted_ms.saturating_sub(self.used_ms);
            let to_ms = now_ms.saturating_sub(self.used_ms);
            tally.pass(self.queue, from_ms, to_ms, weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ages;
    use crate::cells::{Request, cell_of, queue_of};

    #[test]
    fn all_time_between_uses_is_counted_once() {
        let (mut samples, mut tally) = (Samples::new(), Tally::default());
        let [first, again, moved] = [(0, 0), (0, 1), (9, 1)]
            .map(|(brought, uses)| queue_of(0, Request { brought, known: 0 }, uses, false));
        samples.used(7, first, 1_000, &mut tally);
        samples.count(2_500, 1, &mut tally);
        samples.used(7, again, 4_000, &mut tally);
        samples.moved(7, moved);
        samples.count(4_000, 1, &mut tally);
        samples.used(0, again, 4_500, &mut tally); // no identity: not followed
        samples.moved(8, again); // not seen
        samples.count(9_000, 1, &mut tally);
        let told = [first, again, moved].map(|queue| {
            let counts = &tally.counts[cell_of(queue)];
            (counts.reused(), counts.exposure_ms.iter().sum::<f64>())
        });
        assert_eq!(told, [(1.0, 3_000.0), (0.0, 0.0), (0.0, 5_000.0)]);
        assert_eq!(tally.counts[cell_of(first)].reuses[ages::bin_of(3_000)], 1.0);
    }

    #[test]
    fn a_large_pool_is_sampled() {
        let (mut samples, mut tally) = (Samples::new(), Tally::default());
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 0, &mut tally));
        samples.count(0, 1 << 15, &mut tally);
        assert_eq!(samples.weight(), 16.0);
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 10, &mut tally));
        (1..=40_000).for_each(|identity| samples.used(identity, 0, 20, &mut tally));
        let reused = tally.reused();
        assert!((40_000.0..80_000.0).contains(&reused), "{reused}");
    }
}
