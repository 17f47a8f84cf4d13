//! The evictor slot: engines, and the worker that the owner thread of a pool holds.

mod ghost;

use super::bindings::evictor::Evictor as Component;
use super::control::{component_control, native_control};
use super::guest::Guest;
use super::log::Log;
use super::record::{PlayError, PolicyOf, Record};
use super::slot::{Builtin, Found, Hook, OnTrial, Policy, Slot, Worker};
use super::{Error, Fault, Limits, Module, SlotKind, unwrapped};
use kvasir_eviction::KnowsNothing;
use kvasir_policy::Evictor;
use kvasir_policy::evictor::{EVENT, EventKind, Events, Kept, Layout, TierRow, Victim};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An evictor behind either engine: the hot functions of `eviction`, each of which may fail.
///
/// Answers are unchecked: slots may be free, foreign or repeated. The owner checks them.
pub trait EvictorEngine: Policy {
    /// # Errors
    /// Any [`Fault`]; after `Trap` and `Deadline` the engine only answers `NotReady`.
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault>;

    /// `rows`: a row for each tier that the host has.
    ///
    /// # Errors
    /// As `open`.
    fn update_tiers(&mut self, rows: &[f32]) -> Result<(), Fault>;

    /// `words`: records as long as `open` said, oldest first.
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
pub struct NativeEvictor(Kept<dyn Evictor>);

impl NativeEvictor {
    pub fn new(policy: Box<dyn Evictor>) -> Self {
        Self(Kept::new(policy))
    }
}

native_control!(NativeEvictor, this => this.0.evictor());

impl EvictorEngine for NativeEvictor {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        self.0.open(layout);
        Ok(())
    }

    fn update_tiers(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.0.update_tiers(rows);
        Ok(())
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        self.0.on_events(base_ms, words);
        Ok(())
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        self.0.evictor().select_victims(now_ms, want, victims);
        Ok(())
    }
}

component_control!(evictor::Evictor);

impl EvictorEngine for Guest<Component> {
    fn open(&mut self, layout: &[u32]) -> Result<(), Fault> {
        // Allocates and clears a table per slot: more than a hot call's worth of work.
        self.cold("open", |b, store| b.kvasir_policy_eviction().call_open(store, layout))
    }

    fn update_tiers(&mut self, rows: &[f32]) -> Result<(), Fault> {
        self.hot("update-tiers", |b, store| b.kvasir_policy_eviction().call_update_tiers(store, rows))
    }

    fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), Fault> {
        self.hot_plus("on-events", events_time(words), |b, store| {
            b.kvasir_policy_eviction().call_on_events(store, base_ms, words)
        })
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        let words = self.hot_plus("select-victims", victims_time(want), |b, store| {
            b.kvasir_policy_eviction().call_select_victims(store, now_ms, want)
        })?;
        with_victims(victims, words, want)
    }
}

/// Time that a call gets beyond that of every hot call, for the events that it is told.
pub(super) fn events_time(words: &[u32]) -> Duration {
    Duration::from_micros((words.len() / EVENT) as u64)
}

/// The same for the victims that are wanted.
pub(super) fn victims_time(want: u32) -> Duration {
    Duration::from_micros(u64::from(want))
}

/// Appends what a component answered.
///
/// # Errors
/// [`Fault::Invalid`]: more than was wanted.
pub(super) fn with_victims(victims: &mut Vec<Victim>, words: Vec<u32>, want: u32) -> Result<(), Fault> {
    if words.len() > want as usize {
        return Err(Fault::Invalid(format!("{} victims where {want} were wanted", words.len())));
    }
    victims.extend(words.into_iter().map(Victim::unpack));
    Ok(())
}

/// Ties the slot machinery to evictors.
pub struct EvictorHook;

impl Hook for EvictorHook {
    const KIND: SlotKind = SlotKind::Evictor;
    type Engine = dyn EvictorEngine;
    const HAS_SPARES: bool = false;
    const NO_CANARY: Option<&'static str> = Some("one evictor chooses for the whole pool");
    type Heard = ghost::Heard;
    type Shadow = ghost::EvictorShadow;

    fn builtins() -> impl Iterator<Item = Builtin<Self>> {
        kvasir_default_policies::EVICTORS.iter().map(|d| Builtin {
            name: d.name,
            component: d.component,
            native: Box::new(|| -> Box<dyn EvictorEngine> { Box::new(NativeEvictor::new((d.native)())) }),
        })
    }

