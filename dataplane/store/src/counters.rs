//! What a tier counts while it works.

use std::sync::atomic::{AtomicU64, Ordering};

use super::store::TierStats;

/// The running totals of [`TierStats`].
#[derive(Debug, Default)]
pub struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    corrupt: AtomicU64,
    io_errors: AtomicU64,
    evicted: AtomicU64,
}

impl Counters {
    pub fn hit(&self, size: u32) {
        add(&self.hits, 1);
        add(&self.read_bytes, size.into());
    }

    pub fn miss(&self) {
        add(&self.misses, 1);
    }

    /// A damaged block, which is a miss as well.
    pub fn corrupt(&self) {
        add(&self.corrupt, 1);
        self.miss();
    }

    pub fn written(&self, size: u32) {
        add(&self.written_bytes, size.into());
    }

    pub fn io_error(&self) {
        add(&self.io_errors, 1);
    }

    /// A block that made room for others.
    pub fn evicted(&self) {
        add(&self.evicted, 1);
    }

    /// The totals; what the tier holds right now is left at 0.
    pub fn totals(&self) -> TierStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TierStats {
            hits: read(&self.hits),
            misses: read(&self.misses),
            read_bytes: read(&self.read_bytes),
            written_bytes: read(&self.written_bytes),
            corrupt: read(&self.corrupt),
            io_errors: read(&self.io_errors),
            evicted: read(&self.evicted),
            ..TierStats::default()
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}
