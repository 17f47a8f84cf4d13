//! The threads that watch: one ends transfers at their deadlines, one sees to it that rails are mended and grants
//! renewed.

use kvasir_os::thread;
use kvasir_os::time::{Duration, Instant};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::complete::Inner;
use super::peer::Peer;
use super::submit::Shared;

/// Transfers in flight, by deadline.
#[derive(Default)]
pub(super) struct Deadlines {
    by_time: BTreeMap<(Instant, u64), Weak<Inner>>,
    next: u64,
}

impl Shared {
    /// Looks at a transfer again at `when`.
    pub(super) fn watch_deadline(&self, inner: &Arc<Inner>, when: Instant) {
        let mut deadlines = self.deadlines.lock();
        let key = (when, deadlines.next);
        deadlines.next += 1;
        deadlines.by_time.insert(key, Arc::downgrade(inner));
        if deadlines.by_time.first_key_value().is_some_and(|(first, _)| *first == key) {
            self.deadlines_changed.notify_all();
        }
    }

    /// The watching thread.
    pub(super) fn watch(self: &Arc<Self>) {
        /// How often transfers that nobody holds any more are forgotten.
        const SWEEP: Duration = Duration::from_secs(1);
        while !self.ended.load(Ordering::Acquire) {
            self.end_overdue();
            let mut deadlines = self.deadlines.lock();
            deadlines.by_time.retain(|_, inner| inner.strong_count() > 0);
            let first = deadlines.by_time.first_key_value().map(|(key, _)| key.0);
            let sleep = first.map_or(SWEEP, |first| first.saturating_duration_since(self.now()).min(SWEEP));
            if !self.ended.load(Ordering::Acquire) {
                self.deadlines_changed.wait_for(&mut deadlines, sleep);
            }
        }
    }

    /// Ends transfers whose deadline has passed. Parts that a transport could not take back get a little longer; then
    /// their endpoint is closed, which ends them.
    pub(super) fn end_overdue(self: &Arc<Self>) {
        let overdue = {
            let mut deadlines = self.deadlines.lock();
            let later = deadlines.by_time.split_off(&(self.now(), u64::MAX));
            std::mem::replace(&mut deadlines.by_time, later)
        };
        for inner in overdue.into_values().filter_map(|inner| inner.upgrade()) {
            if inner.outcome().is_some() {
                continue;
            }
            if inner.mark_timed_out() {
                self.stop(&inner);
            } else {
                inner.flying().iter().for_each(|endpoint| endpoint.close());
            }
            if inner.outcome().is_none() {
                self.watch_deadline(&inner, self.now() + self.config.grace);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        let deadlines = self.deadlines.lock();
        deadlines.by_time.values().filter(|inner| inner.strong_count() > 0).count()
    }

    pub(super) fn want_mending(&self) {
        *self.mend_wanted.lock() = true;
        self.mend.notify_all();
    }

    /// The mending thread. Connecting blocks for as long as a peer does not answer, and the others' grants must not end
    /// meanwhile, so each peer that needs it is mended on a thread of its own.
    pub(super) fn mend_all(self: &Arc<Self>) {
        while !self.ended.load(Ordering::Acquire) {
            for peer in self.peers_to_mend() {
                let (shared, ailing) = (self.clone(), peer.clone());
                let mend = move || shared.mend_one(&ailing);
                if thread::Builder::new().name("kvasir-xfer-mend1".into()).spawn(mend).is_err() {
                    // No thread could be started, so mend one peer after the other.
                    self.mend_one(&peer);
                }
            }
            let mut wanted = self.mend_wanted.lock();
            if !*wanted && !self.ended.load(Ordering::Acquire) {
                self.mend.wait_for(&mut wanted, self.config.mend_interval);
            }
            *wanted = false;
        }
    }

    /// Peers that need mending now and are not being mended yet, marked as being mended. At most 32 are mended at once.
    fn peers_to_mend(&self) -> Vec<Arc<Peer>> {
        const AT_ONCE_MAX: usize = 32;
        let (now, peers) = (self.now(), self.peers.lock());
        let alive = || peers.iter().filter_map(Weak::upgrade);
        let busy = alive().filter(|peer| peer.mending.load(Ordering::Acquire)).count();
        let ailing = alive().filter(|peer| peer.ails(now) && !peer.mending.swap(true, Ordering::AcqRel));
        ailing.take(AT_ONCE_MAX.saturating_sub(busy)).collect()
    }

    fn mend_one(self: &Arc<Self>, peer: &Arc<Peer>) {
        peer.mend(self.now());
        peer.mending.store(false, Ordering::Release);
        self.pump(peer);
    }

    /// A round of the mending thread, on this one.
    #[cfg(test)]
    pub(super) fn mend_peers(self: &Arc<Self>) {
        self.peers_to_mend().iter().for_each(|peer| self.mend_one(peer));
    }
}
