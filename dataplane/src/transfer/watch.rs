//! The two threads that watch: one ends transfers at their deadlines, one mends rails and renews grants.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::complete::Inner;
use super::submit::{Shared, lock};

/// Transfers in flight, by deadline.
#[derive(Default)]
pub(super) struct Deadlines {
    by_time: BTreeMap<(Instant, u64), Weak<Inner>>,
    next: u64,
}

impl Shared {
    pub(super) fn watch_deadline(&self, inner: &Arc<Inner>) {
        let mut deadlines = lock(&self.deadlines);
        let key = (inner.deadline, deadlines.next);
        deadlines.next += 1;
        deadlines.by_time.insert(key, Arc::downgrade(inner));
        if deadlines.by_time.first_key_value().is_some_and(|(first, _)| *first == key) {
            self.deadlines_changed.notify_all();
        }
    }

    /// The watching thread.
    pub(super) fn watch(self: &Arc<Self>) {
        while !self.ended.load(Ordering::Acquire) {
            for inner in self.overdue() {
                if inner.outcome().is_none() {
                    inner.mark_timed_out();
                    self.stop(&inner);
                }
            }
        }
    }

    /// Sleeps until a deadline passes, and gives the transfers whose did.
    fn overdue(&self) -> Vec<Arc<Inner>> {
        /// Transfers that completed are forgotten at this pace.
        const SWEEP: Duration = Duration::from_secs(1);
        let mut deadlines = lock(&self.deadlines);
        let now = Instant::now();
        let later = deadlines.by_time.split_off(&(now, u64::MAX));
        let overdue = std::mem::replace(&mut deadlines.by_time, later);
        if overdue.is_empty() {
            deadlines.by_time.retain(|_, inner| inner.strong_count() > 0);
            let first =
                deadlines.by_time.first_key_value().map(|(key, _)| key.0.saturating_duration_since(now));
            let sleep = first.unwrap_or(SWEEP).min(SWEEP);
            if !self.ended.load(Ordering::Acquire) {
                drop(self.deadlines_changed.wait_timeout(deadlines, sleep));
            }
        }
        overdue.into_values().filter_map(|inner| inner.upgrade()).collect()
    }

    pub(super) fn want_mending(&self) {
        *lock(&self.mend_wanted) = true;
        self.mend.notify_all();
    }

    /// The mending thread.
    pub(super) fn mend_all(self: &Arc<Self>) {
        while !self.ended.load(Ordering::Acquire) {
            let peers: Vec<_> = lock(&self.peers).iter().filter_map(Weak::upgrade).collect();
            for peer in peers {
                peer.mend();
                self.pump(&peer);
            }
            let mut wanted = lock(&self.mend_wanted);
            if !*wanted && !self.ended.load(Ordering::Acquire) {
                let waited = self.mend.wait_timeout(wanted, self.config.mend_interval);
                wanted = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            *wanted = false;
        }
    }
}
