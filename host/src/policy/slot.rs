//! One slot: the version that serves, the one before it, and the workers that call them.
//!
//! A load prepares everything beside the traffic (compile, instantiate one guest per worker,
//! configure) and then publishes the new [`Version`] with one pointer exchange. A worker notices at
//! its next call, takes a ready guest and drops its old one; no call is ever without a version.
//! Beside the version that serves there may be one on trial ([`trial`]), whose workers are of the same make.
//! Lock order: `Slot::change` before all others, which are leaves.

mod builder;
mod contest;
mod guarded;
mod learning;
mod news;
mod serving;
mod shadow;
mod swap;
mod trial;
mod version;
mod worker;

pub use builder::Builder;
pub(super) use learning::Learning;
pub use learning::{Learner, LearningStatus, Outcomes};
pub(super) use news::News;
pub use serving::Serving;
pub use shadow::{Around, Shadow};
pub use trial::{OnTrial, Trial};
#[cfg(test)]
pub(super) use version::entered;
pub(super) use version::read;
pub use version::{ChainPart, Prepared, Source, Version, standalone};
pub use worker::{Found, SPARES_MAX, Worker};

use self::guarded::Guarded;
use self::learning::Lessons;
use self::version::{Program, code, prepare, stored_program};
use super::catalog::{Assignment, Catalog, Origin, Stored};
use super::chain::Role;
use super::counters::{CounterValues, Totals};
use super::engine::{Engine, Module};
use super::log::Log;
use super::{Error, Fault, Limits, PolicyConfig, SlotKind};
use arc_swap::{ArcSwap, ArcSwapOption};
use kvasir_policy::Description;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// What differs between the four slots.
pub trait Hook: Sized + 'static {
    const KIND: SlotKind;
    /// The hot functions, behind either engine.
    type Engine: Policy + ?Sized + 'static;
    /// Whether an engine that failed is replaced at once by one that was built ahead. False where an engine is large and
    /// must be told much before it can decide.
    const HAS_SPARES: bool = true;
    /// Why there is no canary in this slot, if so.
    const NO_CANARY: Option<&'static str> = None;
    /// What a policy in shadow is told of one decision of the active one.
    type Heard: Send + 'static;
    /// Asks a policy in shadow.
    type Shadow: Shadow<Self>;

    /// Name, component and native twin of each default policy; the first is the default.
    fn builtins() -> impl Iterator<Item = Builtin<Self>>;

    /// # Errors
    /// The module cannot be instantiated.
    fn instantiate(module: &Module, limits: &Limits, log: Arc<Log>) -> Result<Box<Self::Engine>, Error>;

    /// Whether two engines of one policy answer alike what they are asked at random. Slots that enter components alone have no
    /// such question.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn agree(_one: &mut Self::Engine, _other: &mut Self::Engine) -> Result<bool, Fault> {
        Ok(false)
    }

    /// An engine of several that decide together: name, role and engine of each part.
    ///
    /// # Errors
    /// [`Error::Chain`], except for schedulers.
    fn chain(name: &str, _parts: Vec<(String, Role, Box<Self::Engine>)>) -> Result<Box<Self::Engine>, Error> {
        Err(Error::Chain { name: name.into(), reason: "only schedulers form chains".into() })
    }

    /// What an engine of this slot does once, after its settings and its state and before it serves.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn open(_engine: &mut Self::Engine, _limits: &Limits) -> Result<(), Fault> {
        Ok(())
    }
}

/// A default policy.
pub struct Builtin<H: Hook> {
    pub name: &'static str,
    pub component: &'static [u8],
    pub native: Native<H>,
}

/// Makes a native engine.
pub type Native<H> = Box<dyn Fn() -> Box<<H as Hook>::Engine> + Send + Sync>;

/// The cold functions every engine has (`control` of the contract).
pub trait Policy: Send {
    /// # Errors
    /// Any [`Fault`].
    fn describe(&mut self) -> Result<Description, Fault>;

    /// The inner error is the policy's own refusal.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn configure(&mut self, settings: &[(String, String)]) -> Result<Result<(), String>, Fault>;

    /// # Errors
    /// Any [`Fault`].
    fn export_state(&mut self) -> Result<Vec<u8>, Fault>;

