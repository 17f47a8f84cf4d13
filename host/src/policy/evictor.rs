//! The evictor slot: engines, and the worker that the owner thread of a pool holds.

use super::bindings::evictor::Evictor as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Found, Hook, Policy, Worker};
use super::{Error, Fault, Limits, Module, SlotKind};
use kvasir_policy::Evictor;
use kvasir_policy::evictor::{EVENT, Events, Victim};
use std::sync::Arc;
use std::time::Duration;

/// An evictor behind either engine: the hot functions of `eviction`, each of which may fail.
///
/// Answers are unchecked: slots may be free, foreign or repeated. The owner checks them.
pub trait EvictorEngine: Policy {
    /// # Errors
    /// Any [`Fault`]; after `Trap` and `Deadline` the engine only answers `NotReady`.
    fn open(&mut self, slots: u32) -> Result<(), Fault>;

    /// `words`: records of [`kvasir_policy::evictor::EVENT`] words, oldest first.
    ///
    /// # Errors
    /// As `open`.
    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault>;

    /// Appends up to `want` victims.
    ///
    /// # Errors
    /// As `open`.
    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault>;
}

/// A policy compiled into this binary. Never fails.
pub struct NativeEvictor(pub Box<dyn Evictor>);

native_control!(NativeEvictor, this => this.0);

impl EvictorEngine for NativeEvictor {
    fn open(&mut self, slots: u32) -> Result<(), Fault> {
        self.0.open(slots);
        Ok(())
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        self.0.on_events(Events::new(base_ms, words));
        Ok(())
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        self.0.select_victims(now_ms, want, victims);
        Ok(())
    }
}

component_control!(evictor::Evictor);

impl EvictorEngine for Guest<Component> {
    fn open(&mut self, slots: u32) -> Result<(), Fault> {
        // Allocates and clears a table per slot: more than a hot call's worth of work.
        self.cold(|b, store| b.kvasir_policy_eviction().call_open(store, slots))
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        let extra = Duration::from_micros((words.len() / EVENT) as u64);
        self.hot_plus(extra, |b, store| b.kvasir_policy_eviction().call_on_events(store, base_ms, words))
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        let extra = Duration::from_micros(u64::from(want));
        let words = self.hot_plus(extra, |b, store| {
            b.kvasir_policy_eviction().call_select_victims(store, now_ms, want)
        })?;
        if words.len() > want as usize {
            return Err(Fault::Invalid(format!("{} victims where {want} were wanted", words.len())));
        }
        victims.extend(words.into_iter().map(Victim::unpack));
        Ok(())
    }
}

/// Ties the slot machinery to evictors.
pub struct EvictorHook;

impl Hook for EvictorHook {
    const KIND: SlotKind = SlotKind::Evictor;
    type Engine = dyn EvictorEngine;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::EVICTORS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn EvictorEngine> { Box::new(NativeEvictor((d.native)())) }),
        })
    }

    fn instantiate(module: &Module, limits: Limits, log: Arc<Log>) -> Result<Box<dyn EvictorEngine>, Error> {
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }

    fn open(engine: &mut Self::Engine, limits: Limits) -> Result<(), Fault> {
        engine.open(limits.evictor_slots)
    }
}

/// The engine that serves knows nothing of the pool: tell it what is resident before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnowsNothing;

/// The evictor of one pool. Its first engine knows nothing. Its calls never fail outward: when the component does, the native twin
/// takes over, until a new instance or another policy is ready. A policy that follows another learns of
/// the pool beside it, and serves when it knows all.
pub struct EvictorWorker {
    worker: Worker<EvictorHook>,
    slots: u32,
    /// Decides while the component cannot.
    fallback: Option<Box<dyn EvictorEngine>>,
    next: Option<Found<EvictorHook>>,
}

impl EvictorWorker {
    pub(super) fn new(worker: Worker<EvictorHook>, slots: u32) -> Self {
        Self { worker, slots, fallback: None, next: None }
    }

    /// Looks for a newer policy or a rebuilt instance. True if there is one now that is to follow the engine that serves,
    /// and knows nothing: tell it what is resident by [`EvictorWorker::tell_next`], then [`EvictorWorker::promote`] it. If
    /// there was one already, forget it.
    pub fn refresh(&mut self) -> bool {
        let newest = self.worker.newest_generation();
        if self.next.as_ref().is_some_and(|next| next.version.generation == newest) {
            return false;
        }
        let Some(found) = self.worker.find() else { return false };
        self.next = Some(found);
        true
    }

    /// Empties the engine that serves: for when it cannot be told what it missed.
    pub fn open(&mut self) {
        let slots = self.slots;
        // On failure its native twin serves, which is open already.
        let _ = self.call(|engine| engine.open(slots));
    }

    /// Tells the engine that serves what happened.
    ///
    /// # Errors
    /// [`KnowsNothing`]: the component failed, and its native twin serves now.
    pub fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), KnowsNothing> {
        self.call(|engine| engine.on_events(base_ms, words))
    }

    /// Tells the engine that is to follow. False if there is none (any more): it failed.
    pub fn tell_next(&mut self, base_ms: u64, words: &[u32]) -> bool {
        let Some(next) = &mut self.next else { return false };
        let Err(fault) = next.engine.on_events(base_ms, words) else { return true };
        let version = next.version.clone();
        self.next = None;
        self.worker.failed_to_follow(&version, &fault);
        false
    }

    /// Gives up the engine that was to follow; it is built anew.
    pub fn forget_next(&mut self) {
        self.next = None;
    }

    /// From here on the engine that was to follow serves.
    pub fn promote(&mut self) {
        if let Some(next) = self.next.take() {
            self.worker.install(next);
            self.fallback = None;
        }
    }

    /// Appends up to `want` victims; the owner checks each and reports bad ones with
    /// [`EvictorWorker::invalid`].
    ///
    /// # Errors
    /// [`KnowsNothing`]: the component failed, and its native twin serves now.
    pub fn select_victims(
        &mut self,
        now_ms: u64,
        want: u32,
        victims: &mut Vec<Victim>,
    ) -> Result<(), KnowsNothing> {
        self.call(|engine| engine.select_victims(now_ms, want, victims))
    }

    /// The last answer was not within the contract: for `reason`. The native twin serves now, and knows
    /// nothing; the component is tried again with a fresh instance, until the breaker trips.
    pub fn invalid(&mut self, reason: String) {
        if self.fallback.is_some() {
            return self.open(); // a native engine chose: only possible when the pool changed meanwhile
        }
        self.worker.record(&Fault::Invalid(reason));
        self.worker.drop_engine();
        self.fall_back();
    }

    /// Name of the policy that decides now.
    pub fn policy(&self) -> &str {
        &self.worker.version().description.name
    }

    pub fn on_fallback(&self) -> bool {
        self.fallback.is_some()
    }

    fn call(
        &mut self,
        f: impl FnOnce(&mut (dyn EvictorEngine + 'static)) -> Result<(), Fault>,
    ) -> Result<(), KnowsNothing> {
        if let Some(native) = &mut self.fallback {
            self.worker.version().counters.fallback();
            let _ = f(native.as_mut());
            return Ok(());
        }
        self.worker.ask(f).map_err(|fault| {
            if matches!(fault, Fault::Invalid(_)) {
                self.worker.drop_engine(); // the native twin has its place until there is a fresh one
            }
            self.fall_back();
            KnowsNothing
        })
    }

    fn fall_back(&mut self) {
        self.fallback = self.worker.native();
        if let Some(native) = &mut self.fallback {
            let _ = native.open(self.slots); // it does not fail
        }
    }
}
