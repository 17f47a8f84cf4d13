//! What this host knows of copies, here and elsewhere, and waiting for it to change.

use kvasir_os::planted::{self, Bug};
use kvasir_os::time::{Duration, Instant};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::removal::Generations;
use super::stop::Stop;
use super::table::{Fact, Log, Table};

/// The most facts that a follower of the news takes at once.
pub(super) const FACTS_MAX: usize = 4096;

/// See the [module](self).
pub(super) struct Copies {
    table: Mutex<Table>,
    /// What is known of copies elsewhere changed, or the host stops.
    heard: Condvar,
    /// The log of the table, under a lock of its own: heartbeats do not wait for the table.
    log: Arc<Mutex<Log>>,
    /// The log grew, or the host stops.
    news: Condvar,
    /// How far it had grown when those who follow it were last told.
    told: AtomicU64,
    pub(super) generations: Generations,
    stop: Arc<Stop>,
}

impl Copies {
    pub(super) fn new(table: Table, stop: &Arc<Stop>) -> Self {
        Self {
            log: table.shared_log(),
            table: Mutex::new(table),
            heard: Condvar::new(),
            news: Condvar::new(),
            told: AtomicU64::new(0),
            generations: Generations::default(),
            stop: Arc::clone(stop),
        }
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Tells those who wait that the table may have changed, and its log with it.
    pub(super) fn changed(&self) {
        self.heard.notify_all();
        if self.has_news() {
            self.news.notify_all();
        }
    }

    /// Whether the log has grown since the last look. What one host says is heard by all others, and most of it is no news of theirs:
    /// a thread for each peer would wake up for nothing.
    fn has_news(&self) -> bool {
        let end = self.log.lock().end();
        self.told.fetch_max(end, Ordering::Relaxed) < end
    }

    /// Called when the host stops: wakes everybody who waits.
    pub(super) fn wake(&self) {
        // Each lock is taken once, so that no waiter is between looking at the flag and going to sleep.
        drop((self.table.lock(), self.log.lock()));
        self.heard.notify_all();
        self.news.notify_all();
    }

    /// This host's own news from number `from` on, as soon as there are any; empty after `patience`. Returns `None` if some are
    /// no longer kept.
    pub(super) fn news(&self, from: u64, patience: Duration) -> Option<Vec<Fact>> {
        let until = Instant::now() + patience;
        if planted::is(Bug::BeatsBehindTheTable) {
            drop(self.table());
        }
        let mut log = self.log.lock();
        loop {
            let facts = log.since(from, FACTS_MAX)?;
            let left = until.saturating_duration_since(Instant::now());
            if !facts.is_empty() || left.is_zero() || self.stop.is_set() {
                return Some(facts);
            }
            self.news.wait_for(&mut log, left);
        }
    }

    /// Waits until this holds of the table, but no longer than `patience`.
    pub(super) fn wait_until(&self, patience: Duration, mut is_so: impl FnMut(&Table) -> bool) {
        let mut table = self.table.lock();
        self.heard.wait_while_for(&mut table, |table| !is_so(table) && !self.stop.is_set(), patience);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Generation, Gone, Holding, NodeId};
    use kvasir_protocol::block::BlockKey;

    #[test]
    fn what_others_say_is_no_news_of_this_host() {
        let nodes = ["own", "peer"].map(NodeId::of).to_vec();
        let copies = Copies::new(Table::new(nodes, 16, 16), &Arc::default());
        let key = BlockKey::from_engine_hash("copies", b"1");
        let (primary, generation) = (NodeId::of("peer"), Generation(1));
        let holding = Holding { size: 512, target: 2, primary, generation };
        assert!(!copies.has_news());
        copies.table().hear(1, Fact::Holds(key, holding));
        assert!(!copies.has_news(), "a peer holds a block");
        copies.table().hear(0, Fact::Holds(key, holding));
        assert!(copies.has_news(), "this host does, too");
        assert!(!copies.has_news(), "which is news once");
        copies.table().hear(0, Fact::Gone(key, Gone::LetGo));
        assert!(copies.has_news());
    }
}