    fn instantiate(module: &Module, limits: &Limits, log: Arc<Log>) -> Result<Box<dyn EvictorEngine>, Error> {
        if module.core.is_some() {
            return Ok(Box::new(Guest::<unwrapped::Evictor>::unwrapped(module, limits, log)?));
        }
        Ok(Box::new(Guest::<Component>::new(module, limits, log, |store, i| Component::new(store, i))?))
    }

    fn agree(one: &mut Self::Engine, other: &mut Self::Engine) -> Result<bool, Fault> {
        unwrapped::evictors_agree(one, other)
    }

    fn open(engine: &mut Self::Engine, limits: &Limits) -> Result<(), Fault> {
        engine.open(&Layout::of(limits.evictor_slots).encode())
    }
}

/// The evictor of one pool. Its first engine knows nothing. Its calls never fail outward: when the component does, the native twin
/// takes over, until a new instance or another policy is ready. A policy that follows another learns of
/// the pool beside it, and serves when it knows all.
pub struct EvictorWorker {
    worker: Worker<EvictorHook>,
    trial: OnTrial<EvictorHook>,
    slots: u32,
    /// Rows of the tiers, as every engine is told them.
    tiers: Arc<[f32]>,
    /// Decides while the component cannot.
    fallback: Option<Box<dyn EvictorEngine>>,
    next: Option<Found<EvictorHook>>,
}

impl EvictorWorker {
    pub(super) fn new(slot: &Arc<Slot<EvictorHook>>, slots: u32) -> Self {
        let (worker, trial) = (slot.worker(), OnTrial::new(slot));
        Self { worker, trial, slots, tiers: Arc::default(), fallback: None, next: None }
    }

    /// Looks for a newer policy or a rebuilt instance. Returns true if there is one now that should follow the engine that serves,
    /// and knows nothing: tell it what is resident by [`EvictorWorker::tell_next`], then [`EvictorWorker::promote`] it. If
    /// there was one already, forget it.
    pub fn refresh(&mut self) -> bool {
        let newest = self.worker.newest_generation();
        if self.next.as_ref().is_some_and(|next| next.version.generation == newest) {
            return false;
        }
        let Some(found) = self.worker.find() else { return false };
        self.next = Some(found);
        let tiers = Arc::clone(&self.tiers);
        self.tell_follower(|engine| engine.update_tiers(&tiers))
    }

    /// Empties the engine that serves, when it cannot be told what it missed.
    pub fn open(&mut self) {
        let (layout, tiers) = (self.layout(), Arc::clone(&self.tiers));
        // On failure its native twin serves, which is open already.
        let _ = self.tell(|engine| open(engine, &layout, &tiers));
    }

    /// Tells every engine of the tiers that blocks can go to, if they are not as they were.
    ///
    /// # Errors
    /// [`KnowsNothing`]: the component failed, and its native twin serves now.
    pub fn update_tiers(&mut self, tiers: &[TierRow]) -> Result<(), KnowsNothing> {
        let rows: Arc<[f32]> = tiers.iter().flat_map(TierRow::encode).collect();
        if rows == self.tiers {
            return Ok(());
        }
        self.tiers = Arc::clone(&rows);
        self.tell_follower(|engine| engine.update_tiers(&rows));
        self.tell(|engine| engine.update_tiers(&rows))
    }

    /// Tells the engine that serves what happened.
    ///
    /// # Errors
    /// [`KnowsNothing`]: the component failed, and its native twin serves now.
    pub fn on_events(&mut self, base_ms: u64, words: &[u32]) -> Result<(), KnowsNothing> {
        if self.fallback.is_none() {
            self.count(base_ms, words);
        }
        if let Some(shadow) = self.trial.shadow() {
            let (slots, tiers) = (self.slots, &self.tiers);
            shadow.tell(|| ghost::Heard { base_ms, words: words.to_vec(), slots, tiers: Arc::clone(tiers) });
        }
        self.tell(|engine| engine.on_events(base_ms, words))
    }

