//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic elsewhere does not make what the lock guards wrong: every change is complete before it could.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
