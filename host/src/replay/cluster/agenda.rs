//! What is going to happen, in order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that happens at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// Something has arrived over the network; void if that was planned anew since.
    Arrived { plan: u64 },
    /// A prefix has arrived where its request will be computed.
    Fetched { request: u64 },
    /// An instance has computed the prompt at the head of its queue.
    Prefilled { instance: usize },
    /// A request's blocks have arrived at its decode instance.
    HandedOver { request: u64 },
    /// A decode batch may change at the end of a step; void if the instance has planned again since.
    StepEnds { instance: usize, plan: u64 },
    /// Instances report, and the balancer is asked.
    Tick,
    /// Learners hear what came of requests.
    Learn,
    /// Another policy takes over.
    Swap { number: usize },
}

/// Events by time; those of one moment in the order in which they were planned.
#[derive(Default)]
pub(super) struct Agenda {
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    planned: u64,
}

impl Agenda {
    pub(super) fn plan(&mut self, at_us: u64, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((at_us, self.planned, event)));
    }

    /// The next event, if it comes at `until_us` or before.
    pub(super) fn next(&mut self, until_us: u64) -> Option<(u64, Event)> {
        let &Reverse((at_us, ..)) = self.events.peek()?;
        if at_us > until_us {
            return None;
        }
        self.events.pop().map(|Reverse((at_us, _, event))| (at_us, event))
    }

    /// Events that [`Self::next`] has told so far.
    pub(super) fn happened(&self) -> u64 {
        self.planned - self.events.len() as u64
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }
}
