//! Plain numbers about the data plane; the host gives them names and exports them.

use crate::tier::lifecycle::LifecycleCounts;

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
    pub hit_bytes: u64,
    pub stored_bytes: u64,
    pub evicted_bytes: u64,
    /// Puts of a block that was resident.
    pub already_stored: u64,
    /// Blocks dropped, or refused at commit, because bytes and checksum differed.
    pub checksum_failures: u64,
    /// Held now.
    pub leases: u64,
    pub leases_expired: u64,
    /// Open now.
    pub reservations: u64,
    pub reservations_reclaimed: u64,
    /// Puts that failed for want of space, and put batches that had to wait for it.
    pub pool_full: u64,
    pub put_waits: u64,
    pub victims_ready: u64,
    pub events_waiting: u64,
    /// Hits the eviction policy was not told about.
    pub hits_dropped: u64,
    /// Tenant 0 (everyone without settings) first, then those with settings.
    pub tenants: Vec<TenantMetrics>,
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
