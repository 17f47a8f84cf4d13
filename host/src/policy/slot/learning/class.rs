//! A slot and its learners.

use super::super::worker::{Backoff, MAX_STATE_BYTES};
use super::super::{Hook, Policy, Slot, Version};
use super::Lessons;
use crate::policy::Fault;
use crate::policy::bindings::learner::Learner as Component;
use crate::policy::control::component_control;
use crate::policy::guest::Guest;
use kvasir_policy::learning::{KNOWLEDGE_MAX, OUTCOME};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How often a learner's state is kept.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// A learner that goes on failing is made again about once a minute (a power of two of milliseconds).
const LONGEST_WAIT: u32 = 16;

/// The learning half of a policy.
pub trait Learner: Policy {
    /// `outcomes`: records of `stride` words.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn observe(&mut self, stride: usize, outcomes: &[u32]) -> Result<(), Fault>;

    /// # Errors
    /// Any [`Fault`]; [`Fault::Invalid`] of an answer over [`KNOWLEDGE_MAX`].
    fn publish(&mut self) -> Result<Vec<u8>, Fault>;
}

/// The learner of a component.
pub(in crate::policy::slot) type LearnerGuest = Guest<Component>;

component_control!(learner::Learner);

impl Learner for LearnerGuest {
    fn observe(&mut self, stride: usize, outcomes: &[u32]) -> Result<(), Fault> {
        self.cold("observe", |b, store| {
            b.kvasir_policy_learning().call_observe(store, stride as u32, outcomes)
        })
    }

    fn publish(&mut self) -> Result<Vec<u8>, Fault> {
        let knowledge = self.cold("publish", |b, store| b.kvasir_policy_learning().call_publish(store))?;
        if knowledge.len() > KNOWLEDGE_MAX {
            return Err(Fault::Invalid(format!(
                "{} bytes to publish; at most {KNOWLEDGE_MAX}",
                knowledge.len()
            )));
        }
        Ok(knowledge)
    }
}

/// Which of a slot's two policies a learner learns for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::policy::slot) enum Seat {
    Service,
    Trial,
}

/// The learners of both seats of a slot.
pub(super) struct Class<H: Hook> {
    pub(super) service: Pupil<H>,
    trial: Pupil<H>,
}

impl<H: Hook> Class<H> {
    pub(super) fn new(slot: Arc<Slot<H>>, now: Instant) -> Self {
        let service = Pupil::new(Arc::clone(&slot), Seat::Service, now);
        Self { service, trial: Pupil::new(slot, Seat::Trial, now) }
    }

    /// The one in service first: what is on trial never holds it up.
    pub(super) fn turn(&mut self, now: Instant) {
        self.service.now = now;
        self.trial.now = now;
        if self.trial.was_promoted(&self.service) {
            self.service.follow(&mut self.trial);
        }
        self.service.turn();
        self.trial.turn();
    }

    pub(super) fn keep_state(&mut self) {
        self.service.keep_state();
        self.trial.keep_state();
    }
}

/// One seat of a slot and its learner, as the thread has them.
pub(super) struct Pupil<H: Hook> {
    slot: Arc<Slot<H>>,
    seat: Seat,
    /// `None` means that nothing is on trial.
    version: Option<Arc<Version<H>>>,
    pub(super) learner: Option<Box<dyn Learner>>,
    /// What the last learner of this policy exported.
    state: Option<Arc<[u8]>>,
    /// The learner heard something since then.
    changed: bool,
    pub(super) keep_due: Instant,
    retry: Backoff,
    /// As of this turn.
    now: Instant,
}

impl<H: Hook> Pupil<H> {
    fn new(slot: Arc<Slot<H>>, seat: Seat, now: Instant) -> Self {
        let (keep_due, retry) = (now + KEEP_EVERY, Backoff::up_to(LONGEST_WAIT));
        let mut pupil = Self {
            slot,
            seat,
            version: None,
            learner: None,
            state: None,
            changed: false,
            keep_due,
            retry,
            now,
        };
        pupil.version = pupil.newest();
        // What it left before the host ended.
        pupil.state = pupil.key().and_then(|key| pupil.slot.learned(&key));
        pupil.begin();
        pupil
    }

    fn newest(&self) -> Option<Arc<Version<H>>> {
        match self.seat {
            Seat::Service => Some(self.slot.current()),
            Seat::Trial => self.slot.trial().map(|trial| Arc::clone(&trial.version)),
        }
    }

    fn lessons(&self) -> &Lessons {
        self.slot.lessons(self.seat)
    }

    fn generation(&self) -> Option<u64> {
        self.version.as_ref().map(|version| version.generation)
    }

    /// The name under which its state is kept.
    fn key(&self) -> Option<String> {
        let name = &self.version.as_ref()?.description.name;
        Some(match self.seat {
            Seat::Service => name.clone(),
            Seat::Trial => on_trial(name),
        })
    }

