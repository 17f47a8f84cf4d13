//! Keys that were not in the remote store a short while ago.
//!
//! Other hosts store there too, so a key that this host does not know may be there all the same. Asking takes a round trip,
//! and most lookups that get this far are of blocks that nobody has. So an answer "not there" holds for a while, for a bounded number
//! of keys; and a store that does not answer is not asked at all for the same time.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kvasir_protocol::block::BlockKey;

/// How long a key counts as absent.
pub(super) const ABSENT_FOR: Duration = Duration::from_secs(10);
/// The most keys kept in mind, about 80 B each. Beyond that the oldest are asked for again.
const KEYS_MAX: usize = 1 << 16;

#[derive(Default)]
pub(super) struct Absent(Mutex<State>);

#[derive(Default)]
struct State {
    /// The time until which each counts as absent.
    until: HashMap<BlockKey, Instant>,
    /// The same in order of time; one that was noted again is there twice.
    order: VecDeque<(BlockKey, Instant)>,
    /// The store did not answer: nothing is asked of it before this time.
    paused_until: Option<Instant>,
}

impl Absent {
    /// Notes that the store does not have it.
    pub(super) fn note(&self, key: BlockKey, now: Instant) {
        let mut state = self.state();
        let until = now + ABSENT_FOR;
        state.until.insert(key, until);
        state.order.push_back((key, until));
        while state.order.len() > KEYS_MAX || state.order.front().is_some_and(|(_, until)| *until <= now) {
            let Some((key, until)) = state.order.pop_front() else { return };
            if state.until.get(&key) == Some(&until) {
                state.until.remove(&key);
            }
        }
    }

    /// Notes that the store did not answer.
    pub(super) fn pause(&self, now: Instant) {
        self.state().paused_until = Some(now + ABSENT_FOR);
    }

    /// Whether the answer may be something other than "not there".
    pub(super) fn is_worth_asking(&self, key: BlockKey, now: Instant) -> bool {
        let state = self.state();
        state.paused_until.is_none_or(|until| until <= now)
            && state.until.get(&key).is_none_or(|until| *until <= now)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_absent_for_a_while_and_so_is_a_store_that_does_not_answer() {
        let (absent, now) = (Absent::default(), Instant::now());
        let later = now + ABSENT_FOR;
        absent.note(BlockKey(1), now);
        assert!(!absent.is_worth_asking(BlockKey(1), now) && absent.is_worth_asking(BlockKey(2), now));
        assert!(absent.is_worth_asking(BlockKey(1), later));
        absent.note(BlockKey(2), later);
        assert_eq!(absent.state().until.len(), 1, "what is over is forgotten");
        absent.pause(later);
        assert!(!absent.is_worth_asking(BlockKey(3), later));
        assert!(absent.is_worth_asking(BlockKey(3), later + ABSENT_FOR));
    }

    #[test]
    fn it_is_bounded() {
        let (absent, now) = (Absent::default(), Instant::now());
        (0..KEYS_MAX as u128 + 10).for_each(|n| absent.note(BlockKey(n), now));
        // The same key again and again takes no more room either.
        (0..KEYS_MAX).for_each(|_| absent.note(BlockKey(u128::MAX), now));
        let state = absent.state();
        assert_eq!((state.order.len(), state.until.len()), (KEYS_MAX, 1));
    }
}
