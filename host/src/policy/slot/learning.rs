//! Learning: what came of requests goes to one more instance of a policy that wants to know, and what that publishes goes
//! to the instances that decide (`learning` of the contract).
//!
//! A slot's learner lives on a thread of its own, behind a bounded queue. No failure of it reaches a decision or the
//! slot's breaker: it is counted and logged, and the learner made anew, later after each failure, from the state that
//! the last one exported. That is kept per policy in the state database: every minute, at a swap, and at the end.

use super::worker::{Backoff, MAX_STATE_BYTES};
use super::{Hook, Policy, Slot, Version};
use crate::policy::bindings::learner::Learner as Component;
use crate::policy::control::component_control;
use crate::policy::guest::Guest;
use crate::policy::{Error, Fault};
use kvasir_policy::learning::{KNOWLEDGE_MAX, OUTCOME, OUTCOMES_MAX, Outcome};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Outcomes that wait for a learner; the oldest give way.
const QUEUE: usize = 4 * OUTCOMES_MAX;
/// How often a learner's state is kept.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// A learner that goes on failing is made anew about once a minute (a power of two of milliseconds).
const LONGEST_WAIT: u32 = 16;

/// What a learner published, for the engines of one version.
pub(super) struct Knowledge {
    /// Of the version that learned it.
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

/// The outcomes on their way to one slot's learner.
#[derive(Default)]
pub(in crate::policy) struct Feed {
    /// The policy in service learns: outcomes are worth keeping.
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

/// Where what came of requests is told. Cheap to clone, and cheap to tell while no policy learns.
#[derive(Clone, Default)]
pub struct Outcomes(Arc<[Arc<Feed>]>);

impl Outcomes {
    pub(in crate::policy) fn new(feeds: [Arc<Feed>; 2]) -> Self {
        Self(Arc::new(feeds))
    }

