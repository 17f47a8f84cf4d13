//! Locks that a forked child can use.
//!
//! An engine forks while threads of its client work. `parking_lot` keeps all that wait for any of its locks in one table of the
//! process. A child inherits that table, with threads that it does not have and whose memory its own threads are given again:
//! waiting for a lock of its own may then take for ever, or follow a pointer into other things. The locks of the standard
//! library wait in the kernel, by their own address. A lock that is inherited locked stays so: a child makes its own client,
//! and drops nothing of its parent's.

use std::sync::{self, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// As that of the standard library, but one whose holder panicked goes on: what is kept in it is right at every step.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `None` if somebody has it locked.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Waits without the lock, and returns with it. May return with no reason.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Also returns whether all of `time` has passed.
    pub fn wait_for<'a, T>(&self, guard: MutexGuard<'a, T>, time: Duration) -> (MutexGuard<'a, T>, bool) {
        let (guard, waited) = self.0.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }
}
