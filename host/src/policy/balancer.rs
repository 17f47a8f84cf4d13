//! The balancer slot: engines, and the worker that the ticking thread holds.

use super::bindings::balancer::Balancer as Component;
use super::bindings::balancer::exports::kvasir::policy::balancing as wit;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Hook, Policy, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use kvasir_policy::Balancer;
use kvasir_policy::balancer::{Action, Plan, Snapshot};
use std::sync::Arc;

/// Actions carried out per tick.
const MAX_ACTIONS: usize = 16;

/// A balancer behind either engine.
pub trait BalancerEngine: Policy {
    /// # Errors
    /// Any [`Fault`].
    fn tick(&mut self, state: &Snapshot) -> Result<Plan, Fault>;
}

/// A policy compiled into this binary. Never fails.
pub struct NativeBalancer(pub Box<dyn Balancer>);

native_control!(NativeBalancer, this => this.0);

impl BalancerEngine for NativeBalancer {
    fn tick(&mut self, state: &Snapshot) -> Result<Plan, Fault> {
        Ok(self.0.tick(state))
    }
}

component_control!(balancer::Balancer);

impl BalancerEngine for Guest<Component> {
    fn tick(&mut self, state: &Snapshot) -> Result<Plan, Fault> {
        let hot = state.hot.iter().map(|h| wit::HotPrefix {
            id: h.id,
            blocks: h.blocks,
            hits: h.hits,
            holders: h.holders.clone(),
        });
        let snapshot = wit::Snapshot {
            now: state.now_ms,
            prefill_queue: state.prefill_queue_ms.clone(),
            decode_step: state.decode_step_ms.clone(),
            hit_rate: state.hit_rate_percent,
            rejected: state.rejected,
            accepted: state.accepted,
            hot: hot.collect(),
        };
        let plan = self.cold(|b, store| b.kvasir_policy_balancing().call_tick(store, &snapshot))?;
        let action =
            |a: &wit::Action| Action { kind: a.kind, prefix: a.prefix, source: a.source, target: a.target };
        Ok(Plan { thresholds: plan.thresholds, actions: plan.actions.iter().map(action).collect() })
    }
}

/// Ties the slot machinery to balancers.
pub struct BalancerHook;

impl Hook for BalancerHook {
    const KIND: SlotKind = SlotKind::Balancer;
    type Engine = dyn BalancerEngine;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::BALANCERS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn BalancerEngine> { Box::new(NativeBalancer((d.native)())) }),
        })
    }

    fn instantiate(module: &Module, limits: Limits, log: Arc<Log>) -> Result<Box<dyn BalancerEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }
}

/// The balancer of one daemon. Its calls never fail outward.
pub struct BalancerWorker {
    worker: Worker<BalancerHook>,
}

impl BalancerWorker {
    pub(super) fn new(worker: Worker<BalancerHook>) -> Self {
        Self { worker }
    }

    /// The plan of this tick: thresholds that are all finite (empty = keep), at most 16 actions of
    /// known kind on slots that exist. Empty if the policy failed.
    pub fn tick(&mut self, state: &Snapshot) -> Plan {
        self.worker.refresh();
        let asked = self.worker.ask(|engine| checked(engine.tick(state)?, state));
        // Not the twin's plan: a failed tick keeps the thresholds in force, says the contract.
        asked.unwrap_or_else(|_| {
            self.worker.version().counters.fallback();
            Plan::default()
        })
    }
}

fn checked(mut plan: Plan, state: &Snapshot) -> Result<Plan, Fault> {
    if let Some(bad) = plan.thresholds.iter().find(|t| !t.is_finite()) {
        return Err(Fault::Invalid(format!("threshold {bad}")));
    }
    plan.actions.truncate(MAX_ACTIONS);
    let slots = state.prefill_queue_ms.len() as u32;
    let known = |a: &Action| {
        let prefix = state.hot.iter().any(|h| h.id == a.prefix);
        (1..=3).contains(&a.kind) && prefix && a.source < slots && (a.kind == 3 || a.target < slots)
    };
    match plan.actions.iter().find(|a| !known(a)) {
        Some(bad) => Err(Fault::Invalid(format!("{bad:?}"))),
        None => Ok(plan),
    }
}