    /// # Errors
    /// Any [`Fault`].
    fn import_state(&mut self, state: &[u8]) -> Result<Result<(), String>, Fault>;

    /// Takes what the policy's learner published. One that does not learn has no use for it.
    ///
    /// # Errors
    /// Any [`Fault`].
    fn adopt(&mut self, _knowledge: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    /// The function of the contract that was called last. Empty where there is no component, or more than one.
    fn called(&self) -> &'static str {
        ""
    }
}

/// The slot itself; shared by workers, the loader and the builder thread.
pub struct Slot<H: Hook> {
    current: Arc<ArcSwap<Version<H>>>,
    previous: Mutex<Option<Previous<H>>>,
    /// Held while the version changes, so that loads, rollbacks and trips come one by one.
    change: Mutex<()>,
    pub log: Arc<Log>,
    /// The policy on trial beside it.
    trial: Arc<ArcSwapOption<Trial<H>>>,
    /// Whether the slot is paused: the trial is not asked, and nothing is swapped by itself.
    paused: AtomicBool,
    /// Why the breaker or a guard last took a policy out of service, or ended a trial.
    last_trip: Mutex<Option<String>>,
    /// The same for what serves now. `None` means that a person brought it into service.
    tripped: Mutex<Option<String>>,
    guarded: Mutex<Guarded>,
    pub(super) news: News,
    /// Counts of the versions before `current`, which changes under this lock.
    totals: Mutex<Totals>,
    generations: AtomicU64,
    workers: AtomicUsize,
    engine: Engine,
    limits: Limits,
    config: PolicyConfig,
    /// What the operator's configuration says of this slot.
    wanted: (Source, Settings),
    catalog: Option<Catalog>,
    /// Components that the configuration named, until the catalogue has them.
    configured: Mutex<Vec<Vec<u8>>>,
    /// What serves came from the catalogue.
    restored: bool,
    builder: Builder,
    /// What goes to and from the learner of what serves, and of what is on trial.
    lessons: Lessons,
    trial_lessons: Lessons,
}

/// The operator's values for a policy's settings.
pub type Settings = Vec<(String, String)>;

/// What served before. Compiled if it served since the start, else rebuilt when it is wanted.
struct Previous<H: Hook> {
    assignment: Assignment,
    /// What it calls itself.
    name: String,
    program: Option<Arc<Program<H>>>,
}

impl<H: Hook> Clone for Previous<H> {
    fn clone(&self) -> Self {
        Self { assignment: self.assignment.clone(), name: self.name.clone(), program: self.program.clone() }
    }
}

impl<H: Hook> Slot<H> {
    /// Restores the slot's assignment from the catalogue, or takes `wanted`.
    ///
    /// A stored policy that no longer starts is reported in the slot's trip reason and replaced by
    /// `wanted`, so that a daemon always comes up.
    ///
    /// # Errors
    /// `wanted` cannot be brought into service.
    pub fn open(
        engine: Engine,
        config: &PolicyConfig,
        wanted: (Source, Settings),
        catalog: Option<Catalog>,
        builder: Builder,
    ) -> Result<Arc<Self>, Error> {
        let limits = H::KIND.limits(config);
        let log = Arc::new(Log::default());
        let prepare = |program, assignment, generation| {
            prepare::<H>(program, assignment, generation, &limits, &log, config, 1)
        };
        let mut last_trip = None;
        let read = catalog.as_ref().and_then(|catalog| catalog.stored(H::KIND).transpose());
        let stored =
            read.and_then(|read| read.map_err(|e| last_trip = Some(format!("not restored: {e}"))).ok());
        if let Some(stored) = &stored {
            last_trip.clone_from(&stored.trip);
        }
        let previous = stored.as_ref().and_then(before::<H>);
        let paused = stored.as_ref().is_some_and(|stored| stored.paused);
        let trial = stored.as_ref().and_then(|stored| stored.trial.clone());
        let restored = stored.map(|stored| stored.current).and_then(|assignment| {
            let program = stored_program::<H>(&engine, catalog.as_ref(), &assignment.origin);
            let version = program.and_then(|program| prepare(program, assignment, 1));
            version.map_err(|e| last_trip = Some(format!("not restored: {e}"))).ok()
        });
        let was_restored = restored.is_some();
        if let Some(version) = &restored {
            tell_if_unused::<H>(&wanted, version, &log);
            if let Some(trip) = &last_trip {
                log.add_host(2, &format!("still so since an earlier run: {trip}"));
            }
        }
        let mut configured = Vec::new();
        let version = match restored {
            Some(version) => version,
            None => {
                let (source, settings) = wanted.clone();
                let code = code::<H>(&engine, source, &[])?;
                configured = code.modules;
                prepare(code.program, Assignment { origin: code.origin, settings }, 1)?
            }
        };
        let slot = Arc::new(Self {
            current: Arc::new(ArcSwap::from_pointee(version)),
            previous: Mutex::new(previous),
            change: Mutex::new(()),
            log,
            trial: Arc::default(),
            paused: AtomicBool::new(paused),
            tripped: Mutex::new(last_trip.clone().filter(|_| was_restored)),
            last_trip: Mutex::new(last_trip),
            guarded: Mutex::default(),
            news: News::default(),
            totals: Mutex::default(),
            generations: AtomicU64::new(1),
            workers: AtomicUsize::new(0),
            engine,
            limits,
            config: config.clone(),
            wanted,
            restored: was_restored,
            configured: Mutex::new(configured),
            catalog,
            builder,
            lessons: Lessons::default(),
            trial_lessons: Lessons::default(),
        });
        slot.stock(&slot.current());
        if let Some(trial) = trial {
            slot.restore_trial(trial);
        }
        Ok(slot)
    }

