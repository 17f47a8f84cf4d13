//! Plain numbers about the data plane; the host gives them names and exports them.

use crate::ghosts::MISS_CAUSES;
use crate::lifecycle::LifecycleCounts;

/// A DRAM store at one moment. Totals count from its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreMetrics {
    /// Blocks per state, and steps between states.
    pub lifecycle: LifecycleCounts,
    pub pool_bytes: u64,
    pub free_bytes: u64,
    pub largest_free_bytes: u64,
    pub free_extents: u64,
    /// Lookups that lent a block, and those that found none (`exists` and `stat` count as neither).
    pub hits: u64,
    pub misses: u64,
    /// The same misses by [`MissCause`](crate::ghosts::MissCause).
    pub misses_by_cause: [u64; MISS_CAUSES],
    pub hit_bytes: u64,
    pub stored_bytes: u64,
    pub evicted_bytes: u64,
    /// Puts of a block that was resident.
    pub already_stored: u64,
    /// Blocks dropped, or refused at commit, because bytes and checksum differed.
    pub checksum_failures: u64,
    /// Leases held now.
    pub leases: u64,
    pub leases_expired: u64,
    /// Reservations open now.
    pub reservations: u64,
    pub reservations_reclaimed: u64,
    /// Held back now because a late writer may still write there; places held back so far; and reservations refused
    /// because half of the pool was.
    pub quarantined_bytes: u64,
    pub quarantined: u64,
    pub quarantine_refused: u64,
    /// Puts that failed because there was no space, and put batches that had to wait for it.
    pub pool_full: u64,
    pub put_waits: u64,
    pub victims_ready: u64,
    pub events_waiting: u64,
    /// Hits not reported to the eviction policy.
    pub hits_dropped: u64,
    /// From the reservation of a block until it was visible.
    pub creation: Histogram,
    /// How long evicted blocks had been resident, and all blocks that ended in any way.
    pub age_at_eviction: Histogram,
    pub lifetime: Histogram,
    /// Between one use of a block and the next (the first: since it was stored).
    pub reuse_interval: Histogram,
    /// Blocks held for sending them elsewhere: how long, and their bytes.
    pub migration: Histogram,
    pub migrated_bytes: u64,
    pub scrub: ScrubMetrics,
    /// Tenant 0 (all tenants without settings) first, then those with settings.
    pub tenants: Vec<TenantMetrics>,
}

/// The search for blocks whose bytes have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubMetrics {
    pub bytes: u64,
    pub blocks: u64,
    /// Dropped, because their bytes no longer matched their checksums.
    pub dropped: u64,
    /// Full passes over the store, and when the last one ended.
    pub passes: u64,
    pub last_pass_ms: Option<u64>,
}

/// Times in buckets of powers of two: bucket `i` counts those below 2^i ms that are in no earlier one, the last
/// also all longer ones (from 12 days on).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    pub buckets: [u64; 32],
    pub sum_ms: u64,
}

impl Histogram {
    pub fn record(&mut self, ms: u64) {
        let bucket = (u64::BITS - ms.leading_zeros()) as usize;
        self.buckets[bucket.min(self.buckets.len() - 1)] += 1;
        self.sum_ms = self.sum_ms.saturating_add(ms);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    pub fn add(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(other.buckets).for_each(|(mine, theirs)| *mine += theirs);
        self.sum_ms = self.sum_ms.saturating_add(other.sum_ms);
    }
}

/// One tenant's part of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantMetrics {
    pub tenant: u16,
    /// Bytes its blocks occupy, in units that the pool hands out.
    pub used_bytes: u64,
    pub pinned_bytes: u64,
    pub quota_bytes: Option<u64>,
    pub floor_bytes: u64,
    /// Puts refused because its quota was full.
    pub quota_full: u64,
    /// Victims refused because it had no more than its floor.
    pub floor_kept: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_its_bucket() {
        let mut times = Histogram::default();
        for (ms, bucket) in [(0, 0), (1, 1), (2, 2), (3, 2), (1023, 10), (1024, 11), (u64::MAX, 31)] {
            let before = times.buckets[bucket];
            times.record(ms);
            assert_eq!(times.buckets[bucket], before + 1, "{ms}");
        }
        let mut sum = times;
        sum.add(&times);
        assert_eq!((sum.count(), sum.sum_ms), (14, u64::MAX));
    }
}