    fn turn(&mut self) {
        let newest = self.newest();
        if newest.as_ref().map(|version| version.generation) != self.generation() {
            self.keep_state();
            let name = |version: &Option<Arc<Version<H>>>| {
                version.as_ref().map(|version| version.description.name.clone())
            };
            let same_name = name(&newest) == name(&self.version);
            self.version = newest;
            (self.learner, self.retry) = (None, Backoff::up_to(LONGEST_WAIT));
            // What the trial before it learned must not spoil this one.
            if !same_name || self.seat == Seat::Trial {
                self.state = None;
            }
            self.begin();
        }
        if !self.learns() {
            return;
        }
        if self.learner.is_none() && self.retry.due(self.now) {
            self.make_learner();
        }
        self.teach();
        if self.now >= self.keep_due {
            self.keep_due = self.now + KEEP_EVERY;
            self.keep_state();
        }
    }

    fn learns(&self) -> bool {
        self.version.as_ref().is_some_and(|version| version.learns())
    }

    /// Another version has the seat.
    fn begin(&mut self) {
        let learns = self.learns();
        if self.seat == Seat::Trial {
            self.lessons().forget();
        }
        self.lessons().feed.want(learns);
        if let Some(version) = self.version.as_ref().filter(|_| learns && self.state.is_none()) {
            self.state = self.slot.learned(&version.description.name);
        }
    }

    /// The policy for which it learned serves now, as it was on trial.
    fn was_promoted(&self, service: &Self) -> bool {
        let (Some(version), Some(newest)) = (&self.version, service.newest()) else { return false };
        let ended = self.newest().is_none_or(|on_trial| on_trial.generation != version.generation);
        let same = Arc::ptr_eq(&version.program, &newest.program) && version.assignment == newest.assignment;
        ended && same && self.learns() && Some(newest.generation) != service.generation()
    }

    /// Goes on with the learner of the trial that was promoted, with what it knows and what it has not heard yet.
    fn follow(&mut self, trial: &mut Self) {
        self.keep_state();
        self.version = self.newest();
        self.learner = trial.learner.take();
        self.state = trial.state.take();
        self.retry = std::mem::replace(&mut trial.retry, Backoff::up_to(LONGEST_WAIT));
        self.lessons().feed.want(true);
        self.lessons().feed.exchange(&trial.lessons().feed);
        (self.changed, trial.changed) = (true, false);
        self.publish();
        self.keep_state();
        // Forgotten, so that it is not taken for another's when that trial ends.
        (trial.version, trial.state) = (None, None);
        trial.begin();
    }

    fn make_learner(&mut self) {
        let Some(version) = self.version.clone() else { return };
        match version.build_learner(&self.slot.limits, &self.slot.log) {
            Ok(learner) => self.learner = learner,
            Err(e) => return self.failed("is not made", &e),
        }
        if let Some(state) = self.state.clone() {
            match self.call(|learner| learner.import_state(&state)) {
                Some(Ok(())) => {}
                // It will not take this state next time either.
                None => self.state = None,
                Some(Err(reason)) => {
                    self.state = None;
                    self.say(&format!("starts cold: {reason}"));
                }
            }
        }
        self.publish();
    }

    fn teach(&mut self) {
        if self.learner.is_none() {
            return;
        }
        let outcomes = self.lessons().feed.take();
        if outcomes.is_empty() {
            return;
        }
        self.lessons().feed.counts.outcomes.fetch_add((outcomes.len() / OUTCOME) as u64, Relaxed);
        self.changed = true;
        if self.call(|learner| learner.observe(OUTCOME, &outcomes)).is_some() {
            self.publish();
        }
    }

    fn publish(&mut self) {
        let Some(bytes) = self.call(|learner| learner.publish()) else { return };
        let Some(generation) = self.generation() else { return };
        if self.lessons().publish(generation, bytes.into()) {
            self.lessons().feed.counts.published.fetch_add(1, Relaxed);
        }
    }

    /// Asks the learner for its state, and keeps it. One that is gone has nothing to keep.
    pub(super) fn keep_state(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let (Some(state), Some(key)) = (self.call(|learner| learner.export_state()), self.key()) else {
            return;
        };
        if state.len() > MAX_STATE_BYTES {
            return self
                .failed("keeps no state", &format!("{} bytes are over {MAX_STATE_BYTES}", state.len()));
        }
        if let Err(e) = self.slot.keep_learned(&key, &state) {
            self.say(&format!("has its state not kept: {e}"));
        }
        self.state = Some(state.into());
    }

    /// `None` means that there is no learner, or it failed; then it is made again later.
    fn call<R>(&mut self, f: impl FnOnce(&mut dyn Learner) -> Result<R, Fault>) -> Option<R> {
        match f(self.learner.as_deref_mut()?) {
            Ok(answer) => Some(answer),
            Err(fault) => {
                self.learner = None;
                self.failed("failed", &fault);
                None
            }
        }
    }

    fn failed(&mut self, how: &str, why: &dyn std::fmt::Display) {
        self.lessons().feed.counts.faults.fetch_add(1, Relaxed);
        self.retry.failed(self.now);
        self.say(&format!("{how}: {why}"));
    }

    fn say(&self, what: &str) {
        let whose = if self.seat == Seat::Trial { "the learner on trial" } else { "the learner" };
        self.slot.log.add_host(2, &format!("{whose} {what}"));
    }
}

/// The name under which the state of a learner on trial is kept. No policy has such a name.
pub(super) fn on_trial(name: &str) -> String {
    format!("{name}@trial")
}