    /// To one who only listens.
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

/// The thread of one slot's learner; ends, and keeps what was learned, when dropped.
pub(in crate::policy) struct Learning {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Learning {
    /// # Errors
    /// The thread cannot be started.
    pub(in crate::policy) fn start<H: Hook>(slot: &Arc<Slot<H>>, every: Duration) -> Result<Self, Error> {
        let (stop, stopped) = mpsc::channel();
        let mut class = Class::new(Arc::clone(slot));
        let run = move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                class.turn(Instant::now());
            }
            class.keep_state();
        };
        let thread = std::thread::Builder::new().name("kvasir-learn".into()).spawn(run);
        let thread = thread.map_err(|e| Error::Engine(format!("cannot start the learner's thread: {e}")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A component's learning half.
pub(super) type Learner = Guest<Component>;

component_control!(learner::Learner);

impl Learner {
    fn observe(&mut self, outcomes: &[u32]) -> Result<(), Fault> {
        self.cold(|b, store| b.kvasir_policy_learning().call_observe(store, OUTCOME as u32, outcomes))
    }

    fn publish(&mut self) -> Result<Vec<u8>, Fault> {
        let knowledge = self.cold(|b, store| b.kvasir_policy_learning().call_publish(store))?;
        if knowledge.len() > KNOWLEDGE_MAX {
            return Err(Fault::Invalid(format!(
                "{} bytes to publish; at most {KNOWLEDGE_MAX}",
                knowledge.len()
            )));
        }
        Ok(knowledge)
    }
}

/// A slot and its learner, as the thread has them.
struct Class<H: Hook> {
    slot: Arc<Slot<H>>,
    version: Arc<Version<H>>,
    learner: Option<Learner>,
    /// What the last learner of this policy exported.
    state: Option<Arc<[u8]>>,
    /// The learner heard something since then.
    changed: bool,
    keep_due: Instant,
    retry: Backoff,
}

impl<H: Hook> Class<H> {
    fn new(slot: Arc<Slot<H>>) -> Self {
        let version = slot.current();
        let (keep_due, retry) = (Instant::now() + KEEP_EVERY, Backoff::up_to(LONGEST_WAIT));
        let mut class = Self { slot, version, learner: None, state: None, changed: false, keep_due, retry };
        class.begin();
        class
    }

    fn turn(&mut self, now: Instant) {
        let newest = self.slot.current();
        if newest.generation != self.version.generation {
            self.keep_state();
            let same_name = newest.description.name == self.version.description.name;
            self.version = newest;
            (self.learner, self.retry) = (None, Backoff::up_to(LONGEST_WAIT));
            if !same_name {
                self.state = None;
            }
            self.begin();
        }
        if !self.version.learns() {
            return;
        }
        if self.learner.is_none() && self.retry.due() {
            self.make_learner();
        }
        self.teach();
        if now >= self.keep_due {
            self.keep_due = now + KEEP_EVERY;
            self.keep_state();
        }
    }

    /// Another version serves.
    fn begin(&mut self) {
        let learns = self.version.learns();
        self.slot.feed.want(learns);
        if learns && self.state.is_none() {
            self.state = self.slot.learned(&self.version.description.name);
        }
    }

    fn make_learner(&mut self) {
        match self.version.build_learner(&self.slot.limits, &self.slot.log) {
            Ok(learner) => self.learner = learner,
            Err(e) => return self.failed("is not made", &e),
        }
        if let Some(state) = self.state.clone() {
            match self.call(|learner| learner.import_state(&state)) {
                Some(Ok(())) => {}
                // It will not take it next time either.
                None => self.state = None,
                Some(Err(reason)) => {
                    self.state = None;
                    self.slot.log.add_host(2, &format!("the learner starts cold: {reason}"));
                }
            }
        }
        self.publish();
    }

    fn teach(&mut self) {
        if self.learner.is_none() {
            return;
        }
        let outcomes = self.slot.feed.take();
        if outcomes.is_empty() {
            return;
        }
        self.slot.feed.counts.outcomes.fetch_add((outcomes.len() / OUTCOME) as u64, Relaxed);
        self.changed = true;
        if self.call(|learner| learner.observe(&outcomes)).is_some() {
            self.publish();
        }
    }

    fn publish(&mut self) {
        let Some(bytes) = self.call(Learner::publish) else { return };
        if self.slot.publish_knowledge(self.version.generation, bytes) {
            self.slot.feed.counts.published.fetch_add(1, Relaxed);
        }
    }

    /// Asks the learner for its state, and keeps it. One that is gone has nothing to keep.
    fn keep_state(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let Some(state) = self.call(Policy::export_state) else { return };
        if state.len() > MAX_STATE_BYTES {
            return self
                .failed("keeps no state", &format!("{} bytes are over {MAX_STATE_BYTES}", state.len()));
        }
        if let Err(e) = self.slot.keep_learned(&self.version.description.name, &state) {
            self.slot.log.add_host(2, &format!("what was learned is not kept: {e}"));
        }
        self.state = Some(state.into());
    }

    /// `None`: there is no learner, or it failed; then it is made anew later.
    fn call<R>(&mut self, f: impl FnOnce(&mut Learner) -> Result<R, Fault>) -> Option<R> {
        match f(self.learner.as_mut()?) {
            Ok(answer) => Some(answer),
            Err(fault) => {
                self.learner = None;
                self.failed("failed", &fault);
                None
            }
        }
    }

    fn failed(&mut self, how: &str, why: &dyn std::fmt::Display) {
        self.slot.feed.counts.faults.fetch_add(1, Relaxed);
        self.retry.failed(Instant::now());
        self.slot.log.add_host(2, &format!("the learner {how}: {why}"));
    }
}

impl<H: Hook> Slot<H> {
    pub(in crate::policy) fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.feed)
    }

    /// Has every engine of that generation adopt `bytes` before it decides next. False if they know that already.
    fn publish_knowledge(&self, generation: u64, bytes: Vec<u8>) -> bool {
        let last = self.knowledge.load_full();
        if last.as_ref().is_some_and(|last| last.generation == generation && *last.bytes == *bytes) {
            return false;
        }
        let number = last.map_or(0, |last| last.number) + 1;
        self.feed.counts.knowledge_bytes.store(bytes.len() as u64, Relaxed);
        self.knowledge.store(Some(Arc::new(Knowledge { generation, number, bytes: bytes.into() })));
        true
    }

    /// What an earlier learner of that policy left.
    fn learned(&self, name: &str) -> Option<Arc<[u8]>> {
        let read = self.catalog.as_ref()?.learned(H::KIND, name);
        read.map_err(|e| self.log.add_host(2, &format!("the learner starts cold: {e}"))).ok()?
    }

    /// Keeps it; what was left by policies that neither serve nor served before goes.
    fn keep_learned(&self, name: &str, state: &[u8]) -> Result<(), Error> {
        let Some(catalog) = &self.catalog else { return Ok(()) };
        let others = [Some(self.current().description.name.clone()), self.previous()];
        let named: Vec<&str> = others.iter().flatten().map(String::as_str).chain([name]).collect();
        catalog.keep_learned(H::KIND, name, state, &named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::catalog::Catalog;
    use crate::policy::engine::Engine;
    use crate::policy::scheduler::SchedulerHook;
    use crate::policy::slot::{Builder, Source, Worker};
    use crate::policy::{PolicyConfig, SlotKind};
    use kvasir_policy::learning::End;

    fn learner(mode: &str, after: u32) -> (Source, Vec<(String, String)>) {
        let bytes = kvasir_tests::guest("learning").to_vec();
        let settings = [("mode", mode.to_owned()), ("after", after.to_string())];
        (Source::Bytes { name: "mine".into(), bytes }, settings.map(|(n, v)| (n.to_owned(), v)).into())
    }

    fn slot(wanted: (Source, Vec<(String, String)>), catalog: Option<Catalog>) -> Arc<Slot<SchedulerHook>> {
        let config = PolicyConfig::default();
        let (engine, builder) = (Engine::new(&config, None).unwrap(), Builder::start().unwrap());
        Slot::open(engine, &config, wanted, catalog, builder).unwrap()
    }

    fn finish(slot: &Slot<SchedulerHook>, requests: usize) {
        let rejected = Outcome { end: End::Rejected, ..Outcome::default() };
        (0..requests).for_each(|_| slot.feed.push(&Outcome::default()));
        slot.feed.push(&rejected);
    }

    /// What the deciding half said last of what it knows.
    fn known(slot: &Slot<SchedulerHook>, worker: &mut Worker<SchedulerHook>) -> Option<String> {
        worker.refresh();
        let lines = slot.log.read().0.into_iter().rev();
        lines.map(|line| line.text).find(|text| text.starts_with("knows of"))
    }

    fn until(class: &mut Class<SchedulerHook>, done: impl Fn(&Class<SchedulerHook>) -> bool) {
        while !done(class) {
            class.turn(Instant::now()); // the test runner's time limit ends this
        }
    }

    #[test]
    fn what_is_learned_reaches_every_engine_that_decides() {
        let slot = slot(learner("none", 0), None);
        let mut workers = [slot.worker(), slot.worker()];
        let mut class = Class::new(slot.clone());
        class.turn(Instant::now());
        for worker in &mut workers {
            assert_eq!(known(&slot, worker).as_deref(), Some("knows of 0 finished requests"));
        }
        finish(&slot, 3);
        class.turn(Instant::now());
        for worker in &mut workers {
            assert_eq!(known(&slot, worker).as_deref(), Some("knows of 3 finished requests"));
        }
        let told = |slot: &Slot<SchedulerHook>| {
            slot.log.read().0.iter().filter(|line| line.text == "knows of 3 finished requests").count()
        };
        assert_eq!(told(&slot), 2);
        // Those that follow a failure are told too, and nobody is told the same again.
        workers[0].drop_engine();
        while told(&slot) < 3 {
            workers[0].refresh();
        }
        finish(&slot, 0);
        class.turn(Instant::now());
        for worker in &mut workers {
            worker.refresh();
        }
        assert_eq!(told(&slot), 3, "a rejection taught nothing new");
        let status = slot.feed.status();
        assert_eq!((status.outcomes, status.published, status.knowledge_bytes), (5, 2, 12));
        assert!(status.learns && status.faults == 0 && slot.current().counters.values().traps == 0);
    }

    #[test]
    fn no_failure_of_a_learner_touches_what_decides() {
        for (mode, faults) in [("trap", 1), ("loop", 1), ("grow", 1), ("publish-too-much", 2)] {
            let slot = slot(learner(mode, 2), None);
            let (mut class, mut worker) = (Class::new(slot.clone()), slot.worker());
            class.turn(Instant::now());
            finish(&slot, 5);
            until(&mut class, |_| slot.feed.status().faults >= faults);
            worker.refresh();
            assert_eq!(
                worker.tell(|engine| engine.export_state().map(|state| state.len())),
                Ok(12),
                "{mode}"
            );
            let counters = slot.current().counters.values();
            assert_eq!(
                (counters.traps, counters.deadline_misses, counters.invalid_answers),
                (0, 0, 0),
                "{mode}"
            );
            assert!(
                slot.log.read().0.iter().any(|line| line.text.starts_with("the learner failed")),
                "{mode}"
            );
            assert_eq!(slot.current().generation, 1, "{mode}");
        }
    }

    #[test]
    fn a_learner_that_traps_goes_on_from_what_was_kept() {
        let slot = slot(learner("trap", 4), None);
        let (mut class, mut worker) = (Class::new(slot.clone()), slot.worker());
        class.turn(Instant::now());
        finish(&slot, 3);
        class.turn(class.keep_due);
        finish(&slot, 9);
        until(&mut class, |class| slot.feed.status().faults == 1 && class.learner.is_some());
        finish(&slot, 2);
        class.turn(Instant::now());
        assert_eq!(known(&slot, &mut worker).as_deref(), Some("knows of 5 finished requests"));
    }

    #[test]
    fn what_was_learned_survives_a_restart_and_a_swap_and_is_no_other_policys() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(sled::open(folder.path()).unwrap(), folder.path()).unwrap();
        let open = || slot(learner("none", 0), Some(catalog.clone()));
        let first = open();
        let mut class = Class::new(first.clone());
        class.turn(Instant::now());
        finish(&first, 7);
        class.turn(Instant::now());
        class.keep_state(); // as at the end
        drop((class, first));

        let second = open();
        let (mut class, mut worker) = (Class::new(second.clone()), second.worker());
        class.turn(Instant::now());
        assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 7 finished requests"));
        finish(&second, 1);
        class.turn(Instant::now());
        let (source, settings) = learner("none", 1);
        second.load(source, settings).unwrap();
        finish(&second, 1); // before its learner is there
        class.turn(Instant::now());
        assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 9 finished requests"));

        second.load(Source::Native("random".into()), Vec::new()).unwrap();
        class.turn(Instant::now());
        worker.refresh();
        finish(&second, 1);
        let status = second.feed.status();
        assert!(!status.learns && second.feed.take().is_empty(), "nobody learns");
        second.rollback().unwrap();
        class.turn(Instant::now());
        assert_eq!(known(&second, &mut worker).as_deref(), Some("knows of 9 finished requests"));
        assert!(catalog.learned(SlotKind::Scheduler, "counting").unwrap().is_some());
        catalog.keep_learned(SlotKind::Scheduler, "other", &[1], &["other"]).unwrap();
        assert!(catalog.learned(SlotKind::Scheduler, "counting").unwrap().is_none(), "named by nobody");
    }

    #[test]
    fn a_state_that_is_not_taken_is_not_offered_again() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(sled::open(folder.path()).unwrap(), folder.path()).unwrap();
        catalog.keep_learned(SlotKind::Scheduler, "counting", &[3; 8], &[]).unwrap();
        let slot = slot(learner("trap-on-import", 0), Some(catalog));
        let (mut class, mut worker) = (Class::new(slot.clone()), slot.worker());
        until(&mut class, |class| slot.feed.status().faults == 1 && class.learner.is_some());
        assert_eq!(known(&slot, &mut worker).as_deref(), Some("knows of 0 finished requests"));
    }

    #[test]
    fn what_cannot_be_adopted_costs_an_instance_and_not_the_decision() {
        let slot = slot(learner("trap-on-adopt", 0), None);
        let (mut class, mut worker) = (Class::new(slot.clone()), slot.worker());
        while slot.current().spares.lock().is_empty() {
            std::thread::yield_now();
        }
        class.turn(Instant::now());
        assert!(worker.refresh(), "another engine, which has to be given everything");
        assert_eq!(worker.tell(|engine| engine.export_state().map(|state| state.len())), Ok(12));
        assert!(!worker.refresh(), "it is not asked to adopt the same again");
        assert_eq!(slot.current().counters.values().traps, 1);
    }

    #[test]
    fn a_learner_that_is_slow_misses_the_oldest() {
        let feed = Feed::default();
        let outcome = |decision| Outcome { decision, ..Outcome::default() };
        feed.push(&outcome(0));
        assert!(feed.take().is_empty(), "nobody learns");
        feed.want(true);
        (0..QUEUE as u64 + 5).for_each(|decision| feed.push(&outcome(decision)));
        assert_eq!((feed.status().dropped, feed.queue.lock().len()), (5, QUEUE));
        let words = feed.take();
        assert_eq!((words.len(), words[2]), (OUTCOMES_MAX * OUTCOME, 5));
    }

    #[test]
    fn a_thread_keeps_what_was_learned_when_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(sled::open(folder.path()).unwrap(), folder.path()).unwrap();
        let slot = slot(learner("none", 0), Some(catalog.clone()));
        let learning = Learning::start(&slot, Duration::from_millis(1)).unwrap();
        while !slot.feed.status().learns {
            std::thread::yield_now();
        }
        finish(&slot, 2);
        while slot.feed.status().outcomes < 3 {
            std::thread::yield_now();
        }
        drop(learning);
        let kept = catalog.learned(SlotKind::Scheduler, "counting").unwrap().unwrap();
        assert_eq!(kept.first_chunk(), Some(&2u64.to_le_bytes()));
    }
}
