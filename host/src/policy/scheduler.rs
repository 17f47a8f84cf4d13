//! The scheduler slot: engines, and the worker that each deciding thread holds.

mod shadow;
mod worker;

pub use self::shadow::is_same;
pub use self::worker::{Outcome, SchedulerWorker, Seat, SharedThresholds};

use super::bindings::scheduler::Scheduler as Component;
use super::bindings::scheduler::exports::kvasir::policy::scheduling;
use super::chain::{Chain, Part, PartSaid, Role};
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::record::{Push, bits};
use super::slot::{Builtin, Hook, Policy};
use super::{Error, Fault, Limits, Module, SlotKind, unwrapped};
use crate::fleet::Changes;
use kvasir_policy::Scheduler;
use kvasir_policy::scheduler::{Answer, Decision, Kept, Question};
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

    /// What each filter and scorer of a chain says, in their order. A policy that is no chain has none.
    ///
    /// # Errors
    /// As `open`.
    fn parts(&mut self, _question: &Question) -> Result<Vec<PartSaid>, Fault> {
        Ok(Vec::new())
    }
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
        self.cold("open", |b, store| b.kvasir_policy_scheduling().call_open(store, layout))
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-prefill", |b, store| b.kvasir_policy_scheduling().call_update_prefill(store, rows))
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-decode", |b, store| b.kvasir_policy_scheduling().call_update_decode(store, rows))
    }

    fn update_links(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-links", |b, store| b.kvasir_policy_scheduling().call_update_links(store, rows))
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.hot("set-thresholds", |b, store| b.kvasir_policy_scheduling().call_set_thresholds(store, values))
    }

    fn schedule(&mut self, question: &Question) -> Result<Decision, Fault> {
        let (now, words) = (question.now(), question.words());
        let answer =
            self.hot("schedule", |b, store| b.kvasir_policy_scheduling().call_schedule(store, now, words));
        answer.map(|answer| Answer::from(answer).into())
    }

    fn explain(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        let (now, words) = (question.now(), question.words());
        self.cold("explain", |b, store| b.kvasir_policy_scheduling().call_explain(store, now, words))
    }

    fn score(&mut self, question: &Question) -> Result<Vec<f32>, Fault> {
        let (now, words) = (question.now(), question.words());
        self.hot("explain", |b, store| b.kvasir_policy_scheduling().call_explain(store, now, words))
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
    type Heard = shadow::Heard;
    type Shadow = shadow::SchedulerShadow;

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
        if module.core.is_some() {
            return Ok(Box::new(Guest::<unwrapped::Scheduler>::unwrapped(module, limits, log)?));
        }
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }

    fn agree(one: &mut Self::Engine, other: &mut Self::Engine) -> Result<bool, Fault> {
        unwrapped::schedulers_agree(one, other)
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

/// Tells an engine what changed in the tables.
///
/// # Errors
/// The policy failed.
pub(crate) fn push(engine: &mut dyn SchedulerEngine, changes: &Changes) -> Result<(), Fault> {
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

/// The same as a recording has it.
pub(crate) fn pushes(changes: &Changes) -> Vec<Push> {
    let Changes { open, prefill, decode, links } = changes;
    let open = open.map(|layout| ("open".to_owned(), layout.encode().to_vec()));
    let rows = [("update-prefill", prefill), ("update-decode", decode), ("update-links", links)];
    let rows = rows.into_iter().filter(|(_, rows)| !rows.is_empty());
    open.into_iter().chain(rows.map(|(name, rows)| (name.to_owned(), bits(rows)))).collect()
}
