//! Learning: what came of requests goes to one more instance of a policy that wants to know, and what that publishes goes
//! to the instances that decide (`learning` of the contract).
//!
//! A slot's learner lives on a thread of its own, behind a bounded queue. No failure of it reaches a decision or the
//! slot's breaker: it is counted and logged, and the learner made again, later after each failure, from the state that
//! the last one exported. That is kept per policy in the state database: every minute, at a swap, and at the end.
//!
//! A policy on trial has a learner too, on the same thread, which hears the same and begins with what a learner of that
//! name left. With the promotion it goes on as the learner of what serves.

mod class;

use self::class::Class;
pub use self::class::Learner;
pub(super) use self::class::{LearnerGuest, Seat};
use super::{Hook, Slot};
use crate::policy::Error;
use arc_swap::ArcSwapOption;
use kvasir_policy::learning::{OUTCOME, OUTCOMES_MAX, Outcome};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most outcomes that wait for a learner; the oldest give way.
const QUEUE: usize = 4 * OUTCOMES_MAX;

/// What a learner published, for the engines of one version.
pub(super) struct Knowledge {
    /// Generation of the version that learned it.
    pub(super) generation: u64,
    /// Rises with everything that is published in the slot.
    pub(super) number: u64,
    pub(super) bytes: Arc<[u8]>,
}

/// What learning did in one slot since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LearningStatus {
    /// Whether the policy in service learns.
    pub learns: bool,
    /// Outcomes that a learner heard, and those dropped because it was slow or gone.
    pub outcomes: u64,
    pub dropped: u64,
    /// Times a learner trapped, was late, or answered outside the contract.
    pub faults: u64,
    /// Times it published something new, and the bytes of the last.
    pub published: u64,
    pub knowledge_bytes: u64,
}

/// What passes between the learner of one seat and the rest of the host.
#[derive(Default)]
pub(super) struct Lessons {
    pub(super) feed: Arc<Feed>,
    /// What the learner published last.
    pub(super) knowledge: Arc<ArcSwapOption<Knowledge>>,
}

impl Lessons {
    /// Has every engine of that generation adopt `bytes` before it decides next. Returns false if they know that already.
    fn publish(&self, generation: u64, bytes: Arc<[u8]>) -> bool {
        let last = self.knowledge.load_full();
        if last.as_ref().is_some_and(|last| last.generation == generation && last.bytes == bytes) {
            return false;
        }
        let number = last.map_or(0, |last| last.number) + 1;
        self.feed.counts.knowledge_bytes.store(bytes.len() as u64, Relaxed);
        self.knowledge.store(Some(Arc::new(Knowledge { generation, number, bytes })));
        true
    }

    /// Everything of those before.
    fn forget(&self) {
        self.knowledge.store(None);
        self.feed.queue.lock().clear();
        let Counts { outcomes, dropped, faults, published, knowledge_bytes } = &self.feed.counts;
        for count in [outcomes, dropped, faults, published, knowledge_bytes] {
            count.store(0, Relaxed);
        }
    }
}

/// The outcomes on their way to one learner.
#[derive(Default)]
pub(in crate::policy) struct Feed {
    /// Whether the policy learns, so that outcomes are worth keeping.
    wanted: AtomicBool,
    queue: Mutex<VecDeque<[u32; OUTCOME]>>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    outcomes: AtomicU64,
    dropped: AtomicU64,
    faults: AtomicU64,
    published: AtomicU64,
    knowledge_bytes: AtomicU64,
}

impl Feed {
    fn push(&self, outcome: &Outcome) {
        if !self.wanted.load(Relaxed) {
            return;
        }
        let mut queue = self.queue.lock();
        if queue.len() == QUEUE {
            queue.pop_front();
            self.counts.dropped.fetch_add(1, Relaxed);
        }
        queue.push_back(outcome.encode());
    }

    /// The oldest outcomes, one behind the other.
    fn take(&self) -> Vec<u32> {
        let mut queue = self.queue.lock();
        let count = queue.len().min(OUTCOMES_MAX);
        queue.drain(..count).flatten().collect()
    }

    /// What waits is what happened, whichever policy hears it.
    fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Relaxed);
        if !wanted {
            self.queue.lock().clear();
        }
    }

    /// Exchanges what waits here with what waits there.
    fn exchange(&self, other: &Self) {
        std::mem::swap(&mut *self.queue.lock(), &mut *other.queue.lock());
    }

    pub(in crate::policy) fn status(&self) -> LearningStatus {
        let Counts { outcomes, dropped, faults, published, knowledge_bytes } = &self.counts;
        LearningStatus {
            learns: self.wanted.load(Relaxed),
            outcomes: outcomes.load(Relaxed),
            dropped: dropped.load(Relaxed),
            faults: faults.load(Relaxed),
            published: published.load(Relaxed),
            knowledge_bytes: knowledge_bytes.load(Relaxed),
        }
    }
}

/// Takes what came of requests, for learners. Cheap to clone, and cheap to tell while no policy learns.
#[derive(Clone, Default)]
pub struct Outcomes(Arc<[Arc<Feed>]>);

