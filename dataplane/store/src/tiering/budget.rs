//! A bound on memory in use.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Budget {
    max: u64,
    used: AtomicU64,
}

/// Bytes taken from a budget; given back when dropped.
#[derive(Debug)]
pub(super) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicU64::new(0) })
    }

    /// Returns `None` if that is more than is left. More than the whole budget is let in when nothing else is.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let fits = |used: u64| (used == 0 || used.saturating_add(bytes) <= self.max).then_some(used + bytes);
        let taken = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits);
        taken.ok().map(|_| Permit { budget: Arc::clone(self), bytes })
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back() {
        let budget = Budget::new(10);
        let first = budget.take(6);
        assert!(first.is_some() && budget.take(5).is_none());
        let second = budget.take(4);
        assert_eq!((second.is_some(), budget.used()), (true, 10));
        drop((first, second));
        assert!(budget.take(11).is_some(), "alone, a larger one passes");
        assert_eq!(budget.used(), 0);
    }
}
