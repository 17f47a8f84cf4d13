//! Requests in the order in which they came, until they have ended.

use crate::replay::trace::Request;
use hashbrown::HashMap;
use std::collections::VecDeque;

/// The most requests that wait, and the most blocks of them (8 bytes each).
const REQUESTS_MAX: usize = 1 << 16;
pub(super) const BLOCKS_MAX: usize = 4 << 20;

/// A request that came.
pub(super) struct Asked {
    /// 0 means that it has ended.
    pub(super) id: u64,
    /// The request, with the length of the answer that was expected.
    pub(super) request: Request,
}

struct Waiting {
    asked: Asked,
    decoded_tokens: u32,
    ended: bool,
}

/// See the module documentation.
pub(super) struct Pending {
    waits_ms: u64,
    waiting: VecDeque<Waiting>,
    /// Requests that have left it.
    gone: u64,
    latest_us: u64,
    /// By id, how many came before a request.
    places: HashMap<u64, u64>,
    blocks: usize,
}

impl Pending {
    /// A request that came `waits_ms` ago counts as ended, whatever was heard of it.
    pub(super) fn new(waits_ms: u64) -> Self {
        Self { waits_ms, waiting: VecDeque::new(), gone: 0, latest_us: 0, places: HashMap::new(), blocks: 0 }
    }

    pub(super) fn add(&mut self, mut asked: Asked) {
        // Two callers may report their requests in another order than that of their times.
        self.latest_us = self.latest_us.max(asked.request.time_us);
        asked.request.time_us = self.latest_us;
        if asked.id != 0 {
            self.places.insert(asked.id, self.gone + self.waiting.len() as u64);
        }
        self.blocks += asked.request.blocks.len();
        let ended = asked.id == 0;
        self.waiting.push_back(Waiting { asked, decoded_tokens: 0, ended });
    }

    fn find(&mut self, id: u64) -> Option<&mut Waiting> {
        let place = self.places.get(&id)?.checked_sub(self.gone)?;
        self.waiting.get_mut(usize::try_from(place).ok()?)
    }

    /// A request that is unknown was written already.
    pub(super) fn decoded(&mut self, id: u64, tokens: u32) {
        if let Some(waiting) = self.find(id) {
            waiting.decoded_tokens = waiting.decoded_tokens.saturating_add(tokens);
        }
    }

    pub(super) fn ended(&mut self, id: u64) {
        if let Some(waiting) = self.find(id) {
            waiting.ended = true;
        }
    }

    /// The next request, if it has ended or must make room.
    pub(super) fn pop(&mut self, now_ms: u64) -> Option<Request> {
        let first = self.waiting.front()?;
        let old = now_ms.saturating_sub(first.asked.request.time_ms()) >= self.waits_ms;
        let full = self.waiting.len() > REQUESTS_MAX || self.blocks > BLOCKS_MAX;
        if !(first.ended || old || full) {
            return None;
        }
        let Waiting { asked: Asked { id, mut request }, decoded_tokens, .. } = self.waiting.pop_front()?;
        self.gone += 1;
        self.places.remove(&id);
        self.blocks -= request.blocks.len();
        if decoded_tokens > 0 {
            request.output_tokens = decoded_tokens;
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(id: u64, at_ms: u64, blocks: usize) -> Asked {
        let request = Request {
            time_us: at_ms * 1_000,
            blocks: vec![0; blocks],
            output_tokens: 7,
            ..Request::default()
        };
        Asked { id, request }
    }

    fn popped(pending: &mut Pending, now_ms: u64) -> Vec<(u64, u32)> {
        std::iter::from_fn(|| pending.pop(now_ms)).map(|r| (r.time_ms(), r.output_tokens)).collect()
    }

    #[test]
    fn they_leave_in_order_when_they_have_ended() {
        let mut pending = Pending::new(1_000);
        for id in 1..=3 {
            pending.add(asked(id, id, 1));
        }
        pending.add(asked(0, 2, 1)); // rejected, and told a little late
        pending.decoded(2, 5);
        pending.ended(2);
        pending.ended(99);
        assert_eq!(popped(&mut pending, 10), []);
        pending.ended(1);
        pending.decoded(1, 9); // after its end: it was still there
        assert_eq!(popped(&mut pending, 10), [(1, 9), (2, 5)]);
        pending.decoded(2, 5);
        pending.ended(3);
        assert_eq!(popped(&mut pending, 10), [(3, 7), (3, 7)]);
        assert!(pending.places.is_empty() && pending.blocks == 0);
        pending.add(asked(0, 1, 1)); // late, when all before it are written
        assert_eq!(popped(&mut pending, 10), [(3, 7)]);
    }

    #[test]
    fn those_that_never_end_leave_when_they_are_old_or_many() {
        let mut pending = Pending::new(1_000);
        pending.add(asked(1, 0, 1));
        pending.add(asked(2, 500, 1));
        assert_eq!(popped(&mut pending, 999), []);
        assert_eq!(popped(&mut pending, 1_000), [(0, 7)]);
        assert_eq!(popped(&mut pending, u64::MAX), [(500, 7)]);
        for id in 1..=REQUESTS_MAX as u64 + 5 {
            pending.add(asked(id, id, 1));
        }
        assert_eq!(popped(&mut pending, 1).len(), 5);
        pending.add(asked(1 << 40, 1 << 20, BLOCKS_MAX));
        assert_eq!(popped(&mut pending, 1).len(), REQUESTS_MAX, "all of them make room for a large one");
    }
}
