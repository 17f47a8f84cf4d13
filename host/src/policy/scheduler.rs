//! The scheduler slot: engines, and the worker that each deciding thread holds.

use super::bindings::scheduler::Scheduler as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Hook, Policy, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use crate::conductor::fleet::{Changes, Fleet, Told};
use arc_swap::ArcSwap;
use kvasir_policy::Scheduler;
use kvasir_policy::scheduler::{Decision, Kept, Reason, Request};
use std::sync::Arc;

/// A scheduler behind either engine: the hot functions of `scheduling`, each of which may fail.
pub trait SchedulerEngine: Policy {
    /// # Errors
    /// Any [`Fault`]; after `Trap` and `Deadline` the engine only answers `NotReady`.
    fn open(&mut self, prefill_slots: u32, decode_slots: u32, block_size_tokens: u32) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// # Errors
    /// As `open`.
    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault>;

    /// The packed answer, unchecked.
    ///
    /// # Errors
    /// As `open`.
    fn schedule(&mut self, request: &Request, prefix_blocks: &[u32]) -> Result<u64, Fault>;

    /// # Errors
    /// As `open`.
    fn explain(&mut self, request: &Request, prefix_blocks: &[u32]) -> Result<Vec<f32>, Fault>;
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
    fn open(&mut self, prefill_slots: u32, decode_slots: u32, block_size_tokens: u32) -> Result<(), Fault> {
        self.0.open(prefill_slots, decode_slots, block_size_tokens);
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

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.0.set_thresholds(values);
        Ok(())
    }

    fn schedule(&mut self, request: &Request, prefix_blocks: &[u32]) -> Result<u64, Fault> {
        Ok(self.0.schedule(request, prefix_blocks))
    }

    fn explain(&mut self, request: &Request, prefix_blocks: &[u32]) -> Result<Vec<f32>, Fault> {
        Ok(self.0.explain(request, prefix_blocks))
    }
}

component_control!(scheduler::Scheduler);

/// Calls a function that takes a request, its values in the contract's order.
macro_rules! with_request {
    ($bindings:ident, $call:ident, $store:ident, $r:ident, $prefix_blocks:ident) => {
        $bindings.kvasir_policy_scheduling().$call(
            $store,
            $r.now,
            $r.prompt_tokens,
            $r.output_tokens,
            $r.class,
            $r.tenant,
            $r.priority,
            $r.session,
            $r.seed,
            $r.ttft_slo,
            $r.tbt_slo,
            $r.hints,
            $prefix_blocks,
        )
    };
}

impl SchedulerEngine for Guest<Component> {
    fn open(&mut self, prefill_slots: u32, decode_slots: u32, block_size_tokens: u32) -> Result<(), Fault> {
        self.cold(|b, store| {
            b.kvasir_policy_scheduling().call_open(store, prefill_slots, decode_slots, block_size_tokens)
        })
    }

    fn update_prefill(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_update_prefill(store, rows))
    }

    fn update_decode(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_update_decode(store, rows))
    }

    fn set_thresholds(&mut self, values: &[f32]) -> Result<(), Fault> {
        self.hot(|b, store| b.kvasir_policy_scheduling().call_set_thresholds(store, values))
    }

    fn schedule(&mut self, r: &Request, prefix_blocks: &[u32]) -> Result<u64, Fault> {
        self.hot(|b, store| with_request!(b, call_schedule, store, r, prefix_blocks))
    }

    fn explain(&mut self, r: &Request, prefix_blocks: &[u32]) -> Result<Vec<f32>, Fault> {
        self.cold(|b, store| with_request!(b, call_explain, store, r, prefix_blocks))
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
        limits: Limits,
        log: Arc<Log>,
    ) -> Result<Box<dyn SchedulerEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
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
    pub fn schedule(&mut self, fleet: &Fleet, request: &Request, prefix_blocks: &[u32]) -> Outcome {
        self.catch_up(fleet);
        self.decide(request, prefix_blocks)
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
    pub fn decide(&mut self, request: &Request, prefix_blocks: &[u32]) -> Outcome {
        self.refresh();
        match self.ask(request, prefix_blocks) {
            Ok(decision) => Outcome { decision, fallback: None, generation: self.generation() },
            Err(fault) => self.decide_natively(request, prefix_blocks, fault),
        }
    }

    fn ask(&mut self, request: &Request, prefix_blocks: &[u32]) -> Result<Decision, Fault> {
        self.push_pending()?;
        let told = &self.told;
        self.worker.ask(|engine| {
            let decision = Decision::unpack(engine.schedule(request, prefix_blocks)?);
            let checked = told.check(&decision, prefix_blocks);
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
    pub fn decide_natively(&mut self, request: &Request, prefix_blocks: &[u32], why: Fault) -> Outcome {
        let decision = self.native(request, prefix_blocks);
        Outcome { decision, fallback: Some(why), generation: self.generation() }
    }

    fn native(&mut self, request: &Request, prefix_blocks: &[u32]) -> Decision {
        let no_instance = Decision::reject(Reason::NoInstance, 1_000);
        let Some(native) = self.worker.twin() else { return no_instance };
        // Rare enough to be told everything, rather than to follow with a cursor of its own.
        let told = push(native, &self.told.all());
        let told = told.and_then(|()| native.set_thresholds(&self.thresholds.load()));
        let answer = told.and_then(|()| native.schedule(request, prefix_blocks));
        let decision = answer.map_or(no_instance, Decision::unpack);
        if self.told.check(&decision, prefix_blocks).is_ok() { decision } else { no_instance }
    }

    /// The score column of the policy in service, on what was caught up, for `kvasir explain`; empty if
    /// it gives none.
    pub fn explain(&mut self, request: &Request, prefix_blocks: &[u32]) -> Vec<f32> {
        self.refresh();
        let pushed = self.push_pending();
        let told = &self.told;
        let scores = pushed.and_then(|()| {
            self.worker.tell(|engine| {
                let scores = engine.explain(request, prefix_blocks)?;
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
    let (Changes::Rows { prefill, decode } | Changes::Full { prefill, decode, .. }) = changes;
    if let &Changes::Full { prefill_slots, decode_slots, block_size_tokens, .. } = changes {
        engine.open(prefill_slots, decode_slots, block_size_tokens)?;
    }
    if !prefill.is_empty() {
        engine.update_prefill(prefill)?;
    }
    if !decode.is_empty() {
        engine.update_decode(decode)?;
    }
    Ok(())
}