impl Outcomes {
    pub(in crate::policy) fn new(feeds: impl IntoIterator<Item = Arc<Feed>>) -> Self {
        Self(feeds.into_iter().collect())
    }

    /// Outcomes that go to one listener and nowhere else.
    #[cfg(test)]
    pub(crate) fn listened_to() -> Self {
        let feed = Feed::default();
        feed.want(true);
        Self(Arc::new([Arc::new(feed)]))
    }

    /// What was told since the last call.
    #[cfg(test)]
    pub(crate) fn heard(&self) -> Vec<Outcome> {
        let words: Vec<u32> = self.0.iter().flat_map(|feed| feed.take()).collect();
        kvasir_policy::learning::Outcomes::new(OUTCOME, &words).iter().collect()
    }

    pub fn tell(&self, outcome: &Outcome) {
        self.0.iter().for_each(|feed| feed.push(outcome));
    }
}

/// The learner of one slot: on a thread of its own, or whenever somebody says what time it is. Keeps what was learned when
/// dropped.
pub(in crate::policy) struct Learning(Turns);

enum Turns {
    Thread { stop: Option<mpsc::Sender<()>>, thread: Option<JoinHandle<()>> },
    ByHand { since: Instant, class: Box<dyn TakesTurns> },
}

/// A [`Class`], whatever its slot.
trait TakesTurns: Send {
    fn turn(&mut self, now: Instant);
    fn keep_state(&mut self);
}

impl<H: Hook> TakesTurns for Class<H> {
    fn turn(&mut self, now: Instant) {
        Class::turn(self, now);
    }

    fn keep_state(&mut self) {
        Class::keep_state(self);
    }
}

impl Learning {
    /// `every`: zero = when [`Learning::turn`] is called, and not by itself.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(in crate::policy) fn start<H: Hook>(slot: &Arc<Slot<H>>, every: Duration) -> Result<Self, Error> {
        let since = Instant::now();
        let mut class = Class::new(Arc::clone(slot), since);
        if every.is_zero() {
            return Ok(Self(Turns::ByHand { since, class: Box::new(class) }));
        }
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                class.turn(Instant::now());
            }
            class.keep_state();
        };
        let thread = std::thread::Builder::new().name("kvasir-learn".into()).spawn(run);
        let thread = thread.map_err(|e| Error::Engine(format!("cannot start the learner's thread: {e}")))?;
        Ok(Self(Turns::Thread { stop: Some(stop), thread: Some(thread) }))
    }

    /// Has the learner hear what came of requests until `now_ms`, on a clock that began with it and does not go back. Does nothing
    /// if it has a thread.
    pub(in crate::policy) fn turn(&mut self, now_ms: u64) {
        if let Turns::ByHand { since, class } = &mut self.0 {
            class.turn(*since + Duration::from_millis(now_ms));
        }
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        match &mut self.0 {
            Turns::Thread { stop, thread } => {
                drop(stop.take());
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
            Turns::ByHand { class, .. } => class.keep_state(),
        }
    }
}

impl<H: Hook> Slot<H> {
    pub(super) fn lessons(&self, seat: Seat) -> &Lessons {
        match seat {
            Seat::Service => &self.lessons,
            Seat::Trial => &self.trial_lessons,
        }
    }

    /// The feeds of the policy in service, and of the one on trial.
    pub(in crate::policy) fn feeds(&self) -> [Arc<Feed>; 2] {
        [Seat::Service, Seat::Trial].map(|seat| Arc::clone(&self.lessons(seat).feed))
    }

    /// What the learners of both did.
    pub(in crate::policy) fn learning(&self) -> (LearningStatus, LearningStatus) {
        (self.lessons.feed.status(), self.trial_lessons.feed.status())
    }

    /// Makes what the learner on trial published for that generation count for the one that takes its place in service, before
    /// its learner follows.
    pub(super) fn promote_knowledge(&self, on_trial: u64, in_service: u64) {
        let known = self.trial_lessons.knowledge.load_full();
        if let Some(known) = known.filter(|known| known.generation == on_trial) {
            self.lessons.publish(in_service, Arc::clone(&known.bytes));
        }
    }

    /// What an earlier learner of that policy left.
    fn learned(&self, name: &str) -> Option<Arc<[u8]>> {
        let read = self.catalog.as_ref()?.learned(H::KIND, name);
        read.map_err(|e| self.log.add_host(2, &format!("the learner starts cold: {e}"))).ok()?
    }

    /// Keeps it. Drops what was left by policies that neither serve, nor served before, nor are on trial.
    fn keep_learned(&self, key: &str, state: &[u8]) -> Result<(), Error> {
        let Some(catalog) = &self.catalog else { return Ok(()) };
        let on_trial = self.trial().map(|trial| class::on_trial(&trial.version.description.name));
        let others = [Some(self.current().description.name.clone()), self.previous(), on_trial];
        let named: Vec<&str> = others.iter().flatten().map(String::as_str).chain([key]).collect();
        catalog.keep_learned(H::KIND, key, state, &named)
    }
}

#[cfg(test)]
mod tests;
