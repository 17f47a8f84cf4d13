//! The scheduler slot: engines, and the worker that each deciding thread holds.

use super::bindings::scheduler::Scheduler as Component;
use super::bindings::scheduler::exports::kvasir::policy::scheduling;
use super::chain::{Chain, Part, Role};
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Hook, Policy, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use crate::conductor::fleet::{Changes, Fleet, Told};
use arc_swap::ArcSwap;
use kvasir_policy::Scheduler;
use kvasir_policy::scheduler::{Answer, Decision, Kept, Question, Reason};
use std::sync::Arc;

/// A scheduler behind either engine: the hot functions of `scheduling`, each of which may fail.
pub trait SchedulerEngine: Policy {
    /// # Errors
    /// Any [`Fault`]; after `Trap` and `Deadline` the engine only answers `NotReady`.
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault>;

    /// The answer, unchecked.
    ///
    /// # Errors
    /// As `open`.
    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault>;

    /// The scores, unchecked.
    ///
    /// # Errors
    /// As `open`.
    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault>;

    /// The same as a part of a chain: within the deadline of a decision.
    ///
    /// # Errors
    /// As `open`.
    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault>;
}

/// A policy compiled into this binary, with the tables it decides on. Never fails.
pub struct NativeScheduler(Kept<dyn Scheduler>);

impl NativeScheduler {
    pub fn new(policy: Box<dyn Scheduler>) -> Self {
        Self(Kept::new(policy))
    }
}

native_control!(NativeScheduler, this => this.0.scheduler());

impl SchedulerEngine for NativeScheduler {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        self.0.open(layout);
        Ok(())
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.0.update_prefill(rows);
        Ok(())
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.0.update_decode(rows);
        Ok(())
    }

    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.0.update_links(rows);
        Ok(())
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.0.set_thresholds(values);
        Ok(())
    }

    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault> {
        Ok(self.0.schedule(question.now(), question.words()))
    }

    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        Ok(self.0.explain(question.now(), question.words()))
    }

    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        self.explain(question)
    }
}

component_control!(scheduler::Scheduler);

impl SchedulerEngine for Guest<Component> {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        self.cold(|b, store| b.kvasir_policy_scheduling().call_open(store, layout))
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_update_prefill(store, rows))
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_update_decode(store, rows))
    }

    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_update_links(store, rows))
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_set_thresholds(store, values))
    }

    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault> {
        let (now, words) = (question.now(), question.words());
        let answer = self.hot(|b, store| b.kvasir_policy_scheduling().call_schedule(store, now, words));
        answer.map(|answer| Answer::from(answer).into())
    }

    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        let (now, words) = (question.now(), question.words());
        self.cold(|b, store| b.kvasir_policy_scheduling().call_explain(store, now, words))
    }

    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        let (now, words) = (question.now(), question.words());
        self.hot(|b, store| b.kvasir_policy_scheduling().call_explain(store, now, words))
    }
}

impl From<scheduling::Decision> for Answer {
    fn from(answer: scheduling::Decision) -> Self {
        let scheduling::Decision {
            prefill,
            decode,
            transfer_blocks,
            source,
            reason,
            retry_after,
            session_memo,
            tenant_charge,
        } = answer;
        Self { prefill, decode, transfer_blocks, source, reason, retry_after, session_memo, tenant_charge }
    }
}

/// Ties the slot machinery to schedulers.
pub struct SchedulerHook;

impl Hook for SchedulerHook {
    const KIND: SlotKind = SlotKind::Scheduler;
    type Engine = dyn SchedulerEngine;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::SCHEDULERS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn SchedulerEngine> { Box::new(NativeScheduler::new((d.native)())) }),
        })
    }

    fn instantiate(
        module: &Module,
        limits: &Limits,
        log: Arc<Log>,
    ) -> Result<Box<dyn SchedulerEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }

    fn chain(
        name: &str,
        parts: Vec<(String, Role, Box<dyn SchedulerEngine>)>,
    ) -> Result<Box<dyn SchedulerEngine>, Error> {
        let part = |(name, role, engine)| Part { name, role, engine };
        let mut parts: Vec<_> = parts.into_iter().map(part).collect();
        let picker = parts.pop().expect("a chain was checked to have a picker");
        Ok(Box::new(Chain::new(name, parts, picker)))
    }
}

/// A decision and who made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub decision: Decision,
    /// Why the native twin decided instead of the policy.
    pub fallback: Option<Fault>,
    /// Generation of the policy in service.
    pub generation: u64,
}

/// Thresholds in force, shared by the balancer that sets them and the schedulers that read them.
pub type SharedThresholds = Arc<ArcSwap<Vec<f32>>>;

