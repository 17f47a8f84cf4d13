//! The workers that are not deciding.

use super::decide::Decider;
use crate::explain::Explain;
use crate::policy::PolicyHost;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};

/// See the module documentation. As many as the host decides at once; a worker holds instances of the
/// policies, so their number is fixed.
pub(super) struct Deciders {
    idle: Mutex<VecDeque<Decider>>,
    returned: Condvar,
}

impl Deciders {
    pub(super) fn new(workers: u32, policies: &PolicyHost, explain: &Explain) -> Self {
        let workers = workers.max(1);
        let decider = |_| Decider::new(policies, explain.tape(workers as usize));
        let idle = (0..workers).map(decider).collect();
        Self { idle: Mutex::new(idle), returned: Condvar::new() }
    }

    /// Takes the worker used last, which is warm and has least to catch up on. Waits while all decide.
    pub(super) fn take(&self) -> Taken<'_> {
        let mut idle = self.idle.lock();
        self.returned.wait_while(&mut idle, |idle| idle.is_empty());
        Taken { decider: idle.pop_front(), home: self }
    }

    /// Lets each idle worker take up new versions; the longest idle first, which keeps their order.
    pub(super) fn refresh_idle(&self) {
        let idle = self.idle.lock().len();
        for _ in 0..idle {
            let Some(decider) = self.idle.lock().pop_back() else { return };
            Taken { decider: Some(decider), home: self }.refresh();
        }
    }
}

/// A worker at work. It goes back to the idle ones when this is dropped, also in a panic.
pub(super) struct Taken<'a> {
    /// `None` only while dropped.
    decider: Option<Decider>,
    home: &'a Deciders,
}

impl Deref for Taken<'_> {
    type Target = Decider;

    fn deref(&self) -> &Decider {
        self.decider.as_ref().expect("taken from a queue that is not empty")
    }
}

impl DerefMut for Taken<'_> {
    fn deref_mut(&mut self) -> &mut Decider {
        self.decider.as_mut().expect("taken from a queue that is not empty")
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(decider) = self.decider.take() {
            self.home.idle.lock().push_front(decider);
            self.home.returned.notify_one();
        }
    }
}
