//! A bound on memory in use.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Budget {
    max: u64,
    used: AtomicU64,
    whole: Option<Arc<Budget>>,
}

/// Bytes taken from a budget; given back when dropped.
#[derive(Debug)]
pub(super) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
    _of_the_whole: Option<Box<Permit>>,
}

impl Budget {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicU64::new(0), whole: None })
    }

    /// A share of this budget: what is taken from it is taken from both.
    pub(super) fn share(self: &Arc<Self>, max: u64) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicU64::new(0), whole: Some(Arc::clone(self)) })
    }

    /// Returns `None` if that is more than is left. More than the whole budget is let in when nothing else is.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let fits = |used: u64| (used == 0 || used.saturating_add(bytes) <= self.max).then_some(used + bytes);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        let mut permit = Permit { budget: Arc::clone(self), bytes, _of_the_whole: None };
        if let Some(whole) = &self.whole {
            permit._of_the_whole = Some(Box::new(whole.take(bytes)?));
        }
        Some(permit)
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

    #[test]
    fn a_share_leaves_the_rest_to_others() {
        let whole = Budget::new(10);
        let share = whole.share(5);
        let held = share.take(4);
        assert!(held.is_some() && share.take(2).is_none());
        assert_eq!((share.used(), whole.used()), (4, 4), "what was refused is not kept");
        let rest = whole.take(6);
        assert!(rest.is_some() && share.take(1).is_none(), "the whole is used up");
        drop(rest);
        assert!(share.take(1).is_some());
        drop(held);
        assert_eq!((share.used(), whole.used()), (0, 0));
    }
}
