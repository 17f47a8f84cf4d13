//! The balancer slot: engines, and the worker that the ticking thread holds.

use super::bindings::balancer::Balancer as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::record::PolicyOf;
use super::slot::{Around, Builtin, Hook, OnTrial, Policy, Shadow, Slot, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use kvasir_policy::Balancer;
use kvasir_policy::balancer::{Snapshot, THRESHOLDS_MAX};
use std::sync::Arc;

/// A balancer behind either engine.
pub trait BalancerEngine: Policy {
    /// The thresholds that the policy wants, unchecked.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn tick(&mut self, state: &Snapshot) -> Result<Vec<f32>, Fault>;
}

/// A policy compiled into this binary. Never fails.
pub struct NativeBalancer(pub Box<dyn Balancer>);

native_control!(NativeBalancer, this => this.0);

impl BalancerEngine for NativeBalancer {
    fn tick(&mut self, state: &Snapshot) -> Result<Vec<f32>, Fault> {
        Ok(self.0.tick(state))
    }
}

component_control!(balancer::Balancer);

impl BalancerEngine for Guest<Component> {
    fn tick(&mut self, state: &Snapshot) -> Result<Vec<f32>, Fault> {
        let Snapshot { now_ms, prefill_queue_ms, decode_step_ms, .. } = state;
        self.cold("tick", |b, store| {
            let balancing = b.kvasir_policy_balancing();
            balancing.call_tick(store, *now_ms, &state.cluster(), prefill_queue_ms, decode_step_ms)
        })
    }
}

/// Ties the slot machinery to balancers.
pub struct BalancerHook;

impl Hook for BalancerHook {
    const KIND: SlotKind = SlotKind::Balancer;
    type Engine = dyn BalancerEngine;
    const NO_CANARY: Option<&'static str> = Some("one balancer sets the thresholds of the whole cluster");
    type Heard = Heard;
    type Shadow = BalancerShadow;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::BALANCERS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn BalancerEngine> { Box::new(NativeBalancer((d.native)())) }),
        })
    }

    fn instantiate(
        module: &Module,
        limits: &Limits,
        log: Arc<Log>,
    ) -> Result<Box<dyn BalancerEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }
}

/// One tick and its answer.
pub struct Heard {
    state: Snapshot,
    thresholds: Vec<f32>,
}

/// A balancer in shadow.
#[derive(Default)]
pub struct BalancerShadow;

impl Shadow<BalancerHook> for BalancerShadow {
    fn hear(&mut self, around: &Around<'_, BalancerHook>, worker: &mut Worker<BalancerHook>, heard: Heard) {
        worker.refresh();
        let asked = worker.ask(|engine| checked(engine.tick(&heard.state)?));
        if let Ok(thresholds) = asked {
            around.trial.tally.compare(thresholds == heard.thresholds);
        }
    }
}

/// The balancer of one daemon. Its calls never fail outward.
pub struct BalancerWorker {
    worker: Worker<BalancerHook>,
    trial: OnTrial<BalancerHook>,
    /// Why the last tick gave no plan.
    fallback: Option<Fault>,
}

impl BalancerWorker {
    pub(super) fn new(slot: &Arc<Slot<BalancerHook>>) -> Self {
        Self { worker: slot.worker(), trial: OnTrial::new(slot), fallback: None }
    }

    /// What decides, as it is recorded.
    pub fn policy_of(&self) -> PolicyOf {
        PolicyOf::from(&**self.worker.version())
    }

    /// Why the last tick gave no plan, if it failed.
    pub fn fallback(&self) -> Option<&Fault> {
        self.fallback.as_ref()
    }

    /// The thresholds from this tick on, all finite. Empty means that they stay as they are, also if the policy failed.
    pub fn tick(&mut self, state: &Snapshot) -> Vec<f32> {
        self.worker.refresh();
        let asked = self.worker.ask(|engine| checked(engine.tick(state)?));
        self.fallback = asked.as_ref().err().cloned();
        // Not the twin's answer: a failed tick keeps the thresholds in force, says the contract.
        let Ok(thresholds) = asked else {
            self.worker.version().counters.fallback();
            return Vec::new();
        };
        if let Some(shadow) = self.trial.shadow() {
            shadow.tell(|| Heard { state: state.clone(), thresholds: thresholds.clone() });
        }
        thresholds
    }
}

/// Thresholds that a scheduler can be told.
///
/// # Errors
/// [`Fault::Invalid`].
pub fn checked(thresholds: Vec<f32>) -> Result<Vec<f32>, Fault> {
    if thresholds.len() > THRESHOLDS_MAX {
        return Err(Fault::Invalid(format!("{} thresholds; at most {THRESHOLDS_MAX}", thresholds.len())));
    }
    match thresholds.iter().find(|t| !t.is_finite()) {
        Some(bad) => Err(Fault::Invalid(format!("threshold {bad}"))),
        None => Ok(thresholds),
    }
}
