//! What a host of a cluster has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvasir_net::endpoint_pool::Stats as Endpoints;
use kvasir_store::times::{Times, TimesTaken};

#[derive(Default)]
pub(super) struct Counts {
    /// Copies that a peer took from here, and their bytes.
    pub(super) copied: AtomicU64,
    pub(super) copied_bytes: AtomicU64,
    /// Times from the offer of a batch of copies to a peer until its answer.
    pub(super) copy_times: Times,
    /// How many of those the peer had already.
    pub(super) had: AtomicU64,
    pub(super) no_room: AtomicU64,
    pub(super) copy_failed: AtomicU64,
    /// Copies taken in here.
    pub(super) taken: AtomicU64,
    pub(super) taken_bytes: AtomicU64,
    pub(super) corrupt: AtomicU64,
    /// Bytes not sent again after a transfer broke.
    pub(super) resumed_bytes: AtomicU64,
    pub(super) read_hits: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) read_misses: AtomicU64,
    pub(super) failovers: AtomicU64,
    pub(super) lent: AtomicU64,
    pub(super) repaired: AtomicU64,
    pub(super) not_repaired: AtomicU64,
    pub(super) trimmed: AtomicU64,
    pub(super) let_go: AtomicU64,
    pub(super) removed: AtomicU64,
    pub(super) told_late: AtomicU64,
    pub(super) restored: AtomicU64,
    pub(super) strangers: AtomicU64,
    /// Number of the first of this host's own news that is not safe on disk.
    pub(super) targets_kept: AtomicU64,
}

/// All counts of a host of a cluster. Totals count from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterStats {
    /// Replicated blocks known, copies of this host among them, and blocks that too few hosts hold.
    pub blocks: u64,
    pub own: u64,
    pub short: u64,
    /// Blocks not tracked because the table was full.
    pub table_full: u64,
    /// Copies that peers took from here and compared with their checksums; `had` of them were there already.
    pub copied: u64,
    pub copied_bytes: u64,
    /// How long batches of copies took, from their offer to the peer until its answer.
    pub copy_times: TimesTaken,
    pub had: u64,
    /// Copies that a peer had no room for, and those that failed otherwise; both are tried again.
    pub no_room: u64,
    pub copy_failed: u64,
    /// Copies taken in.
    pub taken: u64,
    pub taken_bytes: u64,
    /// Blocks from peers whose bytes were not what they should be: not used.
    pub corrupt: u64,
    /// Bytes not sent again when a broken transfer was resumed.
    pub resumed_bytes: u64,
    /// Blocks read from peers for a reader here, blocks that no holder had, and times the next holder was asked.
    pub read_hits: u64,
    pub read_bytes: u64,
    pub read_misses: u64,
    pub failovers: u64,
    /// Blocks lent to peers.
    pub lent: u64,
    /// Damaged blocks fetched again, and those that nobody could give back at once.
    pub repaired: u64,
    pub not_repaired: u64,
    /// Copies dropped because enough others hold the block, and those that the evictor chose.
    pub trimmed: u64,
    pub let_go: u64,
    /// Blocks removed because a peer said so.
    pub removed: u64,
    /// Removals kept in mind for hosts that are away, blocks that this host dropped when it heard of their removal late, and
    /// removals forgotten because there were too many: such a copy comes back with its host.
    pub removals_kept: u64,
    pub removals_told_late: u64,
    pub removals_forgotten: u64,
    /// Copies of this host that were known from before its start, and news of its own that a crash would forget now.
    pub targets_restored: u64,
    pub targets_unkept: u64,
    /// Connections refused: wrong secret, unknown name, no protocol of ours.
    pub strangers: u64,
    /// Connections to peers for transfers, open now, and what became of others.
    pub endpoints: u64,
    pub endpoint_failures: u64,
    pub endpoints_evicted: u64,
}

impl Counts {
    pub(super) fn stats(
        &self,
        blocks: usize,
        own: usize,
        short: usize,
        table_full: u64,
        pools: &[(usize, Endpoints)],
    ) -> ClusterStats {
        let read = |count: &AtomicU64| count.load(Relaxed);
        ClusterStats {
            blocks: blocks as u64,
            own: own as u64,
            short: short as u64,
            table_full,
            copied: read(&self.copied),
            copied_bytes: read(&self.copied_bytes),
            copy_times: self.copy_times.taken(),
            had: read(&self.had),
            no_room: read(&self.no_room),
            copy_failed: read(&self.copy_failed),
            taken: read(&self.taken),
            taken_bytes: read(&self.taken_bytes),
            corrupt: read(&self.corrupt),
            resumed_bytes: read(&self.resumed_bytes),
            read_hits: read(&self.read_hits),
            read_bytes: read(&self.read_bytes),
            read_misses: read(&self.read_misses),
            failovers: read(&self.failovers),
            lent: read(&self.lent),
            repaired: read(&self.repaired),
            not_repaired: read(&self.not_repaired),
            trimmed: read(&self.trimmed),
            let_go: read(&self.let_go),
            removed: read(&self.removed),
            removals_kept: 0,
            removals_told_late: read(&self.told_late),
            removals_forgotten: 0,
            targets_restored: read(&self.restored),
            targets_unkept: 0,
            strangers: read(&self.strangers),
            endpoints: pools.iter().map(|(open, _)| *open as u64).sum(),
            endpoint_failures: pools.iter().map(|(_, pool)| pool.connect_failures + pool.broken).sum(),
            endpoints_evicted: pools.iter().map(|(_, pool)| pool.evicted).sum(),
        }
    }
}

pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Relaxed);
}
