//! The evictor slot: engines, and the worker that the owner thread of a pool holds.

use super::bindings::evictor::Evictor as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::slot::{Builtin, Hook, Policy, Worker};
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
}

/// The engine no longer knows the pool: call [`EvictorWorker::replay`] before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantsReplay;

/// The evictor of one pool. Its calls never fail outward: when the component does, the native twin
/// takes over after a replay, until a new instance or another policy is ready.
pub struct EvictorWorker {
    worker: Worker<EvictorHook>,
    slots: u32,
    /// Decides while the component cannot.
    fallback: Option<Box<dyn EvictorEngine>>,
    wants_replay: bool,
}

impl EvictorWorker {
    pub(super) fn new(worker: Worker<EvictorHook>, slots: u32) -> Self {
        Self { worker, slots, fallback: None, wants_replay: true }
    }

    /// Looks for a newer policy or a rebuilt instance. [`WantsReplay`] stays until `replay`.
    ///
    /// # Errors
    /// [`WantsReplay`]: the engine was exchanged.
    pub fn refresh(&mut self) -> Result<(), WantsReplay> {
        if self.worker.refresh() {
            self.fallback = None;
            self.wants_replay = true;
        }
        if self.wants_replay { Err(WantsReplay) } else { Ok(()) }
    }

    /// Opens the engine and tells it what is resident: event records, oldest first, flagged as
    /// replayed.
    pub fn replay(&mut self, base_ms: u64, words: &[u32]) {
        self.wants_replay = false;
        let slots = self.slots;
        if let Err(WantsReplay) = self.call(|e| e.open(slots).and_then(|()| e.on_events(base_ms, words))) {
            // The component failed at once: the native twin gets the same, and does not fail.
            self.wants_replay = false;
            let _ = self.call(|e| e.open(slots).and_then(|()| e.on_events(base_ms, words)));
        }
    }

    /// # Errors
    /// [`WantsReplay`]: the component failed on these events; they are part of what is resident.
    pub fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), WantsReplay> {
        self.call(|e| e.on_events(base_ms, words))
    }

    /// Appends up to `want` victims; the owner checks each and reports bad ones with
    /// [`EvictorWorker::invalid`].
    ///
    /// # Errors
    /// [`WantsReplay`]: the component failed; replay and ask again.
    pub fn select_victims(
        &mut self,
        now_ms: u64,
        want: u32,
        victims: &mut Vec<Victim>,
    ) -> Result<(), WantsReplay> {
        self.call(|e| e.select_victims(now_ms, want, victims))
    }

    /// The last answer was not within the contract: for `reason`. The native twin takes over after
    /// a replay; the component is tried again with a fresh instance, until the breaker trips.
    pub fn invalid(&mut self, reason: String) {
        if self.fallback.is_some() {
            return; // a native engine chose: only possible when the pool changed meanwhile
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
    ) -> Result<(), WantsReplay> {
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
            WantsReplay
        })
    }

    fn fall_back(&mut self) {
        self.fallback = self.worker.native();
        self.wants_replay = true;
    }
}