    pub fn current(&self) -> Arc<Version<H>> {
        self.current.load_full()
    }

    /// An engine of the version in service, or on trial, that was told nothing, if it is of that generation: for questions beside
    /// the decisions.
    pub fn engine_of(&self, generation: u64) -> Option<Box<H::Engine>> {
        let on_trial = self.trial.load_full().map(|trial| trial.version.clone());
        let version =
            [Some(self.current()), on_trial].into_iter().flatten().find(|v| v.generation == generation)?;
        version.beside(&self.limits).ok()
    }

    /// The name of what a rollback would bring back.
    pub fn previous(&self) -> Option<String> {
        self.previous.lock().as_ref().map(|p| p.name.clone())
    }

    /// Whether what serves since the start was stored by an earlier run.
    pub fn was_restored(&self) -> bool {
        self.restored
    }

    pub(super) fn guarded(&self) -> parking_lot::MutexGuard<'_, Guarded> {
        self.guarded.lock()
    }

    pub fn last_trip(&self) -> Option<String> {
        self.last_trip.lock().clone()
    }

    /// What all versions counted since the start.
    pub fn totals(&self) -> CounterValues {
        self.totals.lock().with(&self.current().counters)
    }

    /// What the memories of all instances take now.
    pub fn memory_in_use(&self) -> usize {
        self.limits.in_use.load(Ordering::Relaxed)
    }

    /// What the memory of one instance may take.
    pub fn memory_bytes_max(&self) -> usize {
        self.limits.memory_bytes
    }
}

/// What a rollback brings back after a restart.
fn before<H: Hook>(stored: &Stored) -> Option<Previous<H>> {
    let assignment = stored.previous.clone()?;
    let name = stored.previous_name.clone().unwrap_or_else(|| assignment.origin.name().to_owned());
    Some(Previous { assignment, name, program: None })
}

/// Says that a policy loaded at run time stands before what the configuration says of the slot.
fn tell_if_unused<H: Hook>(wanted: &(Source, Settings), restored: &Version<H>, log: &Log) {
    let assignment = &restored.assignment;
    let (source, settings) = wanted;
    let default = H::builtins().next().map_or("", |b| b.name);
    let unset = settings.is_empty() && matches!(source, Source::Builtin(name) if name == default);
    let same = match source {
        Source::Builtin(name) => assignment.origin == Origin::Builtin { name: name.clone() },
        Source::Native(name) => assignment.origin == Origin::Native { name: name.clone() },
        Source::File(_) | Source::Bytes { .. } | Source::Signed { .. } | Source::Chain { .. } => false,
    };
    if unset || (same && assignment.settings == *settings) {
        return;
    }
    let (slot, name) = (H::KIND, &restored.description.name);
    log.add_host(2, &format!(
        "`{name}` is restored as it was loaded last; policy.{slot}.source and policy.{slot}.settings hold for the first start only (`kvasir policy load` changes what serves)"
    ));
}
