//! Commands for a thread that sleeps when there are none.

use std::collections::VecDeque;
use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// A sender wakes the thread only if it sleeps: no command is left behind, and none costs a system call while there is
/// work.
#[derive(Debug)]
pub(super) struct Inbox<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<T>,
    /// The thread waits, or is about to; the sender that clears this wakes it.
    sleeping: bool,
}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self(Mutex::new(State { waiting: VecDeque::new(), sleeping: false }))
    }
}

impl<T> Inbox<T> {
    /// Callable from any thread.
    pub(super) fn send(&self, command: T, wake: impl FnOnce()) {
        let sleeps = {
            let mut state = self.state();
            state.waiting.push_back(command);
            std::mem::take(&mut state.sleeping)
        };
        if sleeps {
            wake();
        }
    }

    pub(super) fn take(&self, into: &mut VecDeque<T>) {
        into.append(&mut self.state().waiting);
    }

    /// Whether the thread may wait until it is woken. Returns false if there is something to do after all.
    pub(super) fn may_sleep(&self) -> bool {
        let mut state = self.state();
        state.sleeping = state.waiting.is_empty();
        state.sleeping
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
