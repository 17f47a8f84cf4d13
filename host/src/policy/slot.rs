//! One slot: the version that serves, the one before it, and the workers that call them.
//!
//! A load prepares everything beside the traffic (compile, instantiate one guest per worker,
//! configure) and then publishes the new [`Version`] with one pointer exchange. A worker notices at
//! its next call, takes a ready guest and drops its old one; no call is ever without a version.
//! Lock order: `Slot::change` before `Slot::previous`; `Slot::totals` and `Version::ready` are leaves.

mod builder;
mod learning;
mod version;
mod worker;

pub use builder::Builder;
pub(super) use learning::Learning;
pub use learning::{LearningStatus, Outcomes};
pub(super) use version::read;
pub use version::{ChainPart, Prepared, Source, Version, standalone};
pub use worker::{Found, SPARES_MAX, Worker};

use self::learning::{Feed, Knowledge};
use self::version::{Program, code, default_native, prepare, stored_program};
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
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What differs between the four slots.
pub trait Hook: Sized + 'static {
    const KIND: SlotKind;
    /// The hot functions, behind either engine.
    type Engine: Policy + ?Sized + 'static;
    /// Whether an engine that failed is replaced at once by one that was built ahead. Not where an engine is large and
    /// must be told much before it can decide.
    const HAS_SPARES: bool = true;

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
    /// Why the breaker last took a policy out of service.
    last_trip: Mutex<Option<String>>,
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
            prepare::<H>(Arc::new(program), assignment, generation, &limits, &log, config, 1)
        };
        let stored = catalog.as_ref().map(|c| c.stored(H::KIND)).transpose()?.flatten();
        let mut last_trip = stored.as_ref().and_then(|stored| stored.trip.clone());
        let previous = stored.as_ref().and_then(before::<H>);
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
                let code = code::<H>(&engine, source)?;
                prepare(code.program, Assignment { origin: code.origin, settings }, 1)?
            }
        };
        let slot = Arc::new(Self {
            current: Arc::new(ArcSwap::from_pointee(version)),
            previous: Mutex::new(previous),
            change: Mutex::new(()),
            log,
            last_trip: Mutex::new(last_trip),
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
        Ok(slot)
    }

    pub fn current(&self) -> Arc<Version<H>> {
        self.current.load_full()
    }

    /// The name of what a rollback would bring back.
    pub fn previous(&self) -> Option<String> {
        self.previous.lock().as_ref().map(|p| p.name.clone())
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
    pub fn load(
        self: &Arc<Self>,
        source: Source,
        settings: Vec<(String, String)>,
    ) -> Result<Arc<Version<H>>, Error> {
        let code = code::<H>(&self.engine, source)?;
        let assignment = Assignment { origin: code.origin, settings };
        // Not under the lock: while this one takes its time, the one that serves may have to go.
        let version = self.prepare(Arc::new(code.program), assignment)?;
        let _change = self.change.lock();
        self.publish(version, &code.modules, None)
    }

    /// Loads a component with the settings of the one that serves; with its own defaults if it refuses those.
    ///
    /// # Errors
    /// As [`Slot::load`].
    pub fn load_with_settings_in_service(self: &Arc<Self>, source: Source) -> Result<Arc<Version<H>>, Error> {
        let settings = self.current().assignment.settings.clone();
        if settings.is_empty() {
            return self.load(source, settings);
        }
        match self.load(source.clone(), settings) {
            Err(Error::Settings { reason, .. }) => {
                self.log.add_host(
                    2,
                    &format!("loaded with its defaults, for it refuses the settings in service: {reason}"),
                );
                self.load(source, Vec::new())
            }
            loaded => loaded,
        }
    }

    /// Whether what serves since the start was stored by an earlier run.
    pub fn was_restored(&self) -> bool {
        self.restored
    }

    /// Puts the previous version back; what served becomes the previous one.
    ///
    /// # Errors
    /// There is none, it no longer starts, or the catalogue cannot be written.
    pub fn rollback(self: &Arc<Self>) -> Result<Arc<Version<H>>, Error> {
        let _change = self.change.lock();
        let version = self.prepare_previous()?;
        self.publish(version, &[], None)
    }

    fn prepare_previous(&self) -> Result<Version<H>, Error> {
        let previous = self.previous.lock().clone().ok_or(Error::NoPrevious(H::KIND))?;
        let program = match previous.program {
            Some(program) => program,
            None => {
                Arc::new(stored_program(&self.engine, self.catalog.as_ref(), &previous.assignment.origin)?)
            }
        };
        self.prepare(program, previous.assignment)
    }

    fn prepare(&self, program: Arc<Program<H>>, assignment: Assignment) -> Result<Version<H>, Error> {
        let workers = self.workers.load(Ordering::Relaxed).max(1);
        let unpublished = 0;
        prepare(program, assignment, unpublished, &self.limits, &self.log, &self.config, workers)
    }

    /// Exchanges the pointer, and writes the catalogue: before, for an operator, who hears that the disk is
    /// full while nothing has changed; after, for a `trip`, since a broken policy goes whatever the disk does.
    /// The reason of a trip is there before the new version is seen.
    fn publish(
        self: &Arc<Self>,
        mut version: Version<H>,
        modules: &[Vec<u8>],
        trip: Option<String>,
    ) -> Result<Arc<Version<H>>, Error> {
        let old = self.current();
        let previous = trip.is_none().then(|| Previous {
            assignment: old.assignment.clone(),
            name: old.description.name.clone(),
            program: Some(old.program.clone()),
        });
        if let (None, Some(catalog)) = (&trip, &self.catalog) {
            catalog.assign(H::KIND, &stored(&version.assignment, previous.as_ref(), None), modules)?;
        }
        version.generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let version = Arc::new(version);
        *self.previous.lock() = previous;
        let tripped = trip.is_some();
        if tripped {
            self.last_trip.lock().clone_from(&trip);
        }
        let mut totals = self.totals.lock();
        self.current.store(version.clone());
        totals.retire(old.counters.clone());
        drop(totals);
        // Unused guests of the old version would keep their memory until its last Arc goes.
        old.ready.lock().clear();
        old.spares.lock().clear();
        self.stock(&version);
        if tripped {
            self.persist(trip);
        }
        Ok(version)
    }

    /// Writes what serves since `trip` to the catalogue; if that fails, again later, until it succeeds.
    fn persist(self: &Arc<Self>, trip: Option<String>) {
        let Some(catalog) = &self.catalog else { return };
        let stored = stored(&self.current().assignment, self.previous.lock().as_ref(), trip.clone());
        let Err(error) = catalog.assign(H::KIND, &stored, &[]) else { return };
        let (name, generation) = (self.current().description.name.clone(), self.current().generation);
        self.log.add_host(1, &format!("`{name}` serves, and a restart would not know: {error}"));
        let slot = Arc::downgrade(self);
        self.builder.submit_later(PERSIST_AGAIN, move || {
            if let Some(slot) = slot.upgrade() {
                let _change = slot.change.lock();
                // What somebody loaded meanwhile has been written.
                if slot.current().generation == generation {
                    slot.persist(trip);
                }
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

    /// Takes generation `broken` out of service: back to the previous version, or to the native
    /// twin of the default.
    fn trip(self: &Arc<Self>, broken: u64, fault: &Fault) {
        let _change = self.change.lock();
        let current = self.current();
        if current.generation != broken {
            return; // replaced meanwhile
        }
        let reason = format!("`{}` taken out of service: {fault}", current.description.name);
        self.log.add_host(1, &reason);
        let back = self.prepare_previous().ok().or_else(|| {
            let default = |settings| {
                let (program, assignment) = default_native::<H>(settings)?;
                self.prepare(Arc::new(program), assignment).ok()
            };
            default(self.settings_of_default(&current.assignment)).or_else(|| default(Vec::new()))
        });
        let Some(version) = back else { return };
        let serves = format!("{reason}; `{}` serves", version.description.name);
        if let Err(e) = self.publish(version, &[], Some(serves)) {
            self.log.add_host(1, &format!("breaker: {e}"));
        }
    }
}

/// What a rollback brings back after a restart.
fn before<H: Hook>(stored: &Stored) -> Option<Previous<H>> {
    let assignment = stored.previous.clone()?;
    let name = stored.previous_name.clone().unwrap_or_else(|| assignment.origin.name().to_owned());
    Some(Previous { assignment, name, program: None })
}

fn stored<H: Hook>(current: &Assignment, previous: Option<&Previous<H>>, trip: Option<String>) -> Stored {
    Stored {
        current: current.clone(),
        previous: previous.map(|p| p.assignment.clone()),
        previous_name: previous.map(|p| p.name.clone()),
        trip,
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
