//! One slot: the version that serves, the one before it, and the workers that call them.
//!
//! A load prepares everything beside the traffic (compile, instantiate one guest per worker,
//! configure) and then publishes the new [`Version`] with one pointer exchange. A worker notices at
//! its next call, takes a ready guest and drops its old one; no call is ever without a version.
//! Lock order: `Slot::change` before `Slot::previous`; `Slot::totals` and `Version::ready` are leaves.

mod builder;
mod guarded;
mod learning;
mod news;
mod shadow;
mod trial;
mod version;
mod worker;

pub use builder::Builder;
pub(super) use learning::Learning;
pub use learning::{LearningStatus, Outcomes};
pub(super) use news::News;
pub use shadow::{Around, Shadow};
pub use trial::{OnTrial, Trial};
pub use version::{ChainPart, Prepared, Source, Version, standalone};
pub(super) use version::{read, stored_source};
pub use worker::{Found, SPARES_MAX, Worker};

use self::guarded::Guarded;
use self::learning::{Feed, Knowledge};
use self::version::{Program, code, default_native, prepare, stored_program};
use super::catalog::{Assignment, Catalog, Origin, Stored};
use super::chain::Role;
use super::counters::{CounterValues, Totals};
use super::engine::{Engine, Module};
use super::log::Log;
use super::{Action, Cause, Error, Fault, Limits, PolicyConfig, SlotKind};
use arc_swap::{ArcSwap, ArcSwapOption};
use kvasir_policy::Description;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What differs between the four slots.
pub trait Hook: Sized + 'static {
    const KIND: SlotKind;
    /// The hot functions, behind either engine.
    type Engine: Policy + ?Sized + 'static;
    /// Whether an engine that failed is replaced at once by one that was built ahead. Not where an engine is large and
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
}

/// The slot itself; shared by workers, the loader and the builder thread.
pub struct Slot<H: Hook> {
    current: Arc<ArcSwap<Version<H>>>,
    previous: Mutex<Option<Previous<H>>>,
    /// Held by whoever changes the version, so that loads, rollbacks and trips come one by one.
    change: Mutex<()>,
    pub log: Arc<Log>,
    /// The policy on trial beside it.
    trial: Arc<ArcSwapOption<Trial<H>>>,
    /// The trial is not asked, and nothing is swapped by itself.
    paused: AtomicBool,
    /// Why the breaker or a guard last took a policy out of service.
    last_trip: Mutex<Option<String>>,
    /// The same of what serves now; `None`: a person brought it into service.
    tripped: Mutex<Option<String>>,
    guarded: Mutex<Guarded>,
    pub(super) news: News,
    /// Of the versions before `current`, which changes under this lock.
    totals: Mutex<Totals>,
    generations: AtomicU64,
    workers: AtomicUsize,
    engine: Engine,
    limits: Limits,
    config: PolicyConfig,
    /// What the operator's configuration says of this slot.
    wanted: (Source, Settings),
    catalog: Option<Catalog>,
    /// What serves came from the catalogue.
    restored: bool,
    builder: Builder,
    /// What came of requests, for the learner.
    feed: Arc<Feed>,
    /// What the learner published last.
    knowledge: Arc<ArcSwapOption<Knowledge>>,
}