/// The scheduler of one thread. Its calls never fail outward.
pub struct SchedulerWorker {
    worker: Worker<SchedulerHook>,
    told: Told,
    /// What the engine still has to be given of it.
    pending: Option<Changes>,
    thresholds: SharedThresholds,
    thresholds_seen: Option<Arc<Vec<f32>>>,
}

impl SchedulerWorker {
    pub(super) fn new(worker: Worker<SchedulerHook>, thresholds: SharedThresholds) -> Self {
        Self { worker, told: Told::default(), pending: None, thresholds, thresholds_seen: None }
    }

    /// Decides one request where nobody else touches the tables.
    pub fn schedule(&mut self, fleet: &Fleet, question: &Question) -> Outcome {
        self.catch_up(fleet);
        self.decide(question)
    }

    /// Copies what changed in the tables; no policy is called, so this may stand under their lock.
    pub fn catch_up(&mut self, fleet: &Fleet) {
        let Some(changes) = self.told.catch_up(fleet) else { return };
        // Two steps become one: all there is now.
        let behind = self.pending.is_some();
        self.pending = Some(if behind { self.told.all() } else { changes });
    }

    /// Decides one request on what was caught up: push it to the engine, ask it, check the answer; on
    /// any fault the native twin decides.
    pub fn decide(&mut self, question: &Question) -> Outcome {
        self.refresh();
        match self.ask(question) {
            Ok(decision) => Outcome { decision, fallback: None, generation: self.generation() },
            Err(fault) => self.decide_natively(question, fault),
        }
    }

    fn ask(&mut self, question: &Question) -> Result<Decision, Fault> {
        self.push_pending()?;
        let told = &self.told;
        self.worker.ask(|engine| {
            let decision = engine.schedule(question)?;
            let checked = told.check(&decision, question.candidates());
            checked.map(|()| decision).map_err(|invalid| Fault::Invalid(invalid.to_string()))
        })
    }

    /// Takes up a newer version of the policy or a rebuilt engine, if there is one.
    pub fn refresh(&mut self) {
        if self.worker.refresh() {
            self.pending = Some(self.told.all());
            self.thresholds_seen = None;
        }
    }

    fn push_pending(&mut self) -> Result<(), Fault> {
        let Self { worker, pending, thresholds, thresholds_seen, .. } = self;
        worker.tell(|engine| {
            if let Some(changes) = pending.take() {
                push(engine, &changes)?;
            }
            let thresholds = thresholds.load();
            if thresholds_seen.as_ref().is_none_or(|seen| !Arc::ptr_eq(seen, &thresholds)) {
                engine.set_thresholds(&thresholds)?;
                *thresholds_seen = Some(thresholds.clone());
            }
            Ok(())
        })
    }

    /// The native twin decides on what was caught up, and is counted.
    pub fn decide_natively(&mut self, question: &Question, why: Fault) -> Outcome {
        let decision = self.native(question);
        Outcome { decision, fallback: Some(why), generation: self.generation() }
    }

    fn native(&mut self, question: &Question) -> Decision {
        let no_instance = Decision::reject(Reason::NoInstance, 1_000);
        let Some(native) = self.worker.twin() else { return no_instance };
        // Rare enough to be told everything, rather than to follow with a cursor of its own.
        let told = push(native, &self.told.all());
        let told = told.and_then(|()| native.set_thresholds(&self.thresholds.load()));
        let answer = told.and_then(|()| native.schedule(question));
        let decision = answer.unwrap_or(no_instance);
        if self.told.check(&decision, question.candidates()).is_ok() { decision } else { no_instance }
    }

    /// The scores of the policy in service, on what was caught up, for `kvasir explain`; empty if it gives none.
    pub fn explain(&mut self, question: &Question) -> Vec<f32> {
        self.refresh();
        let pushed = self.push_pending();
        let told = &self.told;
        let scores = pushed.and_then(|()| {
            self.worker.tell(|engine| {
                let scores = engine.explain(question)?;
                let checked = told.check_scores(&scores);
                checked.map(|()| scores).map_err(|invalid| Fault::Invalid(invalid.to_string()))
            })
        });
        scores.unwrap_or_default()
    }

    /// Name of the policy in service.
    pub fn policy(&self) -> &str {
        &self.worker.version().description.name
    }

    fn generation(&self) -> u64 {
        self.worker.version().generation
    }
}

fn push(engine: &mut dyn SchedulerEngine, changes: &Changes) -> Result<(), Fault> {
    let Changes { open, prefill, decode, links } = changes;
    if let Some(layout) = open {
        engine.open(&layout.encode())?;
    }
    if !prefill.is_empty() {
        engine.update_prefill(prefill)?;
    }
    if !decode.is_empty() {
        engine.update_decode(decode)?;
    }
    if !links.is_empty() {
        engine.update_links(links)?;
    }
    Ok(())
}
