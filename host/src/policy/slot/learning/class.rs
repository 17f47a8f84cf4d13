//! A slot and its learner.

use super::super::worker::{Backoff, MAX_STATE_BYTES};
use super::super::{Hook, Policy, Slot, Version};
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
/// A learner that goes on failing is made anew about once a minute (a power of two of milliseconds).
const LONGEST_WAIT: u32 = 16;

/// A component's learning half.
pub(in crate::policy::slot) type Learner = Guest<Component>;

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
pub(super) struct Class<H: Hook> {
    slot: Arc<Slot<H>>,
    version: Arc<Version<H>>,
    pub(super) learner: Option<Learner>,
    /// What the last learner of this policy exported.
    state: Option<Arc<[u8]>>,
    /// The learner heard something since then.
    changed: bool,
    pub(super) keep_due: Instant,
    retry: Backoff,
    /// As of this turn.
    now: Instant,
}

impl<H: Hook> Class<H> {
    pub(super) fn new(slot: Arc<Slot<H>>, now: Instant) -> Self {
        let version = slot.current();
        let (keep_due, retry) = (now + KEEP_EVERY, Backoff::up_to(LONGEST_WAIT));
        let mut class =
            Self { slot, version, learner: None, state: None, changed: false, keep_due, retry, now };
        class.begin();
        class
    }

    pub(super) fn turn(&mut self, now: Instant) {
        self.now = now;
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
        if self.learner.is_none() && self.retry.due(now) {
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
    pub(super) fn keep_state(&mut self) {
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
        self.retry.failed(self.now);
        self.slot.log.add_host(2, &format!("the learner {how}: {why}"));
    }
}
