//! One slot: the version that serves, the one before it, and the workers that call them.
//!
//! A load prepares everything beside the traffic (compile, instantiate one guest per worker,
//! configure) and then publishes the new [`Version`] with one pointer exchange. A worker notices at
//! its next call, takes a ready guest and drops its old one; no call is ever without a version.
//! Lock order: `Slot::change` before `Slot::previous`; `Slot::totals` and `Version::ready` are leaves.

mod version;
mod worker;

pub use version::{Source, Version, standalone};
pub use worker::Worker;

use self::version::{Program, code, default_native, prepare, stored_program};
use super::catalog::{Assignment, Catalog, Origin};
use super::counters::{CounterValues, Totals};
use super::engine::{Engine, Module};
use super::log::Log;
use super::{Error, Fault, Limits, PolicyConfig, SlotKind};
use arc_swap::ArcSwap;
use kvasir_policy::Description;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

/// What differs between the four slots.
pub trait Hook: Sized + 'static {
    const KIND: SlotKind;
    /// The hot functions, behind either engine.
    type Engine: Policy + ?Sized + 'static;

    /// Name, component and native twin of each default policy; the first is the default.
    fn builtins() -> impl Iterator<Item = Builtin<Self>>;

    /// # Errors
    /// The module cannot be instantiated.
    fn instantiate(module: &Module, limits: Limits, log: Arc<Log>) -> Result<Box<Self::Engine>, Error>;
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
    builder: Builder,
}

/// The operator's values for a policy's settings.
pub type Settings = Vec<(String, String)>;

/// What served before. Compiled if it served since the start, else rebuilt when it is wanted.
struct Previous<H: Hook> {
    assignment: Assignment,
    program: Option<Arc<Program<H>>>,
}

impl<H: Hook> Clone for Previous<H> {
    fn clone(&self) -> Self {
        Self { assignment: self.assignment.clone(), program: self.program.clone() }
    }
}

/// Hands work to the thread that builds instances beside the traffic.
#[derive(Clone)]
pub struct Builder(mpsc::Sender<Box<dyn FnOnce() + Send>>);

impl Builder {
    /// # Errors
    /// The thread cannot be started.
    pub fn start() -> Result<Self, Error> {
        let (sender, jobs) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let thread = std::thread::Builder::new().name("kvasir-policy".into());
        thread
            .spawn(move || jobs.into_iter().for_each(|job| job()))
            .map_err(|e| Error::Engine(format!("cannot start the builder thread: {e}")))?;
        Ok(Self(sender))
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) {
        // The receiver ends with the last sender, so this cannot fail while `self` lives.
        let _ = self.0.send(Box::new(job));
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
            prepare::<H>(Arc::new(program), assignment, generation, limits, &log, config, 1)
        };
        let stored = catalog.as_ref().map(|c| c.assignments(H::KIND)).transpose()?.flatten();
        let (stored, previous) = stored.map_or((None, None), |(current, previous)| (Some(current), previous));
        let mut last_trip = None;
        let restored = stored.and_then(|assignment| {
            let program = stored_program::<H>(&engine, catalog.as_ref(), &assignment.origin);
            let version = program.and_then(|program| prepare(program, assignment, 1));
            version.map_err(|e| last_trip = Some(format!("not restored: {e}"))).ok()
        });
        let version = match restored {
            Some(version) => version,
            None => {
                let (source, settings) = wanted.clone();
                let code = code::<H>(&engine, source)?;
                prepare(code.program, Assignment { origin: code.origin, settings }, 1)?
            }
        };
        Ok(Arc::new(Self {
            current: Arc::new(ArcSwap::from_pointee(version)),
            previous: Mutex::new(previous.map(|assignment| Previous { assignment, program: None })),
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
            catalog,
            builder,
        }))
    }

    pub fn current(&self) -> Arc<Version<H>> {
        self.current.load_full()
    }

    /// What a rollback would bring back.
    pub fn previous(&self) -> Option<Assignment> {
        lock(&self.previous).as_ref().map(|p| p.assignment.clone())
    }

    pub fn last_trip(&self) -> Option<String> {
        lock(&self.last_trip).clone()
    }

    /// What all versions counted since the start.
    pub fn totals(&self) -> CounterValues {
        lock(&self.totals).with(&self.current().counters)
    }

    /// Brings a policy into service. Blocking (compiles): not for the hot path.
    ///
    /// # Errors
    /// Any step failed; the version in service is untouched.
    pub fn load(&self, source: Source, settings: Vec<(String, String)>) -> Result<Arc<Version<H>>, Error> {
        let code = code::<H>(&self.engine, source)?;
        let assignment = Assignment { origin: code.origin, settings };
        let _change = lock(&self.change);
        let version = self.prepare(Arc::new(code.program), assignment)?;
        self.publish(version, code.bytes.as_deref(), None)
    }

    /// Puts the previous version back; what served becomes the previous one.
    ///
    /// # Errors
    /// There is none, it no longer starts, or the catalogue cannot be written.
    pub fn rollback(&self) -> Result<Arc<Version<H>>, Error> {
        let _change = lock(&self.change);
        let version = self.prepare_previous()?;
        self.publish(version, None, None)
    }

    fn prepare_previous(&self) -> Result<Version<H>, Error> {
        let previous = lock(&self.previous).clone().ok_or(Error::NoPrevious(H::KIND))?;
        let program = match previous.program {
            Some(program) => program,
            None => {
                Arc::new(stored_program(&self.engine, self.catalog.as_ref(), &previous.assignment.origin)?)
            }
        };
        self.prepare(program, previous.assignment)
    }

    fn prepare(&self, program: Arc<Program<H>>, assignment: Assignment) -> Result<Version<H>, Error> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let workers = self.workers.load(Ordering::Relaxed).max(1);
        prepare(program, assignment, generation, self.limits, &self.log, &self.config, workers)
    }

    /// Writes the catalogue, then exchanges the pointer: after a crash in between, the policy that
    /// is stored is one that was proven to start. A `trip` is why the old version may not come back; whoever
    /// sees the new version sees it too.
    fn publish(
        &self,
        version: Version<H>,
        module: Option<&[u8]>,
        trip: Option<String>,
    ) -> Result<Arc<Version<H>>, Error> {
        let version = Arc::new(version);
        let old = self.current();
        let previous = trip
            .is_none()
            .then(|| Previous { assignment: old.assignment.clone(), program: Some(old.program.clone()) });
        if let Some(catalog) = &self.catalog {
            let previous = previous.as_ref().map(|p| &p.assignment);
            catalog.assign(H::KIND, &version.assignment, previous, module)?;
        }
        *lock(&self.previous) = previous;
        if trip.is_some() {
            *lock(&self.last_trip) = trip;
        }
        let mut totals = lock(&self.totals);
        self.current.store(version.clone());
        totals.retire(old.counters.clone());
        drop(totals);
        // Unused guests of the old version would keep their memory until its last Arc goes.
        lock(&old.ready).clear();
        Ok(version)
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
    fn trip(&self, broken: u64, fault: &Fault) {
        let _change = lock(&self.change);
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
        if let Err(e) = self.publish(version, None, Some(serves)) {
            self.log.add_host(1, &format!("breaker: {e}"));
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
