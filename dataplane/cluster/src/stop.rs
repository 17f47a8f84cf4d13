//! The end of the host, and waits that end with it.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Stop {
    is_set: AtomicBool,
    waiting: Mutex<()>,
    changed: Condvar,
}

impl Stop {
    pub(super) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// True for the first caller only.
    pub(super) fn set(&self) -> bool {
        // Under the lock, so that every waiter is either waiting or has seen the flag.
        let _waiting = self.waiting.lock();
        let before = self.is_set.swap(true, Ordering::SeqCst);
        self.changed.notify_all();
        !before
    }

    /// Waits, unless the host stops.
    pub(super) fn pause(&self, time: Duration) {
        let mut waiting = self.waiting.lock();
        self.changed.wait_while_for(&mut waiting, |()| !self.is_set(), time);
    }
}
