//! The listeners that hear of changes of a slot.

use super::{Hook, Slot, Version};
use crate::policy::{Action, Cause, Change};
use parking_lot::Mutex;
use std::sync::Arc;

/// As [`Listener`](crate::policy::Listener), shared by the slots.
pub(in crate::policy) type Shared = Arc<dyn Fn(&Change) + Send + Sync>;

/// Changes kept until somebody listens: those of a start.
const EARLY_MAX: usize = 16;

#[derive(Default)]
pub(in crate::policy) struct News(Mutex<State>);

#[derive(Default)]
struct State {
    listener: Option<Shared>,
    early: Vec<Change>,
}

impl News {
    pub(in crate::policy) fn listen(&self, listener: Shared) {
        let mut state = self.0.lock();
        state.early.drain(..).for_each(|change| listener(&change));
        state.listener = Some(listener);
    }

    fn tell(&self, change: Change) {
        let mut state = self.0.lock();
        match &state.listener {
            Some(listener) => listener(&change),
            None if state.early.len() < EARLY_MAX => state.early.push(change),
            None => {}
        }
    }
}

impl<H: Hook> Slot<H> {
    pub(super) fn tell(
        &self,
        action: Action,
        cause: Cause,
        before: Option<&Version<H>>,
        after: Option<&Version<H>>,
        reason: Option<String>,
    ) {
        let (before, after) = (before.map(Version::id), after.map(Version::id));
        self.news.tell(Change { slot: H::KIND, action, cause, before, after, reason });
    }
}