    /// Uses of blocks that were there, among those that were not and had to be inserted.
    fn count(&self, base_ms: u64, words: &[u32]) {
        let (mut accesses, mut hits) = (0, 0);
        for event in Events::new(base_ms, EVENT, words).into_iter().filter(|event| !event.replayed) {
            match event.kind {
                EventKind::Insert => accesses += 1,
                EventKind::Hit => {
                    let uses = u64::from(event.parent_or_uses.max(1));
                    (accesses, hits) = (accesses + uses, hits + uses);
                }
                EventKind::Remove | EventKind::Keep | EventKind::Pin | EventKind::Unpin => {}
            }
        }
        self.worker.version().counters.decided.accesses(accesses, hits);
    }

    /// Tells the engine that will follow. Returns false if there is none (any more): it failed.
    pub fn tell_next(&mut self, base_ms: u64, words: &[u32]) -> bool {
        self.tell_follower(|engine| engine.on_events(base_ms, words))
    }

    fn tell_follower(
        &mut self,
        f: impl FnOnce(&mut (dyn EvictorEngine + 'static)) -> Result<(), Fault>,
    ) -> bool {
        let Some(next) = &mut self.next else { return false };
        let Err(fault) = f(next.engine.as_mut()) else { return true };
        let version = next.version.clone();
        self.next = None;
        self.worker.failed_to_follow(&version, &fault);
        false
    }

    /// Gives up the engine that was to follow; it is built again.
    pub fn forget_next(&mut self) {
        self.next = None;
    }

    /// Puts the engine that was to follow into service.
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
    /// The component failed so, and its native twin serves now, which [`KnowsNothing`].
    pub fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) -> Result<(), Fault> {
        if let Some(native) = &mut self.fallback {
            self.worker.version().counters.fallback();
            let _ = native.select_victims(now_ms, want, victims); // it does not fail
            return Ok(());
        }
        let asked = self.worker.ask(|engine| engine.select_victims(now_ms, want, victims));
        asked.inspect_err(|fault| self.failed(fault))
    }

    /// Reports that the last answer was not within the contract, for `reason`. The native twin serves now, and knows
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

    /// Rows of the tiers, as the policy knows them.
    pub fn tiers(&self) -> &[f32] {
        &self.tiers
    }

    /// What decides, as it is recorded.
    pub fn policy_of(&self) -> PolicyOf {
        PolicyOf::from(&**self.worker.version())
    }

    /// Asks another instance of the policy in service what was recorded, elsewhere and later, and keeps its answer, or how
    /// it failed.
    pub fn answered(&self, mut record: Record) -> impl FnOnce() -> Option<Record> + Send + use<> {
        let beside = self.worker.beside();
        move || {
            let mut engine = beside()?;
            let start = Instant::now();
            match record.play::<EvictorHook>(&mut *engine, false) {
                Ok(played) => record.answer = played.answer,
                Err(PlayError::Fault { function, fault }) => {
                    record.fallback = Some(format!("in `{function}`: {fault}"));
                }
                Err(_) => return None,
            }
            record.ns = start.elapsed().as_nanos() as u64;
            Some(record)
        }
    }

    /// Generation of that policy.
    pub fn generation(&self) -> u64 {
        self.worker.version().generation
    }

    pub fn on_fallback(&self) -> bool {
        self.fallback.is_some()
    }

    /// Only choices count as calls of the policy: a batch of events takes as long as it is large.
    fn tell(
        &mut self,
        f: impl FnOnce(&mut (dyn EvictorEngine + 'static)) -> Result<(), Fault>,
    ) -> Result<(), KnowsNothing> {
        if let Some(native) = &mut self.fallback {
            let _ = f(native.as_mut()); // it does not fail
            return Ok(());
        }
        self.worker.tell(f).map_err(|fault| {
            self.failed(&fault);
            KnowsNothing
        })
    }

    fn failed(&mut self, fault: &Fault) {
        if matches!(fault, Fault::Invalid(_)) {
            self.worker.drop_engine(); // the native twin has its place until there is a fresh one
        }
        self.fall_back();
    }

    fn fall_back(&mut self) {
        self.fallback = self.worker.native();
        let layout = self.layout();
        if let Some(native) = &mut self.fallback {
            let _ = open(native.as_mut(), &layout, &self.tiers); // it does not fail
        }
    }

    fn layout(&self) -> [u32; 3] {
        Layout::of(self.slots).encode()
    }
}

/// Tiers that are not known yet are not told.
fn open(engine: &mut dyn EvictorEngine, layout: &[u32], tiers: &[f32]) -> Result<(), Fault> {
    engine.open(layout)?;
    if tiers.is_empty() { Ok(()) } else { engine.update_tiers(tiers) }
}