/// How long after a failure the catalogue is written again.
const PERSIST_AGAIN: Duration = Duration::from_secs(5);

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
        let stored = catalog.as_ref().map(|c| c.stored(H::KIND)).transpose()?.flatten();
        let mut last_trip = stored.as_ref().and_then(|stored| stored.trip.clone());
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
        let version = match restored {
            Some(version) => version,
            None => {
                let (source, settings) = wanted.clone();
                let code = code::<H>(&engine, source, &[])?;
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
            catalog,
            builder,
            feed: Arc::default(),
            knowledge: Arc::default(),
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

    /// The name of what a rollback would bring back.
    pub fn previous(&self) -> Option<String> {
        self.previous.lock().as_ref().map(|p| p.name.clone())
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

    /// What those of one instance may take.
    pub fn memory_bytes_max(&self) -> usize {
        self.limits.memory_bytes
    }

    /// Brings a policy into service. Blocking (compiles): not for the hot path.
    ///
    /// # Errors
    /// Any step failed; the version in service is untouched.
    pub fn load(self: &Arc<Self>, source: Source, settings: Settings) -> Result<Arc<Version<H>>, Error> {
        self.load_for(source, settings, Cause::Operator)
    }

    fn load_for(
        self: &Arc<Self>,
        source: Source,
        settings: Settings,
        cause: Cause,
    ) -> Result<Arc<Version<H>>, Error> {
        let code = self.code(source)?;
        let assignment = Assignment { origin: code.origin, settings };
        // Not under the lock: while this one takes its time, the one that serves may have to go.
        let version = self.prepare(code.program, assignment)?;
        let _change = self.change.lock();
        self.publish(version, &code.modules, Swap::by_hand(Action::Loaded, cause))
    }

    /// Loads a component of the watched folder with the settings of the one that serves; with its own defaults if it
    /// refuses those.
    ///
    /// # Errors
    /// As [`Slot::load`], and [`Error::Paused`].
    pub fn load_with_settings_in_service(self: &Arc<Self>, source: Source) -> Result<Arc<Version<H>>, Error> {
        if self.is_paused() {
            return Err(Error::Paused(H::KIND));
        }
        let settings = self.current().assignment.settings.clone();
        if settings.is_empty() {
            return self.load_for(source, settings, Cause::Folder);
        }
        match self.load_for(source.clone(), settings, Cause::Folder) {
            Err(refused @ (Error::Settings { .. } | Error::UnknownSetting { .. })) => {
                self.log.add_host(
                    2,
                    &format!("loaded with its defaults, for it refuses the settings in service: {refused}"),
                );
                self.load_for(source, Vec::new(), Cause::Folder)
            }
            loaded => loaded,
        }
    }

    /// Gives what serves other settings: the same program, not compiled again.
    ///
    /// # Errors
    /// It refuses them, or the catalogue cannot be written; what serves is untouched.
    pub fn configure(self: &Arc<Self>, settings: Settings) -> Result<Arc<Version<H>>, Error> {
        let _change = self.change.lock();
        let current = self.current();
        let assignment = Assignment { origin: current.assignment.origin.clone(), settings };
        let version = self.prepare(current.program.clone(), assignment)?;
        self.publish(version, &[], Swap::by_hand(Action::Loaded, Cause::Operator))
    }

    /// Whether what serves since the start was stored by an earlier run.
    pub fn was_restored(&self) -> bool {
        self.restored
    }

    /// Ends the trial if there is one; else puts the previous version back, and what served becomes the previous one.
    ///
    /// # Errors
    /// There is neither, the previous one no longer starts, or the catalogue cannot be written.
    pub fn rollback(self: &Arc<Self>) -> Result<(), Error> {
        let _change = self.change.lock();
        if self.end_trial(Cause::Operator, None) {
            return Ok(());
        }
        let version = self.prepare_previous()?;
        self.publish(version, &[], Swap::by_hand(Action::RolledBack, Cause::Operator)).map(drop)
    }

    /// Finds and compiles a policy, or takes the program of one that the slot has compiled already.
    fn code(&self, source: Source) -> Result<version::Code<H>, Error> {
        let previous = self.previous.lock().as_ref().and_then(|previous| previous.program.clone());
        let trial = self.trial.load().as_ref().map(|trial| trial.version.program.clone());
        let compiled: Vec<_> =
            [Some(self.current().program.clone()), previous, trial].into_iter().flatten().collect();
        code::<H>(&self.engine, source, &compiled)
    }

    fn prepare_previous(&self) -> Result<Version<H>, Error> {
        let previous = self.previous.lock().clone().ok_or(Error::NoPrevious(H::KIND))?;
        let program = match previous.program {
            Some(program) => program,
            None => stored_program(&self.engine, self.catalog.as_ref(), &previous.assignment.origin)?,
        };
        self.prepare(program, previous.assignment)
    }

    fn prepare(&self, program: Arc<Program<H>>, assignment: Assignment) -> Result<Version<H>, Error> {
        self.prepare_for(self.workers.load(Ordering::Relaxed), program, assignment)
    }

    fn prepare_for(
        &self,
        workers: usize,
        program: Arc<Program<H>>,
        assignment: Assignment,
    ) -> Result<Version<H>, Error> {
        let unpublished = 0;
        prepare(program, assignment, unpublished, &self.limits, &self.log, &self.config, workers.max(1))
    }

    /// Exchanges the pointer, and writes the catalogue: before, for an operator, who hears that the disk is
    /// full while nothing has changed; after, for a trip, since a broken policy goes whatever the disk does.
    /// The reason of a trip is there before the new version is seen.
    fn publish(
        self: &Arc<Self>,
        mut version: Version<H>,
        modules: &[Vec<u8>],
        swap: Swap,
    ) -> Result<Arc<Version<H>>, Error> {
        let old = self.current();
        let previous = swap.trip.is_none().then(|| Previous {
            assignment: old.assignment.clone(),
            name: old.description.name.clone(),
            program: Some(old.program.clone()),
        });
        if let (None, Some(catalog)) = (&swap.trip, &self.catalog) {
            catalog.assign(
                H::KIND,
                &stored(&version.assignment, previous.as_ref(), self.is_paused()),
                modules,
            )?;
        }
        version.generation = self.next_generation();
        let version = Arc::new(version);
        *self.previous.lock() = previous;
        if swap.trip.is_some() {
            self.last_trip.lock().clone_from(&swap.trip);
        }
        self.tripped.lock().clone_from(&swap.trip);
        if swap.is_watched() {
            self.guarded.lock().watch(version.generation);
        }
        let mut totals = self.totals.lock();
        self.current.store(version.clone());
        totals.retire(old.counters.clone());
        drop(totals);
        // Unused guests of the old version would keep their memory until its last Arc goes.
        old.ready.lock().clear();
        old.spares.lock().clear();
        self.stock(&version);
        let tripped = swap.trip.is_some();
        if tripped {
            self.persist();
        } else {
            self.drop_trial(&swap);
        }
        self.tell(swap.action, swap.cause, Some(&old), Some(&version), swap.trip);
        Ok(version)
    }

    fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What a restart must know.
    fn as_stored(&self) -> Stored {
        let current = self.current().assignment.clone();
        let trial = self.trial.load().as_ref().map(|trial| trial.as_stored());
        let trip = self.tripped.lock().clone();
        Stored { trip, trial, ..stored(&current, self.previous.lock().as_ref(), self.is_paused()) }
    }

    /// Writes what is so now to the catalogue; if that fails, again later, until it succeeds.
    fn persist(self: &Arc<Self>) {
        let Some(catalog) = &self.catalog else { return };
        let Err(error) = catalog.assign(H::KIND, &self.as_stored(), &[]) else { return };
        let name = self.current().description.name.clone();
        self.log.add_host(1, &format!("`{name}` serves, and a restart would not know: {error}"));
        let slot = Arc::downgrade(self);
        self.builder.submit_later(PERSIST_AGAIN, move || {
            if let Some(slot) = slot.upgrade() {
                let _change = slot.change.lock();
                slot.persist();
            }
        });
    }

    /// What the operator set for the slot's default policy: with the component that served, or in the
    /// configuration.
    fn settings_of_default(&self, serving: &Assignment) -> Settings {
        let default = H::builtins().next().map_or("", |b| b.name);
        match (&serving.origin, &self.wanted) {
            (Origin::Builtin { name } | Origin::Native { name }, _) if name == default => {
                serving.settings.clone()
            }
            (_, (Source::Builtin(name) | Source::Native(name), settings)) if name == default => {
                settings.clone()
            }
            _ => Vec::new(),
        }
    }

    /// Takes generation `broken` out of service: back to the previous version, or to the native twin of the default. A
    /// trial of that generation ends.
    fn take_out(self: &Arc<Self>, broken: u64, cause: Cause, why: &str) {
        let _change = self.change.lock();
        if self.trial.load().as_ref().is_some_and(|trial| trial.version.generation == broken) {
            self.end_trial(cause, Some(why));
            return;
        }
        let current = self.current();
        if current.generation != broken {
            return; // replaced meanwhile
        }
        let reason = format!("`{}` taken out of service: {why}", current.description.name);
        self.log.add_host(1, &reason);
        self.guarded.lock().count(cause);
        let back = self.prepare_previous().ok().or_else(|| {
            let default = |settings| {
                let (program, assignment) = default_native::<H>(settings)?;
                self.prepare(Arc::new(program), assignment).ok()
            };
            default(self.settings_of_default(&current.assignment)).or_else(|| default(Vec::new()))
        });
        let Some(version) = back else { return };
        let serves = format!("{reason}; `{}` serves", version.description.name);
        let swap = Swap { action: Action::RolledBack, cause, trip: Some(serves) };
        if let Err(e) = self.publish(version, &[], swap) {
            self.log.add_host(1, &format!("breaker: {e}"));
        }
    }
}

/// Why another version comes into service.
struct Swap {
    action: Action,
    cause: Cause,
    /// Why the host did it by itself.
    trip: Option<String>,
}

impl Swap {
    fn by_hand(action: Action, cause: Cause) -> Self {
        Self { action, cause, trip: None }
    }

    /// What was put back has served before.
    fn is_watched(&self) -> bool {
        self.trip.is_none() && self.action != Action::RolledBack
    }
}

/// What a rollback brings back after a restart.
fn before<H: Hook>(stored: &Stored) -> Option<Previous<H>> {
    let assignment = stored.previous.clone()?;
    let name = stored.previous_name.clone().unwrap_or_else(|| assignment.origin.name().to_owned());
    Some(Previous { assignment, name, program: None })
}

/// Without a trial, and as if brought into service by a person.
fn stored<H: Hook>(current: &Assignment, previous: Option<&Previous<H>>, paused: bool) -> Stored {
    Stored {
        current: current.clone(),
        previous: previous.map(|p| p.assignment.clone()),
        previous_name: previous.map(|p| p.name.clone()),
        trip: None,
        trial: None,
        paused,
    }
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
        Source::File(_) | Source::Bytes { .. } | Source::Chain { .. } => false,
    };
    if unset || (same && assignment.settings == *settings) {
        return;
    }
    let (slot, name) = (H::KIND, &restored.description.name);
    log.add_host(2, &format!(
        "`{name}` is restored as it was loaded last; policy.{slot}.source and policy.{slot}.settings hold for the first start only (`kvasir policy load` changes what serves)"
    ));
}
